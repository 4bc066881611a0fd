"""What a generation config recommends."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from train.sampling import choose_sampling


def test_generation_config_without_sampling(tmp_path: Path) -> None:
    path = tmp_path / "generation_config.json"
    path.write_text(json.dumps({"do_sample": False, "temperature": 0.6}))
    assert choose_sampling(greedy=False, model_path=tmp_path).is_greedy
    path.write_text(json.dumps({"eos_token_id": 2}))
    with pytest.raises(ValueError, match="recommends nothing"):
        choose_sampling(greedy=False, model_path=tmp_path)
