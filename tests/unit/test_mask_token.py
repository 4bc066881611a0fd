"""The tokens of a model folder, and which of them may be the mask token."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from d3d_sglang.drafter.checkpoint import CheckpointError, read_drafter
from d3d_sglang.drafter.mask_token import choose_mask_token, mask_token_problem
from d3d_sglang.drafter.vocabulary import Vocabulary, read_vocabulary
from tests import tiny_folders as tiny


@pytest.fixture
def drafter(tmp_path: Path) -> Path:
    tiny.write_drafter(tmp_path)
    return tmp_path


def test_the_fast_token_map_is_that_of_transformers(drafter: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(drafter)
    vocabulary = read_vocabulary(drafter)
    assert vocabulary.token_to_id == tokenizer.get_vocab()
    assert vocabulary.added == {i: token.content for i, token in tokenizer.added_tokens_decoder.items()}
    assert vocabulary.num_ids == len(tokenizer) == tiny.NUM_TOKENS


def test_a_tokenizer_of_vocabulary_and_merges_is_read_too(tmp_path: Path) -> None:
    (tmp_path / "vocab.json").write_text(json.dumps({"a": 0, "b": 1, "ab": 2}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b\n")
    settings = {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|end|>", "unk_token": None}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    vocabulary = read_vocabulary(tmp_path)
    assert {"a": 0, "b": 1, "ab": 2}.items() <= vocabulary.token_to_id.items()
    end = vocabulary.token_to_id["<|end|>"]
    assert (vocabulary.added[end], vocabulary.roles[end]) == ("<|end|>", "eos")


def test_named_chat_templates_count(drafter: Path) -> None:
    (drafter / "chat_template.jinja").unlink()
    named = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": tiny.RESERVED[1]}]
    tiny.edit_json(drafter / "tokenizer_config.json", chat_template=named)
    with pytest.raises(CheckpointError, match=r"mask_token_id 6 is .*which the chat template uses"):
        read_drafter(drafter)


def vocabulary_of(tokens: dict[str, int], *, added: tuple[str, ...] = (), template: str = "") -> Vocabulary:
    return Vocabulary(
        token_to_id=tokens, added={tokens[x]: x for x in added}, roles={0: "eos"}, chat_template=template
    )


QWEN3_LIKE = {"a": 0, "<|fim|>": 151667, "</think>": 151668}
CHOICES: dict[str, tuple[Vocabulary, int, int]] = {
    "SmolLM2": (vocabulary_of({"a": 0, "<empty_output>": 16}, added=("<empty_output>",)), 17, 16),
    "Qwen3": (vocabulary_of(QWEN3_LIKE, added=("<|fim|>", "</think>")), 151936, 151669),
    "Qwen3 with a mask token added": (
        vocabulary_of({**QWEN3_LIKE, "<|MASK|>": 151669}, added=("<|MASK|>",)),
        151936,
        151669,
    ),
    "last reserved": (
        vocabulary_of({"a": 0, "<r>": 1, "<reserved_7>": 2}, added=("<r>", "<reserved_7>")),
        9,
        2,
    ),
    "mask before reserved": (
        vocabulary_of({"[MASK]": 1, "[unused9]": 2}, added=("[MASK]", "[unused9]")),
        3,
        1,
    ),
    "reserved but in the template": (
        vocabulary_of({"a": 0, "<reserved>": 1}, added=("<reserved>",), template="x<reserved>"),
        4,
        2,
    ),
    "ordinary tokens named so do not count": (vocabulary_of({"eos": 0, "reserved": 1, "mask": 2}), 4, 3),
    "padding row": (vocabulary_of({"a": 0, "b": 1}), 3, 2),
}


@pytest.mark.parametrize(("vocabulary", "num_rows", "chosen"), CHOICES.values(), ids=CHOICES)
def test_the_mask_token_chosen(vocabulary: Vocabulary, num_rows: int, chosen: int) -> None:
    assert choose_mask_token(vocabulary, num_embeddings=num_rows) == chosen
    assert mask_token_problem(chosen, vocabulary, num_embeddings=num_rows) is None


def test_no_free_id_asks_for_one() -> None:
    with pytest.raises(ValueError, match=r"no free id for the mask token.* --mask-token-id"):
        choose_mask_token(vocabulary_of({"a": 0, "b": 1}), num_embeddings=2)


@pytest.mark.slow
def test_the_mask_token_of_a_real_model() -> None:
    from serve.smollm2 import MASK_TOKEN_ID, smollm2_folder

    vocabulary = read_vocabulary(smollm2_folder(dtype="bfloat16"))
    assert choose_mask_token(vocabulary, num_embeddings=49152) == MASK_TOKEN_ID
