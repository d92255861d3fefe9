"""`generate --prompts`: a row for each prompt, whatever the batches, resumed where it was left."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from chat_folders import write_lines
from engine_runs import decoded_alone
from tiny_folders import PairFolders, decode

from redrafter_jax.models.target import Target

pytestmark = pytest.mark.usefixtures("quick_compilation")

TEXTS = ["abc", "wvu\n", "abcdefgh", "d", "q"]
NEW_TOKENS, SEED = 12, 4

Continue = Callable[..., tuple[int, str, str]]


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "texts.jsonl"


@pytest.fixture
def continue_all(
    run_redrafter: Any, folders: PairFolders, tmp_path: Path, output: Path
) -> Continue:
    question = {"question_id": "last", "turns": [TEXTS[-1], "never asked"]}
    lines = [*({"prompt": text} for text in TEXTS[:-1]), question]
    prompts = write_lines(tmp_path / "prompts.jsonl", *lines)
    models = ["--target", folders.target, "--drafter", folders.drafter]
    files = ["--prompts", prompts, "--output", str(output)]
    choice = ["--temperature", "1", "--seed", str(SEED), "--max-new-tokens", str(NEW_TOKENS)]
    # Steps and all, the same rows each time.
    choice += ["--adaptive", "off"]
    return lambda *more: run_redrafter("generate", *models, *files, *choice, *more)


def rows(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in output.read_text().splitlines()]


@pytest.fixture(scope="module")
def alone(habitual_target: Target) -> list[list[int]]:
    """The baseline's tokens of each prompt by itself."""
    return [
        decoded_alone(habitual_target, text, NEW_TOKENS, SEED + index)[0]
        for index, text in enumerate(TEXTS)
    ]


@pytest.mark.long
def test_every_row_is_the_prompts_own_text_and_says_how_it_was_decoded(
    continue_all: Continue, output: Path, alone: list[list[int]]
) -> None:
    code, printed, told = continue_all("--batch-size", "2")
    assert (code, printed) == (0, "")
    assert [line.split(",")[0] for line in told.splitlines()] == [
        "2 of 5 prompts",
        "4 of 5 prompts",
        "5 of 5 prompts",
    ]
    written = rows(output)
    assert [row["id"] for row in written] == ["1", "2", "3", "4", "last"]
    assert [row["seed"] for row in written] == list(range(SEED, SEED + 5))
    assert [row["tokens"] for row in written] == alone
    assert [row["text"] for row in written] == [decode(tokens) for tokens in alone]
    assert {row["ended_by"] for row in written} == {"max_new_tokens"}
    for row in written:
        # Prefill decides one token; a call's gains are counted whole, but for the last one's.
        assert row["acceptance_length"] * row["steps"] == pytest.approx(NEW_TOKENS - 1, abs=0.01)


@pytest.mark.long
def test_rows_end_before_a_stop_string(
    continue_all: Continue, output: Path, alone: list[list[int]]
) -> None:
    stop = decode(alone[0])[3:5]
    stops = ["--stop", stop, "--stop", os.fsdecode(b"\xff")]
    continue_all(*stops)
    assert continue_all(*stops)[2] == f"{output} already has the rows of all 5 prompts.\n"
    for row, tokens in zip(rows(output), alone, strict=True):
        whole = decode(tokens)
        assert row["text"] == whole.partition(stop)[0]
        assert row["ended_by"] == ("stop_string" if stop in whole else "max_new_tokens")


def test_the_same_command_goes_on_after_the_rows_that_are_written(
    continue_all: Continue, output: Path
) -> None:
    continue_all("--batch-size", "5")
    whole = output.read_bytes()
    # In the middle of the third row.
    output.write_bytes(whole[: whole.index(b'"id": "3"') + 30])
    code, _, told = continue_all("--batch-size", "2")
    assert code == 0
    assert output.read_bytes() == whole
    assert told.splitlines()[0].startswith("4 of 5 prompts, ")
    assert continue_all()[2] == f"{output} already has the rows of all 5 prompts.\n"
    # Other options that decide the text are noticed; others are not asked for.
    for more, changed in (
        (["--temperature", "0.5"], r"--temperature 1.0 (now 0.5)"),
        (
            ["--top-k", "5", "--max-new-tokens", "9"],
            "--max-new-tokens 12 (now 9), --top-k None (now 5)",
        ),
    ):
        assert continue_all(*more) == (
            2,
            "",
            f"error: {output}, line 1 was decoded with {changed}; give another --output, or the "
            "options that the file was started with.\n",
        )
    assert continue_all("--beam-width", "2")[0] == 0
    assert output.read_bytes() == whole


def test_rows_of_other_prompts_and_bad_values_are_refused(
    continue_all: Continue, output: Path, tmp_path: Path
) -> None:
    continue_all()
    whole = output.read_text()
    first, _, *rest = whole.splitlines()
    output.write_text("\n".join([first, first, *rest]) + "\n")
    other = write_lines(tmp_path / "other.jsonl", {"prompt": ""})
    long = write_lines(tmp_path / "long.jsonl", {"prompt": "a" * 501})
    for more, reason in (
        ([], f"{output}, line 2 is not the row of "),
        (["--seed", "3"], f"{output}, line 1 is not the row of "),
        (["--seed", str(2**31 - 4)], "for 5 prompts it must be from 0 to 2147483643, because"),
        (["--batch-size", "0"], "--batch-size: 0 is given; it must be greater than 0"),
        (["--output", other, "--prompts", other], "other.jsonl, which is the file of --prompts;"),
        (["--prompts", other], "other.jsonl, line 1: 'prompt' is ''; it must be a string"),
        (
            ["--prompts", long, "--output", str(tmp_path / "new")],
            "long.jsonl, line 1: The request is for 12 new tokens after a prompt of 501, but the "
            "target has 512 positions; ask for 11 new ones at most, or shorten the prompt.",
        ),
    ):
        code, _, told = continue_all(*more)
        assert code == 2
        assert reason in told
    # The file of prompts was edited meanwhile, or another device would choose another dtype.
    for ours, theirs, reason in (
        (f'"prompt": {json.dumps(TEXTS[0])}', '"prompt": "another"', "line 1 is not the row of "),
        ('"dtype": "float32"', '"dtype": "bfloat16"', "--dtype 'bfloat16' (now 'float32');"),
    ):
        assert ours in whole
        output.write_text(whole.replace(ours, theirs, 1))
        assert reason in continue_all()[2]
    assert "the folder of --output" in continue_all("--output", f"{other}/rows.jsonl")[2]
