"""JSON files of model folders, and what a drafter's `config.json` states."""

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_folders import change_json

from redrafter_jax import DrafterConfig, InputError
from redrafter_jax.checkpoints.config_files import (
    drafter_fields,
    field,
    read_drafter_config,
    write_whole,
)

CONFIG = DrafterConfig(13, 8, exit_dim=5, num_draft_layers=1)


def write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values))


@pytest.fixture
def drafter_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "drafter"
    folder.mkdir()
    write_json(folder / "config.json", drafter_fields(CONFIG))
    return folder


def test_what_is_written_is_read_and_null_is_as_good_as_nothing(drafter_folder: Path) -> None:
    assert read_drafter_config(drafter_folder) == CONFIG
    beyond = dict.fromkeys(("cell", "head", "head_rank", "context_layers", "draft_tokens"))
    change_json(drafter_folder / "config.json", **beyond)
    assert read_drafter_config(drafter_folder) == CONFIG


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ('{"model_type": "x"', "is not valid JSON: "),
        ('["x"]', "holds a list, not an object"),
        ("[" * 100_000, "is nested too deeply"),
        (f'{{"hidden_size": {"9" * 5000}}}', "is not valid JSON: Exceeds the limit"),
    ],
)
def test_config_json_that_cannot_be_read(drafter_folder: Path, text: str, sentence: str) -> None:
    (drafter_folder / "config.json").write_text(text)
    with pytest.raises(InputError, match=rf"config\.json {sentence}"):
        read_drafter_config(drafter_folder)
    (drafter_folder / "config.json").unlink()
    (drafter_folder / "config.json").mkdir()
    with pytest.raises(InputError, match=r"Cannot read .*config\.json: Is a directory\.$"):
        read_drafter_config(drafter_folder)


@pytest.mark.parametrize("expected", [int, float])
@pytest.mark.parametrize("value", [2**63, -(10**399)])
def test_numbers_too_large_for_an_array(value: int, expected: type) -> None:
    assert field({"n": 2**63 - 1}, "n", Path("x"), int) == 2**63 - 1
    with pytest.raises(InputError, match=r"states n=-?\d+\.\.\., a number of (19|400) digits"):
        field({"n": value}, "n", Path("x"), expected)


@pytest.mark.parametrize("name", ["exit_dim", "rnn"])
def test_a_drafter_constant_that_is_not_stated_is_not_guessed(
    drafter_folder: Path, name: str
) -> None:
    change_json(drafter_folder / "config.json", **{name: ...})
    with pytest.raises(InputError, match=rf"config\.json does not state '{name}'"):
        read_drafter_config(drafter_folder)


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"cell": "lstm"}, r"cell is 'lstm'; it must be one of simple, gru, sum\.$"),
        ({"head": []}, r"states head=\[\]; it must be a string\.$"),
        ({"rnn": False, "cell": "gru"}, r"rnn=False and cell='gru', which contradict each other"),
        ({"head": "low_rank", "head_rank": 2.5}, r"head_rank=2\.5; it must be a whole number"),
        ({"draft_tokens": 7}, "draft_tokens=7; it must be a list"),
        ({"draft_tokens": [0, True]}, r"states True in 'draft_tokens'; they must be integers"),
    ],
)
def test_a_kind_of_drafter_that_does_not_exist(
    drafter_folder: Path, changes: dict[str, object], sentence: str
) -> None:
    change_json(drafter_folder / "config.json", **changes)
    with pytest.raises(InputError, match=rf"config\.json.* {sentence}"):
        read_drafter_config(drafter_folder)


def test_a_file_is_written_whole_or_left_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.json"
    write_whole(path, "old")

    def fail(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError, match="No space left"):
        write_whole(path, "new")
    assert [(one.name, one.read_text()) for one in tmp_path.iterdir()] == [("a.json", "old")]
