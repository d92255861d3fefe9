"""A measurement in one sentence, which never calls prompt lookup's gain the head's."""

import numpy as np
import pytest

from redrafter_jax.config import TreeConfig
from redrafter_jax.verdict import MeasuredWay, Texts, judge

TREE = TreeConfig(beam_width=2, draft_rounds=3, num_nodes=4)
BOTH = TreeConfig(beam_width=2, draft_rounds=3, num_nodes=12, lookup_tokens=8)
LOOKUP = TreeConfig(lookup_tokens=8)
ENOUGH = Texts(24)


def head(
    low: float, middle: float, high: float, faster: int, accepted: int = 40, turns: int = 24
) -> MeasuredWay:
    ends = low, middle, high
    return MeasuredWay("head", TREE, True, ends, {"recurrent": accepted}, turns, faster)


def both(middle: float, drafted: int, looked_up: int) -> MeasuredWay:
    accepted = {"recurrent": drafted, "lookup": looked_up}
    ends = middle - 0.1, middle, middle + 0.1
    return MeasuredWay("both", BOTH, True, ends, accepted, 24, 24)


def lookup(middle: float) -> MeasuredWay:
    ends = middle - 0.1, middle, middle + 0.1
    return MeasuredWay("lookup", LOOKUP, False, ends, {"lookup": 9}, 24, 24)


@pytest.mark.parametrize(
    ("ways", "kind", "sentence"),
    [
        (
            [head(1.3, 1.42, 1.55, 21)],
            "faster",
            "Faster: 'head' decodes 1.42 times as fast (middle half 1.30 to 1.55, faster in 21 of "
            "24 turns) with W=2 R=3 N=4",
        ),
        (
            [head(0.6, 0.66, 0.7, 1)],
            "slower",
            "Slower than no drafting: 'head' decodes 0.66 times as fast (middle half 0.60 to 0.70, "
            "faster in 1 of 24 turns) with W=2 R=3 N=4",
        ),
        (
            [head(0.95, 1.02, 1.1, 14)],
            "no difference",
            "No clear difference from no drafting: 'head' decodes 1.02 times as fast (middle half "
            "0.95 to 1.10, faster in 14 of 24 turns) with W=2 R=3 N=4",
        ),
        # Gemma 3 270M: 207 accepted tokens of lookup, 27 of a head that was slower alone.
        (
            [head(0.6, 0.66, 0.7, 1), both(2.4, 27, 207), lookup(2.3)],
            "faster",
            "Faster by prompt lookup, not by the head: 'both' decodes 2.40 times as fast (middle "
            "half 2.30 to 2.50, faster in 24 of 24 turns) with W=2 R=3 N=12 C=8, 88% of the "
            "accepted tokens looked up, prompt lookup alone 2.30, the head alone 0.66",
        ),
        (
            [head(0.6, 0.66, 0.7, 1), lookup(1.5)],
            "faster",
            "Faster: 'lookup' decodes 1.50 times as fast (middle half 1.40 to 1.60, faster in 24 "
            "of 24 turns) with C=8, no head, the head alone 0.66",
        ),
        (
            [lookup(1.5), lookup(1.2)],
            "faster",
            "Faster: 'lookup' decodes 1.50 times as fast (middle half 1.40 to 1.60, faster in 24 "
            "of 24 turns) with C=8, no head",
        ),
        # Nothing was accepted: what seems faster is noise.
        (
            [head(1.01, 1.03, 1.06, 20, accepted=0)],
            "no difference",
            "No clear difference from no drafting: 'head' decodes 1.03 times as fast (middle half "
            "1.01 to 1.06, faster in 20 of 24 turns) with W=2 R=3 N=4",
        ),
    ],
)
def test_the_fastest_way_is_named_with_its_tree_and_whose_gain_it_is(
    ways: list[MeasuredWay], kind: str, sentence: str
) -> None:
    verdict = judge(ways, ENOUGH)
    assert (verdict.kind, verdict.sentence) == (kind, sentence)
    assert verdict.then("use it") == f"{sentence}; use it."


@pytest.mark.parametrize(
    ("texts", "why"),
    [
        (Texts(2), "2 texts, but 8 are needed"),
        (Texts(24, repeating=12), "12 of 24 texts repeat themselves, which any drafter guesses"),
        (Texts(24, short=12), "12 of 24 answers end within a few tokens"),
    ],
)
def test_texts_that_tell_nothing_of_a_head_give_no_gain(texts: Texts, why: str) -> None:
    verdict = judge([head(4.5, 5.0, 5.5, 24)], texts)
    assert verdict.kind == "too little data"
    assert verdict.sentence == f"Too little data to tell: {why}"


def test_a_way_without_a_time_is_none() -> None:
    verdict = judge([MeasuredWay("head", TREE, True, None, {"recurrent": 0}, 0, 0)], ENOUGH)
    assert verdict.sentence == "Too little data to tell: no text goes on beyond its first token"


@pytest.mark.parametrize(
    ("turns", "faster", "kind"),
    [
        (1, 1, "too little data"),
        (7, 7, "too little data"),
        # One of two equal ways wins all of eight turns once in 128 times, seven or more in 14.
        (8, 8, "faster"),
        (8, 7, "no difference"),
        (8, 1, "no difference"),
        (8, 0, "slower"),
        # scipy.stats.binomtest(19, 24).pvalue is 0.0066, and of 18 it is 0.0227.
        (24, 19, "faster"),
        (24, 18, "no difference"),
        (24, 6, "no difference"),
        (24, 5, "slower"),
    ],
)
def test_what_chance_gives_is_no_difference(turns: int, faster: int, kind: str) -> None:
    verdict = judge([head(1.1, 1.2, 1.3, faster, turns=turns)], ENOUGH)
    assert verdict.kind == kind
    if kind == "too little data":
        assert verdict.sentence == (
            f"Too little data to tell: {turns} turn{'s' * (turns > 1)} with the baseline, but 8 "
            "are needed"
        )


def measured(name: str, ratios: np.ndarray) -> MeasuredWay:
    low, middle, high = np.quantile(ratios, (0.25, 0.5, 0.75)).tolist()
    won = int((ratios > 1).sum())
    return MeasuredWay(name, TREE, True, (low, middle, high), {name: 9}, len(ratios), won)


@pytest.mark.parametrize("turns", [4, 8, 12, 24, 96])
@pytest.mark.parametrize("noise", [0.03, 0.3])
def test_of_200_comparisons_of_equal_ways_ten_at_most_find_a_difference(
    turns: int, noise: float
) -> None:
    """Three ways, timed in turns with one baseline; now and then a run takes twice as long."""
    random = np.random.default_rng(53)
    found = []
    for _ in range(200):
        seconds = random.lognormal(0.0, noise, (turns, 4)) * random.choice(
            (1, 2), (turns, 4), p=(0.9, 0.1)
        )
        ways = [measured(f"way {way}", seconds[:, 0] / seconds[:, way]) for way in (1, 2, 3)]
        found.append(judge(ways, ENOUGH).kind)
    assert sum(kind in ("faster", "slower") for kind in found) <= 10


def test_a_real_difference_is_found() -> None:
    random = np.random.default_rng(53)
    ratios = 1.2 * random.lognormal(0.0, 0.1, (200, 24))
    found = [judge([measured("head", one)], ENOUGH).kind for one in ratios]
    assert found.count("faster") >= 190
