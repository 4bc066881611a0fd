"""The tokens of a model folder: the token -> id map, the tokens with a role, and the chat template.

Owns reading them, fast enough for a server's start (a transformers tokenizer takes seconds to build), and the
comparison of two maps. Which id may be the mask token is `mask_token`'s business.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from transformers import AutoTokenizer
from transformers.utils import cached_file

ROLES = ("bos", "eos", "pad", "unk")
MAX_DIFFERENCES = 3


@dataclass(frozen=True)
class Vocabulary:
    """Tokens of one model.

    Attributes:
        token_to_id: every token the tokenizer knows, added ones included.
        added: id -> content of the added tokens (matched literally, not built by merges).
        roles: id -> role ("bos", "eos", "pad", "unk"), from tokenizer, config and generation config.
        chat_template: sources of all chat templates, joined; empty if there is none.
    """

    token_to_id: Mapping[str, int]
    added: Mapping[int, str]
    roles: Mapping[int, str]
    chat_template: str

    @property
    def num_ids(self) -> int:
        """One more than the largest id the tokenizer can produce."""
        return max(self.token_to_id.values(), default=-1) + 1

    def differences(self, other: Vocabulary) -> list[str]:
        """The first ids, ascending, whose token is not the same in `other`; empty if the maps are equal."""
        if self.token_to_id == other.token_to_id:
            return []
        ours = {token_id: token for token, token_id in self.token_to_id.items()}
        theirs = {token_id: token for token, token_id in other.token_to_id.items()}
        differing = [i for i in sorted(ours.keys() | theirs.keys()) if ours.get(i) != theirs.get(i)]
        return [f"id {i}: {ours.get(i)!r} against {theirs.get(i)!r}" for i in differing[:MAX_DIFFERENCES]]


def read_vocabulary(path: str | Path) -> Vocabulary:
    """Read the vocabulary of a model folder or of a model id in the Hugging Face cache.

    Raises:
        ValueError: there is no tokenizer, or it cannot be read.
    """
    token_to_id, added = _token_map(path)
    tokenizer_config = _read_json(path, "tokenizer_config.json")
    return Vocabulary(
        token_to_id=token_to_id,
        added=added,
        roles=dict(_roles(path, tokenizer_config, token_to_id)),
        chat_template="\n".join(_chat_templates(path, tokenizer_config)),
    )


def _token_map(path: str | Path) -> tuple[dict[str, int], dict[int, str]]:
    file = _file(path, "tokenizer.json")
    try:
        if file is None:
            tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
            vocab = tokenizer.get_vocab()
            added = tokenizer.added_tokens_decoder
        else:
            backend = Tokenizer.from_file(str(file))
            vocab = backend.get_vocab(with_added_tokens=True)
            added = backend.get_added_tokens_decoder()
    except Exception as error:  # the tokenizers library raises plain Exception
        raise ValueError(
            f"{path} has no tokenizer that can be read ({_first_line(error)}): a drafter and its target need "
            "the same one, copy tokenizer.json and tokenizer_config.json from the target"
        ) from error
    return vocab, {token_id: token.content for token_id, token in added.items()}


def _roles(
    path: str | Path, tokenizer_config: Mapping[str, Any], token_to_id: Mapping[str, int]
) -> Iterator[tuple[int, str]]:
    configs = [_read_json(path, name) for name in ("config.json", "generation_config.json")]
    for role in ROLES:
        token = tokenizer_config.get(f"{role}_token")
        content = token.get("content") if isinstance(token, Mapping) else token
        if isinstance(content, str) and content in token_to_id:
            yield token_to_id[content], role
        for config in configs:
            ids = config.get(f"{role}_token_id")
            for token_id in ids if isinstance(ids, list) else [ids]:
                if isinstance(token_id, int):
                    yield token_id, role


def _chat_templates(path: str | Path, tokenizer_config: Mapping[str, Any]) -> Iterator[str]:
    inline = tokenizer_config.get("chat_template")
    if isinstance(inline, str):
        yield inline
    elif isinstance(inline, list):
        yield from (str(named["template"]) for named in inline)
    file = _file(path, "chat_template.jinja")
    if file is not None:
        yield file.read_text(encoding="utf-8")
    extra = Path(path) / "additional_chat_templates"
    yield from (template.read_text(encoding="utf-8") for template in sorted(extra.glob("*.jinja")))


def _file(path: str | Path, name: str) -> Path | None:
    try:
        found = cached_file(
            str(path),
            name,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
            _raise_exceptions_for_gated_repo=False,
        )
    except OSError as error:
        raise ValueError(f"{path} is neither a model folder nor a model id ({_first_line(error)})") from error
    return None if found is None else Path(found)


def _read_json(path: str | Path, name: str) -> dict[str, Any]:
    file = _file(path, name)
    if file is None:
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is not valid JSON ({error})") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file} must hold a JSON object, it holds {type(content).__name__}")
    return content


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
