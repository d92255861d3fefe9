"""Loading of the inputs of a training run before its first step, and checks when a run resumes."""

import hashlib
from pathlib import Path
from typing import Any, NamedTuple

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from jaxtyping import Array, UInt32
from rich.console import Console

from redrafter_jax.drafters.base import LoadedHead
from redrafter_jax.errors import InputError
from redrafter_jax.files.target_files import TargetFiles, open_target
from redrafter_jax.models.target import Target
from redrafter_jax.parallel.mesh import check_rows
from redrafter_jax.parallel.model import Model
from redrafter_jax.parallel.processes import rows_of_process

from .config import TrainSettings
from .data.batches import Batch, make_batches
from .data.documents import load_documents
from .data.features import FeatureIndex, ReadRow, open_features
from .data.report import describe_passes, print_line, print_report
from .data.rows import Sources, make_rows
from .data.types import Windows
from .gradients import layers_read
from .initial import new_drafter, share_drafted
from .optimizer import make_optimizer
from .trial import Trial, plan_trial

# Settings that may change when a run resumes, because they do not affect the parameters. Features
# are compared by their digest, not by their path.
_FREE_SETTINGS = {
    "output_dir",
    "resume",
    "log_every",
    "checkpoint_every",
    "checkpoints_kept",
    "acceptance",
    "features",
    "mesh",
}


class Run(NamedTuple):
    """The inputs of a training run's steps.

    Attributes:
      settings: settings of the run.
      mesh: mesh of devices; None for a single device.
      target: frozen target; without layers if these are not needed.
      drafter: drafter before its first step.
      sources: documents and rows of each source.
      batches: iterator of batches, which holds the position in the data.
      optimizer: optimizer with its learning rate schedule.
      trial: evaluation of the drafter; None if `settings.acceptance` is not set.
      digests: digest of each input, by name: every source, "drafter.initial_drafter" if it is set,
        and "target" or "features".
    """

    settings: TrainSettings
    mesh: Mesh | None
    target: Target
    drafter: LoadedHead
    sources: Sources
    batches: grain.DatasetIterator[Batch]
    optimizer: optax.GradientTransformation
    trial: Trial | None
    digests: dict[str, str]


def set_up(settings: TrainSettings, console: Console) -> Run:
    """Load the target and the data, initialize the drafter, and print the data's counts.

    With `settings.features`, the target's layers are loaded only if `acceptance` is set.

    Raises:
      InputError: the target, the data or the features do not fit the settings.
    """
    mesh = settings.mesh.build()
    check_rows(settings.optimizer.batch_size, mesh, "optimizer.batch_size")
    if settings.acceptance:
        check_rows(settings.acceptance.batch_size, mesh, "acceptance.batch_size")
    files = open_target(settings.target)
    config, sources = files.config, load_sources(settings, files)
    print_report(sources, console)
    passes = describe_passes(sources, settings.steps, settings.optimizer.rows_per_step)
    print_line(console, passes)
    chats = any(document.is_chat for source, _ in sources for document in source.documents)
    planned = plan_trial(settings, files, mesh, chats)
    digests = {source.name: digest_rows(made.windows) for source, made in sources}
    readers = None
    if settings.features is not None:
        index, readers = _open_features(settings, files, digests)
        digests |= {"features": index.digest}
    mixture = [(made.windows, source.weight) for source, made in sources]
    rows = settings.optimizer.rows_per_step
    part = rows_of_process(mesh)
    batches = make_batches(mixture, rows, settings.data.shuffle_seed, part, readers)
    needs_layers = settings.features is None or settings.acceptance is not None
    load = files.load if needs_layers else files.load_without_layers
    target = load(settings.target_dtype, mesh)
    if settings.features is None:
        digests |= {"target": digest_weights(target)}
    drafter = new_drafter(target, settings.drafter, settings.draft_rounds, mixture, settings.seed)
    if (tokens := drafter.config.draft_tokens) is not None:
        V = config.vocab_size
        share = share_drafted(mixture, tokens, V)
        print_line(
            console,
            f"the head drafts {len(tokens):,} of {V:,} tokens, {share:.1%} of those that carry "
            "loss in the data (drafter.draft_vocab_size)",
        )
    if settings.drafter.initial_drafter is not None:
        digests |= {"drafter.initial_drafter": digest_weights(drafter)}
    optimizer = make_optimizer(settings.optimizer, settings.steps)
    trial = None if planned is None else planned(target)
    return Run(settings, mesh, target, drafter, sources, batches, optimizer, trial, digests)


def load_sources(settings: TrainSettings, files: TargetFiles) -> Sources:
    """Load and tokenize the documents of every source, and make rows from them.

    Raises:
      InputError: the rows are too short for the draft rounds, the tokenizer does not fit the
        target, or the data cannot be used; see `load_documents` and `make_rows`.
    """
    length, rounds = settings.data.sequence_length, settings.draft_rounds
    if length < rounds + 2:
        raise InputError(
            f"data.sequence_length is {length}, too short for draft_rounds={rounds}; set it to "
            f"{rounds + 2} or more."
        )
    loaded = load_documents(settings.data, files)
    end_token = files.config.eos_token_ids[0]
    return [(source, make_rows(source, settings.data, end_token)) for source in loaded]


