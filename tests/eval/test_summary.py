"""What `eval compare` says of runs: medians of pairs, counts, how far prompts may differ."""

from typing import Any

import numpy as np
import pytest

from eval.benchmark import Run, TimedTurn
from eval.summary import Way, judge_case, lookup_lines, summarize
from redrafter_jax import TreeConfig
from redrafter_jax.text.prompts import EncodedPrompts, Prompt


def run_of(seconds: float, *texts: list[int], accepted: list[int] | None = None) -> Run:
    """Texts without a stop token; a text of n tokens took n - 1 less what was accepted calls."""
    accepted = accepted or [0] * len(texts)
    steps = [len(text) - 1 - more for text, more in zip(texts, accepted, strict=True)]
    counts = [[calls - more, more] for calls, more in zip(steps, accepted, strict=True)]
    by = {"recurrent": accepted, "lookup": [0] * len(texts)}
    return Run(list(texts), steps, np.asarray(counts), by, 0.0, seconds)


def test_measures_are_medians_of_pairs_and_counts_over_any_prompts() -> None:
    a, b, c = [1] * 9, [2] * 5, [3] * 3
    prompts = [
        Prompt(name, ("x",), kind, "", index)
        for index, (name, kind) in enumerate((("a", "p"), ("b", "q"), ("c", "p")))
    ]
    asked = EncodedPrompts(prompts, [1, 1, 1], [[0], [0, 0], [0]], "none", ())
    # Two batches, the last one smaller; in the second repeat a text of the second differs.
    speculative = [
        run_of(2.0, a, b, accepted=[4, 1]),
        run_of(1.0, c, accepted=[1]),
        run_of(3.5, a, b, accepted=[4, 1]),
        run_of(1.0, [3, 3, 4], accepted=[1]),
    ]
    baseline = [run_of(7.0, a, b), run_of(1.5, c), run_of(7.0, a, b), run_of(3.0, c)]
    turns = [
        TimedTurn(index % 2, index // 2, {"speculative": ours, "baseline": theirs})
        for index, (ours, theirs) in enumerate(zip(speculative, baseline, strict=True))
    ]
    report = summarize(asked, 2, turns)

    ours = report["methods"]["speculative"]
    # Ratios 3.5, 1.5, 2 and 3; rates 7, 3, 4 and 3 tokens/s.
    assert (ours["speedup"], ours["speedup_quartiles"]) == (2.5, [1.875, 3.125])
    assert ours["tokens_per_second"] == 3.5
    assert ours["identical"] == pytest.approx(5 / 6)
    assert (ours["new_tokens"], ours["target_calls"]) == (17, 4 + 3 + 1)
    assert ours["acceptance_length"] == pytest.approx(14 / 8)
    assert (ours["acceptance_rate_per_depth"], ours["calls_per_depth"]) == ([6 / 8], [8, 6])
    assert ours["accept_counts"] == [2, 6]
    assert ours["accepted_by"] == {"recurrent": 6, "lookup": 0}
    # Of the longest text of each batch: 4, 1, 4 and 1 calls in 2, 1, 3.5 and 1 seconds.
    assert ours["decode_only"]["milliseconds_per_target_call"] == pytest.approx(937.5)
    assert report["methods"]["baseline"]["speedup"] == 1.0
    assert report["answers"]["answer_tokens"] == [4.0, 5.0, 7.0]

    # The shorter text of a batch waits for the longer one's calls.
    of_q = report["categories"]["q"]["methods"]["speculative"]["decode_only"]
    assert of_q["milliseconds_per_target_call"] == pytest.approx((500 + 875) / 2)

    second = report["prompts"][1]
    assert (second["id"], second["batch"], second["prompt_tokens"]) == ("b", 0, 2)
    assert second["methods"]["speculative"]["accept_counts"] == [2, 1]
    assert second["methods"]["speculative"]["speedup"] == 2.75
    category = report["categories"]["p"]
    assert category["prompts"] == 2
    assert category["methods"]["speculative"]["accept_counts"] == [0, 5]
    assert report["categories"]["q"]["methods"]["speculative"]["identical"] == 1.0
    assert len(report["runs"]) == 8


def pairs(speedups: list[float], batch_size: int = 1) -> dict[str, Any]:
    """A summary of batches with these speed-ups; prompt i gains 1 + i % 2 tokens in its calls."""
    rows = len(speedups) * batch_size
    prompts = [
        Prompt(str(row), ("x",), "odd" if row % 2 else "even", "", row) for row in range(rows)
    ]
    asked = EncodedPrompts(prompts, [1] * rows, [[0]] * rows, "none", ())
    turns = []
    for batch, speedup in enumerate(speedups):
        texts = [[1] * 9] * batch_size
        gained = [4 * ((batch * batch_size + row) % 2) for row in range(batch_size)]
        runs = {"head": run_of(1.0, *texts, accepted=gained), "baseline": run_of(speedup, *texts)}
        turns.append(TimedTurn(batch, 0, runs))
    return summarize(asked, batch_size, turns)


def bootstrap(values: np.ndarray, statistic: Any) -> tuple[float, float]:
    """The percentiles of a statistic of rows drawn again, 20,000 times."""
    random = np.random.default_rng(5)
    drawn = [statistic(values[random.integers(0, len(values), len(values))]) for _ in range(20_000)]
    return float(np.quantile(drawn, 0.025)), float(np.quantile(drawn, 0.975))


def scipy_bootstrap(gains: np.ndarray) -> tuple[float, float]:
    """The percentiles of tokens per call of prompts drawn again, as scipy draws them."""
    from scipy.stats import bootstrap  # slow to import

    def ratio(tokens: np.ndarray, calls: np.ndarray) -> float:
        return tokens.sum() / calls.sum()

    drawn = bootstrap(
        (gains[:, 0], gains[:, 1]),
        ratio,
        paired=True,
        vectorized=False,
        method="percentile",
        n_resamples=5000,
        rng=np.random.default_rng(11),
    )
    low, high = drawn.confidence_interval
    return float(low), float(high)


def test_intervals_are_those_of_prompts_drawn_again() -> None:
    speedups = np.random.default_rng(1).lognormal(0.2, 0.2, 24)
    case = pairs(speedups.tolist())
    own = case["methods"]["head"]
    assert own["speedup_interval"] == pytest.approx(bootstrap(speedups, np.median), abs=0.02)
    gains = np.asarray([[8, 4 if row % 2 else 8] for row in range(24)])
    expected = bootstrap(gains, lambda drawn: drawn[:, 0].sum() / drawn[:, 1].sum())
    assert own["acceptance_interval"] == pytest.approx(expected, abs=0.02)
    assert own["acceptance_interval"] == pytest.approx(scipy_bootstrap(gains), abs=0.02)
    assert case["methods"]["baseline"]["speedup_interval"] == [1.0, 1.0]
    odd = case["categories"]["odd"]["methods"]["head"]["speedup_interval"]
    assert odd == pytest.approx(bootstrap(speedups[1::2], np.median), abs=0.03)


def test_prompts_that_were_decoded_together_are_drawn_together() -> None:
    speedups = np.asarray([1.0, 1.1, 1.3, 1.6])
    own = pairs(speedups.tolist(), batch_size=4)["methods"]["head"]["speedup_interval"]
    # Sixteen prompts by themselves would seem to tell twice as much.
    assert own == pytest.approx(bootstrap(speedups, np.median), abs=0.02)
    assert pairs([1.25], batch_size=2)["methods"]["head"]["speedup_interval"] is None


@pytest.mark.parametrize(("batches", "kind"), [(7, "too little data"), (8, "faster")])
def test_one_batch_of_many_texts_tells_no_speed(batches: int, kind: str) -> None:
    found = judge_case(
        pairs([1.25] * batches, batch_size=8), {"head": Way("a", TreeConfig())}, True
    )
    assert found["kind"] == kind


def test_what_was_not_timed_has_counts_and_no_speed() -> None:
    prompts = [Prompt("a", ("x",), None, "", 0)]
    asked = EncodedPrompts(prompts, [1], [[0]], "none", ())
    runs = {"head": run_of(1.0, [1] * 9, accepted=[4]), "baseline": run_of(2.0, [1] * 9)}
    case = summarize(asked, 1, [TimedTurn(0, 0, runs).untimed()])
    ours = case["methods"]["head"]
    assert (ours["target_calls"], ours["acceptance_length"], ours["identical"]) == (4, 2.0, 1.0)
    for speeds in (ours, ours["decode_only"]):
        assert {value for name, value in speeds.items() if "speed" in name} == {None}
    ways = {"baseline": Way(None, None), "none": Way("a", None), "head": Way("a", TreeConfig())}
    case["methods"]["none"] = case["methods"]["head"] | {"acceptance_length": 9.0}
    found = judge_case(case, ways, timed=False)
    assert found["sentence"].startswith("Most accepted: 'head' gains 2.00")


def test_a_table_without_a_tree_is_told_and_lookup_is_not_the_heads_gain() -> None:
    case = pairs([1.25] * 8)
    for timed in (True, False):
        sentence = judge_case(case, {"head": Way("a", None)}, timed)["sentence"]
        assert sentence.startswith("By the drafter's table")
        assert sentence.endswith("or state a tree as drafters.NAME.tree.")
    assert judge_case(case, {"head": Way("a", TreeConfig())}, True)["kind"] == "faster"
    case["ways"] = {"baseline": {"drafter": None}, "head": {"drafter": "a"}}
    assert list(lookup_lines(case)) == []
    case["methods"]["head"]["accepted_by"] = {"recurrent": 4, "lookup": 12}
    (warning,) = lookup_lines(case)
    assert "proposed 75% of the accepted tokens of 'head'" in warning
    assert "drafters.NAME.tree.lookup_tokens=0, and state a tree if it is auto" in warning
