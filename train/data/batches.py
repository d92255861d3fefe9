"""Rows to batches: shuffled, mixed by weight, endless, with a position to save and to return to."""

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


def make_batches(
    sources: Sequence[tuple[Windows, float]], batch_size: int, seed: int
) -> grain.DatasetIterator[Batch]:
    """An endless, shuffled, deterministic iterator whose position can be saved and restored.

    Args:
      sources: examples and the share of every source in the mixture; each is shuffled and
        repeated by itself.
      batch_size: examples per batch.
      seed: of the shuffling.

    Raises:
      InputError: a source has fewer windows than one batch holds.
    """
    for windows, _ in sources:
        if len(windows.tokens) < batch_size:
            raise InputError(
                f"The data gives {len(windows.tokens)} windows, fewer than a batch of "
                f"{batch_size}; lower optimizer.batch_size or data.sequence_length."
            )
    datasets = [_examples(windows, seed) for windows, _ in sources]
    mixed = grain.MapDataset.mix(datasets, weights=[share for _, share in sources])
    return iter(mixed.batch(batch_size).to_iter_dataset())


def _examples(windows: Windows, seed: int) -> grain.MapDataset[Batch]:
    return (
        grain.MapDataset.range(len(windows.tokens))
        .seed(seed)
        .shuffle()
        .repeat()
        .map(lambda i: Batch(tokens=windows.tokens[i], loss_mask=windows.loss_mask[i]))
    )
