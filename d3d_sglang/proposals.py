"""Proposals waiting for their round, by request row.

A proposal is made in one round and verified in a later one, with batches regrouped and prefills in between,
so it is kept in tensors indexed by request row together with the committed length it was made for: one made
for another length is never used. The host learns which rows have none through one pinned copy, started when
the proposals are written and waited for when the next round needs it; nothing else is read back.

Legend: N rows of a batch, R rows in all, B block size, K support size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from d3d_sglang.spec_types import DraftProposal, Origin, Selection


class ProposalStore:
    """Row-indexed proposals on the target's device."""

    def __init__(self, *, num_rows: int, block_size: int, support: int, device: torch.device) -> None:
        def table(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(num_rows, *shape, dtype=dtype, device=device)

        width = block_size - 1
        self._tokens = table(width)
        self._prop_len = table()
        self._support_ids = table(width, support)
        self._support_probs = table(width, support, dtype=torch.float32)
        self._base_len = table()
        self._origin = table()
        on_gpu = device.type == "cuda"
        self._host_origin = torch.zeros(num_rows, dtype=torch.int64, pin_memory=on_gpu)
        self._copied = torch.cuda.Event() if on_gpu else None

    def put(self, rows: torch.Tensor, selection: Selection, *, base_len: torch.Tensor) -> None:
        """Keep proposals for `rows` `[N]`, made for committed lengths `base_len` `[N]`, and tell the host."""
        self._write(rows, selection.proposal, origin=selection.origin, base_len=base_len)
        self._host_origin.copy_(self._origin, non_blocking=True)
        if self._copied is not None:
            # The stream of the store's device, which need not be the current one.
            self._copied.record(torch.cuda.current_stream(self._tokens.device))

    def put_redrafted(self, rows: torch.Tensor, proposal: DraftProposal, *, base_len: torch.Tensor) -> None:
        """Keep proposals drafted on demand; the host, which asked for them, knows."""
        origin = torch.full_like(rows, Origin.REDRAFT)
        self._write(rows, proposal, origin=origin, base_len=base_len)

    def drop(self, row: int) -> None:
        """Forget a row's proposal: the row starts anew."""
        self._wait()
        self._origin[row] = Origin.REDRAFT
        self._host_origin[row] = Origin.REDRAFT

    def origins(self, rows: Sequence[int]) -> list[Origin]:
        """Origin of each row's waiting proposal, REDRAFT for none. The one host read of a round."""
        self._wait()
        return [Origin(value) for value in self._host_origin[list(rows)].tolist()]

    def take(self, rows: torch.Tensor, *, committed_len: torch.Tensor) -> DraftProposal:
        """Proposals of `rows` `[N]`; one made for another length than `committed_len` has no candidates."""
        fits = self._base_len[rows] == committed_len
        return DraftProposal(
            tokens=self._tokens[rows],
            prop_len=self._prop_len[rows] * fits,
            support_ids=self._support_ids[rows],
            support_probs=self._support_probs[rows],
        )

    def _write(
        self, rows: torch.Tensor, proposal: DraftProposal, *, origin: torch.Tensor, base_len: torch.Tensor
    ) -> None:
        self._tokens[rows] = proposal.tokens
        self._prop_len[rows] = proposal.prop_len
        self._support_ids[rows] = proposal.support_ids
        self._support_probs[rows] = proposal.support_probs
        self._base_len[rows] = base_len
        self._origin[rows] = origin

    def _wait(self) -> None:
        if self._copied is not None:
            self._copied.synchronize()
