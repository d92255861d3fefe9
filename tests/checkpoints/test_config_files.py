"""JSON files of model folders: read, refused in a sentence, written whole."""

from pathlib import Path
from typing import Any

import pytest

from redrafter_jax import InputError
from redrafter_jax.checkpoints.config_files import field, read_json, write_atomically


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
