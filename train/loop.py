"""The training run, from settings to an exported drafter."""

import hashlib
import time
from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path
from signal import Signals
from typing import Any, NamedTuple

import jax
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from redrafter_jax.checkpoints.huggingface import load_target, save_drafter
from redrafter_jax.command_line import make_folder
from redrafter_jax.config import TargetConfig
from redrafter_jax.errors import InputError
from redrafter_jax.models.target import Target
from redrafter_jax.parallel.mesh import FULLY_SHARDED, RULES, place, to_host
from redrafter_jax.parallel.model import Model
from redrafter_jax.parallel.processes import is_first, part_of_rows, wait_for_all
from redrafter_jax.settings.files import dump_settings
from redrafter_jax.settings.sections import check_batch

from .acceptance import Best, best_of, keep_best, prepare_trial, try_drafter
from .checkpoint import open_checkpoints, restore_latest, save
from .config import TrainSettings
from .data.batches import make_batches, place_batch
from .data.documents import SourceDocuments, load_documents
from .data.report import print_report, write_report
from .data.rows import Rows, make_rows
from .initial import new_drafter
from .metrics import MetricsLog, check_finite, summary, to_scalars
from .optimizer import make_optimizer
from .step import init_state, train_step
from .termination import watch_for_termination

# Settings that may change between a run and its continuation: they do not touch the parameters.
_FREE_SETTINGS = {
    "output_dir",
    "resume",
    "log_every",
    "checkpoint_every",
    "checkpoints_kept",
    "acceptance",
    "mesh",
}


# Seconds between two lines of a run that no terminal shows.
_QUIET = 30


class Outcome(NamedTuple):
    """How a run ended.

    Attributes:
      step: the last one that was taken.
      exported: folder of the drafter; None where the run was asked to stop before its last step.
      best: the drafter that was accepted most; None where none was tried.
      stopped_by: SIGTERM or SIGINT (Ctrl-C); None for a whole run.
    """

    step: int
    exported: Path | None
    best: Best | None
    stopped_by: Signals | None


def train(settings: TrainSettings, console: Console) -> Outcome:
    """Train a drafter and export it in Apple's layout, to `drafter` in the output folder.

    A run that was killed goes on from its newest checkpoint, to the same parameters bit for bit.
    SIGTERM or Ctrl-C ends it after a last checkpoint. Where `acceptance` is set, the drafter that
    was accepted most is exported to `best`.

    Raises:
      InputError: the target, the data or a checkpoint does not fit the settings, the folder cannot
        be made, or the run diverges.
    """
    folder = settings.output_dir
    make_folder(folder, "output_dir")
    mesh = settings.mesh.build()
    part = part_of_rows(mesh)
    check_batch("optimizer.batch_size", settings.optimizer.batch_size, mesh)
    if settings.acceptance:
        check_batch("acceptance.batch_size", settings.acceptance.batch_size, mesh)
    target = load_target(settings.target, settings.target_dtype, mesh)
    sources = load_sources(settings, target.config)
    print_report(sources, console)
    mixture = [(made.windows, source.weight) for source, made in sources]
    drafter = new_drafter(target, settings.drafter, mixture, settings.seed)
    optimizer = make_optimizer(
        settings.optimizer, settings.steps, lambda name: not name.startswith("lm_head")
    )
    rules = FULLY_SHARDED if settings.mesh.fully_sharded else RULES
    state = place(init_state(drafter, optimizer), mesh, rules)
    accumulation = settings.optimizer.accumulation_steps
    rows = settings.optimizer.batch_size * accumulation
    batches = make_batches(mixture, rows, settings.data.shuffle_seed, part)
    digests = _digests(target, sources)
    trial = prepare_trial(settings, target, drafter)
    best: Best | None = None

    # Signals are watched for outside: leaving the inner block waits for the last save.
    with (
        watch_for_termination() as asked_to_stop,
        open_checkpoints(folder / "checkpoints", settings.checkpoints_kept) as checkpoints,
    ):
        first_step = 0
        restored = restore_latest(checkpoints, state, settings.resume == "auto")
        if restored is not None:
            _check_same_run(restored.record["settings"], settings)
            check_same_inputs(restored.record.get("digests", {}), digests, _chats(sources), folder)
            first_step, state = restored.step, restored.arrays
            batches.set_state(restored.record["data"])
            console.print(f"resumed from step {first_step}")
            best = best_of(restored.record)
            if best and trial and best.measured_on != trial.measured_on:
                console.print("the best drafter so far was measured otherwise and will give way")
        if is_first():
            (folder / "config.yaml").write_text(dump_settings(settings))
            write_report(sources, folder / "data.json")

        step, stopping = first_step, None
        with (
            MetricsLog(folder, first_step) if is_first() else nullcontext() as log,
            _progress(console) as progress,
        ):
            task = progress.add_task(
                "train", total=settings.steps, completed=first_step, status="compiling"
            )
            step_tokens = rows * settings.data.sequence_length
            logged, started, waited = first_step, time.perf_counter(), 0.0
            told = time.monotonic()
            accepted: dict[str, float] = {}
            for step in range(first_step + 1, settings.steps + 1):
                asked = time.perf_counter()
                batch = next(batches)
                waited += time.perf_counter() - asked
                state, metrics = train_step(
                    state,
                    target,
                    drafter.graphdef,
                    **place_batch(batch, accumulation, mesh),
                    rounds=settings.draft_rounds,
                    loss_settings=settings.loss,
                    optimizer=optimizer,
                    fully_sharded=settings.mesh.fully_sharded,
                )
                progress.advance(task)
                stopping = asked_to_stop(step)
                last = step == settings.steps
                on_trial = trial if trial and (trial.is_due(step) or last) else None
                saving = step % settings.checkpoint_every == 0 or last or bool(stopping)
                logging = step % settings.log_every == 0 or on_trial or last
                if logging or saving:
                    # Before anything is written: no checkpoint, no trial and no export of it.
                    check_finite(
                        step,
                        settings.optimizer.learning_rate,
                        loss=float(metrics.loss),
                        gradient_norm=float(metrics.gradient_norm),
                    )
                line = None
                if logging:
                    scalars = to_scalars(metrics)
                    elapsed = time.perf_counter() - started
                    scalars["tokens_per_second"] = (step - logged) * step_tokens / elapsed
                    scalars["data_wait_fraction"] = waited / elapsed
                    if on_trial:
                        trained = Model(drafter.config, drafter.graphdef, state.params, mesh)
                        accepted = try_drafter(on_trial, target, trained)
                        measured = accepted["acceptance_length"]
                        best = keep_best(on_trial, best, step, measured, trained)
                        scalars |= accepted
                    if log is not None:
                        log.write(step, scalars)
                    # The last trial stays on the screen until the next.
                    status = summary({**accepted, **scalars}, settings.draft_rounds)
                    progress.update(task, status=status)
                    due = on_trial or last or time.monotonic() - told > _QUIET
                    if due and not console.is_terminal:
                        line = f"step {step} of {settings.steps}: {status}"
                    logged, started, waited = step, time.perf_counter(), 0.0
                if saving:
                    record = {
                        "data": batches.get_state(),
                        "settings": settings.model_dump(mode="json"),
                        "digests": digests,
                        "best": best and best._asdict(),
                    }
                    save(checkpoints, step, state, record)
                # After the save, for whoever reads may be gone.
                if line:
                    _tell(console, line)
                    told = time.monotonic()
                if stopping:
                    break

    if step < settings.steps:
        return Outcome(step, None, best, stopping)
    exported = folder / "drafter"
    params = to_host(state.params)
    if is_first():
        save_drafter(Model(drafter.config, drafter.graphdef, params), exported)
    wait_for_all("exported")
    return Outcome(step, exported, best, None)


