"""Costs between timed trees: a law of rounds, beams and nodes is found again from a few of them."""

import pytest

from eval.config import TuneSettings
from eval.step_costs import TimedTree, pick_diverse, predict
from eval.tree_grid import build_all
from redrafter_jax import DraftConfig

SIZES = [(1, 1, 0), (1, 4, 0), (2, 2, 0), (4, 4, 0), (8, 2, 0), (8, 4, 0), (1, 4, 8), (4, 2, 8)]
TREES = [DraftConfig(width, rounds, lookup_tokens=lookup) for width, rounds, lookup in SIZES]


def law(draft: DraftConfig) -> tuple[float, float]:
    """What propose costs, and the rest of a step."""
    # The first round has one beam, whatever the width.
    later = draft.draft_rounds - 1
    lookup = 0.05 if draft.lookup_tokens else 0.0
    propose = 0.3 + 0.2 * later + 0.01 * later * draft.beam_width + lookup
    return propose, 1 + 0.03 * draft.budget


def timed(draft: DraftConfig) -> TimedTree:
    propose, rest = law(draft)
    return TimedTree(draft, propose, propose + rest)


@pytest.mark.parametrize("draft", [*TREES, DraftConfig(4, 3), DraftConfig(2, 3, lookup_tokens=8)])
def test_a_law_that_is_linear_is_found_again(draft: DraftConfig) -> None:
    few = [timed(one) for one in pick_diverse(TREES, 6)]
    assert predict(few, draft) == pytest.approx(sum(law(draft)))


def test_beyond_the_timed_trees_a_cost_stays_and_is_never_negative() -> None:
    small = TimedTree(DraftConfig(1, 1), 0.4, 1.5)
    large = TimedTree(DraftConfig(4, 2), 0.1, 1.6)
    assert predict([small, large], DraftConfig(4, 2)) == 1.6
    # Its propose would cost less than nothing; its nodes cost what those of `large` do.
    assert predict([small, large], DraftConfig(8, 4)) == pytest.approx(1.5)


def test_the_timed_trees_are_the_extremes_and_those_most_unlike_the_others() -> None:
    settings = TuneSettings.model_validate(
        {"target": "", "drafter": "", "prompts": "", "report_dir": "", "max_new_tokens": 1}
    )
    drafts = build_all(settings.trees)
    few = pick_diverse(drafts, settings.timed_trees)
    assert few[0] == DraftConfig(1, 1, 2)
    assert {8} <= {draft.beam_width for draft in few}
    assert {33} <= {draft.budget for draft in few}
    assert {0, 8} <= {draft.lookup_tokens for draft in few}
    assert len(few) == len(set(few)) == settings.timed_trees
    # No more than there are sizes.
    same = [DraftConfig(2, 2), DraftConfig(2, 2, sharpness=2.0)]
    assert pick_diverse(same, 5) == same[:1]
