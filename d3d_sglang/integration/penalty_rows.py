"""Penalties of request rows: how often each row has output each token, and what its request asked for.

SGLang's own penalizers count one token a step and, under the overlap scheduler, a step late. A verify block
needs exact counts at every position, so they are kept here, on the device, indexed by request row. Nothing is
allocated until a request with penalties arrives.

Legend: N rows of a batch, R rows in all, B block size, V vocabulary, S stop ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from d3d_sglang.spec_types import VerifyResult
from d3d_sglang.verify.penalties import apply_block_penalties, apply_min_new_tokens, update_counts


@dataclass(frozen=True)
class _Tables:
    """Row-indexed state, `[R, ...]`."""

    counts: torch.Tensor  # [R, V]
    frequency: torch.Tensor  # [R, 1]
    presence: torch.Tensor  # [R, 1]
    repetition: torch.Tensor  # [R, 1]
    min_new_tokens: torch.Tensor  # [R, 1]
    prompt_len: torch.Tensor  # [R]


class PenaltyRows:
    """Exact penalties for verify blocks.

    Args:
        num_rows: R; vocab_size: V of the target's logits; device: the target's.
    """

    def __init__(self, *, num_rows: int, vocab_size: int, device: torch.device) -> None:
        self._num_rows = num_rows
        self._vocab_size = vocab_size
        self._device = device
        self._tables: _Tables | None = None
        self._stop_ids: dict[int, list[int]] = {}  # row -> ids, rows with min_new_tokens only

    def begin(self, reqs: Sequence[Any], rows: Sequence[int]) -> None:
        """Start the rows of an extend batch; a request that was retracted keeps its counts."""
        if self._tables is None:
            if not any(_is_penalized(req.sampling_params) for req in reqs):
                return
            self._tables = self._allocate()
        tables, device = self._tables, self._device
        index = torch.tensor(rows, device=device)
        params = [req.sampling_params for req in reqs]
        for table, values in (
            (tables.frequency, [p.frequency_penalty for p in params]),
            (tables.presence, [p.presence_penalty for p in params]),
            (tables.repetition, [p.repetition_penalty for p in params]),
            (tables.min_new_tokens, [p.min_new_tokens for p in params]),
        ):
            table[index, 0] = torch.tensor(values, dtype=table.dtype, device=device)
        tables.prompt_len[index] = torch.tensor([len(req.origin_input_ids) for req in reqs], device=device)
        tables.counts[index] = 0
        for req, row in zip(reqs, rows, strict=True):
            self._stop_ids[row] = _stop_ids(req) if req.sampling_params.min_new_tokens > 0 else []
            if len(req.output_ids):
                past = torch.tensor(list(req.output_ids), device=device)
                tables.counts[row] = torch.bincount(past, minlength=self._vocab_size).to(tables.counts.dtype)

    def observe_first(self, rows: torch.Tensor, token_ids: torch.Tensor) -> None:
        """Count the token the target output after a prefill, `[N]` each."""
        if self._tables is not None:
            self._tables.counts[rows, token_ids.long()] += 1

    def apply(
        self,
        logits: torch.Tensor,  # [N, B, V], changed in place
        rows: torch.Tensor,  # [N]
        *,
        rows_cpu: Sequence[int],
        draft_tokens: torch.Tensor,  # [N, B-1]
        committed_len: torch.Tensor,  # [N]
    ) -> None:
        """Penalise row j of every block as plain decoding would after candidates 1..j."""
        tables = self._tables
        assert tables is not None, "a penalised row was never begun"
        if any(self._stop_ids.get(row) for row in rows_cpu):
            apply_min_new_tokens(
                logits,
                num_output=committed_len + 1 - tables.prompt_len[rows],
                min_new_tokens=tables.min_new_tokens[rows],
                stop_token_penalties=self._stop_penalties(rows_cpu),
            )
        apply_block_penalties(
            logits,
            counts=tables.counts[rows],
            draft_tokens=draft_tokens,
            frequency=tables.frequency[rows],
            presence=tables.presence[rows],
            repetition=tables.repetition[rows],
        )

    def commit(self, rows: torch.Tensor, verify: VerifyResult) -> None:
        """Count what a round committed."""
        if self._tables is not None:
            update_counts(self._tables.counts, rows, verify.out_tokens, accept_len=verify.accept_len)

    def _allocate(self) -> _Tables:
        def column(dtype: torch.dtype, fill: float) -> torch.Tensor:
            return torch.full((self._num_rows, 1), fill, dtype=dtype, device=self._device)

        return _Tables(
            counts=torch.zeros(self._num_rows, self._vocab_size, dtype=torch.int32, device=self._device),
            frequency=column(torch.float32, 0.0),
            presence=column(torch.float32, 0.0),
            repetition=column(torch.float32, 1.0),
            min_new_tokens=column(torch.int64, 0),
            prompt_len=torch.zeros(self._num_rows, dtype=torch.int64, device=self._device),
        )

    def _stop_penalties(self, rows_cpu: Sequence[int]) -> torch.Tensor:
        """`[N, V]`: -inf at the stop ids of each row, 0 elsewhere."""
        pairs = [(i, token) for i, row in enumerate(rows_cpu) for token in self._stop_ids.get(row, [])]
        index = torch.tensor(pairs, dtype=torch.int64).to(self._device, non_blocking=True)  # [S, 2]
        penalties = torch.zeros(len(rows_cpu), self._vocab_size, device=self._device)
        penalties[index[:, 0], index[:, 1]] = float("-inf")
        return penalties


def _is_penalized(params: Any) -> bool:
    return bool(
        params.frequency_penalty != 0.0
        or params.presence_penalty != 0.0
        or params.repetition_penalty != 1.0
        or params.min_new_tokens > 0
    )


def _stop_ids(req: Any) -> list[int]:
    """Ids SGLang's min_new_tokens keeps back."""
    ids = set(req.sampling_params.stop_token_ids or ()) | set(req.eos_token_ids or ())
    ids |= set(req.tokenizer.additional_stop_token_ids or ()) | {req.tokenizer.eos_token_id}
    return sorted(token for token in ids if token is not None)
