"""Decoding beside Apple's code: our side for real, Apple's by a stand-in of few lines."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from chat_folders import write_lines
from tiny_folders import write_untrained_target

from tools import apple
from tools.apple import Decoded, Job, compare, describe, start_apple, summarize

JOB = Job([1], beam_width=4, draft_rounds=2, max_new_tokens=4)


def test_texts_calls_and_speeds_are_compared_prompt_by_prompt() -> None:
    ours, theirs = Decoded([5, 6, 7, 8], 2, 0.5), Decoded([5, 6, 7, 8], 3, 2.0)
    other = Decoded([5, 6, 9, 8], 2, 1.0)
    rows = [
        compare(JOB, {"ours": lambda _: ours, "apple": lambda _, side=side: side}, repeats=3)
        for side in (theirs, other, other)
    ]
    tree = summarize(rows)
    assert (tree["prompts"], tree["same_text"], tree["same_calls"]) == (3, 1, 2)
    assert tree["target_calls"] == {"ours": 6, "apple": 7}
    assert tree["tokens_per_second"] == {"ours": 8.0, "apple": 4.0}
    assert tree["ratio"] == 2.0
    line = describe(tree | {"beam_width": 4, "draft_rounds": 2})
    assert line.endswith("8.0 and 4.0 tokens/s, ratio 2.00")


def test_the_sides_take_turns_and_neither_always_runs_first() -> None:
    order: list[str] = []

    def side(name: str) -> apple.Side:
        def decode(job: Job) -> Decoded:
            order.append(name)
            return Decoded([1], 1, 1.0)

        return decode

    compare(JOB, {name: side(name) for name in ("ours", "apple")}, repeats=2)
    assert order[2:] == ["ours", "apple", "apple", "ours"]  # after a warm-up of each


def test_a_side_that_contradicts_itself_is_refused() -> None:
    answers = iter([Decoded([1], 1, 1.0), Decoded([2], 1, 1.0)])
    sides: dict[str, apple.Side] = {
        "ours": lambda _: next(answers),
        "apple": lambda _: Decoded([1], 1, 1.0),
    }
    with pytest.raises(SystemExit, match="ours: two runs of the same prompt differ"):
        compare(JOB, sides, repeats=1)


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["/no/python"], "Cannot start /no/python: No such file"),
        ([sys.executable, "-c", "raise SystemExit(3)"], "ended with code 3; see its message"),
    ],
)
def test_a_side_that_does_not_start_is_one_sentence(command: list[str], message: str) -> None:
    with pytest.raises(SystemExit, match=message), start_apple(command):
        pass


# Answers every prompt with the same tokens in no time.
STAND_IN = """
import json, os, sys
print(json.dumps({"policy": os.environ["OMP_WAIT_POLICY"], "words": sys.argv[2:]}), flush=True)
for line in sys.stdin:
    prompt, beam_width, draft_rounds, max_new_tokens = json.loads(line)
    print(json.dumps([[7] * max_new_tokens, 1, 0.5]), flush=True)
"""


@pytest.mark.usefixtures("quick_compilation")
def test_a_difference_ends_the_command_with_exit_code_1_after_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    target, stand_in = str(tmp_path / "target"), tmp_path / "stand_in.py"
    write_untrained_target(tmp_path / "target", functions=50)
    stand_in.write_text(STAND_IN)
    monkeypatch.setattr(apple, "__file__", str(stand_in))
    prompts = write_lines(tmp_path / "prompts.jsonl", {"prompt": "def f(x):\n"})
    output = tmp_path / "reports" / "report.json"
    options: dict[str, Any] = {
        "torch-python": sys.executable,
        "repository": "clone",
        "target": target,
        "drafter": "drafter",
        "prompts": prompts,
        "output": output,
        "beam-widths": 0,
        "max-new-tokens": 4,
        "repeats": 1,
    }
    monkeypatch.setattr("redrafter_jax.load_drafter", lambda *_: None)
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    with pytest.raises(SystemExit) as ended:
        apple.main(words)
    assert ended.value.code == 1
    assert "W=0 R=0: of 1 prompts 0 with the same text" in capsys.readouterr().out
    report = json.loads(output.read_text())
    assert report["versions"]["policy"] == "PASSIVE"
    assert report["versions"]["words"] == ["clone", target, "drafter"]
    (tree,) = report["trees"]
    assert (tree["same_text"], tree["target_calls"]) == (0, {"ours": 3, "apple": 1})
