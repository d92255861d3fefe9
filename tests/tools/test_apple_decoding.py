"""The comparison with Apple's code, with stand-ins for both sides."""

import argparse
import json
import stat
import sys
from pathlib import Path

import pytest

from redrafter_jax.errors import InputError
from tools.apple.compare import compare_mode, compare_prompts, same_prefix, summarize
from tools.apple.decode import check, read_prompts
from tools.apple.process import start
from tools.apple.sides import Mode, Run, apple_side, decode_command
from tools.apple.table import make_table


def a_side(tokens: list[int], calls: int, seconds: float):
    """A side that says the same whatever it is asked."""

    def run(mode: Mode, prompt: list[int]) -> Run:
        return Run(tokens, calls if mode == "speculative" else len(tokens), seconds)

    return run


@pytest.fixture
def arguments(tmp_path: Path) -> argparse.Namespace:
    repository = tmp_path / "clone"
    (repository / "recurrent_drafting").mkdir(parents=True)
    return argparse.Namespace(
        torch_python=sys.executable,
        repository=repository,
        target=tmp_path,
        drafter=tmp_path,
        prompts=tmp_path / "prompts.json",
        output=tmp_path / "report.json",
        beam_width=4,
        draft_rounds=3,
        max_new_tokens=8,
        repeats=1,
        full_vocabulary=False,
        threads=None,
    )


def a_python(folder: Path, script: str) -> str:
    """An executable in the place of Apple's Python: whatever it is asked to run, it does this."""
    path = folder / "python"
    path.write_text(f"#!{sys.executable}\nimport json, sys\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def test_speeds_are_compared_pair_by_pair_and_texts_token_by_token() -> None:
    result = compare_mode(
        "speculative", [1], a_side([5, 6, 7, 8], 2, 0.5), a_side([5, 6, 9, 8], 3, 2.0), repeats=2
    )
    assert result["tokens_per_second"] == {"ours": 8.0, "apple": 2.0}
    assert result["ratio"] == 4.0
    assert not result["same_text"]
    assert result["first_difference"] == 2
    assert result["target_calls"] == {"ours": 2, "apple": 3}


def test_a_side_that_contradicts_itself_is_refused() -> None:
    answers = iter([Run([1], 1, 1.0), Run([2], 1, 1.0)])
    with pytest.raises(InputError, match="ours: two speculative runs of the same prompt differ"):
        compare_mode("speculative", [1], lambda *_: next(answers), a_side([1], 1, 1.0), repeats=1)


def test_the_summary_counts_prompts_whose_calls_agree_within_one() -> None:
    def ours(mode: Mode, prompt: list[int]) -> Run:
        return Run([1, 2], {1: 10, 2: 11, 3: 14}[prompt[0]], 1.0)

    rows = compare_prompts([[1], [2], [3]], ours, a_side([1, 2], 10, 2.0), repeats=1)
    total = summarize(rows)["speculative"]
    assert total["same_text"] == 1.0
    assert total["target_calls"] == {"ours": 35, "apple": 30}
    assert total["same_target_calls"] == pytest.approx(1 / 3)
    assert total["target_calls_within_one"] == pytest.approx(2 / 3)
    assert total["median_ratio"] == 2.0
    report = {
        "settings": {"beam_width": 4, "draft_rounds": 3, "max_new_tokens": 2},
        "device": "a CPU",
        "threads": {"cpus": 2},
        "load_average_before": 0.0,
        "runs": {"ACTIVE": {"prompts": rows, "summary": summarize(rows)}},
    }
    assert make_table(report, "ACTIVE").row_count == 2 * 3 + 2


@pytest.mark.parametrize(
    ("ours", "theirs", "shared"), [([], [1], 0), ([1, 2], [1, 3], 1), ([1, 2], [1, 2, 3], 2)]
)
def test_a_shared_prefix_ends_at_the_first_difference(ours, theirs, shared: int) -> None:
    assert same_prefix(ours, theirs) == shared


def test_the_worker_is_asked_for_apples_beam_length_which_counts_the_root(
    arguments: argparse.Namespace, tmp_path: Path
) -> None:
    arguments.torch_python = a_python(
        tmp_path,
        "import os\n"
        "print(json.dumps({'policy': os.environ['OMP_WAIT_POLICY']}), flush=True)\n"
        "for line in sys.stdin:\n"
        "    asked = json.loads(line)\n"
        "    reply = {'tokens': [asked['beam_length'], asked['beam_width']],\n"
        "             'target_calls': len(asked['prompt']), 'seconds': 0.5}\n"
        "    print(json.dumps(reply), flush=True)",
    )
    with start("Apple's side", decode_command(arguments, threads=1), "ACTIVE") as apple:
        assert apple.about == {"policy": "ACTIVE"}
        assert apple_side(apple, arguments)("speculative", [3, 3, 3]) == Run([4, 4], 3, 0.5)


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ('print(\'{"error": "no such folder"}\')', r"^Apple's side: no such folder\.$"),
        ("print('hello')", r"^Apple's side wrote 'hello', not JSON\.$"),
        ("sys.exit('out of memory')", r"^Apple's side ended with code 1: out of memory"),
    ],
)
def test_a_side_that_fails_is_reported_in_one_sentence(
    tmp_path: Path, script: str, message: str
) -> None:
    with (
        pytest.raises(InputError, match=message),
        start("Apple's side", [a_python(tmp_path, script)]),
    ):
        pass


def test_a_python_without_pytorch_is_refused_in_one_sentence(
    arguments: argparse.Namespace,
) -> None:
    with (
        pytest.raises(InputError, match=r"^Apple's side: [^\n]+\.$"),
        start("Apple's side", decode_command(arguments, threads=1)),
    ):
        pass
    with (
        pytest.raises(InputError, match="Cannot start /no/python: No such file"),
        start("Apple's side", ["/no/python"]),
    ):
        pass


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("beam_width", 0, "--beam-width is 0; the least is 1."),
        ("beam_width", 51, "--beam-width is 51; the most is 50, .* unless --full-vocabulary"),
        ("max_new_tokens", 1, "--max-new-tokens is 1; the least is 2."),
        ("target", Path("nowhere"), "--target nowhere is not a folder."),
        ("output", Path("nowhere/report.json"), "not a file in an existing folder"),
    ],
)
def test_settings_neither_side_could_follow_are_refused(
    arguments: argparse.Namespace, name: str, value: int | Path, message: str
) -> None:
    check(arguments)
    setattr(arguments, name, value)
    with pytest.raises(InputError, match=message):
        check(arguments)


def test_beams_may_outnumber_apples_candidates_where_scores_cover_the_vocabulary(
    arguments: argparse.Namespace,
) -> None:
    arguments.beam_width, arguments.full_vocabulary = 51, True
    check(arguments)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "must be a list of prompts"),
        ('[[1], "text"]', "prompt 1 is not a list of token ids"),
        ("[[1], [true]]", "prompt 1 is not a list of token ids"),
        (r'["a", "b\ud800"]', "prompt 1 holds .* at character 1, a lone surrogate"),
    ],
)
def test_prompts_that_are_no_prompts_are_refused(
    tmp_path: Path, content: str, message: str
) -> None:
    path = tmp_path / "prompts.json"
    path.write_text(content)
    with pytest.raises(InputError, match=message):
        read_prompts(path, tmp_path)
    path.write_text(json.dumps([[1, 2], [3]]))
    assert read_prompts(path, tmp_path) == [[1, 2], [3]]
