"""The `d3d_config` object in the `config.json` of a drafter: what makes a causal LM a D3D drafter.

Owns its fields, their defaults and their checks. Knows nothing of files, tokenizers or weights
(see `drafter.checkpoint`). Imports nothing but the standard library.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

CONFIG_KEY = "d3d_config"
MIN_BLOCK_SIZE = 2  # the anchor and one candidate
DEFAULT_COVERAGE = 12
DEFAULT_FANOUT = 2

ThinkingMode = Literal["on", "off"]
THINKING_MODES: tuple[ThinkingMode, ...] = ("on", "off")

_REQUIRED = ("block_size", "mask_token_id")
_OPTIONAL = ("target_model", "source_layers", "pruned_layers", "thinking_mode", "async", "provenance")
_ASYNC = ("coverage", "fanout")


def default_coverage(block_size: int) -> int:
    """Coverage of a drafter that names none; never above the block size."""
    return min(DEFAULT_COVERAGE, block_size)


@dataclass(frozen=True)
class DrafterConfig:
    """How a drafter was made and how it wants to be served. Build it with `from_dict`, which checks it.

    Attributes:
        block_size: tokens of a block, the anchor included.
        mask_token_id: reserved id that fills the candidate positions; never occurs in text.
        target_model: name of the model it drafts for, None if it is not tied to one.
        source_layers: layers of the source model that were kept, ascending; empty if not recorded.
        pruned_layers: layers removed from the trained drafter, in order of removal.
        thinking_mode: whether the training answers were made with thinking; None: no such mode.
        coverage: accept lengths drafted ahead (C of the paper, section 3.4), 1 to block_size.
        fanout: bonus tokens drafted ahead for each accept length (F).
        provenance: where the weights come from, for people.
    """

    block_size: int
    mask_token_id: int
    target_model: str | None
    source_layers: tuple[int, ...]
    pruned_layers: tuple[int, ...]
    thinking_mode: ThinkingMode | None
    coverage: int
    fanout: int
    provenance: dict[str, str] = field(default_factory=dict)

    @classmethod
    def from_dict(cls, d: Mapping[str, Any], *, where: str) -> DrafterConfig:
        """Check a parsed `d3d_config` object; `where` starts every message (the file it was read from).

        Raises:
            ValueError: an unknown or missing field, or a value that is not allowed.
        """
        read = _Reader(d, where=f"{where}: {CONFIG_KEY}", required=_REQUIRED, optional=_OPTIONAL)
        block_size = read.integer("block_size", at_least=MIN_BLOCK_SIZE)
        ahead = _Reader(read.get("async", {}), where=f"{where}: {CONFIG_KEY}.async", optional=_ASYNC)
        return cls(
            block_size=block_size,
            mask_token_id=read.integer("mask_token_id", at_least=0),
            target_model=read.text("target_model"),
            source_layers=read.layers("source_layers", ascending=True),
            pruned_layers=read.layers("pruned_layers", ascending=False),
            thinking_mode=read.thinking_mode("thinking_mode"),
            coverage=ahead.integer(
                "coverage", at_least=1, at_most=block_size, default=default_coverage(block_size)
            ),
            fanout=ahead.integer("fanout", at_least=1, default=DEFAULT_FANOUT),
            provenance=read.text_map("provenance"),
        )

    def to_dict(self) -> dict[str, Any]:
        """The JSON form; `from_dict` of it gives an equal object."""
        return {
            "block_size": self.block_size,
            "mask_token_id": self.mask_token_id,
            "target_model": self.target_model,
            "source_layers": list(self.source_layers),
            "pruned_layers": list(self.pruned_layers),
            "thinking_mode": self.thinking_mode,
            "async": {"coverage": self.coverage, "fanout": self.fanout},
            "provenance": dict(self.provenance),
        }


class _Reader:
    """Takes fields out of one JSON object, each checked, each error naming the field and the value."""

    def __init__(
        self, obj: Any, *, where: str, required: tuple[str, ...] = (), optional: tuple[str, ...] = ()
    ) -> None:
        if not isinstance(obj, Mapping):
            raise ValueError(f"{where} is {obj!r}: it must be a JSON object")
        self._obj = obj
        self._where = where
        known = (*required, *optional)
        unknown = [str(key) for key in obj if key not in known]
        if unknown:
            raise ValueError(
                f"{where} has the unknown field {sorted(unknown)[0]!r}: known are {', '.join(known)}"
            )
        missing = [key for key in required if key not in obj]
        if missing:
            raise ValueError(f"{where} lacks the field {missing[0]!r}")

    def get(self, key: str, default: Any = None) -> Any:
        return self._obj.get(key, default)

    def integer(
        self, key: str, *, at_least: int, at_most: int | None = None, default: int | None = None
    ) -> int:
        value = self.get(key, default)
        bounds = f"at least {at_least}" if at_most is None else f"from {at_least} to {at_most}"
        if not _is_int(value) or value < at_least or (at_most is not None and value > at_most):
            raise self._refusal(key, value, f"an integer {bounds}")
        return int(value)

    def text(self, key: str) -> str | None:
        value = self.get(key)
        if value is not None and not (isinstance(value, str) and value):
            raise self._refusal(key, value, "a non-empty string or null")
        return value

    def thinking_mode(self, key: str) -> ThinkingMode | None:
        value = self.get(key)
        if value is None:
            return None
        for mode in THINKING_MODES:
            if value == mode:
                return mode
        raise self._refusal(key, value, "'on', 'off' or null")

    def layers(self, key: str, *, ascending: bool) -> tuple[int, ...]:
        value = self.get(key, [])
        allowed = f"a list of different layer numbers{', ascending' if ascending else ''}"
        if not isinstance(value, list | tuple) or not all(_is_int(x) and x >= 0 for x in value):
            raise self._refusal(key, value, allowed)
        if len(set(value)) != len(value) or (ascending and list(value) != sorted(value)):
            raise self._refusal(key, value, allowed)
        return tuple(value)

    def text_map(self, key: str) -> dict[str, str]:
        value = self.get(key, {})
        is_map = isinstance(value, Mapping)
        if not is_map or not all(isinstance(text, str) for item in value.items() for text in item):
            raise self._refusal(key, value, "a JSON object from strings to strings")
        return dict(value)

    def _refusal(self, key: str, value: Any, allowed: str) -> ValueError:
        return ValueError(f"{self._where}.{key} is {value!r}: it must be {allowed}")


def _is_int(value: Any) -> bool:
    # JSON true is an int to Python.
    return isinstance(value, int) and not isinstance(value, bool)
