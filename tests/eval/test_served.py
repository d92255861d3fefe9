"""The verdict of `eval serve-load`, on answers of known times."""

from typing import Any

import numpy as np
import pytest

from eval import served
from eval.served import compare_rates, verdict

LOOKED_UP, DRAFTED = {"lookup": 6, "recurrent": 2}, {"lookup": 2, "recurrent": 6}


def answers(seconds: float, count: int = 40, **fields: Any) -> list[dict[str, Any]]:
    """Answers of ten tokens, most of which take about so many seconds each."""
    spread = np.random.default_rng(3).uniform(0.9, 1.1, count)
    usual = {"tokens": 10, "error": None, "accepted_by": {}, "repeating": False, "short": False}
    return [{"latency": 10 * seconds * one, **usual, **fields} for one in spread]


def runs(
    speedups: dict[float, float], accepted: dict[str, int], **fields: Any
) -> list[dict[str, Any]]:
    """Both methods at every rate, the second of which has this speed-up."""
    return [
        {"rate": rate, "method": method, "sent": len(found), "errors": {}, "answers": found}
        for rate, speedup in speedups.items()
        for method, found in (
            ("speculative", answers(0.1 / speedup, accepted_by=accepted, **fields)),
            ("baseline", answers(0.1, **fields)),
        )
    ]


@pytest.mark.parametrize(
    ("speedups", "accepted", "first", "last"),
    [
        ({1: 1.5, 4: 1.3}, DRAFTED, "Faster: ", "25% of the accepted tokens looked up; serve with"),
        ({1: 1.5, 4: 1.0}, {"eagle": 8}, "Faster: ", "); serve with the drafter."),
        (
            {1: 1.5},
            LOOKED_UP,
            "Faster, by prompt lookup, not by a head: ",
            "75% of the accepted tokens looked up; no head is needed: serve with --no-drafter",
        ),
        ({1: 0.7, 4: 1.0}, DRAFTED, "Slower than no drafting: ", "serve with --no-drafter, or let"),
        ({1: 1.5, 4: 0.7}, DRAFTED, "Faster at some rates, and slower at others: ", "`eval tune`"),
        ({1: 1.0}, DRAFTED, "No clear difference from no drafting: ", "`max_requests` tell more."),
        # A head of random weights: what seems faster is noise.
        ({1: 1.5}, {}, "No clear difference from no drafting: ", "nothing that was drafted was"),
        ({1: 0.7}, {}, "Slower than no drafting: ", "serve with --no-drafter, or let"),
    ],
)
def test_the_verdict_names_every_rate_and_whose_gain_it_is(
    speedups: dict[float, float], accepted: dict[str, int], first: str, last: str
) -> None:
    said = verdict(runs(speedups, accepted))
    assert said.startswith(first)
    assert last in said
    for rate, speedup in speedups.items():
        assert f"{speedup:.2f} times as fast at {rate} requests/s (" in said


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"count": 3}, "6 texts, but 8 are needed"),
        ({"count": 7}, "no rate has 8 whole answers with speculation and 8 without"),
        ({"repeating": True}, "80 of 80 texts repeat themselves, which any drafter guesses"),
        ({"short": True}, "80 of 80 answers end within a few tokens"),
    ],
)
def test_answers_that_tell_nothing_give_no_gain(fields: dict[str, Any], why: str) -> None:
    assert verdict(runs({1: 5.0}, {"recurrent": 8}, **fields)).startswith(
        f"Too little data to tell: {why}; use"
    )


def test_requests_without_a_whole_answer_are_told_and_count_in_no_speed() -> None:
    found = runs({1: 1.5, 4: 1.5}, DRAFTED)
    for answer in found[2]["answers"][:9]:
        answer |= {"error": "queue_full", "latency": 1e-9, "tokens": 0}
    found[2]["errors"] = {"queue_full": 9}
    said = verdict(found)
    assert said.endswith(
        "; 9 of 160 requests, from 4 requests/s on, had no whole answer and are not included in "
        "any figure."
    )
    assert [one.rate for one in compare_rates(found)] == [1, 4]


def test_the_interval_is_that_of_answers_drawn_again() -> None:
    from scipy.stats import bootstrap  # slow to import

    random = np.random.default_rng(7)
    own, baseline = random.lognormal(-0.3, 0.3, 30), random.lognormal(0.0, 0.3, 50)
    found = runs({2: 1.0}, DRAFTED)
    for run, seconds in zip(found, (own, baseline), strict=True):
        run["answers"] = [answers(0.1, 1)[0] | {"latency": 10 * one} for one in seconds]
    (rate,) = compare_rates(found)

    def ratio(theirs: np.ndarray, ours: np.ndarray, axis: int) -> np.ndarray:
        return np.median(theirs, axis=axis) / np.median(ours, axis=axis)

    assert rate.speedup == pytest.approx(ratio(baseline, own, 0))
    drawn = bootstrap(
        (baseline, own),
        ratio,
        confidence_level=0.99,
        method="percentile",
        rng=np.random.default_rng(1),
    )
    assert rate.interval == pytest.approx(tuple(drawn.confidence_interval), abs=0.04)


@pytest.mark.parametrize("count", [8, 40])
@pytest.mark.long
def test_of_200_loads_without_a_difference_ten_at_most_seem_to_have_one(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of four rates."""
    monkeypatch.setattr(served, "_RESAMPLES", 999)
    random = np.random.default_rng(53)
    told = []
    for _ in range(200):
        found = runs(dict.fromkeys((1, 2, 4, 8), 1.0), DRAFTED, count=count)
        for run in found:
            for answer in run["answers"]:
                answer["latency"] = random.lognormal(0.0, 0.3)
        told.append(verdict(found).partition(":")[0])
    assert sum(one != "No clear difference from no drafting" for one in told) <= 10
