"""The verdict of `python -m eval serve-load`: latencies with and without speculation."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from redrafter_jax.types import LOOKUP
from redrafter_jax.verdict import FEWEST_TEXTS, Kind, Texts

# At this level, one of four rates with equal methods seems different about once in 20 measurements.
_RESAMPLES, _LEVEL = 9999, 0.99
DEFINITION = {
    "speedups": "for every rate at which both methods have enough complete answers: the baseline's "
    "median seconds per token of an answer, from arrival to end, over the median with "
    f"speculation, and the {_LEVEL:.0%} percentile interval of a bootstrap of {_RESAMPLES} "
    "samples, in which the answers of the two methods are drawn independently",
    "verdict": "verdict on speculation at these rates, and whether a head or prompt lookup gains",
}


class Rate(NamedTuple):
    """Comparison of the two methods at one request rate.

    Attributes:
      rate: requests per second.
      speedup: the baseline's median seconds per token of an answer, from arrival to end, over the
        median with speculation.
      interval: the 0.5% and 99.5% percentiles of `speedup` in a bootstrap that draws the answers of
        the two methods independently, since they answer different prompts.
    """

    rate: float
    speedup: float
    interval: tuple[float, float]

    @property
    def kind(self) -> Kind:
        """Whether speculation is faster or slower at this rate, by the bootstrap interval."""
        low, high = self.interval
        return "faster" if low > 1 else "slower" if high < 1 else "no difference"


def compare_rates(runs: Sequence[Mapping[str, Any]]) -> list[Rate]:
    """Compare decoding with and without speculation at each rate, lowest rate first.

    A rate is left out if one of the methods has fewer than `FEWEST_TEXTS` complete answers. `runs`
    are the runs of the report, with `rate`, `method` and `answers`.
    """
    found = []
    for rate in sorted({run["rate"] for run in runs}):
        # A rate may be listed twice.
        own, baseline = (
            np.asarray(
                [
                    answer["latency"] / answer["tokens"]
                    for run in runs
                    if (run["rate"], run["method"]) == (rate, method)
                    for answer in run["answers"]
                    if answer["error"] is None
                ]
            )
            for method in ("speculative", "baseline")
        )
        if min(len(own), len(baseline)) >= FEWEST_TEXTS:
            found.append(
                Rate(rate, float(np.median(baseline) / np.median(own)), _interval(own, baseline))
            )
    return found


def verdict(runs: Sequence[Mapping[str, Any]]) -> str:
    """Say in a sentence at which rates speculation answers sooner, why, and what to do next."""
    answers = [answer for run in runs for answer in run["answers"]]
    whole = [answer for answer in answers if answer["error"] is None]
    rates = compare_rates(runs)
    texts = Texts(
        len(whole),
        sum(answer["repeating"] for answer in whole),
        sum(answer["short"] for answer in whole),
    )
    fault = texts.fault
    if not fault and not rates:
        fault = (
            f"no rate has {FEWEST_TEXTS} whole answers with speculation and {FEWEST_TEXTS} without"
        )
    if fault:
        return (
            f"Too little data to tell: {fault}; use other prompts, more `max_new_tokens` or a "
            f"`sampling.temperature` above 0, or send more requests (`seconds`, `max_requests`)"
            f"{_unanswered(runs)}."
        )
    accepted = sum((Counter(answer["accepted_by"]) for answer in whole), Counter[str]())
    looked_up = accepted[LOOKUP] / max(accepted.total(), 1)
    kind, then = _judge({one.kind for one in rates}, accepted.total() > 0, looked_up > 0.5)
    found = ", ".join(
        f"{one.speedup:.2f} times as fast at {one.rate:g} requests/s "
        f"({one.interval[0]:.2f} to {one.interval[1]:.2f})"
        for one in rates
    )
    share = f", {looked_up:.0%} of the accepted tokens looked up" if looked_up else ""
    return f"{kind}: answers come {found}{share}; {then}{_unanswered(runs)}."


def _judge(kinds: set[Kind], accepts: bool, by_lookup: bool) -> tuple[str, str]:
    """Return the finding and what to do next.

    `kinds` are the kinds of all rates. If nothing is accepted, a speed-up above 1 is noise.
    """
    lookup = ", by prompt lookup, not by a head" if by_lookup else ""
    if "faster" in kinds and accepts:
        if "slower" in kinds:
            then = "find a tree for each number of requests that decode together with `eval tune`"
            return f"Faster at some rates{lookup}, and slower at others", then
        then = "no head is needed: serve with --no-drafter --lookup-tokens N" if by_lookup else ""
        return f"Faster{lookup}", then or "serve with the drafter"
    if "slower" in kinds:
        then = "serve with --no-drafter, or let `eval tune` look for smaller trees"
        return "Slower than no drafting", then
    then = "more `seconds` and `max_requests` tell more"
    if not accepts:
        then = "nothing that was drafted was accepted, so serve with --no-drafter"
    return "No clear difference from no drafting", then


def _interval(
    own: Float[np.ndarray, " answers"], baseline: Float[np.ndarray, " others"]
) -> tuple[float, float]:
    random = np.random.default_rng(0)

    def medians(values: Float[np.ndarray, " n"]) -> Float[np.ndarray, " resamples"]:
        drawn = random.integers(0, len(values), (_RESAMPLES, len(values)))
        return np.median(values[drawn], axis=1)

    ends = np.quantile(medians(baseline) / medians(own), [(1 - _LEVEL) / 2, (1 + _LEVEL) / 2])
    return float(ends[0]), float(ends[1])


def _unanswered(runs: Sequence[Mapping[str, Any]]) -> str:
    """A clause about requests without a complete answer, which no figure includes; may be empty."""
    lost = {run["rate"]: 0 for run in runs}
    for run in runs:
        lost[run["rate"]] += sum(run["errors"].values())
    rates = sorted(rate for rate, count in lost.items() if count)
    if not rates:
        return ""
    total = sum(run["sent"] for run in runs)
    return (
        f"; {sum(lost.values())} of {total} requests, from {rates[0]:g} requests/s on, had no "
        "whole answer and are not included in any figure"
    )
