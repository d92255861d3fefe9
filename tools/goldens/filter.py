"""Make `filters.npz`: which tokens Hugging Face's logits processors keep, setting by setting.

This needs PyTorch and transformers, which the project itself does not need; tests/goldens/README.md
names the versions and describes the arrays. The command, from the root of the repository:

    torchenv/bin/python tools/goldens/filter.py
"""

# pyright: reportMissingImports=false

import itertools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import transformers
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

FOLDER = Path(__file__).resolve().parents[2] / "tests" / "goldens"
SEED = 47
MAX_DRAWS = 10_000
# Rounding must not be able to flip a choice of a golden. So a row is drawn again until no sum of
# probabilities is this close to a top_p, and no score this close to a min-p threshold (relative to
# the largest score).
SMALLEST_MASS = 1e-5
SMALLEST_GAP = 2e-6

RowMaker = Callable[[np.random.Generator], np.ndarray]


class Setting(NamedTuple):
    """The filters of one request; `top_k` V or more, `top_p` 1 and `min_p` 0 keep all tokens."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float


def all_settings(V: int) -> list[Setting]:
    """Return all combinations of some values; a large vocabulary gets fewer values."""
    if V < 100:
        top_k = (1, 2, 3, 5, V // 2, V - 1, V, V + 1, 10 * V)
        top_p = (1e-46, 1e-3, 0.1, 0.3, 0.5, 0.8, 0.9, 0.95, 0.99, 1.0)
        min_p = (0.0, 1e-4, 0.05, 0.1, 0.3, 0.9, 1.0)
    else:
        top_k = (1, 4, 50, V - 1, 10 * V)
        top_p = (1e-3, 0.3, 0.8, 0.95, 1.0)
        min_p = (0.0, 0.02, 0.3, 1.0)
    grid = itertools.product((0.3, 0.7, 1.0, 1.3), top_k, top_p, min_p)
    return [Setting(*values) for values in grid]


def spread(V: int, deviation: float) -> RowMaker:
    """Make scores without ties: flat for a small deviation, peaked for a large one."""
    return lambda random: deviation * random.normal(size=V)


def steps(V: int, deviation: float, size: float) -> RowMaker:
    """Make scores that are rounded to multiples of `size`, so that many tie."""
    return lambda random: size * np.round(deviation * random.normal(size=V) / size)


def groups(*sizes_and_scores: tuple[int, float]) -> RowMaker:
    """Make scores in random order, from pairs of a number of tokens and their score."""
    scores = [score for size, score in sizes_and_scores for _ in range(size)]
    return lambda random: random.permutation(scores)


def tied_rows(V: int) -> list[RowMaker]:
    """Make rows with ties: at the top, at the bottom, everywhere, and at random tokens."""
    return [
        groups((V, 1.5)),
        groups((1, 3.0), (V - 1, 1.0)),
        groups((4, 2.0), (V - 4, 0.0)),
        groups((2, 30.0), (V - 2, -5.0)),
        groups((1, 4.0), (2, 3.0), (4, 2.0), (V - 7, -1.0)),
        steps(V, 1.0, 1.0),
        steps(V, 2.0, 1.0),
        steps(V, 3.0, 0.5),
    ]


def is_clear(scaled: np.ndarray, setting: Setting) -> bool:
    """Return whether the tokens that top-p and min-p keep are independent of rounding."""
    ordered = -np.sort(-scaled.astype(np.float64))
    # The first index of each score, without the highest score, which is always kept.
    firsts = np.flatnonzero(np.diff(ordered)) + 1
    if setting.top_p < 1:
        weights = np.exp(ordered - ordered[0])
        weights[ordered < ordered[min(setting.top_k, len(ordered)) - 1]] = 0
        greater = (np.cumsum(weights) - weights)[firsts] / weights.sum()
        if (np.abs(greater - setting.top_p) < SMALLEST_MASS).any():
            return False
    if setting.min_p > 0:
        gaps = np.abs(ordered[firsts] - (ordered[0] + np.log(setting.min_p)))
        return not (gaps < SMALLEST_GAP * max(1.0, np.abs(ordered).max())).any()
    return True


def draw(
    make: RowMaker, random: np.random.Generator, settings: Iterable[Setting], distinct: bool
) -> np.ndarray:
    """Draw rows until one is clear under all settings, and return it as float32."""
    for _ in range(MAX_DRAWS):
        row = make(random).astype(np.float32)
        scaled = {s.temperature: row / np.float32(s.temperature) for s in settings}
        if distinct and any(len(np.unique(scores)) < len(row) for scores in scaled.values()):
            continue
        if all(is_clear(scaled[s.temperature], s) for s in settings):
            return row
    raise RuntimeError(f"no row is clear in {MAX_DRAWS} draws; give fewer settings")


def kept_tokens(logits: np.ndarray, setting: Setting) -> np.ndarray:
    """Return the mask of kept scores, from the processors of `generate` in its order."""
    processors = LogitsProcessorList([TemperatureLogitsWarper(setting.temperature)])
    processors.append(TopKLogitsWarper(setting.top_k))
    if setting.top_p < 1:  # at 1 `generate` leaves top-p out
        processors.append(TopPLogitsWarper(setting.top_p))
    processors.append(MinPLogitsWarper(setting.min_p))
    no_text = torch.zeros((len(logits), 0), dtype=torch.long)
    scores = processors(no_text, torch.from_numpy(logits)).numpy()
    kept = np.isfinite(scores)
    assert scores.dtype == np.float32
    assert kept.any(axis=-1).all()
    # why no score needs storing: those kept are the float32 quotients, bit for bit
    quotients = logits / np.float32(setting.temperature)
    assert np.array_equal(scores, np.where(kept, quotients, -np.inf))
    return kept


def main() -> None:
    """Draw the rows, filter them with the processors, and write `filters.npz`."""
    random = np.random.default_rng(SEED)
    arrays: dict[str, np.ndarray] = {}
    for V in (13, 130, 1000):
        settings = all_settings(V)
        distinct = [spread(V, deviation) for deviation in (0.02, 1.0, 3.0, 3.0, 10.0, 40.0)]
        arrays[f"settings_{V}"] = np.asarray(settings, np.float64)
        for kind, makers in (("distinct", distinct), ("tied", tied_rows(V))):
            rows = [draw(make, random, settings, kind == "distinct") for make in makers]
            logits = np.stack(rows)
            kept = np.stack([kept_tokens(logits, setting) for setting in settings])
            arrays[f"{kind}_{V}_logits"] = logits
            arrays[f"{kind}_{V}_kept"] = np.packbits(kept, axis=-1)
    np.savez_compressed(FOLDER / "filters.npz", allow_pickle=False, **arrays)
    print(f"torch {torch.__version__}, transformers {transformers.__version__}")


main()
