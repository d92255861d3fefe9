"""Rows to batches: shuffled, mixed by weight, endless, with a position to save and to return to."""

import math
from collections.abc import Sequence
from typing import TypedDict

import grain
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Int

from redrafter_jax.errors import InputError
from redrafter_jax.parallel.mesh import DATA

from .types import Windows

# Examples of a source before it ends. More than any run takes; grain's own endless repetition is as
# long as a length can be, and batches of one example would be longer.
_ENDLESS = 2**48


class Batch(TypedDict):
    """What one step reads; see `Windows`."""

    tokens: Int[np.ndarray, "B T"]
    loss_mask: Bool[np.ndarray, "B T"]
    segments: Int[np.ndarray, "B T"]


def make_batches(
    sources: Sequence[tuple[Windows, float]],
    batch_size: int,
    seed: int,
    part: tuple[int, int] = (0, 1),
) -> grain.DatasetIterator[Batch]:
    """An endless, shuffled, deterministic iterator whose position can be saved and restored.

    Args:
      sources: examples of every source and its weight in the mixture, relative to the others;
        each is shuffled and repeated by itself.
      batch_size: examples per batch.
      seed: of the shuffling.
      part: which of how many equal parts of every batch this process brings.

    Raises:
      InputError: a source has fewer windows than its part of a batch, which would hold some twice.
    """
    total = sum(weight for _, weight in sources)
    for index, (windows, weight) in enumerate(sources):
        count, needed = len(windows.tokens), math.ceil(batch_size * weight / total)
        if count < needed:
            raise InputError(
                f"data.sources.{index} gives {count} windows, fewer than the {needed} of a batch "
                "that are to come from it; lower optimizer.batch_size, data.sequence_length or the "
                "source's weight."
            )
    datasets = [_examples(windows, seed) for windows, _ in sources]
    mixed = grain.MapDataset.mix(datasets, weights=[weight for _, weight in sources])
    index, parts = part
    return iter(mixed[index::parts].batch(batch_size // parts).to_iter_dataset())


def place_batch(batch: Batch, accumulation: int, mesh: Mesh | None) -> dict[str, Array]:
    """A batch as `train_step` takes it: [A, B, T], on a mesh in the parts of all processes."""

    def place(rows: np.ndarray) -> Array:
        split = rows.reshape(accumulation, -1, rows.shape[-1])
        if mesh is None:
            return jnp.asarray(split)
        parts = NamedSharding(mesh, PartitionSpec(None, DATA))
        return jax.make_array_from_process_local_data(parts, split)

    return {name: place(rows) for name, rows in batch.items() if isinstance(rows, np.ndarray)}


def _examples(windows: Windows, seed: int) -> grain.MapDataset[Batch]:
    count = len(windows.tokens)
    return (
        grain.MapDataset.range(count)
        .seed(seed)
        .shuffle()
        .repeat(_ENDLESS // count)
        .map(lambda i: Batch(**{name: rows[i] for name, rows in windows._asdict().items()}))
    )
