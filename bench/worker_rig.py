"""A real `D3DWorker` in this process, without a server.

The worker is constructed as SGLang does it and handed SGLang's own batches, requests and row pool. Only what
needs weights is replaced: the target worker and the drafter's executor, both brought by the caller. Pages,
rows and proposals are the real ones. SGLang's classes stay as they are: the worker's hooks into them matter
to a server alone.

Legend: N rows of a batch, B block size.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from d3d_sglang import cpu_engine

# Without it SGLang cannot be imported on a machine without a GPU, so others import SGLang's names from here.
cpu_engine.install()

from sglang.srt.layers.logits_processor import LogitsProcessorOutput  # noqa: E402
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch  # noqa: E402
from sglang.srt.managers.utils import GenerationBatchResult  # noqa: E402
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool  # noqa: E402
from sglang.srt.model_executor.forward_batch_info import ForwardMode  # noqa: E402
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo  # noqa: E402
from sglang.srt.sampling.sampling_params import SamplingParams  # noqa: E402

from d3d_sglang import worker as worker_module  # noqa: E402
from d3d_sglang.drafter_config import DEFAULT_FANOUT, default_coverage  # noqa: E402
from d3d_sglang.integration import drafter_setup, state_route, target_hooks  # noqa: E402
from d3d_sglang.integration.spec_input import D3DDraftInput  # noqa: E402
from d3d_sglang.options import OPTION_SPECS  # noqa: E402
from d3d_sglang.worker import D3DWorker  # noqa: E402

__all__ = [
    "D3DDraftInput",
    "D3DWorker",
    "ForwardMode",
    "GenerationBatchResult",
    "LogitsProcessorOutput",
    "ReqToTokenPool",
    "RigSizes",
    "ScheduleBatch",
    "StubModel",
    "WorkerRig",
    "greedy_sampling",
]

CPU = torch.device("cpu")
OPTION_ENV = {spec.name: spec.env for spec in OPTION_SPECS}


@dataclasses.dataclass(frozen=True)
class StubModel:
    """What the drafter's cache and rows need to know of a network: the K/V of a token is one number."""

    device: torch.device = CPU
    dtype: torch.dtype = torch.float32
    num_layers: int = 1
    num_kv_heads: int = 1
    head_dim: int = 1


@dataclasses.dataclass(frozen=True)
class RigSizes:
    """Sizes of a rig. `max_len` is the target's context length, `max_positions` the drafter's.

    `max_total_tokens` is what the target can hold in all, which also sizes the drafter's cache; by default
    as much as all requests at full length.
    """

    block_size: int
    vocab_size: int
    num_requests: int
    max_len: int
    max_positions: int
    max_total_tokens: int | None = None


