"""The CPU engine's parts: kernels against slow loops, verify attention against a dense one, and when it acts.

The attention test runs SGLang's own class over pools of a few slots.
"""

from __future__ import annotations

import importlib
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from d3d_sglang import cpu_engine
from d3d_sglang.cpu_engine import standin
from d3d_sglang.cpu_engine.import_path import sgl_kernel
from d3d_sglang.cpu_engine.kernels import assign_req_to_token_pool_cpu, copy_all_layer_kv_cache_cpu

ROOT = Path(__file__).resolve().parents[2]
# Two fp32 softmax attentions over at most 16 keys of size 8, summed in different orders.
ATTENTION_TOLERANCE = 1e-5


@st.composite
def tables(draw: st.DrawFn) -> tuple[list[int], list[int], list[int], int, int]:
    """Distinct rows of a table with the columns to write in each: rows, starts, ends, R, L."""
    num_rows = draw(st.integers(1, 6))
    width = draw(st.integers(1, 9))
    rows = draw(st.lists(st.integers(0, num_rows - 1), unique=True, max_size=num_rows))
    starts = [draw(st.integers(0, width)) for _ in rows]
    ends = [draw(st.integers(start, width)) for start in starts]
    return rows, starts, ends, num_rows, width


@given(tables(), st.sampled_from([torch.int32, torch.int64]))
def test_slots_are_written_as_by_a_loop(
    table: tuple[list[int], list[int], list[int], int, int], dtype: torch.dtype
) -> None:
    rows, starts, ends, num_rows, width = table
    total = sum(ends) - sum(starts)
    slots = torch.arange(100, 100 + total)
    written = torch.full((num_rows, width), -1, dtype=torch.int32)
    assign_req_to_token_pool_cpu(
        torch.tensor(rows, dtype=torch.int64),
        written,
        torch.tensor(starts, dtype=dtype),
        torch.tensor(ends, dtype=dtype),
        slots,
        width,
    )
    expected = [[-1] * width for _ in range(num_rows)]
    next_slot = iter(slots.tolist())
    for row, start, end in zip(rows, starts, ends, strict=True):
        for column in range(start, end):
            expected[row][column] = next(next_slot)
    assert written.tolist() == expected


def test_wrong_number_of_slots_is_refused() -> None:
    one = torch.ones(1, dtype=torch.int64)
    with pytest.raises(RuntimeError, match="1 slots for 2 columns"):
        assign_req_to_token_pool_cpu(one * 0, torch.zeros(1, 4), one, one * 3, one, 4)


def test_wrong_row_width_is_refused() -> None:
    one = torch.ones(1, dtype=torch.int64)
    with pytest.raises(ValueError, match="row_width is 5: the table has rows of 4"):
        assign_req_to_token_pool_cpu(one * 0, torch.zeros(1, 4), one, one * 2, one, 5)


