"""The D3D worker: one round of draft and verify per decode batch, inside SGLang's scheduler process.

Translates SGLang's batches to our types and back; drafting, choosing and accepting live in modules of their
own. One round, in `_decode`: draft a block for every row, let the target verify it, accept, remember.

Legend: N rows of a batch, R rows in all, B block size, V vocabulary.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import torch
from sglang.srt.layers.logprob_processor import compute_spec_logprobs
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.runtime_context import get_spec
from sglang.srt.speculative.base_spec_worker import BaseSpecWorker
from sglang.srt.speculative.spec_utils import (
    GrammarTree,
    build_grammar_vocab_mask,
    record_stream_for_v2_verify,
)

from d3d_sglang import cpu_engine
from d3d_sglang.drafter.checkpoint import read_drafter
from d3d_sglang.drafter.executor import DraftSampling
from d3d_sglang.drafter.rows import Alive, RowBatch
from d3d_sglang.integration import drafter_setup, state_route, target_hooks
from d3d_sglang.integration.penalty_rows import PenaltyRows
from d3d_sglang.integration.seed_rows import SeedRows
from d3d_sglang.integration.spec_input import D3DDraftInput, verify_input
from d3d_sglang.integration.target_choice import TargetChoice, VerifiedBlock
from d3d_sglang.metrics import RoundStats
from d3d_sglang.spec_types import DraftProposal, VerifyResult

logger = logging.getLogger(__name__)

# Why a request decodes without drafts.
FALLBACKS = {
    "input_embeds": "its prompt has embeddings in place of token ids",
    "too_long": "its tokens and a block exceed what the drafter takes, see drafter_max_length in /d3d/state",
    "out_of_pages": "the drafter's K/V pages are all in use",
}
Publish = Callable[[torch.Tensor], None] | None
Barrier = Callable[[], None] | None


class D3DWorker(BaseSpecWorker):
    """Speculative worker of SGLang's V2 schema; see `BaseSpecWorker` for the contract."""

    def __init__(self, server_args: Any, gpu_id: int, nccl_port: int, target_worker: Any) -> None:
        super().__init__()
        spec = get_spec()
        self._target_worker = target_worker
        self._draft_worker = None  # SGLang runs no draft model of its own
        self.block_size = int(spec.speculative_num_draft_tokens)
        self.speculative_num_draft_tokens = self.block_size
        self.speculative_num_steps = self.block_size - 1
        self.stats = RoundStats(block_size=self.block_size)
        self.device = drafter_setup.target_device(target_worker.model_runner)
        cpu_engine.install_target_verify()
        target_hooks.install(block_size=self.block_size)
        # Loaded before SGLang measures free memory, so its own pools leave room for the weights.
        self._checkpoint = read_drafter(spec.speculative_draft_model_path)
        self.options = drafter_setup.read_options(os.environ, self._checkpoint, block_size=self.block_size)
        self._drafter = drafter_setup.load_model(
            self._checkpoint, target_runner=target_worker.model_runner, options=self.options
        )
        state_route.publish(self.state)
        logger.info(
            "D3D: block_size=%d %s drafter=%s",
            self.block_size,
            self.options.describe(),
            self._checkpoint.path,
        )

    def alloc_memory_pool(
        self,
        memory_pool_config: Any = None,
        req_to_token_pool: Any = None,
        token_to_kv_pool_allocator: Any = None,
    ) -> None:
        """Make the row-indexed state, now that the number of request rows is known."""
        super().alloc_memory_pool(memory_pool_config, req_to_token_pool, token_to_kv_pool_allocator)
        runner = self.target_worker.model_runner
        num_rows = req_to_token_pool.req_to_token.shape[0]
        self.drafting = drafter_setup.make_drafting(
            self._drafter,
            self._checkpoint,
            sizes=drafter_setup.ServerSizes(
                num_rows=num_rows,
                block_size=self.block_size,
                context_len=runner.model_config.context_len,
                max_total_tokens=memory_pool_config.max_total_num_tokens,
            ),
            options=self.options,
            device=self.device,
            alive=self._alive,
        )
        self.penalties = PenaltyRows(
            num_rows=num_rows, vocab_size=runner.model_config.vocab_size, device=self.device
        )
        self.seeds = SeedRows(num_rows=num_rows, device=self.device)
        self._offsets = torch.arange(self.block_size, device=self.device)

    def init_cuda_graphs(self) -> None:
        """The target's graphs are SGLang's; drafter passes run eagerly."""
        self._choice = TargetChoice(
            sampler=self.target_worker.model_runner.sampler,
            penalties=self.penalties,
            block_size=self.block_size,
            match=self.options.draft_sampling == "match",
        )

    def forward_batch_generation(
        self,
        batch: ScheduleBatch,
        on_publish: Publish = None,
        grammar_barrier: Barrier = None,
        pp_proxy_tensors: Any = None,
    ) -> GenerationBatchResult:
        """Run a prefill batch, or one round of a decode batch."""
        if batch.forward_mode.is_extend() or batch.is_extend_in_batch:
            return self._extend(batch, on_publish)
        return self._decode(batch, on_publish, grammar_barrier)

    def _decode(
        self, batch: ScheduleBatch, on_publish: Publish, grammar_barrier: Barrier
    ) -> GenerationBatchResult:
        rows = self._row_batch(batch)
        proposal = self.drafting.propose(rows, _row_indices(batch))
        block = torch.cat([rows.anchor[:, None], proposal.tokens], dim=1)  # [N, B]
        ahead = self.drafting.draft_ahead(rows, block, proposal)  # runs beside the verification
        result, verify = self._verify(batch, block, proposal=proposal, grammar_barrier=grammar_barrier)
        new_seq_lens = batch.seq_lens + verify.accept_len + 1
        if on_publish is not None:
            on_publish(new_seq_lens)
        self.drafting.resolve(rows, block, ahead, verify)
        self.penalties.commit(batch.req_pool_indices, verify)
        return self._fill(result, batch, verify=verify, new_seq_lens=new_seq_lens)

    def _row_batch(self, batch: ScheduleBatch) -> RowBatch:
        """Rows of a decode batch, with room in the drafter's cache for what they may write next."""
        bound = 0
        for req in batch.reqs:
            # What the host knows is the committed length or, under overlap, up to a block less.
            host_len = len(req.origin_input_ids) + len(req.output_ids)
            bound = max(bound, host_len + self.block_size)
            if not self.drafting.keep(req.kv.req_pool_idx, host_len=host_len, token_ids=_ids_of(req)):
                self.stats.record_fallback("out_of_pages", FALLBACKS["out_of_pages"])
        return RowBatch(
            rows=batch.req_pool_indices,
            anchor=batch.spec_info.bonus_tokens,
            committed_len=batch.seq_lens,
            bound=bound,
            sampling=self._draft_sampling(batch),
        )

    def _draft_sampling(self, batch: ScheduleBatch) -> DraftSampling | None:
        sampling = batch.sampling_info
        if sampling.is_all_greedy or self.options.draft_sampling == "greedy":
            return None
        return DraftSampling(
            temperature=sampling.temperatures[:, 0],
            greedy=sampling.top_ks == 1,
            seeds=self._seeds(batch),
        )

    def _seeds(self, batch: ScheduleBatch) -> torch.Tensor:
        given: torch.Tensor | None = batch.sampling_info.sampling_seed  # in SGLang's deterministic mode
        return self.seeds.of(batch.req_pool_indices) if given is None else given

    def _verify(
        self, batch: ScheduleBatch, block: torch.Tensor, *, proposal: DraftProposal, grammar_barrier: Barrier
    ) -> tuple[GenerationBatchResult, VerifyResult]:
        """One target forward over `block` `[N, B]`, and what of it the target accepts."""
        rows, committed_len = batch.req_pool_indices, batch.seq_lens
        tree = GrammarTree.from_linear_chain(block) if batch.has_grammar else None
        positions = committed_len[:, None] + self._offsets  # [N, B]
        self._as_verify_batch(batch, block, positions=positions)
        result = self.target_worker.forward_batch_generation(batch, is_verify=True)
        verified = VerifiedBlock(
            logits=result.logits_output.next_token_logits,
            draft_tokens=proposal.tokens,
            positions=positions.flatten(),
            rows=rows,
            seeds=self._seeds(batch),
            committed_len=committed_len,
            grammar_mask=self._grammar_mask(batch, tree, grammar_barrier),
        )
        self._choice.adjust(verified, batch.sampling_info, rows_cpu=_row_indices(batch))
        verify = self._choice.accept(
            verified, proposal, sampling=batch.sampling_info, keep_logits=batch.return_logprob
        )
        return result, verify

    def _as_verify_batch(self, batch: ScheduleBatch, block: torch.Tensor, *, positions: torch.Tensor) -> None:
        """Turn the decode batch into a verify batch; SGLang restores it after the round."""
        record_stream_for_v2_verify(batch, None, torch.get_device_module(self.device).current_stream())
        slots = self.req_to_token_pool.req_to_token[batch.req_pool_indices[:, None], positions]
        batch.input_ids = block.flatten()
        batch.out_cache_loc = slots.flatten().long()
        batch.forward_mode = ForwardMode.TARGET_VERIFY
        batch.spec_info = verify_input(
            block=batch.input_ids, positions=positions.flatten(), block_size=self.block_size
        )
        if batch.seq_lens_cpu is not None:
            # Attention plans made on the host expect the length with the block.
            batch.seq_lens_cpu = batch.seq_lens_cpu + self.block_size
            batch.seq_lens_sum = int(batch.seq_lens_cpu.sum())

    def _grammar_mask(self, batch: ScheduleBatch, tree: GrammarTree | None, barrier: Barrier) -> Any:
        if tree is None:
            return None
        return build_grammar_vocab_mask(
            reqs=batch.reqs, tree=tree, sampling_info=batch.sampling_info, device=self.device, barrier=barrier
        )

    def _fill(
        self,
        result: GenerationBatchResult,
        batch: ScheduleBatch,
        *,
        verify: VerifyResult,
        new_seq_lens: torch.Tensor,
    ) -> GenerationBatchResult:
        """Complete SGLang's result of a round; its accept lengths count the bonus token."""
        if batch.return_logprob:
            compute_spec_logprobs(
                batch, result.logits_output, verify.out_tokens.flatten(), chain_stride=self.block_size
            )
        result.logits_output.hidden_states = None
        result.next_token_ids = verify.out_tokens.flatten()
        result.accept_lens = (verify.accept_len + 1).int()
        result.new_seq_lens = new_seq_lens
        result.next_draft_input = D3DDraftInput(bonus_tokens=verify.bonus, new_seq_lens=new_seq_lens)
        result.speculative_num_draft_tokens = self.block_size
        return result

    def _extend(self, batch: ScheduleBatch, on_publish: Publish) -> GenerationBatchResult:
        result = self.target_worker.forward_batch_generation(batch)
        if on_publish is not None:
            on_publish(batch.seq_lens)
        self._read_prompts(batch)
        self.penalties.begin(batch.reqs, _row_indices(batch))
        self.penalties.observe_first(batch.req_pool_indices, result.next_token_ids)
        result.new_seq_lens = batch.seq_lens
        result.next_draft_input = D3DDraftInput(
            bonus_tokens=result.next_token_ids, new_seq_lens=batch.seq_lens
        )
        return result

    def _read_prompts(self, batch: ScheduleBatch) -> None:
        """Let the drafter read the tokens of an extend batch, from the host's ids."""
        generations = self.req_to_token_pool.req_generation
        for req, prefix_len, extend_len in zip(batch.reqs, batch.prefix_lens, batch.extend_lens, strict=True):
            row = req.kv.req_pool_idx
            generation = int(generations[row])
            self.seeds.begin(row, req.sampling_params.sampling_seed)
            if req.input_embeds is not None:
                if self.drafting.refuse(row, generation=generation):
                    self.stats.record_fallback("input_embeds", FALLBACKS["input_embeds"])
                continue
            token_ids = _ids_of(req)()[: prefix_len + extend_len]
            reason = self.drafting.extend(row, token_ids, prefix_len=prefix_len, generation=generation)
            if reason is not None:
                self.stats.record_fallback(reason, FALLBACKS[reason])

    def _alive(self) -> Alive:
        """Which (row, generation) pairs still have their request; ends are not announced to a worker."""
        generations, free = self.req_to_token_pool.req_generation, set(self.req_to_token_pool.free_slots)
        return lambda row, generation: row not in free and int(generations[row]) == generation

    def on_verify_complete_cpu(self, num_correct_drafts_per_req: list[int], batch_size: int = 0) -> None:
        """Called by SGLang when a round's accept lengths have reached the host."""
        self.stats.record_round(num_correct_drafts_per_req)

    def clear_cache_pool(self) -> None:
        """Called on `/flush_cache`, when no request runs."""
        self.drafting.rows.clear()

    def state(self) -> dict[str, Any]:
        """What `/d3d/state` shows for this worker."""
        return {
            "block_size": self.block_size,
            "options": {name: value for name, value in asdict(self.options).items() if name != "sources"},
            "option_sources": dict(self.options.sources),
            "drafter": str(self._checkpoint.path),
            "drafter_max_length": self.drafting.rows.max_length,
            **self.stats.as_dict(),
            **self.drafting.state(),
        }


def _ids_of(req: Any) -> Callable[[], Sequence[int]]:
    """The request's tokens as far as the host has them; made when asked for, since that copies."""
    return lambda: req.origin_input_ids + req.output_ids


def _row_indices(batch: ScheduleBatch) -> list[int]:
    return [req.kv.req_pool_idx for req in batch.reqs]
