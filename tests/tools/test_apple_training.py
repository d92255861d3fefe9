"""The comparison with Apple's trainer: our side for real, Apple's by a stand-in."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chat_folders import write_lines
from tiny_folders import write_untrained_target

from redrafter_jax.checkpoints.huggingface import load_drafter
from redrafter_jax.config import DrafterConfig
from tools.apple import training_ours
from tools.apple.process import start
from tools.apple.training import Taken, compare_losses, make_table, measure_speed
from tools.apple.training_case import write_curve_case
from tools.apple.training_settings import AppleSettings
from tools.apple.worker_protocol import answer_steps

pytestmark = pytest.mark.usefixtures("quick_compilation")

TARGET = {
    "vocab_size": 300,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "rope_theta": 1e4,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}


def settings(folder: Path, **changes: Any) -> AppleSettings:
    rows = write_lines(
        folder / "rows.jsonl",
        *({"input_ids": [1, 2, 3, 4, seed], "loss_mask": [0, 0, 1, 1, 1]} for seed in range(8)),
    )
    speed = {"target": TARGET, "batch_size": 2, "sequence_length": 6, "turns": 2}
    curve = {
        "target": str(folder),
        "data": {"sources": [{"files": [rows]}], "sequence_length": 6},
        "batch_size": 2,
        "steps": 3,
    }
    stated = {"speed": speed, "curve": curve, "draft_rounds": 2, "torch_python": sys.executable}
    paths = {"repository": str(folder), "output": str(folder / "report.json")}
    return AppleSettings.model_validate(stated | paths | changes)


def test_our_side_takes_the_steps_of_a_case_and_learns(tmp_path: Path) -> None:
    write_untrained_target(tmp_path, functions=50)
    folder = tmp_path / "case"
    write_curve_case(folder, settings(tmp_path, learning_rate=0.01))
    # Apple's trainer skips the projection, so there is none.
    drafter = load_drafter(folder / "drafter", "float32")
    assert drafter.config == DrafterConfig(300, 16, 32, 1)
    batches = dict(np.load(folder / "batches.npz"))
    assert batches["tokens"].shape == (3, 2, 6)
    np.testing.assert_array_equal(batches["tokens"][..., :4].reshape(-1, 4), [[1, 2, 3, 4]] * 6)
    np.testing.assert_array_equal(batches["loss_mask"][0, 0], [0, 0, 1, 1, 1, 0])
    np.testing.assert_array_equal(batches["segments"][0, 0], [1, 1, 1, 1, 1, 0])
    rates = json.loads((folder / "case.json").read_text())["learning_rates"]
    assert rates[0] == pytest.approx(0.01)  # a tenth of three steps is no warm-up
    assert rates[1] > rates[2] > 0

    take_step = training_ours.load(folder)
    reply = answer_steps(take_step)({"first": 0, "steps": 3})
    first, second, third = reply["losses"]
    # Two rounds of a drafter that knows nothing.
    assert first == pytest.approx(2 * np.log(300), rel=0.1)
    assert first > second > third
    assert len(reply["seconds"]) == 3


def stand_in(*replies: object) -> list[str]:
    """A side that says these lines, whatever it is asked."""
    lines = [json.dumps(reply) for reply in replies]
    script = f"import sys\nfor line in {lines!r}:\n    print(line, flush=True)\n    input()\n"
    return [sys.executable, "-c", script]


ABOUT = {"versions": {}, "loaded_bytes": 1_000_000}


def reply(loss: float, seconds: float, peak: int) -> dict[str, Any]:
    return Taken([loss] * 2, [seconds] * 2, 2 * seconds, peak)._asdict()


def test_sides_take_turns_and_ratios_are_of_turns(tmp_path: Path) -> None:
    mine = [reply(2.0, seconds, 400) for seconds in (9.0, 1.0, 2.0)]
    theirs = [reply(2.5, seconds, 1000) for seconds in (9.0, 3.0, 4.0)]
    with (
        start(stand_in(ABOUT, *mine)) as us,
        start(stand_in(ABOUT, *theirs)) as them,
    ):
        speed = measure_speed({"ours": us, "apple": them}, settings(tmp_path))
    assert speed["ratio_of_turns"] == [3.0, 2.0]
    # Two steps of 2 rows of 6 tokens in 2 and in 4 seconds.
    assert speed["tokens_per_second_of_turns"]["ours"] == [12.0, 6.0]
    assert speed["peak_bytes"] == {"ours": 400, "apple": 1000}
    assert speed["first_step_seconds"] == {"ours": 9.0, "apple": 9.0}
    report = {"speed": speed, "curve": compare_losses({"ours": [2.0], "apple": [2.5]})}
    assert report["curve"]["largest_loss_difference"] == pytest.approx(0.2)
    assert make_table(report).row_count == 6


def test_packed_rows_are_refused(tmp_path: Path) -> None:
    curve = settings(tmp_path).curve.model_dump()
    with pytest.raises(ValueError, match="pack is true, but in Apple's trainer"):
        settings(tmp_path, curve=curve | {"data": curve["data"] | {"pack": True}})
