"""Decoding beside Apple's code: traces compared, both sides timed, with stand-ins for Apple's."""

import sys

import pytest
from trees import tree_of

from redrafter_jax import generate
from redrafter_jax.drafters.head_drafter import LoadedHead
from redrafter_jax.errors import InputError
from redrafter_jax.models.target import Target
from tools.apple.decode import Job, describe, summarize, time_sides
from tools.apple.process import start
from tools.apple.traces import (
    Decoded,
    Step,
    apple_tree,
    compare_traces,
    find_difference,
    largest_error,
    read_apple,
    read_tree,
    trace_ours,
)

ROOT = 9
JOB = Job([1], beam_width=4, draft_rounds=2, max_new_tokens=4)


def step(length: int, *rounds: dict[str, float], root: int = ROOT) -> Step:
    """Beams as strings of digits; the tree holds every beginning of the last round's."""
    read = [{tuple(map(int, word)): score for word, score in beams.items()} for beams in rounds]
    paths = {(root, *beam[:end]) for beam in read[-1] for end in range(len(beam) + 1)}
    return Step(length, read, frozenset(paths))


SAME = step(4, {"1": -0.5, "2": -1.0}, {"13": -1.5, "23": -2.0})


def decoded(tokens: list[int], calls: int = 1, seconds: float = 0.0, *steps: Step) -> Decoded:
    return Decoded(tokens, calls, seconds, list(steps))


def test_a_tree_is_the_paths_of_its_live_nodes() -> None:
    assert list(read_tree(tree_of([[9, 1, -1, 3]], [[0, 0, 0, 1]]))) == [(9,), (9, 1), (9, 1, 3)]


def test_our_trace_is_what_generate_does_step_by_step(
    habitual_target: Target, good_drafter: LoadedHead
) -> None:
    prompt, limit, models = [3, 1, 4], 20, (habitual_target, good_drafter)
    ours = trace_ours(*models, prompt, beam_width=3, draft_rounds=2, max_new_tokens=limit)
    tree = apple_tree(habitual_target, 3, 2)
    whole = generate(*models, [prompt], max_new_tokens=limit, tree=tree, eos_token_ids=())
    assert (ours.tokens, ours.target_calls) == (whole.tokens[0], whole.steps[0])
    assert len(ours.steps) == ours.target_calls < limit - 1
    for one in ours.steps:
        root = [*prompt, *ours.tokens][one.length - 1]
        assert all(path[0] == root for path in one.paths)
        assert [len(beams) for beams in one.rounds] == [3, 3], "all beams, also of the first round"
        ends = {(root, *beam) for beam in one.rounds[-1]}
        assert one.paths == {path[: end + 1] for path in ends for end in range(len(path))}


def test_apples_answer_is_read_as_the_same_kind_of_trace() -> None:
    rounds = [
        {"sequences": [[1], [2]], "log_probs": [-0.5, -1.0]},
        {"sequences": [[1, 3], [2, 3]], "log_probs": [-1.5, -2.0]},
    ]
    tree = {"tokens": [ROOT, 1, 3, 2, 3], "parents": [0, 0, 1, 0, 3]}
    reply = {
        "tokens": [ROOT, 1],
        "target_calls": 1,
        "seconds": 0.5,
        "steps": [{"length": 4, "rounds": rounds, "tree": tree}],
    }
    assert read_apple(reply) == decoded([ROOT, 1], 1, 0.5, SAME)


@pytest.mark.parametrize(("gap", "ties"), [(0.00005, 1), (0.5, 0)])
def test_a_difference_is_a_tie_if_the_scores_behind_it_are_near(gap: float, ties: int) -> None:
    first = {"1": -1.0, "2": -2.0}
    ours = step(4, first, {"13": -1.5, "24": -1.5 - gap})
    order = step(4, first, {"24": -1.5, "13": -1.5})
    # Ours scored "24" higher than the last that Apple's kept.
    beams = step(4, first, {"13": -1.5, "25": -1.5 - 2 * gap})
    for apples, kind in ((order, "order"), (beams, "beams")):
        assert find_difference(ours, apples) == (kind, pytest.approx(gap))
        result = compare_traces(decoded([9], 1, 0, ours), decoded([9], 1, 0, apples), 3)
        assert (result["ties"], result["unexplained"]) == (ties, 1 - ties)


