"""A measurement in one sentence, which never calls prompt lookup's gain the head's."""

import pytest

from redrafter_jax.config import TreeConfig
from redrafter_jax.verdict import MeasuredWay, Texts, judge

TREE = TreeConfig(beam_width=2, draft_rounds=3, num_nodes=4)
BOTH = TreeConfig(beam_width=2, draft_rounds=3, num_nodes=12, lookup_tokens=8)
LOOKUP = TreeConfig(lookup_tokens=8)
ENOUGH = Texts(24)


def head(low: float, middle: float, high: float, accepted: int = 40) -> MeasuredWay:
    return MeasuredWay("head", TREE, True, (low, middle, high), {"recurrent": accepted})


def both(middle: float, drafted: int, looked_up: int) -> MeasuredWay:
    accepted = {"recurrent": drafted, "lookup": looked_up}
    return MeasuredWay("both", BOTH, True, (middle - 0.1, middle, middle + 0.1), accepted)


def lookup(middle: float) -> MeasuredWay:
    return MeasuredWay("lookup", LOOKUP, False, (middle - 0.1, middle, middle + 0.1), {"lookup": 9})


@pytest.mark.parametrize(
    ("ways", "kind", "sentence"),
    [
        (
            [head(1.3, 1.42, 1.55)],
            "faster",
            "Faster: 'head' decodes 1.42 times as fast (middle half 1.30 to 1.55) with W=2 R=3 N=4",
        ),
        (
            [head(0.6, 0.66, 0.7)],
            "slower",
            "Slower than no drafting: 'head' decodes 0.66 times as fast (middle half 0.60 to 0.70) "
            "with W=2 R=3 N=4",
        ),
        (
            [head(0.95, 1.02, 1.1)],
            "no difference",
            "No clear difference from no drafting: 'head' decodes 1.02 times as fast (middle half "
            "0.95 to 1.10) with W=2 R=3 N=4",
        ),
        # Gemma 3 270M: 207 accepted tokens of lookup, 27 of a head that was slower alone.
        (
            [head(0.6, 0.66, 0.7), both(2.4, 27, 207), lookup(2.3)],
            "faster",
            "Faster by prompt lookup, not by the head: 'both' decodes 2.40 times as fast (middle "
            "half 2.30 to 2.50) with W=2 R=3 N=12 C=8, 88% of the accepted tokens looked up, "
            "prompt lookup alone 2.30, the head alone 0.66",
        ),
        (
            [head(0.6, 0.66, 0.7), lookup(1.5)],
            "faster",
            "Faster: 'lookup' decodes 1.50 times as fast (middle half 1.40 to 1.60) with C=8, no "
            "head, the head alone 0.66",
        ),
        # Nothing was accepted: what seems faster is noise.
        (
            [head(1.01, 1.03, 1.06, accepted=0)],
            "no difference",
            "No clear difference from no drafting: 'head' decodes 1.03 times as fast (middle half "
            "1.01 to 1.06) with W=2 R=3 N=4",
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
        (Texts(2), "2 texts, and 8 are the fewest"),
        (Texts(24, repeating=12), "12 of 24 texts repeat themselves, which any drafter guesses"),
        (Texts(24, short=12), "12 of 24 answers end within a few tokens"),
        (Texts(24, pairs=1), "1 batch timed beside the baseline, and 4 are the fewest"),
        (Texts(24, pairs=3), "3 batches timed beside the baseline, and 4 are the fewest"),
    ],
)
def test_texts_that_tell_nothing_of_a_head_give_no_gain(texts: Texts, why: str) -> None:
    verdict = judge([head(4.5, 5.0, 5.5)], texts)
    assert verdict.kind == "too little data"
    assert verdict.sentence == f"Too little data to tell: {why}"


def test_a_way_without_a_time_is_none() -> None:
    verdict = judge([MeasuredWay("head", TREE, True, None, {"recurrent": 0})], ENOUGH)
    assert verdict.sentence == "Too little data to tell: no text goes on beyond its first token"
