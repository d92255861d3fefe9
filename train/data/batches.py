"""Batches of rows: shuffled, mixed by weight, endless, with a position that can be restored."""

import math
from collections.abc import Sequence
from typing import Any, NotRequired, TypedDict

import grain
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, BFloat16, Bool, Int

from redrafter_jax.errors import InputError
from redrafter_jax.parallel.mesh import DATA

from .features import ReadRow
from .types import Windows

# Number of batches to prefetch; with features, a batch may take gigabytes.
_AHEAD = grain.ReadOptions(num_threads=4, prefetch_buffer_size=4)
# Number of rows of a repeated source, which is more than any run reads. Grain's own endless
# repetition has the largest possible length, which batches of one example would exceed.
_ENDLESS = 2**48


class Batch(TypedDict):
    """The rows that one step reads: the arrays of `Windows`, and the features if they are stored.

    Attributes:
      tokens: token ids.
      loss_mask: True for tokens whose prediction carries loss.
      segments: number of the token's document within its row, from 1; 0 at padding.
      hidden: the target's hidden states at the tokens; absent if the target runs in training.
      log_probs: log-probabilities of the target's k most likely next tokens; absent if `hidden` is.
      token_ids: ids of these k tokens; absent if `hidden` is.
    """

    tokens: Int[np.ndarray, "B T"]
    loss_mask: Bool[np.ndarray, "B T"]
    segments: Int[np.ndarray, "B T"]
    hidden: NotRequired[BFloat16[np.ndarray, "B T Z"]]
    log_probs: NotRequired[BFloat16[np.ndarray, "B T k"]]
    token_ids: NotRequired[Int[np.ndarray, "B T k"]]


def make_batches(
    sources: Sequence[tuple[Windows, float]],
    batch_size: int,
    seed: int,
    part: tuple[int, int] = (0, 1),
    features: Sequence[ReadRow | None] | None = None,
) -> grain.DatasetIterator[Batch]:
    """Make an endless, shuffled, deterministic iterator whose position can be saved and restored.

    Each source is shuffled and repeated separately. Its share of the rows is its weight divided by
    the sum of all weights.

    Args:
      sources: the rows and the weight of each source.
      batch_size: number of rows of a batch, over all processes.
      seed: seed of the shuffling.
      part: index of this process's part of every batch, and the number of parts.
      features: function that reads the features of a row, for each source; None for a source
        without features, or instead of the list.

    Raises:
      InputError: a source has too few rows; see `refuse_few_rows`.
    """
    refuse_few_rows(sources, batch_size)
    readers = features or [None] * len(sources)
    datasets = [
        _examples(windows, seed, read) for (windows, _), read in zip(sources, readers, strict=True)
    ]
    mixed = grain.MapDataset.mix(datasets, weights=[weight for _, weight in sources])
    index, parts = part
    return iter(mixed[index::parts].batch(batch_size // parts).to_iter_dataset(_AHEAD))


def refuse_few_rows(sources: Sequence[tuple[Windows, float]], batch_size: int) -> None:
    """Refuse a source with fewer rows than its share of a batch: a batch would repeat rows."""
    total = sum(weight for _, weight in sources)
    for index, (windows, weight) in enumerate(sources):
        (count, length), needed = windows.tokens.shape, math.ceil(batch_size * weight / total)
        if count < needed:
            raise InputError(
                f"data.sources.{index} gives {count} row{'s' * (count != 1)} of {length} tokens, "
                f"fewer than its share of {needed} rows in each step; lower "
                "data.sequence_length, optimizer.batch_size, "
                "optimizer.accumulation_steps or the source's weight."
            )


def place_batch(batch: Batch, accumulation: int, mesh: Mesh | None) -> dict[str, Array]:
    """Reshape a batch for `train_step`, and place it on the mesh.

    The arrays get the shape [A, B, T, ...]: A = `accumulation` batches of B rows of T tokens.
    """

    def place(rows: np.ndarray) -> Array:
        split = rows.reshape(accumulation, -1, *rows.shape[1:])
        if mesh is None:
            return jnp.asarray(split)
        parts = NamedSharding(mesh, PartitionSpec(None, DATA))
        return jax.make_array_from_process_local_data(parts, split)

    return {name: place(np.asarray(rows)) for name, rows in batch.items()}


def _examples(windows: Windows, seed: int, read: ReadRow | None) -> grain.MapDataset[Batch]:
    count = len(windows.tokens)

    def example(i: int) -> Batch:
        rows: Any = {name: values[i] for name, values in windows._asdict().items()}
        return rows if read is None else rows | read(i)

    return grain.MapDataset.range(count).seed(seed).shuffle().repeat(_ENDLESS // count).map(example)
