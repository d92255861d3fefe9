"""`python -m tools.gpu_table`: the numbers of the files of `make gpu`, and of one GPU alone."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from places import ROOT

from redrafter_jax import InputError
from tools.gpu_table import main

# An invented device: no number here was measured.
COMMON: dict[str, Any] = {
    "platform": "gpu",
    "device": "Imaginary G1 80GB",
    "timestamp": "2001-02-03T04:05:06+00:00",
    "versions": {"jax": "1.2.3"},
}
RIGHT = {"microseconds": [1, 12.34, 3], "share_of_copy": [0.5, 0.6, 0.7], "difference": 0.003}
KERNEL: dict[str, Any] = COMMON | {
    "rows": [
        {
            "heads": "vicuna-7b",
            "batch": 8,
            "slots": 1024,
            "nodes": 32,
            "candidates": {"mosaic_gpu": RIGHT, "reference": {"not_run": "there was no memory"}},
        }
    ],
}
OTHER = {name: value for name, value in RIGHT.items() if name != "difference"}
PRODUCTS: dict[str, Any] = COMMON | {
    "rows": [
        {
            "weights": "vicuna-7b",
            "nodes": 16,
            "candidates": {"mosaic_gpu": RIGHT, "bfloat16": OTHER},
        }
    ],
}
STEP = {
    "beam_width": 8,
    "draft_rounds": 4,
    "num_nodes": 32,
    "lookup_tokens": 0,
    "sharpness": 1.0,
    "final_beams_only": False,
    "rerank": False,
    "candidates": None,
    "batch_size": 1,
    "slots": 4096,
    "sampling": "greedy",
    "milliseconds": {"propose": [1, 1.5, 2], "step": [4, 4.25, 5], "baseline": [3, 3.5, 4]},
    "in_baseline_steps": {"step": [1.1, 1.2, 1.3]},
}
STEPS = COMMON | {"device": "1 x Imaginary G1 80GB", "rows": [STEP]}


def run(measured: Path, monkeypatch: pytest.MonkeyPatch, **changed: Any) -> tuple[str, Any]:
    """The page and the JSON file beside it."""
    reports = {"kernel": KERNEL, "products": PRODUCTS, "steps": STEPS} | changed
    (measured / "kernel.json").write_text(json.dumps(reports["kernel"]))
    (measured / "grouped_matmul.json").write_text(json.dumps(reports["products"]))
    (measured / "steps_some_7b").mkdir()
    (measured / "steps_some_7b" / "steps.json").write_text(json.dumps(reports["steps"]))
    monkeypatch.setattr(sys, "argv", ["gpu_table", str(measured), str(measured / "docs")])
    main()
    path = measured / "docs" / "imaginary-g1-80gb-2001-02-03.md"
    return path.read_text(), json.loads(path.with_suffix(".json").read_text())


def test_both_files_have_the_numbers_of_the_reports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page, numbers = run(tmp_path, monkeypatch)
    assert page.startswith("# Imaginary G1 80GB, 2001-02-03\n")
    assert "| vicuna-7b | 8 | 1024 | 32 | 12.3, 0.60, 3.0e-03 | not run |" in page
    assert (
        "| 8 | 4 | 32 | 0 | 1.0 | False | False | None | 1 | 4096 | greedy "
        "| 1.500 | 4.250 | 3.500 | 1.20 |" in page
    )
    assert "| vicuna-7b | 16 | 12.3, 0.60, 3.0e-03 | 12.3, 0.60 |" in page
    assert numbers == {"kernel": KERNEL, "products": PRODUCTS, "steps": {"some_7b": STEPS}}


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"kernel": KERNEL | {"platform": "cpu"}}, r"'Imaginary G1 80GB' \(cpu\)"),
        ({"products": PRODUCTS | {"device": "Other"}}, "measurements on 'Other'"),
        ({"steps": STEPS | {"device": "1 x Other"}}, "measurements on '1 x Other'"),
    ],
)
def test_what_was_not_measured_on_one_gpu_makes_no_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(InputError, match=sentence):
        run(tmp_path, monkeypatch, **changed)
    assert not (tmp_path / "docs").exists()


def test_where_there_is_no_gpu_make_says_so_and_does_nothing(tmp_path: Path) -> None:
    make = shutil.which("make")
    assert make is not None
    finished = subprocess.run(
        [make, "gpu", f"VENV={tmp_path / 'venv'}"],
        cwd=ROOT,
        env={"PATH": str(tmp_path)},  # without nvidia-smi
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert finished.returncode != 0
    first, *_ = finished.stderr.splitlines()
    assert first == "make gpu needs an NVIDIA GPU, and nvidia-smi finds none here."
    assert list(tmp_path.iterdir()) == []
