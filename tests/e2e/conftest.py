"""Servers of the end-to-end tests: six starts in all, one server alive at a time.

The plain server comes first, answers every case and stops. Then tests run in the order of the D3D servers
they name (`server` is parametrized by name), so each of those starts once.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from d3d_sglang.drafter.initialise import DrafterPlan, init_drafter
from d3d_sglang.drafter_config import DEFAULT_FANOUT
from d3d_sglang.reference import block_logits
from serve.launch import LOG_FOLDER, ServerProcess, no_progress
from serve.smollm2 import MASK_TOKEN_ID, smollm2_folder
from tests.e2e.asking import Reply, RunningServer
from tests.e2e.cases import ALL_OUTCOMES, COMPARED, WITHOUT_EFFECT
from tests.e2e.expected import Cacheless
from tests.e2e.logged import logged_environment
from tests.e2e.scripted.environment import scripted_environment
from tests.e2e.scripted.script import Script

BLOCK_SIZE = 16
# Untrained, the last two layers propose what depends on all of the context. Others, such as the first and the
# last, propose the same token nearly everywhere, and a drafter that reads a wrong page would not be noticed.
LAYERS = (28, 29)
SHORT_POSITIONS = 192  # of the drafter of server "short"
SHORT_CONTEXT = 320  # of server "short"
# "drafter": untrained, default flags. "scripted": synchronous, all accept lengths, prompts in chunks.
# "ahead": the same, asynchronous, hits and misses at all positions. "retracting": scripted, requests are
# taken back every few rounds, pages. "short": an untrained drafter of few positions.
D3D_SERVERS = ("drafter", "scripted", "ahead", "retracting", "short")
SCRIPTED_SERVERS = ("scripted", "ahead", "retracting")
TIMEOUT_S = 900  # the first test of a server waits for its start, and the very first for the plain answers

COVERAGE, FANOUT = 12, 2  # the paper's grid; where the drafter is a script a branch costs little
PAPERS_GRID = ("--d3d-mode", "async", "--d3d-coverage", str(COVERAGE), "--d3d-fanout", str(FANOUT))
SMALL_GRID = ("--d3d-mode", "async", "--d3d-coverage", "4", "--d3d-fanout", "1")
CHUNKS = ("--chunked-prefill-size", "128", "--page-size", "1")
FLAGS: Mapping[str, tuple[str, ...]] = {
    "drafter": ("--enable-metrics", *SMALL_GRID),
    "scripted": (*CHUNKS, "--d3d-mode", "sync"),
    "ahead": (*CHUNKS, *PAPERS_GRID),
    "retracting": ("--page-size", "16", *SMALL_GRID, "--d3d-miss", "sibling"),
    "short": ("--context-length", str(SHORT_CONTEXT), "--chunked-prefill-size", "64", *SMALL_GRID),
}
ENVIRONMENT: Mapping[str, Mapping[str, str]] = {
    "retracting": {
        "SGLANG_TEST_RETRACT": "1",
        # Passes from one to the next. With 2 it is always the request that was read again just before.
        "SGLANG_TEST_RETRACT_INTERVAL": "3",
        # Counts the pages of all requests in every round.
        "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
    },
}


def _server_of(item: pytest.Item) -> str | None:
    callspec = getattr(item, "callspec", None)
    return callspec.params.get("server") if callspec else None


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests that need a server and put them last, by server."""
    order = {None: -1} | {name: i for i, name in enumerate(D3D_SERVERS)}
    for item in items:
        if _server_of(item):
            item.add_marker(pytest.mark.e2e)
            item.add_marker(pytest.mark.timeout(TIMEOUT_S))
    items.sort(key=lambda item: order[_server_of(item)])


@pytest.fixture(scope="session")
def model() -> Path:
    """Folder of the target, in fp32."""
    return smollm2_folder()


