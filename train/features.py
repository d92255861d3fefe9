"""`python -m train features --config FILE features=DIR`: store the target's outputs for training.

One forward pass over the data of a training run stores the target's hidden states and most likely
next tokens, the features. Training runs with the same `features` read these files and do not run
the target's layers.
"""

import shutil
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int
from pydantic import PositiveInt
from rich.console import Console
from rich.filesize import decimal
from safetensors import SafetensorError
from safetensors.numpy import save_file

from redrafter_jax.command_line import make_folder
from redrafter_jax.config import TargetConfig
from redrafter_jax.errors import InputError
from redrafter_jax.files.fields import write_atomically
from redrafter_jax.files.target_files import TargetFiles, open_target
from redrafter_jax.lock import hold
from redrafter_jax.models.target import Target
from redrafter_jax.parallel.mesh import check_rows, to_host
from redrafter_jax.parallel.processes import (
    broadcast_from_first,
    is_first,
    rows_of_process,
    wait_for_all,
)
from redrafter_jax.progress import progress
from redrafter_jax.settings.arguments import parse_settings

from .config import TrainSettings, WorkerSettings
from .data.batches import Batch, place_batch
from .data.features import FeatureIndex, read_index, shard_path
from .data.report import print_line, print_report
from .data.types import Windows
from .gradients import layers_read, run_target
from .loss import TopTokens
from .setup import digest_rows, load_sources
from .workers import absolute, open_workers, prepare

# Largest shard in bytes, unless one pass takes more; a killed run loses at most one shard.
_SHARD_BYTES = 64 << 20
# Passes whose features a worker holds before it waits for the others.
_PASSES_AHEAD = 2


class FeaturesSettings(TrainSettings, WorkerSettings):
    """The settings of `python -m train features`: those of a training run and of its workers.

    The target reads `optimizer.batch_size` rows at a time.

    Attributes:
      features: output folder.
      top_k: number of most likely next tokens that are stored for each position.
    """

    top_k: PositiveInt = 64


def features(arguments: Sequence[str]) -> None:
    """Write the features of a training run's data; shards that already exist are kept.

    With `workers`, this restricts JAX in this process to the CPU; see `prepare`.

    Raises:
      InputError: the settings, the target or the data cannot be used, the folder holds features of
        other data or settings, or the disk has no room for the features.
    """
    settings = parse_settings(
        FeaturesSettings,
        "Store the target's hidden states and most likely tokens for the data of a training run.",
        arguments,
        command="features",
        processes=True,
    )
    folder = settings.features
    if folder is None:
        raise InputError("features is missing; set the output folder with features=DIR.")
    prepare(settings)
    if settings.workers is None:
        _build_mesh(settings)
    files = open_target(settings.target)
    config = files.config
    settings.drafter.build_for(config, settings.draft_rounds)
    if settings.top_k > config.vocab_size:
        raise InputError(
            f"top_k is {settings.top_k}, but the target has {config.vocab_size} tokens; lower "
            "top_k."
        )
    make_folder(folder, "features")
    with hold(folder, "features"):
        _write_features(settings, folder, files)


def _build_mesh(settings: FeaturesSettings) -> Mesh | None:
    mesh = settings.mesh.build()
    check_rows(settings.optimizer.batch_size, mesh, "optimizer.batch_size")
    return mesh


def _load_target(settings: FeaturesSettings, path: Path) -> Target:
    return open_target(path).load(settings.target_dtype, _build_mesh(settings))


def _write_features(settings: FeaturesSettings, folder: Path, files: TargetFiles) -> None:
    console = Console(stderr=True, quiet=not is_first())
    config, sources = files.config, load_sources(settings, files)
    print_report(sources, console)
    windows = [rows.windows for _, rows in sources]
    index = make_index(settings, files, windows)
    write_index(folder, index)
    exists = [shard_path(folder, shard).exists() for shard in range(len(index.shards) - 1)]
    missing = np.flatnonzero(~broadcast_from_first(np.asarray(exists))).tolist()
    lengths = np.concatenate([(each.segments > 0).sum(axis=1) for each in windows])
    check_space(folder, index, config, lengths, missing, console)
    if missing:
        rows = Windows(*(np.concatenate(part) for part in zip(*windows, strict=True)))
        read = partial(
            features_of_passes, rows=rows, index=index, chunk_length=settings.loss.chunk_length
        )
        load = partial(_load_target, settings, absolute(settings.target))
        with open_workers(settings, settings.mesh, load, _PASSES_AHEAD) as workers:
            passes = [one for shard in missing for one in passes_of_shard(index, shard)]
            write_shards(folder, index, missing, workers.share(read, passes), rows)
    wait_for_all("features")
    print_line(console, f"features of {lengths.sum():,} tokens in {folder}")