@given(
    st.lists(st.tuples(st.integers(0, 7), st.integers(0, 7)), max_size=8, unique_by=lambda pair: pair[0]),
    st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_kv_slots_are_copied_as_by_a_loop(pairs: list[tuple[int, int]], dtype: torch.dtype) -> None:
    # Two layers whose slots differ in size, as K and V may.
    buffers = [torch.arange(8 * n, dtype=dtype).view(8, n) for n in (3, 5)]
    before = [buffer.tolist() for buffer in buffers]
    copy_all_layer_kv_cache_cpu(
        torch.tensor([buffer.data_ptr() for buffer in buffers], dtype=torch.uint64),
        torch.tensor([buffer.stride(0) * buffer.itemsize for buffer in buffers]),
        torch.tensor([target for target, _ in pairs], dtype=torch.int64),
        torch.tensor([source for _, source in pairs], dtype=torch.int64),
    )
    sources = dict(pairs)
    expected = [[layer[sources.get(slot, slot)] for slot in range(8)] for layer in before]
    assert [buffer.tolist() for buffer in buffers] == expected


@pytest.mark.parametrize("name", sorted(sgl_kernel.IMPORTED_ONLY))
def test_a_name_without_a_function_fails_when_called(name: str) -> None:
    function = getattr(sgl_kernel, name)
    with pytest.raises(RuntimeError, match=f"sgl_kernel.{name} was called"):
        function(1, out=2)


def test_other_names_are_absent() -> None:
    assert not hasattr(sgl_kernel, "rmsnorm")


@pytest.fixture
def import_path() -> Iterator[list[str]]:
    """`sys.path` without the stand-in, restored afterwards."""
    saved = list(sys.path)
    sys.path[:] = [entry for entry in saved if entry != standin.IMPORT_PATH]
    yield sys.path
    sys.path[:] = saved


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(standin.ENABLE_ENV, "1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.usefixtures("no_gpu")
def test_install_puts_the_standin_first_and_only_once(import_path: list[str]) -> None:
    cpu_engine.install()
    cpu_engine.install()
    assert import_path[0] == standin.IMPORT_PATH
    assert import_path.count(standin.IMPORT_PATH) == 1


@pytest.mark.usefixtures("no_gpu")
def test_install_does_nothing_beside_a_gpu(import_path: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    before = list(import_path)
    cpu_engine.install()
    assert import_path == before


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize("value", [None, "0", ""])
def test_install_does_nothing_unless_the_cpu_engine_is_asked_for(
    import_path: list[str], monkeypatch: pytest.MonkeyPatch, value: str | None
) -> None:
    monkeypatch.delenv(standin.ENABLE_ENV)
    if value is not None:
        monkeypatch.setenv(standin.ENABLE_ENV, value)
    before = list(import_path)
    cpu_engine.install()
    assert import_path == before


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize(
    ("operators", "kept"), [("common_ops.abi3.so", True), ("sm90/common_ops.abi3.so", False)]
)
def test_only_a_cpu_build_of_the_real_module_is_kept(
    import_path: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, operators: str, kept: bool
) -> None:
    build = tmp_path / "sgl_kernel"
    (build / operators).parent.mkdir(parents=True)
    (build / operators).touch()
    (build / "__init__.py").touch()
    import_path.insert(0, str(tmp_path))
    monkeypatch.delitem(sys.modules, "sgl_kernel", raising=False)
    importlib.invalidate_caches()
    cpu_engine.install()
    assert (standin.IMPORT_PATH not in import_path) == kept


SPAWN = """
import multiprocessing
from d3d_sglang import cpu_engine
if __name__ == "__main__":
    cpu_engine.install()
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(pool.apply(eval, ["__import__('sgl_kernel').__file__"]))
"""


def test_a_spawned_process_imports_the_standin(tmp_path: Path) -> None:
    """As SGLang's scheduler does, before any plugin is loaded in it."""
    script = tmp_path / "spawn.py"
    script.write_text(SPAWN)
    own = {standin.ENABLE_ENV: "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    run = subprocess.run(
        [sys.executable, str(script)], env={**os.environ, **own}, capture_output=True, text=True, timeout=120
    )
    assert run.stdout.strip() == str(Path(standin.IMPORT_PATH) / "sgl_kernel.py"), run.stderr


HEADS, KV_HEADS, HEAD_SIZE, BLOCK = 4, 2, 8, 3
CACHED = [5, 0, 12]


class OneLayerPool:
    """The K and V of one layer, as the attention backend asks for them."""

    def __init__(self, num_slots: int) -> None:
        self.keys = torch.randn(num_slots, KV_HEADS, HEAD_SIZE)
        self.values = torch.randn(num_slots, KV_HEADS, HEAD_SIZE)

    def set_kv_buffer(
        self, _layer: object, location: SimpleNamespace, k: torch.Tensor, v: torch.Tensor
    ) -> None:
        self.keys[location.loc] = k
        self.values[location.loc] = v

    def get_key_buffer(self, _layer_id: int) -> torch.Tensor:
        return self.keys

    def get_value_buffer(self, _layer_id: int) -> torch.Tensor:
        return self.values


def dense_attention(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, num_seen: int) -> torch.Tensor:
    """One query [H, D] over the first `num_seen` keys [L, KV_HEADS, D], head by head."""
    heads = []
    for head in range(HEADS):
        kv_head = head * KV_HEADS // HEADS
        scores = keys[:num_seen, kv_head] @ q[head] / math.sqrt(HEAD_SIZE)
        heads.append(torch.softmax(scores, dim=0) @ values[:num_seen, kv_head])
    return torch.stack(heads)


def test_verify_attention_sees_the_cached_tokens_and_the_block_causally() -> None:
    from d3d_sglang.cpu_engine.torch_native import VerifyingTorchNative

    torch.manual_seed(0)
    num_rows, num_tokens = len(CACHED), len(CACHED) * BLOCK
    cached = torch.tensor(CACHED)
    pool = OneLayerPool(num_slots=64)
    table = torch.randperm(64)[: 4 * 16].view(4, 16)
    rows = torch.tensor([2, 0, 3])
    q = torch.randn(num_tokens, HEADS * HEAD_SIZE)
    k, v = torch.randn(2, num_tokens, KV_HEADS, HEAD_SIZE)
    fields = {
        "forward_mode": SimpleNamespace(is_target_verify=lambda: True),
        "spec_info": SimpleNamespace(draft_token_num=BLOCK),
        "seq_lens": cached,
        "extend_prefix_lens": None,
        "extend_seq_lens": None,
        "req_pool_indices": rows,
        "encoder_lens": None,
        "out_cache_loc": torch.cat([table[r, n : n + BLOCK] for r, n in zip(rows, CACHED, strict=True)]),
    }
    batch = SimpleNamespace(**fields)
    layer = SimpleNamespace(
        layer_id=0,
        qk_head_dim=HEAD_SIZE,
        v_head_dim=HEAD_SIZE,
        tp_q_head_num=HEADS,
        tp_k_head_num=KV_HEADS,
        scaling=1 / math.sqrt(HEAD_SIZE),
        is_cross_attention=False,
        attn_type="decoder",
        sliding_window_size=None,
    )
    runner = SimpleNamespace(
        device="cpu", req_to_token_pool=SimpleNamespace(req_to_token=table), token_to_kv_pool=pool
    )
    output = VerifyingTorchNative(runner).forward_extend(q, k, v, layer, batch)

    assert vars(batch) == fields  # left as it was
    for n in range(num_rows):
        keys, values = pool.keys[table[rows[n]]], pool.values[table[rows[n]]]
        for j in range(BLOCK):
            token = n * BLOCK + j
            expected = dense_attention(q[token].view(HEADS, HEAD_SIZE), keys, values, CACHED[n] + j + 1)
            torch.testing.assert_close(
                output[token].view(HEADS, HEAD_SIZE), expected, rtol=0, atol=ATTENTION_TOLERANCE
            )


@pytest.mark.usefixtures("no_gpu")
def test_target_verify_replaces_the_backend_on_a_cpu_only(monkeypatch: pytest.MonkeyPatch) -> None:
    from d3d_sglang.cpu_engine import torch_native

    stock = object()
    registry = {torch_native.NAME: stock}
    monkeypatch.setattr(torch_native, "ATTENTION_BACKENDS", registry)
    with monkeypatch.context() as gpu:
        gpu.setattr(torch.cuda, "is_available", lambda: True)
        cpu_engine.install_target_verify()
    assert registry[torch_native.NAME] is stock
    cpu_engine.install_target_verify()
    assert registry[torch_native.NAME] is torch_native.VerifyingTorchNative
