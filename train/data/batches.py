"""Rows to batches: shuffled, mixed by weight, endless, with a position to save and to return to."""

import math
from collections.abc import Sequence
from typing import TypedDict

import grain
import numpy as np
from jaxtyping import Bool, Int

from redrafter_jax.errors import InputError
from train.data.types import Windows


class Batch(TypedDict):
    """What one step reads; see `Windows`."""

    tokens: Int[np.ndarray, "B T"]
    loss_mask: Bool[np.ndarray, "B T"]
    segments: Int[np.ndarray, "B T"]


def make_batches(
    sources: Sequence[tuple[Windows, float]], batch_size: int, seed: int
) -> grain.DatasetIterator[Batch]:
    """An endless, shuffled, deterministic iterator whose position can be saved and restored.

    Args:
      sources: examples of every source and its weight in the mixture, relative to the others;
        each is shuffled and repeated by itself.
      batch_size: examples per batch.
      seed: of the shuffling.

    Raises:
      InputError: a source has fewer windows than its part of a batch, which would hold some twice.
    """
    total = sum(weight for _, weight in sources)
    for index, (windows, weight) in enumerate(sources):
        count, part = len(windows.tokens), math.ceil(batch_size * weight / total)
        if count < part:
            raise InputError(
                f"data.sources.{index} gives {count} windows, fewer than the {part} of a batch "
                "that are to come from it; lower optimizer.batch_size, data.sequence_length or the "
                "source's weight."
            )
    datasets = [_examples(windows, seed) for windows, _ in sources]
    mixed = grain.MapDataset.mix(datasets, weights=[weight for _, weight in sources])
    return iter(mixed.batch(batch_size).to_iter_dataset())


def _examples(windows: Windows, seed: int) -> grain.MapDataset[Batch]:
    return (
        grain.MapDataset.range(len(windows.tokens))
        .seed(seed)
        .shuffle()
        .repeat()
        .map(lambda i: Batch(**{name: rows[i] for name, rows in windows._asdict().items()}))
    )
