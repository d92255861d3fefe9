"""`python -m train inspect`: what is learnt can be seen, in colours or between brackets."""

import json
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from chat_folders import CONFIG, RECORDS, chat_tokenizer, write_lines, write_tokenizer
from rich.console import Console
from train_runs import Start, settings

from redrafter_jax.files.families import target_fields
from train.data.types import Document
from train.inspect import print_document, split_runs


def document(text: str, learnt: str) -> Document:
    tokens = chat_tokenizer().encode(text, add_special_tokens=False).ids
    mask = np.asarray([letter == "x" for letter in learnt])
    return Document("rows.jsonl, line 1", "tokens", np.asarray(tokens, np.int32), mask)


def printed(shown: Document, most: int = 99, *, terminal: bool = False) -> str:
    colours = "standard" if terminal else None
    console = Console(
        file=StringIO(), width=80, force_terminal=terminal, color_system=colours, no_color=False
    )
    with console.capture() as captured:
        print_document(shown, chat_tokenizer(), most, console)
    return captured.get()


def test_what_is_learnt_is_green_on_a_terminal_and_the_rest_is_counted() -> None:
    text = printed(document("ab cdef", "...xxxx"), most=5, terminal=True)
    assert "ab \x1b[1;32mcd\x1b[0m\n... and 2 tokens more" in text
    assert "⟦" not in text


def test_half_characters_and_control_characters_are_shown_whole() -> None:
    # "é" is two tokens; the edge of what is learnt lies between them.
    runs = list(split_runs(document("aé\x1b[2Jb\n", ".." + "x" * 7), chat_tokenizer(), 99))
    assert runs == [("a", False), ("é\\x1b[2Jb\n", True)]


@pytest.fixture
def values(tmp_path: Path) -> dict[str, object]:
    target = write_tokenizer(tmp_path / "target")
    (target / "config.json").write_text(json.dumps(target_fields(CONFIG)))
    rows = write_lines(tmp_path / "rows.jsonl", RECORDS["messages"], {"text": ""}, {"text": " "})
    more = write_lines(tmp_path / "more.jsonl", RECORDS["text"], {"text": "long" * 20})
    data = {"sources": [{"files": [rows]}, {"files": [more]}], "sequence_length": 64}
    return settings(target, tmp_path / "out", data=data)


def test_inspect_shows_counts_skips_and_examples_and_writes_nothing(
    values: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: Start
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    shown = start(values, "inspect").out
    rows = tmp_path / "rows.jsonl"
    (counts,) = [line for line in shown.splitlines() if "rows.jsonl)" in line and "│" in line]
    # Four turns of an opening, a role, a newline, the text, an end and a newline.
    tokens = 4 * 4 + len("userassistant") * 2 + len("HiHelloByeCiao")
    learnt = len("HelloCiao") + 2 * 2
    cells = [cell.strip() for cell in counts.strip("│").split("│")]
    assert cells[1:] == ["3", "2", str(tokens), str(learnt), "1", "1"]
    assert f"{rows}, line 1: chat, {tokens} tokens, {learnt} carry loss" in shown
    assert f"skipped 2 × text is blank (first at {rows}, line 2)" in shown
    assert "records longer than a row, cut into pieces: 1" in shown
    assert "<|im_start|>assistant\n⟦Hello<|im_end|>\n⟧<|im_start|>user\n" in shown
    assert "⟦plain</s>⟧" in shown
    assert not (tmp_path / "out").exists()
    # Half of the 160 rows of 40 steps.
    assert f"40 steps of 4 rows read data.sources.0 ({rows}) 80 times, data.sources.1 (" in shown
    assert "a run would stop: data.sources.0 gives 1 row of 64 tokens, fewer than its" in shown


def test_data_of_which_little_carries_loss_is_warned_of(
    values: dict[str, object], tmp_path: Path, start: Start
) -> None:
    rows = {"input_ids": [1] * 40, "loss_mask": [0] * 37 + [1] * 3}
    files = write_lines(tmp_path / "little.jsonl", rows, rows)
    words = ("inspect", "data.sources=[{files: [" + files + "]}]")
    assert "warning: 6 of 80 tokens (7.5%) carry loss" in start(values, *words).out