def _open_features(
    settings: TrainSettings, files: TargetFiles, sources: dict[str, str]
) -> tuple[FeatureIndex, list[ReadRow]]:
    """Open the run's features.

    Raises:
      InputError: the errors of `open_features`, or a loss needs what the features do not store.
    """
    assert settings.features is not None
    drafter = settings.drafter.build_for(files.config, settings.draft_rounds)
    index, readers = open_features(
        settings.features,
        files.digest(),
        settings.target_dtype,
        *layers_read(drafter, files.config),
        sources,
        settings.data.sequence_length,
    )
    loss, kept = settings.loss, index.top_k
    if (loss.soft_top_k or 0) > kept:
        raise InputError(
            f"loss.soft_top_k is {loss.soft_top_k}, but {settings.features} stores {kept} tokens "
            "per position; lower loss.soft_top_k, or write features with a larger top_k."
        )
    if loss.soft and loss.soft_temperature != 1 and loss.soft_top_k is None:
        raise InputError(
            f"loss.soft_temperature is {loss.soft_temperature:g}, which needs more probabilities "
            f"than {settings.features} stores; set loss.soft_top_k to {kept} or less."
        )
    drafted = settings.drafter.count_draft_tokens(files.config.vocab_size)
    if loss.soft and loss.soft_temperature != 1 and drafted:
        raise InputError(
            f"loss.soft_temperature is {loss.soft_temperature:g}, which needs the probabilities of "
            f"more draft tokens than {settings.features} stores; set "
            "drafter.draft_vocab_size=null, or train without features."
        )
    return index, readers


def check_same_run(
    saved: dict[str, Any], step: int, settings: TrainSettings, steps_may_change: bool = False
) -> None:
    """Check that a run with these settings may resume from a checkpoint.

    Args:
      saved: settings of the run that saved the checkpoint.
      step: number of finished steps in the checkpoint.
      settings: settings of the present run.
      steps_may_change: whether `steps` may differ; otherwise it may only be greater, and only if
        all steps of the saved run are finished.

    Raises:
      InputError: a setting differs that affects the parameters.
    """
    stated = settings.model_dump(mode="json")
    longer = step == saved["steps"] < settings.steps
    free = _FREE_SETTINGS | ({"steps"} if longer or steps_may_change else set())
    changed = [name for name in stated if name not in free and saved.get(name) != stated[name]]

    def tell(name: str) -> str:
        new = stated[name]
        nested = isinstance(new, (dict, list))
        return f"another {name}" if nested else f"{name} {saved.get(name)} (now {new})"

    if changed:
        only = f"; steps may only grow after all {saved['steps']} are taken" * ("steps" in changed)
        raise InputError(
            f"{settings.output_dir} already holds a run with other settings: "
            f"{', '.join(map(tell, changed))}{only}; use another output_dir, or delete this folder."
        )


def check_same_inputs(
    saved: dict[str, str], stated: dict[str, str], chats: set[str], folder: Path
) -> None:
    """Check that the inputs of a resumed run have the digests in its checkpoint.

    Args:
      saved: digests in the checkpoint, by name of the input.
      stated: digests of the present inputs.
      chats: names of the sources that a chat template renders.
      folder: output folder, for the error.

    Raises:
      InputError: a digest differs.
    """
    changed = [name for name in stated if saved.get(name) != stated[name]]
    if changed:
        dated = (
            "; if the chat template writes today's date, state the date of the first start with "
            "data.template_arguments={date_string: ...}"
        )
        raise InputError(
            f"{folder} holds a run with other contents of {', '.join(changed)}; restore them, "
            f"use another output_dir, or delete this folder{dated * bool(chats & {*changed})}."
        )


def digest_weights(model: Model[Any, Any]) -> str:
    """Return a digest of a model's configuration and weights, the same on every mesh.

    Every device hashes its own shard, so no weight leaves a device.
    """
    sums = [int(_fingerprint(leaf)) for leaf in jax.tree.leaves(model.params)]
    return hashlib.sha256(repr((model.config, sums)).encode()).hexdigest()


@jax.jit
def _fingerprint(array: Array) -> UInt32[Array, ""]:
    """The sum over elements of a hash of their bits and index (the finalizer of MurmurHash3)."""
    array = array.astype(jnp.int8) if array.dtype == jnp.int4 else array
    unsigned = jnp.dtype(f"uint{8 * array.dtype.itemsize}")
    mixed = jax.lax.bitcast_convert_type(array, unsigned).astype(jnp.uint32)
    place = jnp.zeros(array.shape, jnp.uint32)
    for axis, size in enumerate(array.shape):
        place = place * size + jax.lax.broadcasted_iota(jnp.uint32, array.shape, axis)
    mixed = mixed + place * jnp.uint32(0x9E3779B1)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        mixed = (mixed ^ (mixed >> shift)) * jnp.uint32(factor)
    return (mixed ^ (mixed >> 16)).sum(dtype=jnp.uint32)


def digest_rows(windows: Windows) -> str:
    """Return a digest of all tokens, masks and segments, and of the shape of the arrays."""
    digest = hashlib.sha256(repr(windows.tokens.shape).encode())
    for array in windows:
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()
