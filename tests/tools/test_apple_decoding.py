"""The comparison of decoding speed with Apple's code, with stand-ins for both sides."""

import sys

import pytest

from redrafter_jax.errors import InputError
from tools.apple.decode import Run, compare_prompt, make_table, summarize
from tools.apple.process import start


def a_side(tokens: list[int], calls: int, seconds: float):
    """A side that says the same whatever it is asked."""
    return lambda mode, prompt: Run(tokens, calls, seconds)


def test_speeds_are_compared_pair_by_pair_and_texts_token_by_token() -> None:
    ours, apple = a_side([5, 6, 7, 8], 2, 0.5), a_side([5, 6, 9, 8], 3, 2.0)
    result = compare_prompt("speculative", [1], ours, apple, repeats=2)
    assert result["tokens_per_second"] == {"ours": 8.0, "apple": 2.0}
    assert result["ratio"] == 4.0
    assert (result["same_text"], result["shared_tokens"]) == (False, 2)
    assert result["target_calls"] == {"ours": 2, "apple": 3}


def test_a_side_that_contradicts_itself_is_refused() -> None:
    answers = iter([Run([1], 1, 1.0), Run([2], 1, 1.0)])
    with pytest.raises(InputError, match="ours: two speculative runs of the same prompt differ"):
        compare_prompt("speculative", [1], lambda *_: next(answers), a_side([1], 1, 1.0), repeats=1)


def test_the_summary_adds_calls_and_takes_medians_of_speeds() -> None:
    apple = a_side([1, 2], 10, 2.0)
    rows = [
        compare_prompt("speculative", [1], a_side([1, 2], calls, seconds), apple, repeats=1)
        for calls, seconds in ((10, 1.0), (11, 0.5), (14, 0.25))
    ]
    total = summarize(rows)
    assert (total["same_texts"], total["same_target_calls"], total["prompts"]) == (3, 1, 3)
    assert total["target_calls"] == {"ours": 35, "apple": 30}
    assert total["tokens_per_second"] == {"ours": 4.0, "apple": 1.0}
    assert total["ratio"] == 4.0
    assert make_table({"ACTIVE": {"speculative": {"summary": total}}}).row_count == 1


def test_a_side_answers_line_by_line_and_waits_as_it_is_told() -> None:
    script = (
        "import json, os, sys\n"
        "print(json.dumps({'policy': os.environ['OMP_WAIT_POLICY']}), flush=True)\n"
        "for line in sys.stdin:\n"
        "    print(json.dumps({'asked': json.loads(line)}), flush=True)"
    )
    with start([sys.executable, "-c", script], "ACTIVE") as side:
        assert side.about == {"policy": "ACTIVE"}
        for number in (1, 2):
            assert side.ask({"number": number}) == {"asked": {"number": number}}


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["/no/python"], "Cannot start /no/python: No such file"),
        ([sys.executable, "-c", "raise SystemExit(3)"], "ended with code 3; its own message"),
    ],
)
def test_a_side_that_does_not_start_is_one_sentence(command: list[str], message: str) -> None:
    with pytest.raises(InputError, match=message), start(command):
        pass
