"""Both sides over every prompt, in turns, and what the prompts say together."""

import statistics
import time
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.progress import track

from redrafter_jax.errors import InputError
from tools.apple.sides import MODES, Mode, Run, Side

NAMES = ("ours", "apple")

# Both runtimes' thread pools spin for some milliseconds after their last task; let that pass, or
# the side that has just finished takes cycles from the side being timed.
SETTLE_SECONDS = 0.05


def same_prefix(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """How many leading tokens two texts share."""
    pairs = zip(ours, theirs, strict=False)
    differences = (i for i, (a, b) in enumerate(pairs) if a != b)
    return next(differences, min(len(ours), len(theirs)))


def compare_prompts(
    prompts: list[list[int]], ours: Side, apple: Side, repeats: int
) -> list[dict[str, Any]]:
    """Every prompt with both ways of decoding, one row of results each."""
    console = Console(stderr=True)
    rows = []
    for prompt in track(prompts, "comparing", console=console, disable=not console.is_terminal):
        results = {mode: compare_mode(mode, prompt, ours, apple, repeats) for mode in MODES}
        rows.append({"prompt_tokens": len(prompt), **results})
    return rows


def compare_mode(
    mode: Mode, prompt: list[int], ours: Side, apple: Side, repeats: int
) -> dict[str, Any]:
    """Warm both sides up on this very prompt, then time them in turns."""
    sides = {"ours": ours, "apple": apple}
    first = {name: side(mode, prompt) for name, side in sides.items()}
    runs: dict[str, list[Run]] = {name: [] for name in sides}
    for repeat in range(repeats):
        # whoever goes first changes each time: neither always follows the other's heat
        for name in sorted(sides, reverse=repeat % 2 == 0):
            time.sleep(SETTLE_SECONDS)
            runs[name].append(sides[name](mode, prompt))
    for name, repeated in runs.items():
        if any(run.tokens != first[name].tokens for run in repeated):
            raise InputError(f"{name}: two {mode} runs of the same prompt differ.")
    pairs = zip(runs["ours"], runs["apple"], strict=True)
    shared = same_prefix(first["ours"].tokens, first["apple"].tokens)
    same = first["ours"].tokens == first["apple"].tokens
    return {
        "same_text": same,
        "first_difference": None if same else shared,
        "target_calls": {name: run.target_calls for name, run in first.items()},
        "tokens_per_second": {
            name: statistics.median(run.tokens_per_second for run in repeated)
            for name, repeated in runs.items()
        },
        "seconds": {name: [run.seconds for run in repeated] for name, repeated in runs.items()},
        "ratio": statistics.median(a.tokens_per_second / b.tokens_per_second for a, b in pairs),
        "tokens": {name: run.tokens for name, run in first.items()},
    }


def summarize(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """What the prompts say together, for each way of decoding."""
    return {mode: summarize_mode([row[mode] for row in rows]) for mode in MODES}


def summarize_mode(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Fractions and sums over prompts; medians of speeds and of their ratios."""
    calls = [result["target_calls"] for result in results]
    apart = [abs(c["ours"] - c["apple"]) for c in calls]
    speeds = [result["tokens_per_second"] for result in results]
    return {
        "same_text": fraction([result["same_text"] for result in results]),
        "target_calls": {name: sum(c[name] for c in calls) for name in NAMES},
        "same_target_calls": fraction([difference == 0 for difference in apart]),
        "target_calls_within_one": fraction([difference <= 1 for difference in apart]),
        "tokens_per_second": {name: statistics.median(s[name] for s in speeds) for name in NAMES},
        "median_ratio": statistics.median(result["ratio"] for result in results),
    }


def fraction(outcomes: list[bool]) -> float:
    """The share that is true."""
    return sum(outcomes) / len(outcomes)
