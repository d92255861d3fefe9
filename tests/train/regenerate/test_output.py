"""The output of `python -m train regenerate`: rows of texts, and of every kind what is kept."""

import json
from pathlib import Path
from typing import Any

import pytest
from regenerated import Regeneration, read

from redrafter_jax import SamplingConfig, generate_autoregressive, load_target
from redrafter_jax.errors import InputError
from train.config import RegenerateSettings
from train.data.files import read_raw
from train.data.records import parse
from train.data.settings import SourceSettings
from train.data.types import Raw, Tokens
from train.regenerate.output import summarize

pytestmark = pytest.mark.usefixtures("quick_compilation")


def test_rows_are_what_plain_decoding_writes(continuing: Regeneration) -> None:
    rows = read(continuing.finished)
    assert [row["seed"] for row in rows] == [0, 1, 2, 3, 4]
    target = load_target(continuing.target, "float32")
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
    raws = list(read_raw(SourceSettings(files=[str(continuing.finished)])))
    records = [parse(raw, None) for raw in raws if isinstance(raw, Raw)]
    assert [record.ids for record in records if isinstance(record, Tokens)] == [
        row["input_ids"] for row in rows
    ]


@pytest.fixture
def kind(request: pytest.FixtureRequest) -> Regeneration:
    """The runs that are named: `continuing`, `rewriting` or `inventing`."""
    return request.getfixturevalue(request.param)


@pytest.mark.parametrize("kind", ["continuing", "rewriting", "inventing"], indirect=True)
def test_a_stopped_run_goes_on_to_the_same_bytes_and_writes_nothing_twice(
    kind: Regeneration, tmp_path: Path
) -> None:
    output, whole = tmp_path / "rows.jsonl", kind.finished.read_bytes()
    # How many rows decode together makes no difference.
    for kept, changes in (
        (len(whole) // 2, {"batch_size": 2}),
        (len(whole) - 9, {}),
        (len(whole), {}),
    ):
        output.write_bytes(whole[:kept])
        kind(output, **changes)
        assert output.read_bytes() == whole
    output.write_bytes(whole * 2)
    with pytest.raises(InputError, match=r"line \d+ is not a row of this run"):
        kind(output)


def test_a_longer_run_adds_to_the_rows_and_a_shorter_one_leaves_them(
    continuing: Regeneration,
    inventing: Regeneration,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    output, whole = tmp_path / "rows.jsonl", inventing.finished.read_bytes()
    output.write_bytes(whole)
    inventing(output, count=4)
    assert output.read_bytes() == whole
    inventing(output, count=11)
    assert output.read_bytes().startswith(whole)
    whole = continuing.finished.read_bytes()
    output.write_bytes(b"".join(whole.splitlines(keepends=True)[:3]))
    continuing(output)
    assert output.read_bytes() == whole
    assert "5 rows in" in capsys.readouterr().err
    with pytest.raises(InputError, match=r"line 5 is not a row of this run"):
        continuing(output, count=4)


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("continuing", {"temperatures": [0.0, 0.5]}),
        ("continuing", {"prompt_tokens": 5}),
        ("continuing", {"data": {"shuffle_seed": 1}}),
        ("continuing", {"data": {"sequence_length": 18}}),
        ("rewriting", {"max_new_tokens": 5}),
        ("rewriting", {"data": {"sequence_length": 127}}),
        ("inventing", {"turns": 1}),
        ("inventing", {"user_sampling": {"temperature": 0.9}}),
        ("inventing", {"max_new_tokens": 5}),
    ],
    indirect=["kind"],
)
def test_rows_of_other_settings_are_refused_and_kept(
    kind: Regeneration, tmp_path: Path, changes: dict[str, Any]
) -> None:
    # A cut row stays as well.
    output, before = tmp_path / "rows.jsonl", kind.finished.read_bytes() + b'{"seed"'
    output.write_bytes(before)
    dated = "" if "prompt_tokens" in kind.values else r".*\{date_string"
    with pytest.raises(InputError, match=f"is not a row of this run, {dated}"):
        kind(output, **changes)
    assert output.read_bytes() == before


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("# Notes\n", "line 1 is not a row of this run"),
        ("[1]\n", "line 1 is not a row of this run"),
        ('{"seed":1}\n', "line 1 is not a row of this run"),
        ('{"text":"a source of one line"}', r"""ends with '{"text".* use another output"""),
        ('{"seed":0,"temperature":0.5,', "does not begin a row of this run"),
    ],
)
def test_a_file_of_something_else_is_refused_and_kept(
    continuing: Regeneration, tmp_path: Path, content: str, sentence: str
) -> None:
    output = tmp_path / "rows.jsonl"
    output.write_text(content)
    with pytest.raises(InputError, match=sentence):
        continuing(output)
    assert output.read_text() == content


def test_an_output_that_the_run_reads_is_refused(continuing: Regeneration, tmp_path: Path) -> None:
    (text,) = continuing.target.glob("*.py")
    link, lines = tmp_path / "link.py", tmp_path / "rows.jsonl"
    link.symlink_to(text)
    lines.write_text('{"text": "a"}')
    folder = {"folder": str(continuing.target)}
    for output, source in ((link, folder), (lines, {"files": [str(lines)]})):
        before = output.read_bytes()
        with pytest.raises(InputError, match=r"output .* is a file of data.sources.0 \("):
            continuing(output, data={"sources": [source]})
        assert output.read_bytes() == before


def test_there_must_be_so_many_prompts(continuing: Regeneration, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"count is 100000, but the data has .*=16 tokens"):
        continuing(tmp_path / "b.jsonl", count=100000)


@pytest.mark.parametrize(("loops", "warned"), [(1, False), (2, True)])
def test_answers_half_of_which_repeat_themselves_are_warned_of(
    tmp_path: Path, loops: int, warned: bool
) -> None:
    """Two rows of two answers each; a question between two answers is neither."""
    loop, varied = [7, 8] * 10, list(range(20))
    rows = []
    for seed in range(2):
        answers = [loop if 2 * seed + turn < loops else varied for turn in range(2)]
        ids = [5, *answers[0], 6, 6, *answers[1]]
        mask = [0, *[1] * 20, 0, 0, *[1] * 20]
        rows.append({"seed": seed, "input_ids": ids, "loss_mask": mask, "answers": 2, "cut": 0})
    output = tmp_path / "rows.jsonl"
    output.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = RegenerateSettings.model_validate(
        {
            "target": "a/model",
            "data": {"sources": [{"files": ["chats.jsonl"]}], "sequence_length": 64},
            "batch_size": 1,
            "output": output,
        }
    )
    warning = f". Warning: {loops} of 4 repeat themselves, and a head that is trained on these"
    assert (warning in summarize(settings)) == warned
