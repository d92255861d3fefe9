"""`python -m train.regenerate`: the target's own words, row by row, resumable."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from tiny_folders import write_untrained_target

from redrafter_jax import SamplingConfig, generate_autoregressive, load_target
from redrafter_jax.errors import InputError
from train.data.files import read_raw
from train.data.records import parse
from train.data.settings import SourceSettings
from train.data.types import Raw, Tokens
from train.regenerate import __main__ as program

pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("regenerate")
    write_untrained_target(folder, functions=200)
    return folder


def regenerate(folder: Path, output: Path, **changes: object) -> None:
    settings = {
        "target": str(folder),
        "target_dtype": "float32",
        "data": {"sources": [{"folder": str(folder)}], "sequence_length": 16},
        "prompt_tokens": 6,
        "count": 5,
        "batch_size": 2,
        "temperatures": [0.0, 1.0],
        "output": str(output),
    }
    path = output.with_suffix(".yaml")
    path.write_text(yaml.safe_dump(settings | changes))
    program.regenerate(["--config", str(path)])


def test_rows_are_what_plain_decoding_writes(folder: Path, tmp_path: Path) -> None:
    output = tmp_path / "rows.jsonl"
    regenerate(folder, output)
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert [row["seed"] for row in rows] == [0, 1, 2, 3, 4]
    target = load_target(folder, "float32")
    for row in rows:
        prompt = row["input_ids"][:6]
        # Beside another row, so that the program is one that is compiled already.
        alone = generate_autoregressive(
            target,
            [prompt, [0]],
            max_new_tokens=[10, 1],
            sampling=SamplingConfig(row["temperature"]),
            seeds=[row["seed"], 0],
        )
        assert row["input_ids"][6:] == alone.tokens[0]
        assert row["loss_mask"] == [0] * 6 + [1] * len(alone.tokens[0])
    raws = list(read_raw(SourceSettings(files=[str(output)])))
    records = [parse(raw, None) for raw in raws if isinstance(raw, Raw)]
    assert [record.ids for record in records if isinstance(record, Tokens)] == [
        row["input_ids"] for row in rows
    ]


def test_a_stopped_run_goes_on_after_its_last_whole_row(folder: Path, tmp_path: Path) -> None:
    whole, stopped = tmp_path / "whole.jsonl", tmp_path / "stopped.jsonl"
    regenerate(folder, whole)
    lines = whole.read_text().splitlines(keepends=True)
    stopped.write_text("".join(lines[:2]) + lines[2][:20])
    regenerate(folder, stopped)
    assert stopped.read_text() == whole.read_text()


def test_a_finished_run_is_left_as_it_is_and_a_longer_one_adds_to_it(
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    output = tmp_path / "rows.jsonl"
    regenerate(folder, output, count=3)
    three = output.read_text()
    regenerate(folder, output, count=3)
    assert output.read_text() == three
    regenerate(folder, output)
    assert output.read_text().startswith(three)
    assert "5 rows in" in capsys.readouterr().err
    with pytest.raises(InputError, match=r"line 5 is no row of this run's 4 prompts"):
        regenerate(folder, output, count=4)


@pytest.mark.parametrize(
    "changes",
    [
        {"temperatures": [0.0, 0.5]},
        {"temperatures": [0.5]},
        {"prompt_tokens": 5},
        {"data": {"shuffle_seed": 1}},
        {"data": {"sequence_length": 18}},
    ],
)
def test_rows_of_other_settings_are_refused_and_kept(
    folder: Path,
    tmp_path: Path,
    changes: dict[str, Any],
) -> None:
    output = tmp_path / "rows.jsonl"
    regenerate(folder, output, count=3)
    # A cut row stays as well.
    output.write_text(output.read_text() + '{"seed"')
    before = output.read_bytes()
    if "data" in changes:
        changes = {
            "data": {"sources": [{"folder": str(folder)}], "sequence_length": 16} | changes["data"]
        }
    with pytest.raises(InputError, match="is no row of this run's 5 prompts"):
        regenerate(folder, output, **changes)
    assert output.read_bytes() == before


@pytest.mark.parametrize("rows", ["# Notes\n", "[1]\n", '{"seed":1}\n'])
def test_a_file_of_something_else_is_refused(folder: Path, tmp_path: Path, rows: str) -> None:
    output = tmp_path / "rows.jsonl"
    output.write_text(rows)
    with pytest.raises(InputError, match="line 1 is no row of this run"):
        regenerate(folder, output)
    assert output.read_text() == rows


@pytest.mark.parametrize(
    "rows", ['{"text":"a source of one line"}', '{"seed":0,"temperature":0.5,']
)
def test_a_line_without_an_end_that_is_no_row_of_ours_is_kept(
    folder: Path, tmp_path: Path, rows: str
) -> None:
    output = tmp_path / "rows.jsonl"
    output.write_text(rows)
    with pytest.raises(InputError, match="no beginning of a row of this run; use another output"):
        regenerate(folder, output)
    assert output.read_text() == rows


def test_an_output_that_the_run_reads_is_refused(folder: Path, tmp_path: Path) -> None:
    (text,) = folder.glob("*.py")
    link = tmp_path / "link.py"
    link.symlink_to(text)
    before = text.read_bytes()
    with pytest.raises(InputError, match=r"output .*link.py is a file of data.sources.0 \("):
        regenerate(folder, link)
    assert text.read_bytes() == before


def test_prompts_must_leave_room_and_exist(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="prompt_tokens is 16, which leaves nothing"):
        regenerate(folder, tmp_path / "a.jsonl", prompt_tokens=16)
    with pytest.raises(InputError, match=r"count is 100000, but the data has .* of 16 tokens"):
        regenerate(folder, tmp_path / "b.jsonl", count=100000)
