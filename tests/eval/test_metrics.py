"""The measures, held to literal examples and to counting by hand, and the tables of them."""

from io import StringIO

import numpy as np
import pytest
from rich.console import Console

from eval.metrics import answer_lines, describe_answers, first_divergence, quartiles
from eval.report import make_table
from redrafter_jax.text.prompts import EncodedPrompts


@pytest.mark.parametrize(
    ("tokens", "expected", "place"),
    [
        ([1, 2, 3], [1, 2, 3], None),
        ([], [], None),
        ([1, 2, 3], [1, 5, 3], 1),
        ([7], [1, 5, 3], 0),
        ([1, 2], [1, 2, 3], 2),
        ([1, 2, 3], [1, 2], 2),
    ],
)
def test_first_divergence_is_where_a_token_differs_or_is_missing(
    tokens: list[int], expected: list[int], place: int | None
) -> None:
    assert first_divergence(tokens, expected) == place


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([5.0, 1.0, 4.0, 2.0, 3.0], [2.0, 3.0, 4.0]),
        ([np.nan, 8.0], [8.0, 8.0, 8.0]),
        ([np.nan], None),
        ([], None),
    ],
)
def test_quartiles_leave_out_what_is_no_number(
    values: list[float], expected: list[float] | None
) -> None:
    assert quartiles(np.asarray(values)) == expected


def test_answers_tell_their_lengths_their_ends_and_warn_where_they_say_little() -> None:
    asked = EncodedPrompts([], [1, 1, 1, 2], [], "none", (9,))
    said = describe_answers(asked, [[1, 9], [1, 2, 3, 9, 9], [1, 2, 3, 4, 9], [1, 2, 3]])
    assert said == {
        "chat_template": "none",
        "turns": 2,
        "answer_tokens": [2.75, 4.0, 5.0],
        "ended_by": {"stop_token": 3, "max_new_tokens": 1},
        "short": 1,
        "repeating": 0,
    }
    (line,) = answer_lines(said)
    assert (
        "none, up to 2 turns with its own answers; answers of 4 tokens (2.75 to 5), 3 ended" in line
    )
    _, warning = answer_lines(describe_answers(asked, [[1, 9], [9], [1, 2, 3], [1] * 9]))
    assert "2 of 4 answers end within 4 tokens" in warning
    # The user's own limit warns of nothing.
    (_,) = answer_lines(describe_answers(asked, [[1, 2], [3, 4]]))
    # Of the 13 4-grams of the first text 4 are distinct, of the second all.
    loop, other = [1, 2, 3, 4] * 4, [*range(10, 26)]
    _, warning = answer_lines(describe_answers(asked, [loop, other]))
    assert "1 of 2 answers repeat themselves" in warning


def test_names_are_broken_before_a_number_is_cut() -> None:
    numbers = ["1.10", "1.04 to 1.23", "1.83", "0.13", "673.9", "24 of 24"]
    name = "the shipped head and prompt lookup, on all prompts"
    columns = ["method", "speedup", "quartiles", "acceptance", "lookup", "MB", "identical"]
    console = Console(width=80, file=StringIO())
    console.print(make_table("", columns, [[name, *numbers]]))
    assert isinstance(console.file, StringIO)
    lines = console.file.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    told = " ".join(" ".join(lines).split())
    assert all(cell in told for cell in [*columns, *numbers, *name.split()])
