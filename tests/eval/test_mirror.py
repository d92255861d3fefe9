"""`python -m eval mirror`: it counts what the engine does, and the law adds its parts up."""

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_folders import write_yaml

from eval.commands import evaluate
from redrafter_jax import InputError

pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.mark.long
def test_the_report_agrees_with_the_engine_and_with_itself(
    tmp_path: Path, pair_settings: dict[str, Any]
) -> None:
    values = {
        "drafter": "self:layers=1",
        "tree": {"beam_width": 1, "draft_rounds": 3},
        "layers": [1],
        "candidates": [1, 3],
        "max_new_tokens": 24,
        "prompt_count": 4,
        "batch_size": 2,
        "stop": "never",
        "drafter_devices": 1,
        "repeats": 1,
        "wait_milliseconds": 30,
        "report_dir": str(tmp_path),
    }
    config = write_yaml(tmp_path / "mirror.yaml", pair_settings | values)
    evaluate(["mirror", "--config", str(config)])
    [row] = json.loads((tmp_path / "mirror.json").read_text())["rows"]
    assert row["equal"]
    assert 0 <= row["fallback_rate"]["3"] <= row["fallback_rate"]["1"] < 1
    parts = row["milliseconds"]
    assert parts["now"] > 30
    assert parts["ahead"] > 30
    longer = max(parts["complete"], parts["ahead"])
    assert row["law"] > parts["begin"] + longer + parts["pick"] + parts["transfers"]


@pytest.mark.long
def test_prompt_lookup_is_a_drafter(tmp_path: Path, pair_settings: dict[str, Any]) -> None:
    values = {
        "drafter": None,
        "tree": {"lookup_tokens": 2},
        "layers": [1],
        "candidates": [1, 2],
        "max_new_tokens": 8,
        "prompt_count": 1,
        "stop": "never",
        "report_dir": str(tmp_path),
    }
    config = write_yaml(tmp_path / "mirror.yaml", pair_settings | values)
    evaluate(["mirror", "--config", str(config)])
    [row] = json.loads((tmp_path / "mirror.json").read_text())["rows"]
    assert row["equal"]
    assert row["outcomes"] > 0
    with pytest.raises(InputError, match="prompt lookup alone; set drafter, or set only lookup_to"):
        evaluate(["mirror", "--config", str(config), "tree.draft_rounds=3"])
