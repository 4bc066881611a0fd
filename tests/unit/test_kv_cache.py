"""The device side of the pages: slots, the scratch page, memory.

Legend: N rows, W tokens, H heads, D head size.
"""

from __future__ import annotations

import torch

from d3d_sglang.drafter.kv_cache import CacheShape, PagedCache

CPU = torch.device("cpu")
SHAPE = CacheShape(
    num_layers=2,
    num_rows=3,
    num_pages=6,
    page_size=4,
    max_length=10,
    num_kv_heads=1,
    head_dim=2,
    dtype=torch.float32,
)
SCRATCH = list(range(24, 28))  # slots of the page after the six


def slots(cache: PagedCache, row: int, *positions: int) -> list[int]:
    return cache.slots(torch.tensor([row]), torch.tensor([positions]))[0].tolist()


def test_positions_lie_in_the_pages_of_their_row() -> None:
    cache = PagedCache(SHAPE, CPU)
    cache.assign(1, (5, 2), first=0)
    cache.assign(1, (0,), first=2)
    assert slots(cache, 1, 0, 3, 4, 7, 8, 11) == [20, 23, 8, 11, 0, 3]
    assert slots(cache, 2, 0, 5) == [SCRATCH[0], SCRATCH[1]], "another row was given pages"


def test_positions_without_a_page_and_past_the_end_lie_in_the_scratch_page() -> None:
    cache = PagedCache(SHAPE, CPU)
    cache.assign(1, (5,), first=0)
    assert SHAPE.pages_per_row == 3
    assert set(slots(cache, 1, *range(4, 100))) == set(SCRATCH)


def test_a_row_that_is_assigned_anew_loses_its_pages() -> None:
    cache = PagedCache(SHAPE, CPU)
    cache.assign(1, (5, 2, 0), first=0)
    cache.assign(2, (4,), first=0)
    cache.assign(1, (3,), first=0)
    assert slots(cache, 1, 0, 4, 8) == [12, SCRATCH[0], SCRATCH[0]]
    cache.assign(1, (), first=0)
    assert slots(cache, 1, 0) == [SCRATCH[0]]
    assert slots(cache, 2, 0) == [16]
    cache.unassign_all()
    assert slots(cache, 2, 0) == [SCRATCH[0]]


def test_what_is_written_is_read_back_in_its_layer_and_nowhere_else() -> None:
    cache = PagedCache(SHAPE, CPU)
    cache.assign(1, (5, 2), first=0)
    cache.assign(2, (1,), first=0)
    rows = torch.tensor([1, 2])
    where = cache.slots(rows, torch.tensor([[3, 4, 5], [0, 1, 9]]))  # [N, W]; 9 has no page
    k = torch.arange(1, 13, dtype=torch.float32).view(2, 3, 1, 2)
    cache.write(1, where, k=k, v=-k)
    keys, values = cache.read(1, where)
    assert torch.equal(keys, k) and torch.equal(values, -k)
    every = torch.arange(28)[None]
    written = cache.read(1, every)[0].flatten(1).view(28, 2).abs().sum(dim=1).nonzero().flatten().tolist()
    assert written == sorted(where.flatten().tolist()) and SCRATCH[1] in written
    assert not cache.read(0, every)[0].any(), "another layer was written"


def test_a_cache_takes_the_memory_it_says() -> None:
    shape = CacheShape(
        num_layers=3,
        num_rows=5,
        num_pages=7,
        page_size=16,
        max_length=40,
        num_kv_heads=2,
        head_dim=4,
        dtype=torch.bfloat16,
    )
    cache = PagedCache(shape, CPU)
    every = torch.arange(8 * 16)[None]
    tensors = [t for layer in range(3) for t in cache.read(layer, every)]
    assert shape.num_bytes == sum(t.numel() * t.element_size() for t in tensors)
