"""What a measurement of drafting comes to: faster, slower, or too little to tell.

What prompt lookup gains is never called the gain of a head. Faster and slower are said where one of
two equal ways of decoding would win so many turns in one of a hundred measurements at most.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from redrafter_jax.config import TreeConfig
from redrafter_jax.types import LOOKUP

# Fewer texts differ too much from each other for a median to tell.
FEWEST_TEXTS = 8
# Fewer turns are all won by one of two equal ways more often than `_BY_CHANCE`.
FEWEST_TURNS, _BY_CHANCE = 8, 0.01
Kind = Literal["faster", "slower", "no difference", "too little data"]


class Texts(NamedTuple):
    """The baseline's texts: how many, how many repeat themselves, how many end at once."""

    total: int
    repeating: int = 0
    short: int = 0

    @property
    def fault(self) -> str:
        """Why they tell nothing of a head; empty if they do."""
        if self.total < FEWEST_TEXTS:
            return f"{self.total} text{'s' * (self.total != 1)}, and {FEWEST_TEXTS} are the fewest"
        if 2 * self.short >= self.total:
            return f"{self.short} of {self.total} answers end within a few tokens"
        if 2 * self.repeating >= self.total:
            return (
                f"{self.repeating} of {self.total} texts repeat themselves, which any drafter "
                "guesses"
            )
        return ""


class MeasuredWay(NamedTuple):
    """A way of drafting, measured beside the baseline.

    Attributes:
      name: what the sentence calls it.
      tree: how its trees are drafted; None is the baseline itself.
      has_head: whether trained heads draft, alone or beside prompt lookup.
      speedup: quartiles of the turns' speed-ups over the baseline, the median in the middle; None
        where none could be timed.
      accepted_by: accepted tokens by the source that proposed them.
      turns: how often it and the baseline decoded the same batch, one after the other.
      faster: in how many of the turns it was the faster one.
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
        """The median speed-up, 0 where there is none."""
        return self.speedup[1] if self.speedup else 0.0

    @property
    def lookup_share(self) -> float:
        """The part of the accepted tokens that prompt lookup proposed."""
        return self.accepted_by.get(LOOKUP, 0) / max(sum(self.accepted_by.values()), 1)

    @property
    def is_heads_own(self) -> bool:
        """Whether what it gains is the head's: most of the accepted tokens are."""
        return self.has_head and self.lookup_share <= 0.5


class Verdict(NamedTuple):
    """What was found, of which way of drafting, in a sentence without its period."""

    kind: Kind
    way: MeasuredWay
    sentence: str

    def then(self, next_step: str) -> str:
        """The whole sentence, with what to do next."""
        return f"{self.sentence}; {next_step}."


def judge(ways: Sequence[MeasuredWay], texts: Texts) -> Verdict:
    """The verdict on one way of drafting or more, measured on the same texts in turns.

    It is on the fastest way. Where that is not a head alone the sentence says what prompt lookup
    and the head do alone, if that was measured.
    """
    best = max(ways, key=lambda way: way.median)
    untimed = "" if any(way.speedup for way in ways) else "no text goes on beyond its first token"
    if fault := texts.fault or untimed:
        return Verdict("too little data", best, f"Too little data to tell: {fault}")
    if best.turns < FEWEST_TURNS:
        count = f"{best.turns} turn{'s' * (best.turns != 1)} with the baseline"
        fault = f"{count}, and {FEWEST_TURNS} are the fewest"
        return Verdict("too little data", best, f"Too little data to tell: {fault}")
    found = f"{_describe(best)}{_describe_others(ways, best)}"
    # Where nothing was accepted a ratio above 1 is the machine's noise.
    if _beyond_chance(best.faster, best.turns) and any(best.accepted_by.values()):
        lookups = " by prompt lookup, not by the head" * (best.has_head and not best.is_heads_own)
        return Verdict("faster", best, f"Faster{lookups}: {found}")
    if _beyond_chance(best.turns - best.faster, best.turns):
        return Verdict("slower", best, f"Slower than no drafting: {found}")
    return Verdict("no difference", best, f"No clear difference from no drafting: {found}")


def _beyond_chance(won: int, turns: int) -> bool:
    """The sign test, of both sides: whether equal ways would hardly give one so many turns.

    It asks nothing of how times are distributed, so that a few slow moments decide nothing.
    """
    as_many = sum(math.comb(turns, count) for count in range(won, turns + 1))
    return 2 * as_many <= _BY_CHANCE * 2**turns


def describe_tree(tree: TreeConfig | None) -> str:
    """The sizes of a tree in the letters of the glossary, and what else is not by default."""
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
    """What shares the gain: lookup without a head, and a head without lookup."""
    others = ((False, "prompt lookup alone"), (True, "the head alone"))
    found = []
    for has_head, words in others:
        own = [
            way.median
            for way in ways
            if way is not best and way.speedup and way.tree is not None
            if way.has_head == has_head and not (has_head and way.lookup_share)
        ]
        if own and (has_head != best.has_head or best.lookup_share):
            found.append(f", {words} {max(own):.2f}")
    return "".join(found)
