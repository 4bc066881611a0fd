"""Acceptance found on known answers against the reference method, which really runs target and drafter."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from d3d_sglang.reference import Generation, Method, block_logits, target_logits
from tests import tiny_folders
from tests.tiny import MASK_TOKEN_ID, tiny_llama
from tests.unit.train.separate_blocks import example_of, sample
from train.acceptance import ORIGINS
from train.dataset import Example
from train.evaluate import evaluate_examples, main
from train.model import TrainModel
from train.packing import pack

BLOCK_SIZE = 4
ANSWER_LEN = 24
PROMPTS = [sample(5 + i, 2, seed=i).prompt_ids for i in range(4)]
BATCH_TOKENS = 400  # two rows a pass


@cache
def target() -> PreTrainedModel:
    """A target that does not say the mask token."""
    lm = tiny_llama(0)
    lm.lm_head.weight[MASK_TOKEN_ID] = 0.0
    return lm


@cache
def answers(end_token: int | None) -> list[Example]:
    """Greedy answers of the tiny target, cut after the end token or at ANSWER_LEN tokens."""
    said = []
    for i, prompt in enumerate(PROMPTS):
        tokens = prompt.tolist()
        while len(tokens) < len(prompt) + ANSWER_LEN and end_token not in tokens[len(prompt) :]:
            tokens.append(int(target()(torch.tensor([tokens])).logits[0, -1].argmax()))
        said.append(example_of(prompt, tokens[len(prompt) :], id=str(i)))
    return said


@cache
def drafter() -> PreTrainedModel:
    """A drafter that is often right, half-way to knowing the answers by heart; float64, so without ties."""
    model = TrainModel(tiny_llama(1).requires_grad_(True), mask_token_id=MASK_TOKEN_ID, attention="sdpa")
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    generator, first = np.random.default_rng(0), None
    for _ in range(40):
        batch = pack(
            answers(None),
            block_size=BLOCK_SIZE,
            num_anchors=16,
            gamma=7.0,
            mask_token_id=MASK_TOKEN_ID,
            generator=generator,
        )
        losses = model(batch)
        first = losses.diff.item() if first is None else first
        optimizer.zero_grad()
        losses.total.backward()
        optimizer.step()
    assert losses.diff.item() < 0.7 * first
    return model.lm.double().requires_grad_(False)


@cache
def reference(end_token: int | None, *, mode: str, coverage: int = 1, fanout: int = 1) -> list[Generation]:
    """The method run for real on every prompt."""
    lm = drafter()
    lm.set_attn_implementation("sdpa")
    method = Method(
        target=target_logits(target()),
        drafter=block_logits(lm, block_size=BLOCK_SIZE, mask_token_id=MASK_TOKEN_ID),
        mode=mode,  # type: ignore[arg-type]
        coverage=coverage,
        fanout=fanout,
    )
    ends = frozenset() if end_token is None else frozenset({end_token})
    generations = [method.generate(prompt.tolist(), ANSWER_LEN, eos_ids=ends) for prompt in PROMPTS]
    for generation, answer in zip(generations, answers(end_token), strict=True):
        assert generation.output_ids == answer.response_ids.tolist()
    return generations


def end_tokens() -> list[int | None]:
    """None, and a token that ends answers early."""
    return [None, int(answers(None)[0].response_ids[12])]


def train_model() -> TrainModel:
    return TrainModel(drafter(), mask_token_id=MASK_TOKEN_ID, attention="sdpa")


@pytest.mark.parametrize("which_end", [0, 1])
@pytest.mark.parametrize(("coverage", "fanout"), [(1, 1), (3, 2), (4, 5)])
def test_tau_rounds_and_hits_are_the_references(which_end: int, coverage: int, fanout: int) -> None:
    end_token = end_tokens()[which_end]
    usable = [i for i, answer in enumerate(answers(end_token)) if len(answer.response_ids) > 1]
    found = evaluate_examples(
        train_model(),
        [answers(end_token)[i] for i in usable],
        block_size=BLOCK_SIZE,
        coverage=coverage,
        fanout=fanout,
        batch_tokens=BATCH_TOKENS,
    )
    for counts, settings in (
        (found.sync, {"mode": "sync"}),
        (found.ahead, {"mode": "async", "coverage": coverage, "fanout": fanout}),
    ):
        generations = [reference(end_token, **settings)[i] for i in usable]  # type: ignore[arg-type]
        rounds = [done for generation in generations for done in generation.rounds]
        assert counts.num_rounds == len(rounds)
        assert counts.tau == sum(len(g.output_ids) - 1 for g in generations) / len(rounds)
        assert counts.origins == tuple(sum(r.origin == origin for r in rounds) for origin in ORIGINS)
        later = [done.origin for generation in generations for done in generation.rounds[1:]]
        assert counts.hit_rate == sum(origin != "redraft" for origin in later) / len(later)
        assert 1.2 < counts.tau < BLOCK_SIZE  # or the comparison would be of nothing
    assert found.tau == found.sync.tau
    if coverage > 1:
        assert all(found.ahead.origins)


def test_a_model_in_training_stays_in_training() -> None:
    model = train_model().train()
    done = []
    settings = {"block_size": BLOCK_SIZE, "coverage": 2, "fanout": 1}
    found = evaluate_examples(model, answers(None), **settings, on_answer=lambda: done.append(1))
    assert model.training and model.lm.training
    assert len(done) == found.sync.num_answers == len(PROMPTS)


def test_no_examples_are_refused() -> None:
    with pytest.raises(ValueError, match="examples is empty"):
        evaluate_examples(train_model(), [], block_size=BLOCK_SIZE, coverage=2, fanout=1)


# The command line


def write_answers(path: Path, responses: list[list[int]]) -> None:
    words = [" ".join(tiny_folders.TOKENS[token] for token in response) for response in responses]
    rows = [
        {
            "id": f"row{i}",
            "conversations": [
                {"role": "user", "content": f"word{i} word3"},
                {"role": "assistant", "content": text, "output_ids": response, "finish_reason": "length"},
            ],
        }
        for i, (response, text) in enumerate(zip(responses, words, strict=True))
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def replayed(folder: Path, prompt_ids: list[int], response: list[int]) -> Generation:
    """The reference on a drafter folder, with a target that says `response` whatever comes."""
    lm = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    block = {"block_size": tiny_folders.BLOCK_SIZE, "mask_token_id": tiny_folders.RESERVED_IDS[1]}
    truth = [*prompt_ids, *response, *[0] * 10]
    method = Method(
        target=lambda tokens: torch.nn.functional.one_hot(torch.tensor(truth[1 : len(tokens) + 1])).float(),
        drafter=block_logits(lm, **block),
        mode="sync",
    )
    return method.generate(prompt_ids, len(response), eos_ids=frozenset())


def test_the_command_measures_sets_of_answers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "drafter"
    tiny_folders.write_drafter(folder, **{"async": {"coverage": 3, "fanout": 2}})
    first, second = [[10, 11, 12, 13, 10], [7, 7, 7]], [[9, 8, 9, 8, 9, 8, 9, 8]]
    write_answers(tmp_path / "first.jsonl", [*first, [8]])  # one token: no round
    write_answers(tmp_path / "second.jsonl", second)
    command = ["--drafter", str(folder), "--out", str(tmp_path / "out.json"), "--max-dropped-share", "0.4"]
    command += ["--answers", str(tmp_path / "first.jsonl"), "--answers", str(tmp_path / "second.jsonl")]
    assert main([*command, "--device", "cpu"]) == 0
    found = json.loads((tmp_path / "out.json").read_text())
    assert list(found["sets"]) == ["first", "second"]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for name, responses in (("first", first), ("second", second)):
        prompts = [tokenizer.encode(f"<|turn|>user word{i} word3") for i in range(len(responses))]
        generations = [replayed(folder, *pair) for pair in zip(prompts, responses, strict=True)]
        num_rounds = sum(len(generation.rounds) for generation in generations)
        sync = found["sets"][name]["sync"]
        assert (sync["num_answers"], sync["num_rounds"]) == (len(responses), num_rounds)
        assert sync["tau"] == sum(len(response) - 1 for response in responses) / num_rounds
        assert (found["sets"][name]["coverage"], found["sets"][name]["fanout"]) == (3, 2)
    taus = [found["sets"][name]["sync"]["tau"] for name in ("first", "second")]
    assert found["tau_mean"] == pytest.approx(sum(taus) / 2)
    assert found["sets"]["first"]["answers"]["short_response"] == 1
    shown = capsys.readouterr().out
    assert all(text in shown for text in ("first", "second", "mean", f"{found['tau_mean']:.3f}"))


def test_the_command_takes_prompts_spread_over_the_file(tmp_path: Path) -> None:
    tiny_folders.write_drafter(tmp_path / "drafter")
    write_answers(tmp_path / "set.jsonl", [[7] * (2 + i) for i in range(9)])
    command = ["--drafter", str(tmp_path / "drafter"), "--answers", str(tmp_path / "set.jsonl")]
    assert main([*command, "--max-prompts", "3", "--device", "cpu", "--out", str(tmp_path / "out.json")]) == 0
    sync = json.loads((tmp_path / "out.json").read_text())["sets"]["set"]["sync"]
    assert (sync["num_answers"], sync["num_tokens"]) == (3, 1 + 4 + 7)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--fanout", "0"], "fanout is 0"),
        (["--coverage", "99"], "coverage is 99, allowed are 1 to the block size 4"),
        (["--batch-tokens", "10"], "batch_tokens is 10, it must be at least"),
        (["--answers", "nowhere.jsonl"], "nowhere.jsonl"),
        (["--drafter", "nowhere"], "nowhere does not exist"),
        (["--target", "nowhere"], "the target nowhere cannot be read"),
    ],
)
def test_the_command_refuses_what_cannot_be(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny_folders.write_drafter(tmp_path / "drafter")
    write_answers(tmp_path / "set.jsonl", [[7, 8, 9]])
    out = tmp_path / "out.json"
    command = ["--drafter", str(tmp_path / "drafter"), "--answers", str(tmp_path / "set.jsonl")]
    assert main([*command, "--device", "cpu", "--out", str(out), *arguments]) == 2
    assert message in capsys.readouterr().err
    assert not out.exists()


def test_two_sets_of_one_name_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny_folders.write_drafter(tmp_path / "drafter")
    write_answers(tmp_path / "set.jsonl", [[7, 8, 9]])
    command = ["--drafter", str(tmp_path / "drafter"), *["--answers", str(tmp_path / "set.jsonl")] * 2]
    assert main([*command, "--device", "cpu"]) == 2
    assert "they must differ" in capsys.readouterr().err
