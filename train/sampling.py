"""How the target chooses its tokens when it is asked: greedy, or as its makers recommend, or as given."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

GENERATION_CONFIG = "generation_config.json"
MAX_TEMPERATURE = 2.0


def _check(name: str, value: float | None, allowed: bool, range_text: str) -> None:
    if not allowed:
        raise ValueError(f"{name} is {value}, allowed are {range_text}")


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters by the names that servers and generation_config.json share; None is not sent."""

    temperature: float
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None

    def __post_init__(self) -> None:
        _check("temperature", self.temperature, 0 <= self.temperature <= MAX_TEMPERATURE, "0 to 2")
        _check("top_p", self.top_p, self.top_p is None or 0 < self.top_p <= 1, "above 0, to 1")
        _check("top_k", self.top_k, self.top_k is None or self.top_k >= 1, "1 or more")
        _check("min_p", self.min_p, self.min_p is None or 0 <= self.min_p <= 1, "0 to 1")
        positive = self.repetition_penalty is None or self.repetition_penalty > 0
        _check("repetition_penalty", self.repetition_penalty, positive, "above 0")

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0

    def to_request(self) -> dict[str, float]:
        """The fields of a request."""
        return {name: value for name, value in asdict(self).items() if value is not None}


GREEDY = Sampling(temperature=0.0)


def choose_sampling(*, greedy: bool, model_path: Path | None, **given: float | None) -> Sampling:
    """Greedy, or what the target's folder recommends with the `given` parameters in place of its own.

    Raises:
        ValueError: greedy together with other parameters, or nothing says what the temperature is.
    """
    given = {name: value for name, value in given.items() if value is not None}
    if greedy:
        if given:
            raise ValueError(f"greedy answers have no {', '.join(given)}: leave out one or the other")
        return GREEDY
    recommended = {} if model_path is None else _recommended(model_path)
    settings: dict[str, Any] = recommended | given
    if "temperature" not in settings:
        source = "" if model_path is None else f": {model_path / GENERATION_CONFIG} recommends nothing"
        raise ValueError(
            f"how to sample is not known{source}. Give --greedy, or --temperature (and --top-p, --top-k, "
            "--min-p), or the target's folder with --model-path"
        )
    return replace(GREEDY, **settings)


def _recommended(model_path: Path) -> dict[str, Any]:
    path = model_path / GENERATION_CONFIG
    if not path.is_file():
        raise ValueError(f"no {GENERATION_CONFIG} in {model_path}: give --temperature, or --greedy")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON ({error})") from error
    if config.get("do_sample") is False:
        return {"temperature": 0.0}
    names = [name for name in asdict(GREEDY) if config.get(name) is not None]
    # transformers writes top_k 0 for no limit, servers say it by leaving it out
    return {name: config[name] for name in names if not (name == "top_k" and config[name] == 0)}