class WorkerRig:
    """Runs extend and decode batches through a worker.

    Args:
        make_target: a target worker that reads the given rows; the rig sets its `model_runner`.
        make_executor: stands in for the class `DrafterExecutor`.
        options: D3D options by name, as a user would write them.
    """

    def __init__(
        self,
        sizes: RigSizes,
        *,
        make_target: Callable[[ReqToTokenPool], Any],
        make_executor: Callable[..., Any],
        options: Mapping[str, str],
    ) -> None:
        self.sizes = sizes
        self._num_requests = 0
        width = sizes.max_len + 2 * sizes.block_size
        self.pool = ReqToTokenPool(sizes.num_requests, width, "cpu", enable_memory_saver=False)
        # Slots in an arbitrary order, so that a position is never mistaken for a slot.
        order = torch.randperm(self.pool.req_to_token.numel(), generator=torch.Generator().manual_seed(0))
        self.pool.req_to_token.copy_(order.view_as(self.pool.req_to_token))
        runner = SimpleNamespace(
            device="cpu",
            gpu_id=0,
            dtype=torch.float32,
            sampler=None,
            attn_backend=None,
            model_config=SimpleNamespace(context_len=sizes.max_len, vocab_size=sizes.vocab_size),
        )
        self.target = make_target(self.pool)
        self.target.model_runner = runner
        max_total_tokens = sizes.max_total_tokens or sizes.num_requests * sizes.max_len
        with _without_weights(sizes, make_executor, options):
            self.worker = D3DWorker(server_args=None, gpu_id=0, nccl_port=0, target_worker=self.target)
            self.worker.alloc_memory_pool(
                memory_pool_config=SimpleNamespace(max_total_num_tokens=max_total_tokens),
                req_to_token_pool=self.pool,
            )
            self.worker.init_attention_backends()
            self.worker.init_cuda_graphs()

    def request(self, prompt_ids: Sequence[int], *, tokenizer: Any = None, **sampling: Any) -> Req:
        """A request that has no row yet; greedy unless `sampling` says otherwise."""
        params = SamplingParams(**{"temperature": 0.0, "max_new_tokens": self.sizes.max_len, **sampling})
        params.normalize(tokenizer)
        self._num_requests += 1
        req = Req(
            f"request-{self._num_requests}",
            "",
            array("q", prompt_ids),
            params,
            vocab_size=self.sizes.vocab_size,
        )
        req.tokenizer = tokenizer
        return req

    def extend_batch(
        self, reqs: Sequence[Req], *, ends: Sequence[int], prefix_lens: Sequence[int]
    ) -> ScheduleBatch:
        """Prefill tokens `prefix_lens[i]` to `ends[i]` of every request; new ones get a row."""
        rows = self.pool.alloc(list(reqs))
        assert rows is not None, "more requests than rows"
        for req, end in zip(reqs, ends, strict=True):
            req.kv.kv_allocated_len = end
        spans = list(zip(reqs, rows, prefix_lens, ends, strict=True))
        input_ids = [
            t for req, _, start, end in spans for t in (req.origin_input_ids + req.output_ids)[start:end]
        ]
        slots = [self.pool.req_to_token[row, start:end] for _, row, start, end in spans]
        batch = self._batch(reqs, seq_lens=torch.tensor(ends), mode=ForwardMode.EXTEND)
        batch.input_ids = torch.tensor(input_ids)
        batch.out_cache_loc = torch.cat(slots).long()
        batch.prefix_lens = list(prefix_lens)
        batch.extend_lens = [end - start for _, _, start, end in spans]
        return batch

    def decode_batch(self, reqs: Sequence[Req], draft_input: D3DDraftInput) -> ScheduleBatch:
        """The next round of requests after the one that returned `draft_input`."""
        batch = self._batch(reqs, seq_lens=draft_input.new_seq_lens, mode=ForwardMode.DECODE)
        batch.spec_info = draft_input
        return batch

    def run(self, batch: ScheduleBatch, **kwargs: Any) -> GenerationBatchResult:
        """One call of the worker as the scheduler does it: in inference mode, the batch restored after it."""
        before = {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
        with torch.inference_mode():
            result = self.worker.forward_batch_generation(batch, **kwargs)
        for name, value in before.items():
            setattr(batch, name, value)
        return result

    def _batch(self, reqs: Sequence[Req], *, seq_lens: torch.Tensor, mode: ForwardMode) -> ScheduleBatch:
        return ScheduleBatch(
            reqs=list(reqs),
            req_to_token_pool=self.pool,
            device="cpu",
            forward_mode=mode,
            req_pool_indices=torch.tensor([req.kv.req_pool_idx for req in reqs]),
            seq_lens=seq_lens,
            seq_lens_cpu=seq_lens.clone(),
            seq_lens_sum=int(seq_lens.sum()),
            sampling_info=greedy_sampling(len(reqs), self.sizes.vocab_size),
        )


def greedy_sampling(num_rows: int, vocab_size: int) -> SamplingBatchInfo:
    """Sampling parameters of a batch of greedy requests."""
    return SamplingBatchInfo(
        temperatures=torch.ones(num_rows, 1),
        top_ps=torch.ones(num_rows),
        top_ks=torch.ones(num_rows, dtype=torch.int32),
        min_ps=torch.zeros(num_rows),
        is_all_greedy=True,
        is_any_greedy=True,
        need_top_p_sampling=False,
        need_top_k_sampling=False,
        need_min_p_sampling=False,
        vocab_size=vocab_size,
        device="cpu",
    )


@contextlib.contextmanager
def _without_weights(
    sizes: RigSizes, make_executor: Callable[..., Any], options: Mapping[str, str]
) -> Iterator[None]:
    """Replace what a worker reads from its process and from a drafter folder while it is made."""
    checkpoint = SimpleNamespace(
        path=Path("stub-drafter"),
        d3d_config=SimpleNamespace(
            mask_token_id=0, coverage=default_coverage(sizes.block_size), fanout=DEFAULT_FANOUT
        ),
        max_position_embeddings=sizes.max_positions,
    )
    spec = SimpleNamespace(
        speculative_num_draft_tokens=sizes.block_size, speculative_draft_model_path=str(checkpoint.path)
    )
    with contextlib.ExitStack() as patches:
        for owner, name, value in (
            (worker_module, "get_spec", lambda: spec),
            (worker_module, "read_drafter", lambda _path: checkpoint),
            (drafter_setup, "load_model", lambda *_args, **_kwargs: StubModel()),
            (drafter_setup, "DrafterExecutor", make_executor),
            (target_hooks, "install", lambda **_kwargs: None),
            (state_route, "publish", lambda _state: None),
            (cpu_engine, "install_target_verify", lambda: None),
        ):
            patches.enter_context(mock.patch.object(owner, name, value))
        environ = {OPTION_ENV[name]: value for name, value in options.items()}
        patches.enter_context(mock.patch.dict(os.environ, environ))
        yield
