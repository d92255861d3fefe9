"""`python -m eval gpu`: a page whose numbers are those of the files, and of one GPU alone."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from places import ROOT

from eval.gpu_page import write_gpu_page
from redrafter_jax import InputError

# An invented device: no number here was measured.
COMMON: dict[str, Any] = {
    "platform": "gpu",
    "device": "Imaginary G1 80GB",
    "timestamp": "2001-02-03T04:05:06+00:00",
    "versions": {"jax": "1.2.3"},
}
KERNEL: dict[str, Any] = COMMON | {
    "settings": {"dtype": "bfloat16", "repeats": 7},
    "rows": [
        {
            "heads": "vicuna-7b",
            "batch": 8,
            "slots": 1024,
            "nodes": 32,
            "copy_gigabytes_per_second": [99.0, 100.0, 101.0],
            "candidates": {
                "mosaic_gpu": {
                    "microseconds": [1.0, 12.34, 3.0],
                    "share_of_copy": [0.5, 0.6, 0.7],
                    "difference": 0.003,
                },
                "reference": {"not_run": "there was no memory"},
            },
        }
    ],
}
TIMES = {"draft": [1, 1.5, 2], "step": [4, 4.25, 5], "plain": [3, 3.5, 4]}
STEP = {
    "beam_width": 8,
    "draft_rounds": 4,
    "num_nodes": 32,
    "lookup_tokens": 0,
    "batch_size": 1,
    "slots": 4096,
    "milliseconds": TIMES,
    "in_plain_steps": {"draft": [0.3, 0.4, 0.5], "step": [1.1, 1.2, 1.3]},
}
STEPS = COMMON | {
    "device": "1 x Imaginary G1 80GB",
    "config": {"dtype": "bfloat16", "steps": 16, "repeats": 7},
    "rows": [STEP],
}
PASSED = (
    "<testsuites><testsuite><testcase classname='tests.a' name='one'/>{}</testsuite></testsuites>"
)
FAILED = (
    "<testcase classname='tests.b' name='two'>"
    "<failure message='assert 1 == 2&#10;more'/></testcase>"
    "<testcase classname='tests.b' name='three'><skipped message='no'/></testcase>"
)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    write(tmp_path)
    path = tmp_path / "gpu.yaml"
    values = {
        "tests": str(tmp_path / "tests.xml"),
        "kernel": str(tmp_path / "kernel.json"),
        "steps": {"Some-7B": str(tmp_path / "steps.json")},
        "folder": str(tmp_path / "docs"),
    }
    path.write_text(yaml.safe_dump(values))
    return path


def write(folder: Path, tests: str = "", kernel: Any = KERNEL, steps: Any = STEPS) -> None:
    (folder / "tests.xml").write_text(PASSED.format(tests))
    (folder / "kernel.json").write_text(json.dumps(kernel))
    (folder / "steps.json").write_text(json.dumps(steps))


def test_the_page_has_the_numbers_of_the_files(config: Path) -> None:
    write_gpu_page(["--config", str(config)])
    text = (config.parent / "docs" / "imaginary-g1-80gb-2001-02-03.md").read_text()
    assert text.startswith("# Imaginary G1 80GB, 2001-02-03\n")
    assert "jax 1.2.3" in text
    assert "1 passed, 0 failed, 0 skipped" in text
    assert (
        "| vicuna-7b | 8 | 1024 | 32 | 100 | 12.3 µs, 0.60 [0.50, 0.70], 3.0e-03 | not run |"
        in text
    )
    assert "- reference was not run: there was no memory" in text
    assert "## A decode step of Some-7B" in text
    assert "| 8 | 4 | 32 | 0 | 1 | 4096 | 1.500 | 4.250 | 3.500 | 1.20 [1.10, 1.30] |" in text
    numbers = json.loads((config.parent / "docs" / "imaginary-g1-80gb-2001-02-03.json").read_text())
    assert numbers["kernel"] == KERNEL
    assert numbers["steps"] == {"Some-7B": STEPS}
    assert numbers["tests"] == {"passed": 1, "skipped": 0, "failed": []}


def test_a_failed_test_is_on_the_page_and_in_the_exit_code(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(config.parent, FAILED)
    with pytest.raises(SystemExit) as ended:
        write_gpu_page(["--config", str(config)])
    assert ended.value.code == 1
    text = (config.parent / "docs" / "imaginary-g1-80gb-2001-02-03.md").read_text()
    assert "1 passed, 1 failed, 1 skipped" in text
    assert "- tests.b::two: assert 1 == 2\n" in text
    assert "1 passed, 1 failed, 1 skipped" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("difference", "shown"),
    [
        ({"difference": 0.021}, "2.1e-02"),
        ({"difference": None}, "not finite"),
        ({}, "not compared"),
    ],
)
def test_a_wrong_kernel_is_on_the_page_and_in_the_exit_code(
    config: Path, capsys: pytest.CaptureFixture[str], difference: dict[str, Any], shown: str
) -> None:
    [row] = KERNEL["rows"]
    times = {"microseconds": [1.0, 12.34, 3.0], "share_of_copy": [0.5, 0.6, 0.7]}
    candidates = {"candidates": {"mosaic_gpu": times | difference}}
    write(config.parent, kernel=KERNEL | {"rows": [row | candidates]})
    with pytest.raises(SystemExit) as ended:
        write_gpu_page(["--config", str(config)])
    assert ended.value.code == 1
    sentence = (
        f"mosaic_gpu at vicuna-7b, B=8, S=1024, N=32: its difference from the reference is {shown},"
    )
    assert sentence in capsys.readouterr().err
    text = (config.parent / "docs" / "imaginary-g1-80gb-2001-02-03.md").read_text()
    assert f"- {sentence}" in text
    assert f"0.60 [0.50, 0.70], {shown} |" in text


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"kernel": KERNEL | {"platform": "cpu"}}, "was measured on 'cpu', and this page is about"),
        ({"steps": STEPS | {"platform": "cpu"}}, "was measured on 'cpu', and this page is about"),
        ({"steps": STEPS | {"device": "1 x Other"}}, "one page is about one GPU"),
        ({"steps": STEPS | {"rows": []}}, "is no report of a bench: it has no rows"),
        ({"kernel": {"rows": [1]}}, "is no report of a bench: it has no device"),
        ({"kernel": 5}, r"kernel\.json is no report of a bench: it holds 5\.$"),
        ({"steps": KERNEL}, r"steps\.json is no report of a bench: it has no config\.$"),
        ({"kernel": STEPS}, r"kernel\.json is no report of a bench: it has no settings\.$"),
        *(
            (
                {
                    "steps": STEPS
                    | {"rows": [{name: STEP[name] for name in STEP if name != missing}]}
                },
                f"or an older one: its rows have no '{missing}'",
            )
            for missing in STEP
        ),
    ],
)
def test_what_was_not_measured_on_this_gpu_makes_no_page(
    config: Path, changed: dict[str, Any], sentence: str
) -> None:
    write(config.parent, **changed)
    with pytest.raises(InputError, match=sentence):
        write_gpu_page(["--config", str(config)])
    assert not (config.parent / "docs").exists()


@pytest.mark.parametrize("name", ["tests.xml", "kernel.json", "steps.json"])
def test_a_missing_or_broken_file_is_one_sentence(config: Path, name: str) -> None:
    (config.parent / name).write_text("{")
    with pytest.raises(InputError, match=f"{name} is no "):
        write_gpu_page(["--config", str(config)])
    (config.parent / name).unlink()
    with pytest.raises(InputError, match=rf"Cannot read .*{name}: .*; run `make gpu`"):
        write_gpu_page(["--config", str(config)])


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
    assert finished.stdout == ""
    assert list(tmp_path.iterdir()) == []
