"""Host cost of a D3D round: time inside `D3DWorker.forward_batch_generation` outside target and drafter.

A greedy decode round runs with a target and a drafter that return prepared tensors. Their time is subtracted
and all that is left counts: bookkeeping of rows, pages and proposals, branches, acceptance, the target's
inputs, SGLang's result. One part of that is device work, the target's choice, an argmax over `[N * B, V]`:
the host of a GPU pays its launch and nothing else, while on a CPU it takes milliseconds and empties the
caches. So there are two passes:

- `extra_ms`: logits of two tokens. The host's cost with every call in place and no work of the size of V.
- `cold_extra_ms`: logits of V tokens, the time of the choice (`choice_ms`) subtracted as well. The same code
  after its caches were emptied, which is what a server whose target runs on this CPU sees.

Three kinds of rounds: synchronous ones; asynchronous ones in which every outcome was drafted ahead (metrics
`hit_*`); asynchronous ones after which every second row, of one row that one, has to be drafted on demand
(`miss_*`), the most that a round can have to do.

One torch thread, which is what SGLang sets on a server with a GPU.

Legend: N rows, B block size, V vocabulary, R branches, K support size.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from itertools import product
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from bench.result import make_result, write_result
from bench.worker_rig import GenerationBatchResult, LogitsProcessorOutput, RigSizes, WorkerRig
from d3d_sglang.drafter.executor import BlockRequest
from d3d_sglang.spec_types import BlockDrafts

BLOCK_SIZE = 16
VOCAB_SIZE = 49152  # SmolLM2
PROMPT_LEN = 100
NUM_ACCEPTED = 7  # candidates of every row in every round
COVERAGE, FANOUT = 12, 2
NO_VOCAB = 2  # a right and a wrong token
KINDS = ("sync", "hit", "miss")
# Of extra_ms on an idle 2-core machine, by batch size.
BARS_MS = {"sync": {1: 0.4, 16: 0.6}, "hit": {1: 0.6, 16: 1.0}, "miss": {1: 0.6, 16: 1.0}}
BATCH_SIZES = (1, 16)


@dataclass(frozen=True)
class Round:
    """Microseconds of one round and its parts."""

    total: float
    drafter: float
    target: float
    choice: float

    @property
    def extra(self) -> float:
        """All but the stubs."""
        return self.total - self.drafter - self.target


class PreparedTarget:
    """A target worker whose logits are the same in every round."""

    def __init__(self, logits: torch.Tensor) -> None:
        self.model_runner: Any = None  # set by the rig
        self._logits = logits  # [N * B, V]

    def forward_batch_generation(self, batch: Any, is_verify: bool = False) -> GenerationBatchResult:
        logits = self._logits if is_verify else self._logits[: len(batch.reqs)]
        result = GenerationBatchResult(logits_output=LogitsProcessorOutput(next_token_logits=logits))
        if not is_verify:
            result.next_token_ids = torch.zeros(len(batch.reqs), dtype=torch.int64)
        return result


class PreparedExecutor:
    """A drafter executor whose blocks are the same in every round; stands in for `DrafterExecutor`."""

    def __init__(
        self, model: Any, cache: Any, *, ranked: torch.Tensor, block_size: int, support: int, **_: Any
    ) -> None:
        self.model = model
        self.cache = cache
        self.block_size = block_size
        repeated = ranked[:, :, -1:].expand(-1, -1, support - ranked.shape[2])
        self._ids = torch.cat([ranked, repeated], dim=2)  # [N, B-1, K]
        self._prepared: dict[torch.Size, BlockDrafts] = {}

    def prefill(self, row: int, token_ids: Any, *, start: int) -> None:
        """Read nothing."""

    def draft(self, request: BlockRequest, sampling: Any) -> BlockDrafts:
        shape = request.anchors.shape
        if shape not in self._prepared:
            self._prepared[shape] = self._prepare(*shape)
        return self._prepared[shape]

    def _prepare(self, num_rows: int, num_blocks: int) -> BlockDrafts:
        """Passes run over all rows or, on demand, over every second one."""
        ids = self._ids if num_rows == len(self._ids) else self._ids[::2]  # [N, B-1, K]
        ids = ids[:, None].expand(-1, num_blocks, -1, -1).contiguous()  # [N, R, B-1, K]
        probs = torch.zeros(ids.shape)
        probs[..., 0] = 1.0
        return BlockDrafts(tokens=ids[..., 0].contiguous(), support_ids=ids, support_probs=probs)


class GreedyRows:
    """N greedy requests that decode together, their prompts already read.

    After `NUM_ACCEPTED` candidates the drafter is wrong, and so the target's token is a bonus. Where that is
    the drafter's second choice it was drafted ahead.
    """

    def __init__(self, num_rows: int, *, kind: str, vocab_size: int, num_rounds: int) -> None:
        logits = torch.randn(num_rows * BLOCK_SIZE, vocab_size, generator=torch.Generator().manual_seed(0))
        right = logits.argmax(dim=-1).view(num_rows, BLOCK_SIZE)[:, :-1]  # [N, B-1]
        ranked = torch.stack([right, (right + 1) % vocab_size], dim=2)  # [N, B-1, 2]
        ranked[:, NUM_ACCEPTED] = ranked[:, NUM_ACCEPTED].flip(1)
        if kind == "miss":
            ranked[::2, NUM_ACCEPTED, 1] = ranked[::2, NUM_ACCEPTED, 0]
        max_len = PROMPT_LEN + (num_rounds + 1) * (NUM_ACCEPTED + 1)
        self.rig = WorkerRig(
            RigSizes(
                block_size=BLOCK_SIZE,
                vocab_size=vocab_size,
                num_requests=num_rows,
                max_len=max_len,
                max_positions=max_len + 2 * BLOCK_SIZE,
            ),
            make_target=lambda _pool: PreparedTarget(logits),
            make_executor=partial(PreparedExecutor, ranked=ranked),
            options={
                "mode": "sync" if kind == "sync" else "async",
                "coverage": str(COVERAGE),
                "fanout": str(FANOUT),
            },
        )
        self.num_rows = num_rows
        # No two alike: shared pages would be less work.
        starts = range(0, num_rows * PROMPT_LEN, PROMPT_LEN)
        self._reqs = [self.rig.request(range(start, start + PROMPT_LEN)) for start in starts]
        prompts = self.rig.extend_batch(self._reqs, ends=[PROMPT_LEN] * num_rows, prefix_lens=[0] * num_rows)
        self._draft_input = self.rig.run(prompts).next_draft_input

    def round(self) -> None:
        """One round. Fails if a row did not accept what it should: plain decoding would cost less."""
        result = self.rig.run(self.rig.decode_batch(self._reqs, self._draft_input), on_publish=_ignore)
        assert result.accept_lens.tolist() == [NUM_ACCEPTED + 1] * self.num_rows
        self._draft_input = result.next_draft_input
        for req in self._reqs:
            req.output_ids.extend([0] * (NUM_ACCEPTED + 1))


class Clock:
    """Replaces a method by itself with the time taken, in microseconds."""

    def __init__(self, owner: Any, method: str) -> None:
        self._micros = 0.0
        self._call: Callable[..., Any] = getattr(owner, method)
        setattr(owner, method, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        value = self._call(*args, **kwargs)
        self._micros += (time.perf_counter() - start) * 1e6
        return value

    def take(self) -> float:
        """Time since the last take."""
        micros, self._micros = self._micros, 0.0
        return round(micros, 2)


class OpCounter(TorchDispatchMode):
    """Counts the torch operations run under it, views included."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


