"""The functions of `sgl_kernel` that SGLang calls while it serves on a CPU, in plain PyTorch.

They follow the signatures of SGLang's calls and change their arguments in place, as the compiled ones do.
Must not import sglang.

Legend: N rows of a batch, R rows of the request table, L its width, T tokens, S slots of the KV pool.
"""

from __future__ import annotations

import ctypes

import torch


def assign_req_to_token_pool_cpu(
    req_pool_indices: torch.Tensor,  # [N]
    req_to_token: torch.Tensor,  # [R, L], written
    start_offset: torch.Tensor,  # [N]
    end_offset: torch.Tensor,  # [N]
    out_cache_loc: torch.Tensor,  # [T], T = sum of end - start
    row_width: int,
) -> None:
    """Write the new slots of every request into its row, columns start to end.

    Raises:
        IndexError: a row or a column outside the table.
        RuntimeError: the number of slots is not the number of columns to write.
    """
    if row_width != req_to_token.shape[1]:
        raise ValueError(f"row_width is {row_width}: the table has rows of {req_to_token.shape[1]}")
    lengths = (end_offset - start_offset).to(torch.int64)
    rows = torch.repeat_interleave(req_pool_indices.to(torch.int64), lengths)  # [T]
    if rows.numel() != out_cache_loc.numel():
        raise RuntimeError(f"{out_cache_loc.numel()} slots for {rows.numel()} columns")
    # Token t of a row whose tokens begin at `first` goes to column start + t - first.
    first = lengths.cumsum(0) - lengths  # [N]
    shift = torch.repeat_interleave(start_offset.to(torch.int64) - first, lengths)  # [T]
    columns = torch.arange(rows.numel(), device=rows.device) + shift
    req_to_token[rows, columns] = out_cache_loc.to(req_to_token.dtype)


def copy_all_layer_kv_cache_cpu(
    data_ptrs: torch.Tensor,  # [layers], addresses of the K or V buffer of a layer
    strides: torch.Tensor,  # [layers], bytes of one slot in it
    tgt_loc: torch.Tensor,  # [T]
    src_loc: torch.Tensor,  # [T]
) -> None:
    """Copy slot `src_loc[i]` to slot `tgt_loc[i]` in every buffer; all are read before one is written."""
    if tgt_loc.numel() == 0:
        return
    num_slots = int(torch.maximum(tgt_loc.max(), src_loc.max())) + 1
    for address, stride in zip(data_ptrs.tolist(), strides.tolist(), strict=True):
        memory = (ctypes.c_uint8 * (num_slots * stride)).from_address(address)
        slots = torch.frombuffer(memory, dtype=torch.uint8).view(num_slots, stride)
        slots[tgt_loc] = slots[src_loc]
