"""The training run, from settings to an exported drafter."""

import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from signal import Signals
from typing import Literal, NamedTuple, TypeAlias

import jax
import orbax.checkpoint as ocp
from rich.console import Console

from redrafter_jax.command_line import make_folder
from redrafter_jax.files.drafter_files import save_drafter
from redrafter_jax.lock import hold
from redrafter_jax.parallel.mesh import FULLY_SHARDED, RULES, place, to_host
from redrafter_jax.parallel.model import Model
from redrafter_jax.parallel.processes import is_first, rows_of_process, wait_for_all
from redrafter_jax.settings.files import dump_settings

from . import checkpoint
from .card import write_card
from .checkpoint import open_checkpoints, restore_latest
from .config import TrainSettings
from .data.batches import place_batch
from .data.report import write_report
from .metrics import TrainProgress, check_finite, open_log, to_scalars
from .setup import Run, check_same_inputs, check_same_run, set_up
from .step import TrainState, init_state, train_step
from .termination import watch_for_termination
from .trial import Best, keep_best, try_drafter

Stop: TypeAlias = Signals | Literal["late"]


class Outcome(NamedTuple):
    """The outcome of a training run.

    Attributes:
      step: number of finished steps.
      exported: folder of the exported drafter; None if a signal or `is_late` ended the run early.
      best: drafter with the highest acceptance length so far; None if none was evaluated.
      stopped_by: signal that ended the run early; None if no signal was received.
    """

    step: int
    exported: Path | None
    best: Best | None
    stopped_by: Signals | None


class Position(NamedTuple):
    """Progress of a run.

    Attributes:
      step: number of finished steps.
      state: parameters and optimizer state after this step.
      best: drafter with the highest acceptance length so far; None if none was evaluated.
    """

    step: int
    state: TrainState
    best: Best | None


def train(
    settings: TrainSettings, console: Console, is_late: Callable[[int], bool] | None = None
) -> Outcome:
    """Train a drafter and export it to the folder `drafter` in `settings.output_dir`.

    `is_late` is called after every step with the number of finished steps. Once this function
    returns True, the run saves a checkpoint and ends. A run with `is_late` may resume a run with
    another `steps`.

    A killed run resumes from its newest checkpoint and reaches the same parameters bit for bit.
    SIGTERM or Ctrl-C ends the run after a last checkpoint. If `acceptance` is set, the drafter with
    the highest acceptance length is exported to the folder `best`.

    Raises:
      InputError: the target, the data or a checkpoint does not fit the settings, the output folder
        cannot be made, or the loss or a gradient is not finite.
    """
    folder = settings.output_dir
    make_folder(folder, "output_dir")
    with hold(folder, "output_dir"):
        return _train(settings, console, is_late)


def _train(
    settings: TrainSettings, console: Console, is_late: Callable[[int], bool] | None
) -> Outcome:
    run = set_up(settings, console)
    folder = settings.output_dir
    # Watch signals in the outer block: closing the checkpoints waits for the last save.
    with (
        watch_for_termination() as asked_to_stop,
        open_checkpoints(folder / "checkpoints", settings.checkpoints_kept) as checkpoints,
    ):
        position = resume(run, checkpoints, console, steps_may_change=is_late is not None)

        def stop(step: int) -> Stop | None:
            late = is_late is not None and step < settings.steps and is_late(step)
            return asked_to_stop(step) or ("late" if late else None)

        if is_first():
            (folder / "config.yaml").write_text(dump_settings(settings))
            write_report(run.sources, folder / "data.json")
        with (
            open_log(folder, position.step) if is_first() else nullcontext() as log,
            TrainProgress(console, settings.steps, position.step) as progress,
        ):
            stopped_by: Stop | None = None
            while position.step < settings.steps and stopped_by is None:
                position, scalars, stopped_by = run_interval(run, position, stop, progress.step)
                due = _due(settings, position.step)
                if "try" in due:
                    position, tried = try_position(run, position)
                    scalars |= tried
                if due & {"try", "log"}:
                    if log is not None:
                        log(position.step, scalars)
                    progress.show(position.step, scalars)
                if "save" in due or stopped_by:
                    save(run, position, checkpoints)
                # Print after saving: printing to a closed pipe raises.
                progress.print_status(due="try" in due or position.step == settings.steps)

    exported = export(run, position) if position.step == settings.steps else None
    signal = stopped_by if isinstance(stopped_by, Signals) else None
    return Outcome(position.step, exported, position.best, signal)


