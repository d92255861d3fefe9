"""Two traces compared: what is the same, what is a tie, what is neither."""

import jax.numpy as jnp
import pytest
from trees import tree_of

from redrafter_jax.types import Beams
from tools.apple.agreement import make_table, summarize
from tools.apple.differences import compare_traces, find_difference, score_errors
from tools.apple.traces import Round, Step, Trace, read_apple, read_beams, read_tree

ROOT = 9


def step(length: int, *rounds: tuple[list[str], list[float]], root: int = ROOT) -> Step:
    """Beams as strings of digits; the tree holds every beginning of the last round's."""
    read = [Round([tuple(map(int, word)) for word in words], scores) for words, scores in rounds]
    beams = read[-1].sequences
    paths = {(root, *beam[:end]) for beam in beams for end in range(len(beam) + 1)}
    return Step(length, read, frozenset(paths))


SAME = step(4, (["1", "2"], [-0.5, -1.0]), (["13", "23"], [-1.5, -2.0]))


def test_beams_are_read_from_their_parents() -> None:
    beams = Beams(
        tokens=jnp.array([[[1, 2], [3, 4], [5, 6]]]),
        parents=jnp.array([[[0, 0], [1, 0], [1, 1]]]),
        log_probs=jnp.array([[[-1.0, -2.0], [-3.0, -4.0], [-5.0, -6.0]]]),
    )
    assert read_beams(beams) == [
        Round([(1,), (2,)], [-1.0, -2.0]),
        Round([(2, 3), (1, 4)], [-3.0, -4.0]),
        Round([(1, 4, 5), (1, 4, 6)], [-5.0, -6.0]),
    ]


def test_a_tree_is_the_paths_of_its_live_nodes() -> None:
    tree = tree_of([[9, 1, -1, 3]], [[0, 0, 0, 1]])
    assert read_tree(tree) == {(9,), (9, 1), (9, 1, 3)}


def test_apples_answer_is_read_as_the_same_kind_of_trace() -> None:
    rounds = [
        {"sequences": [[1], [2]], "log_probs": [-0.5, -1.0]},
        {"sequences": [[1, 3], [2, 3]], "log_probs": [-1.5, -2.0]},
    ]
    tree = {"tokens": [ROOT, 1, 3, 2, 3], "parents": [0, 0, 1, 0, 3]}
    reply = {
        "tokens": [ROOT, 1],
        "target_calls": 1,
        "steps": [{"length": 4, "rounds": rounds, "tree": tree}],
    }
    assert read_apple(reply) == Trace([ROOT, 1], 1, [SAME])


def test_the_same_beams_and_trees_differ_nowhere() -> None:
    near = step(4, (["1", "2"], [-0.5, -1.25]), (["13", "23"], [-1.5, -2.0]))
    assert find_difference(SAME, near) is None
    assert max(score_errors(SAME, near)) == 0.25
    result = compare_traces(Trace([9, 1], 1, [SAME]), Trace([9, 1], 1, [near]), prompt_length=3)
    assert result["same_text"]
    assert (result["same_beams"], result["same_trees"]) == (1, 1)
    assert result["largest_error"] == 0.25
    assert result["differences"] == []


@pytest.mark.parametrize(("gap", "tie"), [(0.00005, True), (0.5, False)])
def test_a_difference_is_a_tie_if_the_scores_behind_it_are_near(gap: float, tie: bool) -> None:
    first = (["1", "2"], [-1.0, -2.0])
    ours = step(4, first, (["13", "24"], [-1.5, -1.5 - gap]))
    apple = step(4, first, (["24", "13"], [-1.5, -1.5]))
    order = find_difference(ours, apple)
    # Ours scored "24" higher than the last that Apple's kept.
    apple = step(4, first, (["13", "25"], [-1.5, -1.5 - 2 * gap]))
    beams = find_difference(ours, apple)
    for found, kind in ((order, "order"), (beams, "beams")):
        assert found is not None
        assert (found.length, found.round, found.kind, found.tie) == (4, 1, kind, tie)
        assert found.gap == pytest.approx(gap)


def test_another_tree_of_the_same_beams_is_no_tie() -> None:
    found = find_difference(SAME, SAME._replace(paths=SAME.paths - {(ROOT, 2, 3)}))
    assert found is not None
    assert (found.round, found.kind, found.gap, found.tie) == (None, "tree", None, False)


def test_steps_are_compared_as_long_as_the_texts_are_one() -> None:
    later, parted = SAME._replace(length=6), SAME._replace(length=7)
    ours = Trace([9, 1, 2, 5], 3, [SAME, later, parted])
    # Two tokens in one call where ours took two calls, and another last token.
    apple = Trace([9, 1, 2, 6], 2, [SAME, SAME._replace(length=5), parted])
    result = compare_traces(ours, apple, prompt_length=3)
    assert (result["same_text"], result["shared_tokens"]) == (False, 3)
    assert result["steps"] == 1
    assert result["target_calls"] == {"ours": 3, "apple": 2}


def row(**changes: object) -> dict[str, object]:
    """A prompt on which the two agree."""
    agreed = compare_traces(Trace([9, 1], 2, [SAME]), Trace([9, 1], 2, [SAME]), prompt_length=3)
    return agreed | changes


def test_whatever_no_tie_accounts_for_is_counted() -> None:
    tie = {"length": 4, "round": 0, "kind": "order", "gap": 1e-5, "tie": True}
    calls = {"ours": 2, "apple": 3}
    rows = [
        row(),
        row(target_calls=calls),
        # Another tree may well take another number of calls.
        row(target_calls=calls, differences=[tie], same_beams=0),
        row(differences=[tie | {"gap": 1.0, "tie": False}], same_beams=0, largest_error=1e-3),
        row(same_text=False, shared_tokens=5, text_gap=1e-6, text_tie=True),
        row(same_text=False, shared_tokens=6, text_gap=0.3, text_tie=False),
    ]
    result = summarize(rows)
    assert (result["unexplained"], result["ties"]) == (3, 1)
    assert (result["same_text"], result["same_target_calls"]) == (4, 4)
    assert result["target_calls"] == {"ours": 12, "apple": 14}
    assert (result["steps"], result["same_beams"], result["same_trees"]) == (6, 4, 6)
    assert result["largest_error"] == 1e-3
    assert [difference["prompt"] for difference in result["differences"]] == [2, 3]
    assert result["texts"][1] == {"prompt": 5, "token": 6, "gap": 0.3}
    assert make_table([result | {"beam_width": 4, "draft_rounds": 2}]).row_count == 1
