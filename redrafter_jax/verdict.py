"""The verdict of a measurement of drafting: faster, slower, no difference, or too little data.

A way of drafting is a drafter with one shape of trees. It is measured in turns: in each turn, the
way of drafting and the baseline decode the same batch, one after the other. The baseline drafts
nothing.

The verdict is faster or slower only if chance cannot explain the number of turns won. Two equally
fast ways would reach such a number in at most one of a hundred measurements. A gain of prompt
lookup is never attributed to a head.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from redrafter_jax.config import TreeConfig
from redrafter_jax.types import LOOKUP

# Minimum number of texts; with fewer texts the median varies too much.
FEWEST_TEXTS = 8
# Minimum number of turns; with fewer turns, chance alone could let one way win all of them.
FEWEST_TURNS, _BY_CHANCE = 8, 0.01
Kind = Literal["faster", "slower", "no difference", "too little data"]


class Texts(NamedTuple):
    """Counts of the texts that the baseline wrote.

    Attributes:
      total: number of all texts.
      repeating: number of texts that repeat themselves.
      short: number of texts that end within a few tokens.
    """

    total: int
    repeating: int = 0
    short: int = 0

    @property
    def fault(self) -> str:
        """The reason why the texts cannot show the speed of a head; empty if there is none."""
        if self.total < FEWEST_TEXTS:
            return f"{self.total} text{'s' * (self.total != 1)}, but {FEWEST_TEXTS} are needed"
        if 2 * self.short >= self.total:
            return f"{self.short} of {self.total} answers end within a few tokens"
        if 2 * self.repeating >= self.total:
            return (
                f"{self.repeating} of {self.total} texts repeat themselves, which any drafter "
                "guesses"
            )
        return ""


class MeasuredWay(NamedTuple):
    """A way of drafting that was measured in turns with the baseline.

    Attributes:
      name: name of the way in the verdict.
      tree: shape of the drafted trees; None for the baseline itself.
      has_head: whether a trained head drafts, alone or with prompt lookup.
      speedup: lower quartile, median and upper quartile of the speed-up over the baseline, over all
        turns; None if no turn could be timed.
      accepted_by: number of accepted tokens by source (the drafter's name, or "lookup").
      turns: number of batches that both this way and the baseline decoded, one after the other.
      faster: number of turns in which this way was faster than the baseline.
    """

    name: str
    tree: TreeConfig | None
    has_head: bool
    speedup: tuple[float, float, float] | None
    accepted_by: Mapping[str, int]
    turns: int
    faster: int

    @property
    def median(self) -> float:
        """The median speed-up over the baseline; 0 if no turn could be timed."""
        return self.speedup[1] if self.speedup else 0.0

    @property
    def lookup_share(self) -> float:
        """The fraction of accepted tokens that prompt lookup proposed."""
        return self.accepted_by.get(LOOKUP, 0) / max(sum(self.accepted_by.values()), 1)

    @property
    def is_heads_own(self) -> bool:
        """Whether the head earned the gain: it proposed at least half of the accepted tokens."""
        return self.has_head and self.lookup_share <= 0.5


class Verdict(NamedTuple):
    """The result of `judge`.

    Attributes:
      kind: the kind of the verdict.
      way: the way that was judged, the fastest one.
      sentence: the verdict with its reasons, without the final period.
    """

    kind: Kind
    way: MeasuredWay
    sentence: str

    def then(self, next_step: str) -> str:
        """Return the sentence, followed by the next step and a period."""
        return f"{self.sentence}; {next_step}."


def judge(ways: Sequence[MeasuredWay], texts: Texts) -> Verdict:
    """Judge the fastest of several ways of drafting, measured in turns on the same texts.

    `Verdict.sentence` also gives the best speed-up among the other ways that use only prompt
    lookup, and among those that use only the head. If the fastest way is itself of one of these
    kinds, the others of its kind are left out.

    Args:
      ways: the measured ways, without the baseline.
      texts: counts of the texts that the baseline wrote.
    """
    best = max(ways, key=lambda way: way.median)
    untimed = "" if any(way.speedup for way in ways) else "no text goes on beyond its first token"
    if fault := texts.fault or untimed:
        return Verdict("too little data", best, f"Too little data to tell: {fault}")
    if best.turns < FEWEST_TURNS:
        count = f"{best.turns} turn{'s' * (best.turns != 1)} with the baseline"
        fault = f"{count}, but {FEWEST_TURNS} are needed"
        return Verdict("too little data", best, f"Too little data to tell: {fault}")
    found = f"{_describe(best)}{_describe_others(ways, best)}"
    # Without accepted tokens a ratio above 1 is the machine's noise.
    if _beyond_chance(best.faster, best.turns) and any(best.accepted_by.values()):
        lookups = " by prompt lookup, not by the head" * (best.has_head and not best.is_heads_own)
        return Verdict("faster", best, f"Faster{lookups}: {found}")
    if _beyond_chance(best.turns - best.faster, best.turns):
        return Verdict("slower", best, f"Slower than no drafting: {found}")
    return Verdict("no difference", best, f"No clear difference from no drafting: {found}")


def _beyond_chance(won: int, turns: int) -> bool:
    """Whether one of two equally fast ways wins so many turns with a probability of at most 1%.

    This is a two-sided sign test. The test assumes nothing about the distribution of times, so
    outliers have no effect.
    """
    as_many = sum(math.comb(turns, count) for count in range(won, turns + 1))
    return 2 * as_many <= _BY_CHANCE * 2**turns


def describe_tree(tree: TreeConfig | None) -> str:
    """Describe a tree in words such as "W=2 R=3 N=4": beam width, draft rounds and nodes.

    If they are set, `lookup_tokens` follows as C, `mean_nodes` as mean, and then `rerank`.
    """
    if tree is None:
        return "no drafting"
    named = {"W": tree.beam_width, "R": tree.draft_rounds, "N": tree.budget}
    words = [f"{letter}={value}" for letter, value in named.items()]
    if tree.lookup_tokens:
        words.append(f"C={tree.lookup_tokens}")
    if tree.mean_nodes:
        words.append(f"mean={tree.mean_nodes}")
    return " ".join([*words, *["rerank"] * tree.rerank])


def _describe(way: MeasuredWay) -> str:
    assert way.speedup is not None
    low, median, high = way.speedup
    tree = describe_tree(way.tree)
    if way.tree is not None and not way.has_head:
        tree = f"C={way.tree.lookup_tokens}, no head"
    looked_up = ""
    if way.has_head and way.lookup_share:
        looked_up = f", {way.lookup_share:.0%} of the accepted tokens looked up"
    return (
        f"{way.name!r} decodes {median:.2f} times as fast (middle half {low:.2f} to {high:.2f}, "
        f"faster in {way.faster} of {way.turns} turns) with {tree}{looked_up}"
    )


def _describe_others(ways: Sequence[MeasuredWay], best: MeasuredWay) -> str:
    """Describe the speed-ups of the other ways that use prompt lookup alone or the head alone."""
    others = ((False, "prompt lookup alone"), (True, "the head alone"))
    found = []
    for has_head, words in others:
        own = [
            way.median
            for way in ways
            if way is not best and way.speedup and way.tree is not None
            if way.has_head == has_head and not (has_head and way.lookup_share)
        ]
        is_mixed = best.has_head and best.lookup_share
        if own and (has_head != best.has_head or is_mixed):
            found.append(f", {words} {max(own):.2f}")
    return "".join(found)