def load_sources(
    settings: TrainSettings, config: TargetConfig
) -> list[tuple[SourceDocuments, Rows]]:
    """The documents of every source, in the target's own tokens, and their rows.

    Raises:
      InputError: the rows are too short for the draft rounds, the tokenizer does not fit the
        target, or the data cannot be used; see `load_documents` and `make_rows`.
    """
    length, rounds = settings.data.sequence_length, settings.draft_rounds
    if length < rounds + 2:
        raise InputError(
            f"data.sequence_length is {length}, too short for draft_rounds={rounds}; give "
            f"{rounds + 2} or more."
        )
    loaded = load_documents(settings.data, settings.target, config)
    end_token = config.eos_token_ids[0]
    return [(source, make_rows(source, settings.data, end_token)) for source in loaded]


def check_same_inputs(
    saved: dict[str, str], stated: dict[str, str], chats: set[str], folder: Path
) -> None:
    """Compare digests of what the run read when it began with those of what it reads now.

    Args:
      saved: by name, of the checkpoint.
      stated: by name, of now.
      chats: the names that a chat template has a part in.
      folder: of the run, for the message.

    Raises:
      InputError: one is another.
    """
    changed = [name for name in stated if saved.get(name) != stated[name]]
    if changed:
        dated = (
            "; a template that writes today's date needs one, data.template_arguments="
            "{date_string: ...}, from the first start on"
        )
        raise InputError(
            f"{folder} holds a run with other contents of {', '.join(changed)}; bring those back, "
            f"use another output_dir or remove that one{dated * bool(chats & {*changed})}."
        )


def _check_same_run(saved: dict[str, Any], settings: TrainSettings) -> None:
    stated = settings.model_dump(mode="json")
    changed = [
        name for name in stated if name not in _FREE_SETTINGS and saved.get(name) != stated[name]
    ]
    if changed:
        raise InputError(
            f"{settings.output_dir} holds a run with other settings for {', '.join(changed)}; "
            "use another output_dir or remove that one."
        )


def _digests(target: Target, sources: list[tuple[SourceDocuments, Rows]]) -> dict[str, str]:
    """What a run reads, by name: equal digests mean the same rows and weights."""
    digests = {"target": _digest(repr(target.config), jax.tree.leaves(target.params))}
    for source, rows in sources:
        digests[source.name] = _digest("", rows.windows)
    return digests


def _digest(name: str, arrays: Iterable[jax.Array | np.ndarray]) -> str:
    digest = hashlib.sha256(name.encode())
    # One by one: a target's weights need not fit into memory twice.
    for array in arrays:
        digest.update(np.asarray(to_host(array)).tobytes())
    return digest.hexdigest()


def _chats(sources: list[tuple[SourceDocuments, Rows]]) -> set[str]:
    """Names of the sources that a chat template has a part in."""
    return {
        source.name
        for source, _ in sources
        if any(document.kind == "chat" for document in source.documents)
    }


def _tell(console: Console, line: str) -> None:
    console.print(line, markup=False, highlight=False, soft_wrap=True)


def _progress(console: Console) -> Progress:
    """A bar that is the first to give way where the line is short."""
    return Progress(
        TextColumn("step"),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[status]}"),
        BarColumn(),
        console=console,
        disable=not console.is_terminal,
    )