def measure(num_rows: int, *, kind: str, vocab_size: int, num_rounds: int, num_warmup: int) -> list[Round]:
    """Time rounds of a batch of `num_rows`; `kind` is one of `KINDS`."""
    rows = GreedyRows(num_rows, kind=kind, vocab_size=vocab_size, num_rounds=num_rounds + num_warmup)
    worker = rows.rig.worker
    clocks = (
        Clock(worker, "forward_batch_generation"),
        Clock(worker.drafting.rows.executor, "draft"),
        Clock(rows.rig.target, "forward_batch_generation"),
        Clock(worker._choice, "accept"),
    )
    rounds = []
    for _ in range(num_warmup + num_rounds):
        rows.round()
        rounds.append(Round(*(clock.take() for clock in clocks)))
    return rounds[num_warmup:]


def metric(name: str, *, kind: str, num_rows: int) -> str:
    """Name of a metric; synchronous rounds have no prefix."""
    return f"{'' if kind == 'sync' else kind + '_'}{name}_b{num_rows}"


def metrics_of(rounds: list[Round], *, kind: str, num_rows: int, vocab_size: int) -> dict[str, float]:
    """Medians in milliseconds."""
    if vocab_size == NO_VOCAB:
        medians = {"extra": statistics.median(r.extra for r in rounds)}
    else:
        medians = {
            "cold_extra": statistics.median(r.extra - r.choice for r in rounds),
            "choice": statistics.median(r.choice for r in rounds),
        }
    return {
        metric(f"{name}_ms", kind=kind, num_rows=num_rows): round(micros / 1e3, 4)
        for name, micros in medians.items()
    }


