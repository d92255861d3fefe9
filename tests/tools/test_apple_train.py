"""The comparison with Apple's trainer: our side for real, Apple's by a stand-in."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chat_folders import write_lines
from places import CONFIGS
from tiny_folders import write_untrained_target

from redrafter_jax import InputError
from redrafter_jax.drafters.recurrent import RecurrentConfig
from redrafter_jax.files.drafter_files import load_drafter
from tools.apple.case import load_case, write_case
from tools.apple.process import start
from tools.apple.train import RealSettings, main, take_turns
from tools.apple.worker import take_steps

pytestmark = pytest.mark.usefixtures("quick_compilation")


def curve(folder: Path, **data: Any) -> RealSettings:
    rows = write_lines(
        folder / "rows.jsonl",
        *({"input_ids": [1, 2, 3, 4, seed], "loss_mask": [0, 0, 1, 1, 1]} for seed in range(8)),
    )
    return RealSettings.model_validate(
        {
            "target": str(folder),
            "data": {"sources": [{"files": [rows]}], "sequence_length": 6} | data,
            "batch_size": 2,
            "turns": 1,
            "steps_per_turn": 1,
        }
    )


@pytest.mark.long
def test_our_side_takes_the_steps_of_a_case_and_learns(tmp_path: Path) -> None:
    write_untrained_target(tmp_path, functions=50)
    target, steps = curve(tmp_path).make()
    folder = tmp_path / "case"
    folder.mkdir()
    write_case(folder, target, steps, rounds=2, learning_rate=0.01)
    # Apple's trainer skips the projection, so there is none.
    drafter = load_drafter(folder / "drafter", "float32")
    assert drafter.config == RecurrentConfig(300, 16, 32, 1)
    batches = dict(np.load(folder / "batches.npz"))
    assert batches["tokens"].shape == (3, 2, 6)
    np.testing.assert_array_equal(batches["tokens"][..., :4].reshape(-1, 4), [[1, 2, 3, 4]] * 6)
    np.testing.assert_array_equal(batches["loss_mask"][0, 0], [0, 0, 1, 1, 1, 0])
    np.testing.assert_array_equal(batches["segments"][0, 0], [1, 1, 1, 1, 1, 0])
    rates = json.loads((folder / "case.json").read_text())["learning_rates"]
    assert rates[0] == pytest.approx(0.01)  # a tenth of three steps is no warm-up
    assert rates[1] > rates[2] > 0

    reply = take_steps(load_case(folder), {"first": 0, "steps": 3})
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


def reply(loss: float, seconds: float, peak: int) -> dict[str, Any]:
    taken = {"losses": [loss] * 2, "seconds": [seconds] * 2}
    return taken | {"processor_seconds": 2 * seconds, "peak_bytes": peak}


def test_sides_take_turns_and_ratios_are_of_turns(tmp_path: Path) -> None:
    about = {"versions": {}, "loaded_bytes": 1_000_000}
    mine = [reply(2.0, seconds, 400_000) for seconds in (9.0, 1.0, 2.0)]
    theirs = [reply(2.5, seconds, 1_000_000) for seconds in (9.0, 3.0, 4.0)]
    case = curve(tmp_path).model_copy(update={"turns": 2, "steps_per_turn": 2})
    with start(stand_in(about, *mine)) as us, start(stand_in(about, *theirs)) as them:
        measured = take_turns({"ours": us, "apple": them}, case, step_tokens=12)
    assert measured["ratio_of_turns"] == [3.0, 2.0]
    # Two steps of 12 tokens in 2 and in 4 seconds.
    assert measured["tokens_per_second_of_turns"]["ours"] == [12.0, 6.0]
    assert measured["processor_seconds_per_step"] == {"ours": 1.5, "apple": 3.5}
    assert measured["peak_megabytes"] == {"ours": 0.4, "apple": 1.0}
    assert measured["first_step_seconds"] == {"ours": 9.0, "apple": 9.0}
    assert measured["losses"]["ours"] == [2.0] * 6
    assert measured["largest_loss_difference"] == pytest.approx(0.2)


def test_packed_rows_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="pack is true, but in Apple's trainer"):
        curve(tmp_path, pack=True).make()


def test_a_report_that_would_be_a_folder_is_refused_before_anything_is_run(tmp_path: Path) -> None:
    words = ["torch_python=python", "repository=clone", f"output={tmp_path}"]
    with pytest.raises(InputError, match=r"output is .*, a folder; name a file in it"):
        main(["--config", str(CONFIGS / "apple_training.yaml"), *words])
