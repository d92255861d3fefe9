"""`python -m tools.gpu`, which `make gpu` runs: on a bare machine, cut anywhere, on one card."""

import json
import shutil
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
from places import ROOT

from redrafter_jax import InputError
from tools.gpu import __main__ as runner
from tools.gpu.acceptance import measure as force_acceptance
from tools.gpu.page import check_one_card, markdown
from tools.gpu.pieces import PIECES, Piece

# Packages of training, charts, settings and GGUF files, which a machine with a card may lack.
ABSENT = ("gguf", "grain", "orbax", "matplotlib", "pydantic")
COMMON: dict[str, Any] = {
    "platform": "gpu",
    "device": "Imaginary G1 80GB",
    "timestamp": "2001-02-03T04:05:06+00:00",
    "versions": {"jax": "1.2.3"},
    "seconds": 12.0,
    "peak_memory_bytes": 17_300_000_000,
}


def on_a_bare_machine(folder: Path, *command: str) -> str:
    """What Python prints where some packages are not installed."""
    (folder / "sitecustomize.py").write_text(
        "import sys\n"
        "class Absent:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name.partition('.')[0] in {ABSENT}:\n"
        "            raise ModuleNotFoundError(f'No module named {name!r}', name=name)\n"
        "sys.meta_path.insert(0, Absent())\n"
    )
    path = {"PYTHONPATH": f"{folder}:{ROOT}", "JAX_PLATFORMS": "cpu", "PATH": "/usr/bin:/bin"}
    finished = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env=path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return finished.stdout


def test_no_piece_imports_what_a_machine_with_a_card_may_lack(tmp_path: Path) -> None:
    modules = ", ".join(dict.fromkeys(piece.module for piece in PIECES))
    on_a_bare_machine(tmp_path, "-c", f"import {modules}")


def test_a_piece_runs_on_a_bare_machine_and_is_not_run_again(tmp_path: Path) -> None:
    output = tmp_path / "measured"
    command = "-m", "tools.gpu", "--small", "--only", "copy", "--output", str(output)
    assert "copy: -m tools.gpu.copying" in on_a_bare_machine(tmp_path, *command)
    record = json.loads((output / "copy.json").read_text())
    assert record["peak_host_bytes"] > 0
    assert len(record["gigabytes_per_second"]) == 10
    assert "## A copy" in (output / "page.md").read_text()
    assert "copying" not in on_a_bare_machine(tmp_path, *command)


def settings(folder: Path, **changed: Any) -> Namespace:
    given = {"output": folder / "measured", "docs": folder / "docs", "model": None}
    return Namespace(**given | {"minutes": None, "only": None, "small": True} | changed)


# Those that a CPU can run.
SMALL = [piece.name for piece in PIECES if piece.small is not None]


@pytest.mark.parametrize("cut", range(len(SMALL)))
def test_a_run_that_is_cut_at_any_piece_goes_on(
    cut: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def run(piece: Piece, path: Path, kind: dict[str, Any], _: Namespace) -> bool:
        asked.append(piece.name)
        if len(asked) == cut + 1:
            path.with_suffix(".new").write_text("{")  # half a file
            raise KeyboardInterrupt
        path.write_text(json.dumps(COMMON | {"measured_by": kind}))
        return True

    monkeypatch.setattr(runner, "_run", run)
    monkeypatch.setattr(runner, "markdown", lambda records, left_out: [*records, *left_out])
    with pytest.raises(KeyboardInterrupt):
        runner.measure(settings(tmp_path))
    assert runner.measure(settings(tmp_path)) == 0
    assert asked == [*SMALL[: cut + 1], *SMALL[cut:]]
    assert runner.measure(settings(tmp_path)) == 0
    assert len(asked) == len(SMALL) + 1
    assert not (tmp_path / "docs").exists()


def test_a_piece_that_fails_is_tried_again_and_stops_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = Piece("kernels", "tools.gpu.no_such_module"), Piece("copy", "tools.gpu.copying")
    monkeypatch.setattr(runner, "PIECES", failing)
    assert runner.measure(settings(tmp_path)) == 1
    page = (tmp_path / "measured" / "page.md").read_text()
    assert "kernels is left out: it failed." in page
    assert "## A copy" in page
    assert not (tmp_path / "measured" / "kernels.json").exists()


def test_no_piece_begins_when_time_is_up(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert runner.measure(settings(tmp_path, minutes=0.0)) == 0
    assert "the same command resumes with kernels" in capsys.readouterr().out


def test_what_is_missing_is_said_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(runner, "PIECES", [Piece("copy", "", needs=("no_such_tool",))])
    assert runner.measure(settings(tmp_path)) == 0
    assert capsys.readouterr().out == "copy is left out: no_such_tool is not installed\n"
    monkeypatch.setattr(runner, "NEEDED", ("jax", "no_such_package", "nor_this"))
    with pytest.raises(InputError, match="lacks no_such_package, nor_this, which all pieces need"):
        runner.measure(settings(tmp_path))


def test_the_page_has_the_numbers_and_says_first_what_is_wrong() -> None:
    row = {"kernel": "some_kernel", "shape": "N=8", "largest": 0.01, "difference": 0.5}
    step = {"beam_width": 8, "draft_rounds": 4, "num_nodes": 32, "batch_size": 1}
    times = {"step": [4, 4.25, 5], "baseline": [3, 3.5, 4]}
    step |= {"sampling": "greedy", "milliseconds": times, "in_baseline_steps": 1.2}
    records = {
        "kernels": COMMON | {"rows": [row | {"right": False}]},
        "copy": COMMON | {"gigabytes_per_second": [4000.0, 4100.0, 4200.0]},
        "step_some_7b": COMMON | {"rows": [step]},
    }
    page = "\n".join(markdown(records, {"texts": "gguf is not installed"}))
    assert page.startswith("# Imaginary G1 80GB, 2001-02-03\n")
    assert page.index("**Wrong: some_kernel of N=8.**") < page.index("##")
    assert "| some_kernel | N=8 | 5.0e-01 | 1e-02 | NO |" in page
    assert "| 4000 | 4100 | 4200 |" in page
    assert "| 8 | 4 | 32 | 1 | greedy | 4.250 | 3.500 | 1.20 |" in page
    assert "| copy | 12 | 17.3 |" in page
    assert page.endswith("texts is left out: gguf is not installed.")


def test_two_cards_make_no_page() -> None:
    with pytest.raises(InputError, match="'Imaginary G1 80GB' and copy on 'Other'"):
        check_one_card({"kernels": COMMON, "copy": COMMON | {"device": "Other"}})


@pytest.mark.long
@pytest.mark.usefixtures("quick_compilation")
def test_as_much_is_accepted_as_is_forced() -> None:
    measured = force_acceptance(Namespace(small=True))
    lengths = [row["acceptance_length"] for row in measured["rows"]]
    assert lengths == [1, 1, 2, 3, 4, 5]


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