def test_steps_are_compared_as_long_as_the_texts_are_one() -> None:
    later, parted = SAME._replace(length=6), SAME._replace(length=7)
    ours = decoded([9, 1, 2, 5], 3, 0, SAME, later, parted)
    # Two tokens in one call where ours took two calls, and another last token.
    apple = decoded([9, 1, 2, 6], 2, 0, SAME, SAME._replace(length=5), parted)
    result = compare_traces(ours, apple, prompt_length=3)
    assert (result["same_text"], result["shared_tokens"], result["unexplained"]) == (False, 3, 1)
    assert result["steps"] == 1
    assert result["target_calls"] == {"ours": 3, "apple": 2}


def test_whatever_no_tie_accounts_for_is_counted() -> None:
    near = step(4, {"1": -0.5, "2": -1.25}, {"13": -1.5, "23": -2.0})
    assert find_difference(SAME, near) is None
    assert largest_error(SAME, near) == 0.25
    tied = step(4, {"1": -0.5, "2": -1.0}, {"23": -1.5, "13": -1.5 - 1e-5})
    other = step(4, {"1": -0.5, "3": -0.75}, {"13": -1.5, "33": -2.0})
    tree = SAME._replace(paths=SAME.paths - {(ROOT, 2, 3)})
    assert find_difference(SAME, tree) == ("tree", None)
    ours = decoded([9, 1], 2, 0, SAME)
    rows = [
        compare_traces(ours, apple, prompt_length=3)
        for apple in (
            ours,
            decoded([9, 1], 2, 0, near),
            decoded([9, 1], 3, 0, SAME),  # more calls without any reason
            decoded([9, 1], 3, 0, tied),
            decoded([9, 1], 2, 0, other),
            decoded([9, 1], 2, 0, tree),
            decoded([9, 2], 2, 0, SAME),
        )
    ]
    assert [row["unexplained"] for row in rows] == [0, 0, 1, 1, 1, 1, 1]
    result = summarize(rows)
    assert (result["prompts"], result["unexplained"], result["ties"]) == (7, 5, 0)
    assert (result["same_text"], result["same_calls"]) == (6, 5)
    assert (result["steps"], result["same_beams"], result["same_trees"]) == (7, 5, 5)
    assert result["target_calls"] == {"ours": 14, "apple": 16}
    line = describe(result | {"beam_width": 4, "draft_rounds": 2})
    assert line.startswith("W=4 R=2: 6 of 7 texts the same; 14 and 16 target calls; of 7 compared,")


def test_speeds_are_compared_pair_by_pair() -> None:
    ours, theirs = decoded([5, 6, 7, 8], 2, 0.5), decoded([5, 6, 9, 8], 3, 2.0)
    sides = {"ours": lambda job, trace: ours, "apple": lambda job, trace: theirs}
    row = compare_traces(ours, theirs, 1) | time_sides(JOB, sides, repeats=2)
    total = summarize([row])
    assert total["tokens_per_second"] == {"ours": 8.0, "apple": 2.0}
    assert total["ratio"] == 4.0


def test_a_side_that_contradicts_itself_is_refused() -> None:
    answers = iter([decoded([1]), decoded([2])])
    sides = {"ours": lambda *_: next(answers), "apple": lambda *_: decoded([1], 1, 1.0)}
    with pytest.raises(InputError, match="ours: two runs of the same prompt differ"):
        time_sides(JOB, sides, repeats=1)


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
            assert side.ask(number=number) == {"asked": {"number": number}}


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