def resume(
    run: Run,
    checkpoints: ocp.CheckpointManager,
    console: Console,
    steps_may_change: bool = False,
) -> Position:
    """Restore the newest checkpoint with its position in the data, or start at step 0.

    With `steps_may_change`, the learning rate continues on the schedule of the new `steps`.

    Raises:
      InputError: the checkpoint belongs to another run, or cannot be read.
    """
    settings = run.settings
    rules = FULLY_SHARDED if settings.mesh.fully_sharded else RULES
    state = place(init_state(run.drafter, run.optimizer), run.mesh, rules)
    restored = restore_latest(checkpoints, state, settings.resume == "auto")
    if restored is None:
        return Position(0, state, None)
    check_same_run(restored.record["settings"], restored.step, settings, steps_may_change)
    chats = {
        source.name
        for source, _ in run.sources
        if any(document.kind == "chat" for document in source.documents)
    }
    saved = restored.record.get("digests", {})
    check_same_inputs(saved, run.digests, chats, settings.output_dir)
    run.batches.set_state(restored.record["data"])
    console.print(f"resumed from step {restored.step}")
    best = Best(**restored.record["best"]) if restored.record.get("best") else None
    if best and run.trial and best.measured_on != run.trial.measured_on:
        console.print(
            "the best drafter so far was measured on other prompts or another tree; the next "
            "evaluated drafter replaces it"
        )
    return Position(restored.step, restored.arrays, best)


def run_interval(
    run: Run,
    position: Position,
    asked_to_stop: Callable[[int], Stop | None],
    advance: Callable[[], None],
) -> tuple[Position, dict[str, float], Stop | None]:
    """Run steps until logging, evaluation or a checkpoint is due, or the run must stop.

    Args:
      run: the inputs of the run.
      position: where to begin; the training state is donated.
      asked_to_stop: called after every step with its number; returns a reason to stop, or None.
      advance: called after every step, for the progress display.

    Returns:
      The new position, the scalars of the last step by name, and the reason to stop, if any. Two of
      the scalars cover all steps: `data_wait_fraction`, the fraction of the time spent waiting for
      data, and `tokens_per_second`, without padding, extrapolated to all processes.

    Raises:
      InputError: the loss or the gradient norm is not finite.
    """
    settings = run.settings
    step, state, metrics, waited, tokens = position.step, position.state, None, 0.0, 0
    _, parts = rows_of_process(run.mesh)
    started = time.perf_counter()
    while True:
        step += 1
        asked = time.perf_counter()
        batch = next(run.batches)
        waited += time.perf_counter() - asked
        tokens += parts * int((batch["segments"] > 0).sum())
        before = metrics
        state, metrics = train_step(
            state,
            run.target,
            run.drafter.graphdef,
            **place_batch(batch, settings.optimizer.accumulation_steps, run.mesh),
            rounds=settings.draft_rounds,
            loss_settings=settings.loss,
            optimizer=run.optimizer,
            fully_sharded=settings.mesh.fully_sharded,
        )
        # Limit the queue of dispatched steps to one, so that a request to stop is served soon.
        jax.block_until_ready(before)
        advance()
        stopped_by = asked_to_stop(step)
        if stopped_by or _due(settings, step):
            break
    scalars = to_scalars(metrics)
    elapsed = time.perf_counter() - started
    scalars["tokens_per_second"] = tokens / elapsed
    scalars["data_wait_fraction"] = waited / elapsed
    check_finite(
        step,
        settings.optimizer.learning_rate,
        loss=scalars["loss"],
        gradient_norm=scalars["gradient_norm"],
    )
    return Position(step, state, position.best), scalars, stopped_by


def try_position(run: Run, position: Position) -> tuple[Position, dict[str, float]]:
    """Decode the held-out prompts with the current drafter, and export the drafter if it is best.

    Returns:
      The position with the new best drafter, and the measures of `try_drafter`.
    """
    assert run.trial is not None
    trained = Model(run.drafter.config, run.drafter.graphdef, position.state.params, run.mesh)
    tried = try_drafter(run.trial, run.target, trained)
    measured = tried["acceptance_length"]
    texts = [int(tried.get(f"trial/{name}", 0)) for name in ("texts", "repeating", "short")]
    best = keep_best(run.trial, position.best, position.step, measured, trained, texts)
    return position._replace(best=best), tried


def save(run: Run, position: Position, checkpoints: ocp.CheckpointManager) -> None:
    """Save a checkpoint with the settings and digests that `resume` compares."""
    record = {
        "data": run.batches.get_state(),
        "settings": run.settings.model_dump(mode="json"),
        "digests": run.digests,
        "best": position.best and position.best._asdict(),
    }
    checkpoint.save(checkpoints, position.step, position.state, record)


def export(run: Run, position: Position) -> Path:
    """Write the drafter and its model card to `drafter` in the output folder."""
    exported = run.settings.output_dir / "drafter"
    params = to_host(position.state.params)
    if is_first():
        save_drafter(Model(run.drafter.config, run.drafter.graphdef, params), exported)
        write_card(run.settings)
    wait_for_all("exported")
    return exported


def _due(settings: TrainSettings, step: int) -> set[str]:
    """The actions that are due after a step: a set of "log", "try" and "save"."""
    every = {"log": settings.log_every, "save": settings.checkpoint_every}
    if settings.acceptance is not None:
        every["try"] = settings.acceptance.every
    return {what for what, count in every.items() if step % count == 0 or step == settings.steps}
