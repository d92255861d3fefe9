"""JSON files of model folders: read, refused in a sentence, written whole."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_models import tiny_config

from redrafter_jax import InputError, load_target, load_tree
from redrafter_jax.files.families import target_fields
from redrafter_jax.files.fields import field, read_json, write_atomically
from redrafter_jax.files.target_files import open_target


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ('{"model_type": "x"', "is not valid JSON: "),
        ('["x"]', "holds a list, not an object"),
        ("[" * 100_000, "is nested too deeply"),
        (f'{{"hidden_size": {"9" * 5000}}}', "is not valid JSON: Exceeds the limit"),
    ],
)
def test_json_that_describes_no_model(tmp_path: Path, text: str, sentence: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(InputError, match=rf"config\.json {sentence}"):
        read_json(path)


def test_a_file_that_cannot_be_read_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"^Cannot read .*: Is a directory\.$"):
        read_json(tmp_path)


# As https://github.com/git-lfs/git-lfs/blob/main/docs/spec.md has it.
POINTER = """\
version https://git-lfs.github.com/spec/v1
oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393
size 12345
"""


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("config.json", load_target),
        ("model.safetensors", load_target),
        ("pytorch_model.bin", load_target),
        ("model.safetensors.index.json", load_target),
        ("model-Q4_0.gguf", lambda folder: load_target(folder / "model-Q4_0.gguf")),
        ("tokenizer.json", lambda folder: open_target(folder).tokenizer),
        ("draft.yaml", load_tree),
    ],
)
def test_a_git_lfs_pointer_is_told_as_one(
    tmp_path: Path, name: str, read: Callable[[Path], Any]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(target_fields(tiny_config())))
    (tmp_path / name).write_text(POINTER)
    with pytest.raises(InputError, match=rf"{name} is a Git LFS pointer, .*`git lfs pull` in its"):
        read(tmp_path)


@pytest.mark.parametrize("expected", [int, float])
@pytest.mark.parametrize("value", [2**63, -(10**399)])
def test_numbers_too_large_for_an_array(value: int, expected: type) -> None:
    assert field({"n": 2**63 - 1}, "n", Path("x"), int) == 2**63 - 1
    with pytest.raises(InputError, match=r"states n=-?\d+\.\.\., a number of (19|400) digits"):
        field({"n": value}, "n", Path("x"), expected)


def test_a_file_is_written_whole_or_left_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.json"
    write_atomically(path, "old")

    def fail(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError, match="No space left"):
        write_atomically(path, "new")
    assert [(one.name, one.read_text()) for one in tmp_path.iterdir()] == [("a.json", "old")]
