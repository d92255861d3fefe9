"""Intervals beside a bootstrap of our own hand, CSV and LaTeX as their readers read them."""

import csv
import io
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eval.paper import add_intervals, as_csv, as_latex, escape_latex, markdown, training_seeds


def case_of(speedups: list[float], batches: list[int] | None = None) -> dict[str, Any]:
    """A sampling with a head of these speed-ups; prompt i gains 2 + i % 3 tokens in four calls."""

    def measures(speedup: float, row: int) -> dict[str, Any]:
        counts = [0, 0, 0, 0, 0]
        counts[1 + row % 3] = 4
        return {"speedup": speedup, "accept_counts": counts}

    rows = [
        {
            "category": "odd" if row % 2 else "even",
            "batch": batches[row] if batches else row,
            "methods": {"baseline": measures(1.0, -1), "head_50%": measures(speedup, row)},
        }
        for row, speedup in enumerate(speedups)
    ]
    whole = {
        "tokens_per_second": 40.0,
        "speedup": float(np.median(speedups)),
        "decode_only": {"speedup": 1.25},
        "acceptance_length": 3.0,
        "target_calls": 4 * len(rows),
        "identical": 1.0,
    }
    odd = {"prompts": len(rows) // 2, "methods": {"head_50%": dict(whole)}}
    return {
        "described": "T 0.7, top_k 5",
        "prompts": rows,
        "methods": {"baseline": {**whole, "speedup": 1.0}, "head_50%": whole},
        "categories": {"odd": odd},
    }


def report_of(case: dict[str, Any]) -> dict[str, Any]:
    drafting = {"drafter": "runs/a/drafter", "tree": {"beam_width": 2, "draft_rounds": 3}}
    return {
        "samplings": [case],
        "training_seeds": {"head_50%": 7},
        "versions": {"python": "3.12.1", "jax": "0.11.2", "flax": None},
        "device": "a CPU",
        "timestamp": "2026-11-27T01:02:03+00:00",
        "config": {
            "target": "models/t",
            "dtype": "float32",
            "batch_size": 1,
            "max_new_tokens": 32,
            "repeats": 1,
            "drafters": {"head_50%": drafting},
        },
    }


def bootstrap(values: np.ndarray, statistic: Any) -> tuple[float, float]:
    """The percentiles of a statistic of rows drawn again, 20,000 times."""
    random = np.random.default_rng(5)
    drawn = [statistic(values[random.integers(0, len(values), len(values))]) for _ in range(20_000)]
    return float(np.quantile(drawn, 0.025)), float(np.quantile(drawn, 0.975))


def test_intervals_are_those_of_prompts_drawn_again() -> None:
    speedups = np.random.default_rng(1).lognormal(0.2, 0.2, 24)
    case = case_of(speedups.tolist())
    add_intervals(case)
    own = case["methods"]["head_50%"]
    assert own["speedup_interval"] == pytest.approx(bootstrap(speedups, np.median), abs=0.02)
    gains = np.asarray([[4 * (2 + row % 3), 4] for row in range(24)])
    expected = bootstrap(gains, lambda drawn: drawn[:, 0].sum() / drawn[:, 1].sum())
    assert own["acceptance_interval"] == pytest.approx(expected, abs=0.02)
    assert case["methods"]["baseline"]["speedup_interval"] == [1.0, 1.0]
    odd = case["categories"]["odd"]["methods"]["head_50%"]["speedup_interval"]
    assert odd == pytest.approx(bootstrap(speedups[1::2], np.median), abs=0.03)


def test_prompts_that_were_decoded_together_are_drawn_together() -> None:
    speedups = np.asarray([1.0, 1.1, 1.3, 1.6])
    case = case_of(np.repeat(speedups, 4).tolist(), np.repeat(range(4), 4).tolist())
    add_intervals(case)
    own = case["methods"]["head_50%"]["speedup_interval"]
    # Sixteen prompts by themselves would seem to tell twice as much.
    assert own == pytest.approx(bootstrap(speedups, np.median), abs=0.02)
    one = case_of([1.2, 1.3], [0, 0])
    add_intervals(one)
    assert one["methods"]["head_50%"]["speedup_interval"] is None


def test_csv_and_latex_say_what_the_page_says() -> None:
    case = case_of([1.1, 1.2, 1.3, 1.4])
    add_intervals(case)
    report = report_of(case)
    low, high = case["methods"]["head_50%"]["speedup_interval"]
    rows = list(csv.DictReader(io.StringIO(as_csv(report))))
    assert [(row["category"], row["method"]) for row in rows] == [
        ("", "baseline"),
        ("", "head_50%"),
        ("odd", "head_50%"),
    ]
    head = rows[1]
    assert (head["sampling"], head["prompts"]) == ("T 0.7, top_k 5", "4")
    assert (float(head["speedup_low"]), float(head["speedup_high"])) == (low, high)
    assert float(head["milliseconds_per_token"]) == 25.0

    latex = as_latex(report)
    columns = re.search(r"\\begin\{tabular\}\{(\w+)\}", latex)
    assert columns
    body = [line for line in latex.splitlines() if line.endswith(r"\\") and "multi" not in line]
    assert [line.count(" & ") for line in body] == [len(columns[1]) - 1] * 3
    assert rf"head\_50\% & 40.0 & 25.00 & 1.25 [{low:.2f}, {high:.2f}] & 1.25 & 3.00 [" in latex
    assert r"\multicolumn{6}{l}{T 0.7, top\_k 5} \\" in latex
    # Braces match, and what is opened is closed.
    plain = re.sub(r"\\[\\{}]", "", latex)
    assert plain.count("{") == plain.count("}")
    assert (latex.count(r"\begin{"), latex.count(r"\end{")) == (1, 1)

    page = markdown(report)
    assert f"| head_50% | 40.0 | 25.00 | 1.25 [{low:.2f}, {high:.2f}] | 1.25 | 3.00 [" in page
    assert "| head_50% | runs/a/drafter | 7 | W=2 R=3 N=7 |" in page
    for words in ("prefill", "a CPU", "python 3.12.1, jax 0.11.2; 2026-11-27T01:02:03", "batch 1"):
        assert words in page


def test_characters_of_latex_are_written_out() -> None:
    assert escape_latex(r"a_b & 5% {#1} $x^2~\y") == (
        r"a\_b \& 5\% \{\#1\} \$x\textasciicircum{}2\textasciitilde{}\textbackslash{}y"
    )


def test_the_seed_of_a_head_is_that_of_the_run_beside_it(tmp_path: Path) -> None:
    for name, text in (("one", "seed: 3"), ("two", "steps: 1"), ("three", "[1]")):
        (tmp_path / name / "drafter").mkdir(parents=True)
        (tmp_path / name / "config.yaml").write_text(text)
    (tmp_path / "four").mkdir()
    drafters = {name: str(tmp_path / name / "drafter") for name in ("one", "two", "three", "four")}
    assert training_seeds(drafters | {"lookup": None}) == {"one": 3}
