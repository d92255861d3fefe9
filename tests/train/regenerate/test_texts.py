"""`python -m train regenerate`: the target's own words, row by row, resumable."""

from pathlib import Path
from typing import Any

import pytest
from regenerated import read, run, settings
from tiny_folders import write_untrained_target

from redrafter_jax import SamplingConfig, generate_autoregressive, load_target
from redrafter_jax.errors import InputError
from train.data.files import read_raw
from train.data.records import parse
from train.data.settings import SourceSettings
from train.data.types import Raw, Tokens

pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("regenerate")
    write_untrained_target(folder, functions=200)
    return folder


def regenerate(folder: Path, output: Path, **changes: Any) -> list[dict[str, Any]]:
    data = {"sources": [{"folder": str(folder)}], "sequence_length": 16} | changes.pop("data", {})
    texts: dict[str, Any] = {"data": data, "prompt_tokens": 6, "count": 5}
    return run(settings(folder, output, **(texts | changes)))


@pytest.fixture(scope="module")
def finished(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("finished") / "rows.jsonl"
    regenerate(folder, output)
    return output


def test_rows_are_what_plain_decoding_writes(folder: Path, finished: Path) -> None:
    rows = read(finished)
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
    raws = list(read_raw(SourceSettings(files=[str(finished)])))
    records = [parse(raw, None) for raw in raws if isinstance(raw, Raw)]
    assert [record.ids for record in records if isinstance(record, Tokens)] == [
        row["input_ids"] for row in rows
    ]


def test_a_finished_run_is_left_as_it_is_and_a_longer_one_adds_to_it(
    folder: Path, finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output, whole = tmp_path / "rows.jsonl", finished.read_bytes()
    three = b"".join(whole.splitlines(keepends=True)[:3])
    output.write_bytes(three)
    regenerate(folder, output, count=3)
    assert output.read_bytes() == three
    # A kill leaves half a row, which is written again.
    output.write_bytes(three[:-20])
    regenerate(folder, output)
    assert output.read_bytes() == whole
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
    folder: Path, finished: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    # A cut row stays as well.
    output, before = tmp_path / "rows.jsonl", finished.read_bytes() + b'{"seed"'
    output.write_bytes(before)
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


def test_there_must_be_so_many_prompts(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"count is 100000, but the data has .* of 16 tokens"):
        regenerate(folder, tmp_path / "b.jsonl", count=100000)
