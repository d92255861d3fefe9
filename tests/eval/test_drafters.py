"""Kinds of drafter side by side: what they weigh, read and take."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from tiny_shapes import TARGET

from eval.commands import evaluate
from redrafter_jax import InputError

pytestmark = pytest.mark.usefixtures("quick_compilation")

V, D, E, R = 24, 16, 8, 3
SHAPES = {
    "apple": {"exit_dim": E, "num_draft_layers": 1},
    "other": {
        "exit_dim": E,
        "num_draft_layers": 0,
        "cell": "gru",
        "head": "target",
        "context_layers": [0],
        "draft_vocab_size": 5,
    },
    "factors": {"cell": "sum", "num_draft_layers": 0, "head": "low_rank", "head_rank": 3},
}
VALUES: dict[str, Any] = {
    "target": TARGET,
    "drafters": SHAPES,
    "dtype": "float32",
    "trees": [{"beam_width": [2], "draft_rounds": [R]}],
    "steps": 2,
    "repeats": 2,
}


def write(folder: Path, **changes: Any) -> list[str]:
    values = VALUES | {"report_dir": str(folder / "report")} | changes
    path = folder / "drafters.yaml"
    path.write_text(yaml.safe_dump(values, sort_keys=False))
    return ["drafters", "--config", str(path)]


def test_bytes_and_times_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    evaluate(write(tmp_path))
    report = json.loads((tmp_path / "report" / "drafters.json").read_text())
    apple, other, factors = report["rows"]
    recurrence = 2 * D * D + D
    weights = recurrence + (2 * D * E + E) + (E * E + E) + E * V
    assert apple["weight_bytes"] == 4 * weights
    assert apple["bytes_per_step"] == R * 4 * weights
    assert apple["relative"] == [1.0, 1.0, 1.0]
    # Gates with two biases, input and head projections; the context's projection is read once, and
    # five columns of the target's head in every round.
    rounds = 2 * (3 * D * D + 3 * D) + (2 * D * E + E) + E * D
    assert other["weight_bytes"] == 4 * (rounds + 2 * D * D)
    assert other["bytes_per_step"] == 4 * (2 * D * D + R * (rounds + 5 * D))
    assert factors["bytes_per_step"] == R * 4 * (2 * D * 3 + 3 * V)
    assert "factors" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("shape", "sentence"),
    [
        ({"context_layers": [1]}, r"drafters\.bad\.context_layers holds 1; the target has 2"),
        ({"draft_vocab_size": 25}, r"drafters\.bad\.draft_vocab_size is 25; .* 24 tokens\.$"),
        ({"draft_vocab_size": 1}, r"beam_width is 2, more than the 1 tokens"),
    ],
)
def test_shapes_that_do_not_fit_the_target_are_refused(
    tmp_path: Path, shape: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(InputError, match=sentence):
        evaluate(write(tmp_path, drafters={"bad": shape}))
