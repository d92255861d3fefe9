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


def regenerate(folder: Path, output: Path, **changes: Any) -> None:
    data = {"sources": [{"folder": str(folder)}], "sequence_length": 16}
    settings = {
        "target": str(folder),
        "target_dtype": "float32",
        "data": data | changes.pop("data", {}),
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


def test_a_finished_run_is_left_as_it_is_and_a_longer_one_adds_to_it(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "rows.jsonl"
    regenerate(folder, output, count=3)
    three = output.read_text()
    regenerate(folder, output, count=3)
    assert output.read_text() == three
    # A kill leaves half a row, which is written again.
    output.write_text(three[:-20])
    regenerate(folder, output)
    assert output.read_text().startswith(three)
    assert "5 rows in" in capsys.readouterr().err
    with pytest.raises(InputError, match=r"line 5 is no row of this run"):
        regenerate(folder, output, count=4)


@pytest.mark.parametrize(
    "changes",
    [
        {"temperatures": [0.0, 0.5]},
        {"prompt_tokens": 5},
        {"data": {"shuffle_seed": 1}},
        {"data": {"sequence_length": 18}},
    ],
)
def test_rows_of_other_settings_are_refused_and_kept(
    folder: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    output = tmp_path / "rows.jsonl"
    regenerate(folder, output, count=3)
    # A cut row stays as well.
    output.write_text(output.read_text() + '{"seed"')
    before = output.read_bytes()
    with pytest.raises(InputError, match="is no row of this run"):
        regenerate(folder, output, **changes)
    assert output.read_bytes() == before


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("# Notes\n", "line 1 is no row of this run"),
        ("[1]\n", "line 1 is no row of this run"),
        ('{"seed":1}\n', "line 1 is no row of this run"),
        ('{"text":"a source of one line"}', r"""ends with '{"text".* use another output"""),
        ('{"seed":0,"temperature":0.5,', "no beginning of a row of this run"),
    ],
)
def test_a_file_of_something_else_is_refused_and_kept(
    folder: Path, tmp_path: Path, content: str, sentence: str
) -> None:
    output = tmp_path / "rows.jsonl"
    output.write_text(content)
    with pytest.raises(InputError, match=sentence):
        regenerate(folder, output)
    assert output.read_text() == content


def test_an_output_that_the_run_reads_is_refused(folder: Path, tmp_path: Path) -> None:
    (text,) = folder.glob("*.py")
    link, lines = tmp_path / "link.py", tmp_path / "rows.jsonl"
    link.symlink_to(text)
    lines.write_text('{"text": "a"}')
    for output, source in ((link, {"folder": str(folder)}), (lines, {"files": [str(lines)]})):
        before = output.read_bytes()
        with pytest.raises(InputError, match=r"output .* is a file of data.sources.0 \("):
            regenerate(folder, output, data={"sources": [source]})
        assert output.read_bytes() == before


def test_prompts_must_leave_room_and_exist(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="prompt_tokens is 16, which leaves nothing"):
        regenerate(folder, tmp_path / "a.jsonl", prompt_tokens=16)
    with pytest.raises(InputError, match=r"count is 100000, but the data has .* of 16 tokens"):
        regenerate(folder, tmp_path / "b.jsonl", count=100000)