def make_index(
    settings: FeaturesSettings, files: TargetFiles, windows: Sequence[Windows]
) -> FeatureIndex:
    """Build the index of the features to write; `windows` are the rows of each source."""
    *starts, total = np.cumsum([0, *(len(each.tokens) for each in windows)]).tolist()
    rows_per_pass = settings.optimizer.batch_size
    drafter = settings.drafter.build_for(files.config, settings.draft_rounds)
    layers, raw = layers_read(drafter, files.config)
    row_bytes = settings.data.sequence_length * token_bytes(files.config, layers, settings.top_k)
    passes = max(1, _SHARD_BYTES // (row_bytes * rows_per_pass))
    return FeatureIndex(
        target=files.digest(),
        target_dtype=settings.target_dtype,
        context_layers=layers,
        raw_layers=raw,
        top_k=settings.top_k,
        rows_per_pass=rows_per_pass,
        sources=dict(zip(map(digest_rows, windows), starts, strict=True)),
        shards=[*range(0, total, passes * rows_per_pass), total],
    )


def token_bytes(config: TargetConfig, context_layers: Sequence[int], top_k: int) -> int:
    """Return the number of bytes that the features of one token take on disk."""
    hidden = (len(context_layers) + 1) * config.hidden_size * 2
    return hidden + top_k * (2 + _id_dtype(config.vocab_size).itemsize)


def write_index(folder: Path, index: FeatureIndex) -> None:
    """Write the index, or check that the folder already holds the same index.

    Raises:
      InputError: the folder holds features with another index.
    """
    existing = read_index(folder)
    if existing is None:
        if is_first():
            write_atomically(folder / "index.json", index.model_dump_json(indent=2) + "\n")
        return
    stated, found = index.model_dump(), existing.model_dump()
    if changed := [name for name in stated if stated[name] != found[name]]:
        raise InputError(
            f"{folder} holds features with other values of {', '.join(changed)}; set features to "
            "another folder, or delete this one."
        )


def check_space(
    folder: Path,
    index: FeatureIndex,
    config: TargetConfig,
    lengths: np.ndarray,
    missing: Sequence[int],
    console: Console,
) -> None:
    """Print the size of all shards and the free disk space.

    Args:
      folder: the output folder.
      index: the index of all shards.
      config: the target's configuration.
      lengths: number of tokens of each row, without padding.
      missing: numbers of the shards to write.
      console: where to print.

    Raises:
      InputError: the missing shards do not fit on the disk.
    """
    per_token = token_bytes(config, index.context_layers, index.top_k)
    sizes = [
        int(lengths[first:end].sum()) * per_token + (end - first + 1) * 8
        for first, end in pairwise(index.shards)
    ]
    needed, free = sum(sizes[shard] for shard in missing), shutil.disk_usage(folder).free
    print_line(
        console,
        f"the features of {lengths.sum():,} tokens take {decimal(sum(sizes))} in {folder}, of "
        f"which {decimal(needed)} are to be written; {decimal(free)} are free",
    )
    if needed > free:
        raise InputError(
            f"{folder} needs {decimal(needed)} more disk space, but {decimal(free)} are free; make "
            "room, set features to another folder, or lower top_k."
        )


def passes_of_shard(index: FeatureIndex, shard: int) -> list[tuple[int, int]]:
    """The rows of each of the target's passes over a shard, as (first row, row after the last)."""
    first, end = index.shards[shard], index.shards[shard + 1]
    starts = range(first, end, index.rows_per_pass)
    return [(start, min(start + index.rows_per_pass, end)) for start in starts]


def write_shards(
    folder: Path,
    index: FeatureIndex,
    missing: Sequence[int],
    read: Iterator[dict[str, np.ndarray]],
    rows: Windows,
) -> None:
    """Write each missing shard as soon as all its passes are read.

    Args:
      folder: the output folder.
      index: the index of all shards.
      missing: numbers of the shards to write.
      read: the features of each of the target's passes over the missing shards, in order.
      rows: the rows of all shards.

    Raises:
      InputError: a shard cannot be written.
    """
    total = sum(index.shards[shard + 1] - index.shards[shard] for shard in missing)
    for path in folder.glob(".tmp??????") if is_first() else ():  # of a killed run
        path.unlink()
    with progress(total, "rows read") as advance:
        for shard in missing:
            parts = []
            for start, stop in passes_of_shard(index, shard):
                parts.append(next(read))
                advance(stop - start)
            if is_first():
                own = slice(index.shards[shard], index.shards[shard + 1])
                lengths = (rows.segments[own] > 0).sum(axis=1)
                _write(shard_path(folder, shard), parts, np.cumsum([0, *lengths]))


def features_of_passes(
    target: Target,
    passes: Sequence[tuple[int, int]],
    *,
    rows: Windows,
    index: FeatureIndex,
    chunk_length: int,
) -> Iterator[dict[str, np.ndarray]]:
    """Yield the features of the rows of each pass, in order; see `features_of_rows`."""
    for start, stop in passes:
        yield features_of_rows(target, rows, start, stop, index, chunk_length)


def features_of_rows(
    target: Target, rows: Windows, start: int, stop: int, index: FeatureIndex, chunk_length: int
) -> dict[str, np.ndarray]:
    """Compute a shard's arrays for the rows from `start` up to, but not including, `stop`.

    The tokens of the rows are concatenated without padding.
    """
    # Pad the last pass with its last row, so that it reuses the compiled program.
    indices = np.minimum(np.arange(start, start + index.rows_per_pass), stop - 1)
    part, parts = rows_of_process(target.mesh)
    own = np.split(indices, parts)[part]
    batch = Batch(**{name: values[own] for name, values in rows._asdict().items()})
    placed = place_batch(batch, 1, target.mesh)
    hidden, top = to_host(
        compute_features(
            target,
            placed["tokens"][0],
            placed["segments"][0],
            context_layers=index.context_layers,
            raw_layers=index.raw_layers,
            top_k=index.top_k,
            chunk_length=chunk_length,
        )
    )
    is_token = rows.segments[start:stop] > 0
    ids = top.token_ids.astype(_id_dtype(target.config.vocab_size))
    kept = {"hidden": hidden, "log_probs": top.log_probs, "token_ids": ids}
    return {name: values[: len(is_token)][is_token] for name, values in kept.items()}


@partial(jax.jit, static_argnames=("context_layers", "raw_layers", "top_k", "chunk_length"))
def compute_features(
    target: Target,
    tokens: Int[Array, "B T"],
    segments: Int[Array, "B T"],
    *,
    context_layers: tuple[int, ...],
    raw_layers: bool,
    top_k: int,
    chunk_length: int,
) -> tuple[Float[Array, "B T Z"], TopTokens]:
    """Compute the target's hidden states and its `top_k` most likely next tokens, in bfloat16.

    Only the logits of `chunk_length` positions exist at a time.
    """
    hidden = run_target(target, tokens, segments, context_layers, raw_layers)
    decoder = target.merge()

    def best(chunk: Float[Array, "B C Z"]) -> TopTokens:
        log_probs, ids = jax.lax.top_k(jax.nn.log_softmax(decoder.logits(chunk)), top_k)
        return TopTokens(log_probs.astype(jnp.bfloat16), ids)

    B, T, Z = hidden.shape
    chunk_length = min(chunk_length, T)
    padded = jnp.pad(hidden, ((0, 0), (0, -T % chunk_length), (0, 0)))
    chunks = padded.reshape(B, -1, chunk_length, Z).swapaxes(0, 1)
    top = jax.lax.map(best, chunks)
    top = jax.tree.map(lambda x: x.swapaxes(0, 1).reshape(B, -1, top_k)[:, :T], top)
    return hidden.astype(jnp.bfloat16), top


def _write(path: Path, parts: Sequence[dict[str, np.ndarray]], starts: np.ndarray) -> None:
    arrays = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    try:
        save_file(arrays | {"starts": starts}, path)  # atomic
        # safetensors makes files that only their owner may read.
        shutil.copymode(path.with_name("index.json"), path)
    except SafetensorError as error:  # a full disk, for example
        raise InputError(f"{path} could not be written ({error}); free disk space.") from None


def _id_dtype(vocab_size: int) -> np.dtype:
    return np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.int32)
