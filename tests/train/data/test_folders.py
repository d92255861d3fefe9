"""Which text files below a folder are trained on, and which are held out."""

from pathlib import Path
from typing import Any

import pytest

from redrafter_jax.errors import InputError
from train.data.folders import read_folder
from train.data.settings import SourceSettings


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("a.py", "pkg/b.py", "held/c.py", "pkg/skip.py", "note.txt"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"# {name}\n")
    return tmp_path


def settings(root: Path, **changes: object) -> SourceSettings:
    values = {"folder": str(root), "exclude": ["pkg/skip*"], "held_out": ["held/*"]}
    return SourceSettings.model_validate(values | changes)


def test_include_exclude_and_held_out_divide_the_files(folder: Path) -> None:
    (folder / "a.py").write_bytes(b"# a.py\r\n")
    training = read_folder(settings(folder))
    assert [file.place for file in training] == ["a.py", "pkg/b.py"]
    assert training[0].text == "# a.py\r\n", "the file as it is"
    held_out = read_folder(settings(folder), held_out=True)
    assert [file.place for file in held_out] == ["held/c.py"]
    # A folder whose name matches is no document.
    (folder / "module.py").mkdir()
    assert read_folder(settings(folder)) == training


@pytest.mark.parametrize(
    ("glob", "names"),
    [
        ("**/secret.py", ["a/b/secret.py", "a/secret.py", "secret.py"]),
        ("a/**/secret.py", ["a/b/secret.py", "a/secret.py"]),
        ("**/b/**/*.py", ["a/b/secret.py"]),
        ("a/*", ["a/b/secret.py", "a/secret.py"]),
        ("./secret.py", ["secret.py"]),
    ],
)
def test_a_held_out_file_is_never_trained_on_at_whatever_depth(
    tmp_path: Path, glob: str, names: list[str]
) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    every = ["a/b/secret.py", "a/secret.py", "open.py", "secret.py"]
    for name in every:
        (tmp_path / name).write_text("x")
    chosen = settings(tmp_path, held_out=[glob])
    held_out = [file.place for file in read_folder(chosen, held_out=True)]
    training = [file.place for file in read_folder(chosen)]
    assert held_out == names
    assert training == [name for name in every if name not in names]
    excluded = read_folder(settings(tmp_path, exclude=[glob], held_out=[]))
    assert [file.place for file in excluded] == training


def test_the_standard_library_is_a_folder_with_a_name() -> None:
    stdlib = SourceSettings(folder="python:stdlib", include=["json/*.py"])
    assert "json/decoder.py" in {file.place for file in read_folder(stdlib)}


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"folder": "nowhere"}, "'nowhere' is not a folder"),
        ({"include": ["*.rs"]}, r"No file in .* matches the source's include, '\*\.rs'"),
        ({"exclude": ["*"]}, r"^All 4 files in .* are left out by exclude or"),
        ({"include": ["*.txt"]}, r"note\.txt is not UTF-8 at byte 5"),
    ],
)
def test_unusable_folders_and_files_are_named(
    folder: Path, changes: dict[str, Any], sentence: str
) -> None:
    (folder / "note.txt").write_bytes(b"# caf\xe9\n")
    with pytest.raises(InputError, match=sentence):
        read_folder(settings(folder, **changes))
