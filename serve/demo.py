"""`make demo`: serve a small model with D3D, ask three questions, compare with plain decoding.

Starts SGLang's own server twice, first plain and then with D3D, and asks both the same three questions
through the official openai client, streaming. Prints the answers as they come and a table last. The exit
status is 1 if an answer differs in fp32, since greedy D3D must not change a token.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from openai import OpenAI
from rich.console import Console
from rich.table import Table

from d3d_sglang.drafter.checkpoint import read_drafter
from d3d_sglang.drafter.initialise import DrafterPlan, init_drafter
from serve.launch import ServerError, ServerProcess, pick_device
from serve.smollm2 import default_home, smollm2_folder

QUESTIONS = (
    "What is the capital of France, and what is it known for?",
    "Write a Python function that returns the n-th Fibonacci number.",
    "Tom has 3 boxes with 12 pencils each and gives away 7 pencils. How many are left?",
)
MAX_TOKENS = 64
DRAFTER_LAYERS = (0, 1, 28, 29)
BLOCK_SIZE = 16


@dataclass(frozen=True)
class Answer:
    """One streamed answer."""

    text: str
    num_tokens: int
    seconds: float  # from the first token to the last
    num_rounds: int  # verify rounds; 0 for plain decoding

    @property
    def tau(self) -> float | None:
        """Tokens a round added; the first token comes from the prefill."""
        return (self.num_tokens - 1) / self.num_rounds if self.num_rounds else None


def make_drafter(model: Path) -> Path:
    """A drafter with a few of the target's layers, made once; it is not trained, so it drafts badly."""
    out = default_home() / "drafters" / f"{model.name}-{len(DRAFTER_LAYERS)}-layers"
    if not out.exists():
        plan = DrafterPlan(
            source=str(model),
            target=str(model),
            out=out,
            block_size=BLOCK_SIZE,
            layers=DRAFTER_LAYERS,
            fanout=2,
        )
        init_drafter(plan, progress=lambda line: print(f"  {line}", file=sys.stderr))
    return read_drafter(out).path


def ask(client: OpenAI, question: str, console: Console) -> Answer:
    """Ask one question and print the answer while it streams."""
    stream = client.chat.completions.create(
        model="default",
        messages=[{"role": "user", "content": question}],
        temperature=0,
        max_tokens=MAX_TOKENS,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"return_spec_tokens_details": True},
    )
    pieces: list[str] = []
    num_tokens = num_rounds = 0
    first = last = time.monotonic()
    for chunk in stream:
        if chunk.choices and (piece := chunk.choices[0].delta.content):
            last = time.monotonic()
            first = last if not pieces else first
            pieces.append(piece)
            console.print(piece, end="", markup=False, highlight=False)
        if chunk.usage is not None:
            num_tokens = chunk.usage.completion_tokens
        num_rounds = _rounds(chunk) or num_rounds
    console.print()
    return Answer("".join(pieces), num_tokens, last - first, num_rounds)


def _rounds(chunk: object) -> int:
    """Verify rounds so far, from SGLang's extension of the answer; 0 where there is none."""
    extension = getattr(chunk, "sglext", None) or {}
    details = extension.get("spec_tokens_details") or {}
    return int(details.get("spec_verify_ct", 0))


def ask_all(model: Path, args: Sequence[str], *, title: str, console: Console) -> list[Answer]:
    """Start a server, ask the questions, stop it."""
    console.rule(title)
    with ServerProcess(model, *args) as server:
        client = OpenAI(base_url=f"{server.url}/v1", api_key="none")
        answers = []
        for question in QUESTIONS:
            console.print(f"\n[bold]{question}[/bold]")
            answers.append(ask(client, question, console))
    return answers


def print_table(plain: Sequence[Answer], d3d: Sequence[Answer], *, device: str, console: Console) -> None:
    """One line a question, and what the figures do not say."""
    table = Table("question", "tokens", "tau", "D3D tokens/s", "plain tokens/s", "same text")
    for number, (one, other) in enumerate(zip(d3d, plain, strict=True), start=1):
        tau = f"{one.tau:.2f}" if one.tau is not None else "-"
        speeds = [f"{(x.num_tokens - 1) / x.seconds:.1f}" if x.seconds > 0 else "-" for x in (one, other)]
        table.add_row(
            str(number), str(one.num_tokens), tau, *speeds, "yes" if one.text == other.text else "NO"
        )
    console.print(table)
    console.print(
        "tau: tokens per verify round, 1.00 means no candidate was accepted. The drafter is "
        f"{len(DRAFTER_LAYERS)} untrained layers of the target, so expect about 1."
    )
    if device == "cpu":
        console.print(
            "This ran on a CPU: it shows that the text is the same, and tau. It does not show speed."
        )


def main() -> int:
    parser = argparse.ArgumentParser(description="Serve a small model with D3D and ask it three questions.")
    parser.add_argument("server_args", nargs="*", help="further arguments of both servers, after --")
    extra = parser.parse_args().server_args
    console = Console()
    device = pick_device()
    dtype = "bfloat16" if device == "cuda" else "float32"
    console.print(f"[1/4] target: SmolLM2-135M-Instruct, {dtype}, on {device}")
    model = smollm2_folder(dtype=dtype)
    console.print("[2/4] drafter: a few of the target's layers, not trained")
    drafter = make_drafter(model)
    flags = ("--speculative-algorithm", "D3D", "--speculative-draft-model-path", str(drafter))
    try:
        plain = ask_all(model, extra, title="[3/4] plain SGLang", console=console)
        d3d = ask_all(
            model, [*flags, *extra], title="[4/4] SGLang with --speculative-algorithm D3D", console=console
        )
    except ServerError as error:
        console.print(f"The server failed: {error}", style="red", markup=False)
        return 1
    print_table(plain, d3d, device=device, console=console)
    same = all(one.text == other.text for one, other in zip(plain, d3d, strict=True))
    # In bf16 a block and a single token round differently, so near ties may fall the other way.
    return 0 if same or dtype == "bfloat16" else 1


if __name__ == "__main__":
    sys.exit(main())