@pytest.fixture(scope="session")
def drafter(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained drafter of two of the target's layers."""
    out = tmp_path_factory.mktemp("drafters") / "two-layers"
    plan = DrafterPlan(
        source=str(model),
        out=out,
        block_size=BLOCK_SIZE,
        fanout=DEFAULT_FANOUT,
        layers=LAYERS,
        mask_token_id=MASK_TOKEN_ID,
        target=str(model),
    )
    init_drafter(plan, progress=no_progress)
    return out


@pytest.fixture(scope="session")
def short_drafter(drafter: Path) -> Path:
    """The same drafter, made for fewer positions than the target's."""
    out = drafter.with_name("short")
    shutil.copytree(drafter, out)
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(config | {"max_position_embeddings": SHORT_POSITIONS}))
    return out


@pytest.fixture(scope="session")
def cacheless(drafter: Path) -> Cacheless:
    """The drafter without a server."""
    network = AutoModelForCausalLM.from_pretrained(drafter, dtype=torch.float32).eval()
    return Cacheless(block_logits(network, block_size=BLOCK_SIZE, mask_token_id=MASK_TOKEN_ID))


@pytest.fixture(scope="session")
def plain(model: Path) -> dict[str, Reply]:
    """The plain server's reply to every case.

    Without overlap: with it, plain SGLang counts penalties one token late.
    """
    cases = (*COMPARED, *WITHOUT_EFFECT)
    assert len({case.name for case in cases}) == len(cases)
    log = LOG_FOLDER / "e2e-plain.log"
    with ServerProcess(
        model, "--disable-overlap-schedule", device="cpu", log=log, progress=no_progress
    ) as process:
        server = RunningServer("plain", process)
        asked_for = {"return_logprob": True, "top_logprobs_num": 2}
        with_own = [case for case in cases if "top_logprobs_num" in case.fields]
        others = [case for case in cases if case not in with_own]
        replies = server.ask_together(others, at_once=8, **asked_for)
        replies += server.ask_together(with_own, at_once=8, return_logprob=True)
    return {reply.case.name: reply for reply in replies}


@pytest.fixture(scope="session")
def script(plain: dict[str, Reply]) -> Script:
    """The plain answers, the longest one to every prompt, with errors of every kind at all positions."""
    longest: dict[tuple[int, ...], list[int]] = {}
    for reply in (plain[case.name] for case in COMPARED):
        prompt = reply.case.prompt_ids
        longest[prompt] = max(longest.get(prompt, []), reply.output_ids, key=len)
    asked = Script.of([(case.prompt_ids, longest[case.prompt_ids]) for case in ALL_OUTCOMES])
    for _ in range(100):  # seeds for the asynchronous server, of which about every second does for the other
        asked = asked.seeded_for_all_outcomes(block_size=BLOCK_SIZE, coverage=COVERAGE, fanout=FANOUT)
        if set(asked.accept_lengths(block_size=BLOCK_SIZE)) == set(range(BLOCK_SIZE)):
            return Script.of(list(longest.items()), seed=asked.seed)
        asked = asked.with_seed(asked.seed + 1)
    pytest.fail("no seed with which everything occurs: the answers are too short")


@pytest.fixture(scope="session")
def server(
    request: pytest.FixtureRequest, plain: dict[str, Reply], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningServer]:
    """The D3D server of that name; the one before it is stopped first."""
    name: str = request.param
    folder = tmp_path_factory.mktemp(name)
    rounds = folder / "rounds.jsonl"
    script = None
    if name in SCRIPTED_SERVERS:
        script = request.getfixturevalue("script")
        script.save(folder / "script.json")
        env = scripted_environment(folder, script=folder / "script.json", rounds=rounds)
    else:
        env = logged_environment(folder, rounds=rounds)
    drafter = request.getfixturevalue("short_drafter" if name == "short" else "drafter")
    process = ServerProcess(
        request.getfixturevalue("model"),
        *("--speculative-algorithm", "D3D", "--speculative-draft-model-path", str(drafter)),
        *FLAGS[name],
        env={**env, **ENVIRONMENT.get(name, {})},
        device="cpu",
        log=LOG_FOLDER / f"e2e-{name}.log",
        progress=no_progress,
    )
    with process:
        yield RunningServer(name, process, rounds_file=rounds, script=script)
