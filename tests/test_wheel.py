"""The installed commands, and the wheel that installs them."""

import os
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest
from places import ROOT

from redrafter_jax import entry_points


@pytest.mark.parametrize("program", ["train", "eval"])
def test_an_installed_command_without_the_packages_it_needs_is_told_how_to_get_them(
    program: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [program])
    for name in [name for name in sys.modules if name.partition(".")[0] in (program, "rich")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "rich", None)
    command = {"train": entry_points.train, "eval": entry_points.evaluate}[program]
    with pytest.raises(SystemExit) as left:
        command()
    assert left.value.code == 2
    assert f"error: redrafter-{program} needs the package rich" in capsys.readouterr().err


@pytest.mark.parametrize("folder", ["train", "eval"])
def test_no_file_of_the_two_programs_imports_its_package_by_name(folder: str) -> None:
    for path in (ROOT / folder).rglob("*.py"):
        for line in path.read_text().splitlines():
            assert not line.lstrip().startswith((f"from {folder}", f"import {folder}")), path


@pytest.mark.long
def test_the_wheel_brings_no_package_named_train_or_eval(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", str(tmp_path)]
    constraints = ["--build-constraint", str(ROOT / "constraints.txt")]
    built = subprocess.run(
        [*build, *constraints, str(ROOT)], capture_output=True, text=True, check=False
    )
    if built.returncode:
        pytest.skip(f"pip cannot build here: {built.stderr.strip().splitlines()[-1]}")
    (wheel,) = tmp_path.glob("*.whl")
    with ZipFile(wheel) as archive:
        names = archive.namelist()
        archive.extractall(tmp_path)
    tops = {name.partition("/")[0] for name in names}
    assert {top for top in tops if "dist-info" not in top} == {"redrafter_jax", "pallas_kernels"}
    for name, words in (("train", "Train a drafter"), ("evaluate", "--config")):
        program = f"from redrafter_jax.entry_points import {name}; {name}()"
        shown = subprocess.run(
            [sys.executable, "-P", "-c", program, "--help"],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(tmp_path)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert shown.returncode == 0, shown.stderr
        assert words in shown.stdout
