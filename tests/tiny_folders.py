"""Tiny model and drafter folders on disk, with a tokenizer built here: a user's folders, small.

Written without the code under test. The vocabulary: four tokens with a role, one that the chat template
writes, two reserved ones, then words; the models have some embedding rows more than the tokenizer has ids.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast, Qwen3Config

ROLE_TOKENS = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
TURN_TOKEN = "<|turn|>"
RESERVED = ("<|reserved_0|>", "<|reserved_1|>")
WORDS = tuple(f"word{i}" for i in range(20))
TOKENS = (*ROLE_TOKENS.values(), TURN_TOKEN, *RESERVED, *WORDS)

UNK_ID, BOS_ID, EOS_ID, PAD_ID, TURN_ID = range(5)
RESERVED_IDS = (5, 6)
WORD_ID = 7
NUM_TOKENS = len(TOKENS)  # 27
NUM_ROWS = 32
BLOCK_SIZE = 4

CHAT_TEMPLATE = "{% for m in messages %}<|turn|>{{ m.role }} {{ m.content }}{% endfor %}"
CONFIGS = {"llama": LlamaConfig, "qwen3": Qwen3Config}


def write_tokenizer(folder: Path, *, tokens: tuple[str, ...] = TOKENS, template: str = CHAT_TEMPLATE) -> None:
    """A word-level tokenizer: ids are positions in `tokens`, those in angle brackets are added tokens."""
    backend = Tokenizer(WordLevel({token: i for i, token in enumerate(tokens)}, unk_token="<unk>"))
    backend.pre_tokenizer = Whitespace()
    backend.add_special_tokens([token for token in tokens if token.startswith("<")])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=template, **ROLE_TOKENS)
    tokenizer.save_pretrained(folder)


def write_model(folder: Path, *, family: str = "llama", tied: bool = False, **changes: Any) -> None:
    """A random causal LM of 4 layers in fp32, with its tokenizer; `changes` go to its config."""
    settings = {
        "vocab_size": NUM_ROWS,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "max_position_embeddings": 128,
        "tie_word_embeddings": tied,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "pad_token_id": PAD_ID,
    }
    config = CONFIGS[family](**settings | changes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)
    write_tokenizer(folder)


def write_drafter(folder: Path, **changes: Any) -> None:
    """A model folder with a valid `d3d_config`; `changes` replace its fields."""
    write_model(folder)
    d3d_config = {"block_size": BLOCK_SIZE, "mask_token_id": RESERVED_IDS[1], **changes}
    edit_json(folder / "config.json", d3d_config=d3d_config)


def edit_json(path: Path, **changes: Any) -> None:
    """Replace top-level keys of a JSON file; a value of None removes the key."""
    content = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


def edit_d3d_config(folder: Path, **changes: Any) -> None:
    """Replace keys of a drafter's `d3d_config`."""
    d3d_config = json.loads((folder / "config.json").read_text())["d3d_config"]
    edit_json(folder / "config.json", d3d_config=d3d_config | changes)
