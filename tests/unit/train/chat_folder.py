"""A target's folder with a byte-level tokenizer: token i is byte i, then the special tokens.

So the ids of a text are known without a tokenizer. The template is that of the Qwen family, small: turns end
with <|im_end|>, thinking that is off leaves an empty thought in front of the answer.
"""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

SPECIAL = ("<|end|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<|mask|>")
END_OF_TEXT, IM_START, IM_END, THINK, END_THINK, MASK = range(256, 256 + len(SPECIAL))
TEMPLATE = (
    "{% for m in messages %}"
    "{% if m.role == 'system' and not loop.first %}{{ raise_exception('system comes first') }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}{% endif %}"
)
PLAIN_TEMPLATE = TEMPLATE.replace("<think></think>", "")


def write_target(
    folder: Path, *, template: str = TEMPLATE, end_ids: tuple[int, ...] = (IM_END, END_OF_TEXT)
) -> Path:
    """A folder with tokenizer and generation config."""
    byte_of = bytes_to_unicode()
    vocabulary = {byte_of[i]: i for i in range(256)}
    backend = Tokenizer(BPE(vocabulary | {one: 256 + i for i, one in enumerate(SPECIAL)}, []))
    backend.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = ByteLevelDecoder()
    backend.add_special_tokens(list(SPECIAL))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|end|>", chat_template=template or None
    )
    tokenizer.save_pretrained(folder)
    if end_ids:
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": list(end_ids)}))
    return folder


def ids_of(text: str) -> list[int]:
    """The ids of a text that holds special tokens, found by hand."""
    ids: list[int] = []
    while text:
        special = next((i for i, one in enumerate(SPECIAL) if text.startswith(one)), None)
        if special is None:
            ids += text[0].encode()
            text = text[1:]
        else:
            ids.append(256 + special)
            text = text.removeprefix(SPECIAL[special])
    return ids


def prompt_of(*turns: str) -> list[int]:
    """The ids of a prompt, thinking off: user, assistant, user, ..."""
    roles = ("user", "assistant")
    said = "".join(f"<|im_start|>{roles[i % 2]}\n{turn}<|im_end|>\n" for i, turn in enumerate(turns))
    return ids_of(f"{said}<|im_start|>assistant\n<think></think>")