def count_ops(num_rows: int, *, kind: str) -> Counter[str]:
    """Torch operations of one round, views included; the choice's are among them."""
    rows = GreedyRows(num_rows, kind=kind, vocab_size=NO_VOCAB, num_rounds=4)
    # The first round has nothing waiting, the second is the first of its kind.
    for _ in range(3):
        rows.round()
    worker = rows.rig.worker
    forward, ops = worker.forward_batch_generation, OpCounter()

    def counted(*args: Any, **kwargs: Any) -> GenerationBatchResult:
        with ops:
            return forward(*args, **kwargs)

    worker.forward_batch_generation = counted  # type: ignore[method-assign]
    rows.round()
    return ops.counts


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Measure the host cost of a D3D round; see the module's text."
    )
    parser.add_argument("--rounds", type=int, default=500, help="measured rounds per pass (default 500)")
    parser.add_argument("--warmup", type=int, default=50, help="rounds before them (default 50)")
    parser.add_argument("--ops", action="store_true", help="only list the torch operations of a round")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.ops:
        _print_ops()
    else:
        _measure_all(num_rounds=args.rounds, num_warmup=args.warmup)


def _measure_all(*, num_rounds: int, num_warmup: int) -> None:
    runs = []
    metrics: dict[str, float] = {}
    for kind, num_rows in product(KINDS, BATCH_SIZES):
        for vocab_size in (NO_VOCAB, VOCAB_SIZE):
            rounds = measure(
                num_rows, kind=kind, vocab_size=vocab_size, num_rounds=num_rounds, num_warmup=num_warmup
            )
            micros = {part.name: [getattr(r, part.name) for r in rounds] for part in fields(Round)}
            runs.append({"kind": kind, "batch": num_rows, "vocab_size": vocab_size, "micros": micros})
            metrics |= metrics_of(rounds, kind=kind, num_rows=num_rows, vocab_size=vocab_size)
        num_ops = metric("num_ops", kind=kind, num_rows=num_rows)
        metrics[num_ops] = count_ops(num_rows, kind=kind).total()
        _print_row(num_rows, metrics, kind=kind)
    settings = {
        "block_size": BLOCK_SIZE,
        "coverage": COVERAGE,
        "fanout": FANOUT,
        "num_rounds": num_rounds,
        "num_warmup": num_warmup,
        "num_threads": torch.get_num_threads(),
    }
    path = write_result(make_result("host_overhead", runs=runs, metrics=metrics, settings=settings))
    print(f"wrote {path}")
    print(json.dumps(metrics))


def _ignore(_new_seq_lens: torch.Tensor) -> None:
    """Publishing is SGLang's own work."""


def _print_row(num_rows: int, metrics: dict[str, float], *, kind: str) -> None:
    extra, cold, choice, ops = (
        metrics[metric(name, kind=kind, num_rows=num_rows)]
        for name in ("extra_ms", "cold_extra_ms", "choice_ms", "num_ops")
    )
    bar = BARS_MS[kind][num_rows]
    verdict = "ok" if extra <= bar else "ABOVE IT"
    print(
        f"{kind:4} batch {num_rows:2}: host {extra:.3f} ms a round (bar {bar} ms: {verdict}), "
        f"{ops} torch operations; with the choice over {VOCAB_SIZE} tokens on this device "
        f"{cold:.3f} ms and {choice:.3f} ms for the choice itself"
    )


def _print_ops() -> None:
    for kind, num_rows in product(KINDS, BATCH_SIZES):
        ops = count_ops(num_rows, kind=kind)
        print(f"{kind}, batch {num_rows}: {ops.total()} operations")
        for name, count in ops.most_common():
            print(f"  {count:3} {name}")


if __name__ == "__main__":
    main()
