"""A target and a drafter for worker tests whose tokens are functions of the whole token history.

Both keep tokens where real models keep K/V: by slot, in the target's pages and in the drafter's. So a wrong
slot, length or block in the worker changes the history and with it the tokens, from that round on.

Legend: N rows, B block size, V vocabulary, K support size.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.managers.utils import GenerationBatchResult

from tests.e2e.scripted.token_executor import UNWRITTEN, TokenExecutor

VOCAB_SIZE = 50


@lru_cache(maxsize=100_000)
def _logits(history: bytes) -> torch.Tensor:
    return torch.randn(VOCAB_SIZE, generator=torch.Generator().manual_seed(zlib.crc32(history)))


def next_logits(tokens: Sequence[int]) -> torch.Tensor:
    """Logits `[V]` of the token after `tokens`: noise seeded by all of them."""
    assert UNWRITTEN not in tokens, "a token was read that nobody wrote"
    return _logits(array("q", tokens).tobytes())


def all_logits(tokens: Sequence[int]) -> torch.Tensor:
    """Logits `[L, V]` after every prefix of `tokens`, as `reference.Method.target` gives them."""
    return torch.stack([next_logits(tokens[: i + 1]) for i in range(len(tokens))])


def plain_decode(prompt_ids: Sequence[int], num_tokens: int) -> list[int]:
    """What the target outputs without a drafter."""
    tokens = list(prompt_ids)
    for _ in range(num_tokens):
        tokens.append(int(next_logits(tokens).argmax()))
    return tokens[len(prompt_ids) :]


def scripted_candidates(tokens: Sequence[int], *, block_size: int) -> list[int]:
    """B-1 candidates after `tokens`: the target's continuation with an error at a seeded place, or none."""
    num_right = zlib.crc32(array("q", tokens).tobytes(), 1) % block_size
    candidates = plain_decode(tokens, block_size - 1)
    if num_right < len(candidates):
        candidates[num_right] = (candidates[num_right] + 1) % VOCAB_SIZE
    return candidates


@lru_cache(maxsize=20_000)
def _drafter_logits(history: bytes, block_size: int) -> torch.Tensor:
    tokens = array("q", history).tolist()
    seed = zlib.crc32(history, 2)
    logits = torch.rand(block_size - 1, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed))
    right = plain_decode(tokens, block_size - 1)
    for j, candidate in enumerate(scripted_candidates(tokens, block_size=block_size)):
        # At the error the right token comes next, or the one after, or anywhere: two, one, one in four.
        if candidate != right[j] and seed % 4 < 3:
            logits[j, right[j]] = 50
            logits[j, (right[j] + 2) % VOCAB_SIZE] += 60 * (seed % 4 == 2)
        logits[j, candidate] = 100
    return logits


def scripted_logits(tokens: Sequence[int], *, block_size: int) -> torch.Tensor:
    """Logits `[B-1, V]`, the candidates' the largest, as `reference.Method.drafter` gives them."""
    return _drafter_logits(array("q", tokens).tobytes(), block_size)


class ScriptedExecutor(TokenExecutor):
    """Drafts `scripted_candidates` after what it reads of a row."""

    def __init__(self, *args: Any, **sizes: int) -> None:
        super().__init__(*args, **sizes)
        self.prefills: list[tuple[int, int, int]] = []  # (row, start, number of tokens)

    def prefill(self, row: int, token_ids: Sequence[int], *, start: int) -> None:
        self.prefills.append((row, start, len(token_ids)))
        super().prefill(row, token_ids, start=start)

    def ranked(self, row: int, tokens: list[int]) -> list[list[int]]:
        if UNWRITTEN in tokens:  # a row the drafter has not read holds no tokens to draft from
            return [list(range(self.support))] * (self.block_size - 1)
        ranked: list[list[int]] = (
            scripted_logits(tokens, block_size=self.block_size).topk(self.support).indices.tolist()
        )
        return ranked


@dataclass(frozen=True)
class TargetCall:
    """What the target was handed for a verify batch."""

    block: torch.Tensor  # [N, B]
    seq_lens_cpu: torch.Tensor  # [N]
    seq_lens_sum: int


class SlotTarget:
    """A target worker that reads each row's history through its slots, as attention does."""

    def __init__(self, pool: Any) -> None:
        self.model_runner: Any = None  # set by the rig
        self.calls: list[TargetCall] = []
        self._pool = pool
        self._tokens = torch.full((pool.req_to_token.numel(),), UNWRITTEN)  # by slot

    def forward_batch_generation(self, batch: Any, is_verify: bool = False) -> GenerationBatchResult:
        assert is_verify == batch.forward_mode.is_target_verify()
        assert batch.out_cache_loc.dtype == torch.int64
        self._tokens[batch.out_cache_loc] = batch.input_ids
        histories = self._verify_histories(batch) if is_verify else self._extend_histories(batch)
        logits = torch.stack([next_logits(history) for history in histories])
        result = GenerationBatchResult(logits_output=LogitsProcessorOutput(next_token_logits=logits))
        if not is_verify:
            result.next_token_ids = logits.argmax(dim=-1)
        return result

    def _verify_histories(self, batch: Any) -> list[list[int]]:
        size = batch.spec_info.draft_token_num
        block, positions = batch.input_ids.view(-1, size), batch.spec_info.positions.view(-1, size)
        self.calls.append(TargetCall(block, batch.seq_lens_cpu, batch.seq_lens_sum))
        assert torch.equal(block.flatten(), batch.spec_info.draft_token)
        assert torch.equal(positions, batch.seq_lens[:, None] + torch.arange(size))
        histories = []
        for row, length in zip(batch.req_pool_indices.tolist(), batch.seq_lens.tolist(), strict=True):
            tokens = self._history(row, length + size)
            histories += [tokens[: length + j + 1] for j in range(size)]
        return histories

    def _extend_histories(self, batch: Any) -> list[list[int]]:
        pairs = zip(batch.req_pool_indices.tolist(), batch.seq_lens.tolist(), strict=True)
        return [self._history(row, length) for row, length in pairs]

    def _history(self, row: int, length: int) -> list[int]:
        return self._tokens[self._pool.req_to_token[row, :length].long()].tolist()
