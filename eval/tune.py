"""`python -m eval tune`: the fastest tree for each batch size and temperature, into `draft.yaml`.

What a tree gains is counted on recorded answers. What it costs is interpolated between the steps of
a few timed trees. The best by their ratio, each of another number of nodes, then decode the prompts
beside the baseline.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import batched, groupby, product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int
from rich.table import Table

from redrafter_jax.acceptance import acceptance_length
from redrafter_jax.checkpoints.download import DRAFT_TABLE
from redrafter_jax.checkpoints.draft_table import DraftTable, TunedTree, write_draft_table
from redrafter_jax.checkpoints.huggingface import load_drafter
from redrafter_jax.config import DraftConfig, SamplingConfig
from redrafter_jax.drafters.base import RootOnly
from redrafter_jax.drafters.bind import bind_drafter
from redrafter_jax.drafters.head_drafter import DraftModel
from redrafter_jax.errors import InputError
from redrafter_jax.models.target import Target
from redrafter_jax.progress import track
from redrafter_jax.text.prompts import EncodedPrompts, read_prompts

from .benchmark import Method
from .config import TuneSettings
from .loading import load
from .recorded import Recording, count_calls, record
from .report import describe_device, describe_sampling, make_table, show, tree_columns, write_report
from .speed import BASELINE, time_methods
from .step_costs import TimedTree, pick_diverse, predict, time_steps
from .step_parts import slots_needed
from .tree_grid import build_all

DEFINITIONS = {
    "acceptance_length": "mean tokens gained per target call, bonus token included, counted on the "
    "target's answers: the drafter alone ran",
    "cost": "of a decode step in baseline steps; `timed_trees` by the clock, the others between "
    "them: propose by rounds and beams, the rest by nodes",
    "predicted": "speed-up: in each batch that goes on after prefill target calls of the baseline "
    "/ those with the tree, each of its longest row; the median of these / cost",
    "measured": "quartiles over (batch, repeat) turns of the ratio to the baseline's tokens per "
    "second without prefill, of real decoding; empty for trees that were no finalists",
    "chosen": "the finalist of the largest median, if its lower quartile is above 1; where there "
    "is none, the baseline",
}
_LEGEND = (
    "length: acceptance length, tokens per target call. step: what a decode step costs, in "
    "baseline steps. predicted, measured: speed-up over the baseline, without prefill."
)

_BATCH_SIZES = (1, 2, 4, 8)
# Fewest timed runs of a finalist: quartiles of fewer mean little.
_TURNS = 8


class Candidate(NamedTuple):
    """A tree at one batch size and sampling: its step in baseline steps, and its speed-up.

    `measured` are the quartiles of real decoding, none for a tree that was no finalist.
    """

    draft: DraftConfig
    acceptance_length: float
    cost: float
    predicted: float
    measured: tuple[float, ...] = ()


def tune(settings: TuneSettings) -> None:
    """Count, time, predict, measure; write the table and a report.

    Raises:
      InputError: a setting, a file or a prompt cannot be used.
    """
    if settings.mesh.build() is not None:
        raise InputError("eval tune measures one device; leave mesh out, and start one process.")
    drafts = build_all(settings.trees)
    output = _output(settings)
    batch_sizes = _batch_sizes(settings)
    target, ask = load(settings, drafts, max(batch_sizes))
    drafter = load_drafter(settings.drafter, settings.dtype, target.mesh)
    asked = [ask(sampling) for sampling in settings.samplings]
    recordings = _record(target, drafter, asked, settings)
    counts = count_calls(target, drafter, drafts, recordings)
    timed_drafts = pick_diverse(drafts, settings.timed_trees)
    batches = [batch for one in recordings for batch in one.batches]
    room = slots_needed(settings.steps, max(draft.max_path for draft in drafts))
    longest = max(batch.tokens.shape[1] for batch in batches)
    slots = max(longest, 32 * (room // 32 + 1))
    # As when half of an answer is written.
    cached = int(np.median([(batch.prompts + batch.ends) // 2 for batch in batches]))
    cached = min(cached, slots - room)
    timed = {
        batch_size: time_steps(target, drafter, timed_drafts, batch_size, slots, cached, settings)
        for batch_size in batch_sizes
    }
    rows, entries = [], []
    for batch_size, (index, sampling) in product(batch_sizes, enumerate(settings.samplings)):
        candidates = rank_candidates(
            recordings[index],
            {draft: own[index] for draft, own in counts.items()},
            timed[batch_size][index],
            batch_size,
        )
        candidates = leaders_first(candidates)
        finalists = _measure(
            target,
            drafter,
            asked[index],
            candidates[: settings.finalists],
            batch_size,
            sampling,
            settings,
        )
        best = choose(finalists)
        rows += [
            {
                "batch_size": batch_size,
                "sampling": describe_sampling(sampling),
                **asdict(one.draft),
                **dict(zip(one._fields[1:], one[1:], strict=True)),
                "chosen": one == best,
            }
            for one in [*finalists, *candidates[settings.finalists :]]
        ]
        found = (None, 1.0, 1.0)
        if best is not None:
            found = (best.draft, round(best.predicted, 3), round(best.measured[1], 3))
        entries.append(TunedTree(batch_size, sampling.temperature, *found))
    write_draft_table(output, DraftTable(describe_device(), settings.dtype, tuple(entries)))
    path = settings.report_dir / "tune.json"
    shapes = {"target": asdict(target.config), "drafter": asdict(drafter.config)}
    write_report(path, {"rows": rows, **shapes}, settings, DEFINITIONS)
    show(path, _table(rows), _LEGEND, f"The trees: {output}")


def rank_candidates(
    recording: Recording,
    counts: Mapping[DraftConfig, Int[np.ndarray, "prompts _"]],
    timed: Sequence[TimedTree],
    batch_size: int,
) -> list[Candidate]:
    """Every tree with its predicted speed-up, the fastest first."""
    baseline = _batch_calls(recording.baseline_calls, batch_size)
    goes_on = baseline > 0
    candidates = []
    for draft, own in counts.items():
        cost = predict(timed, draft)
        calls = _batch_calls(own.sum(axis=1), batch_size)
        # A median, like `measured`, is not moved by a few texts that gain much.
        gain = float(np.median(baseline[goes_on] / calls[goes_on]))
        candidates.append(Candidate(draft, acceptance_length(own), cost, gain / cost))
    return sorted(candidates, key=lambda one: one.predicted, reverse=True)


def leaders_first(candidates: Sequence[Candidate]) -> list[Candidate]:
    """The first tree of each number of nodes, then the rest, both in their order.

    The cost of the nodes is the least certain part of a prediction. Its error is much the same for
    trees of the same number of nodes, so trees of several numbers are measured.
    """
    leaders: dict[int, Candidate] = {}
    for one in candidates:
        leaders.setdefault(one.draft.budget, one)
    first = list(leaders.values())
    return [*first, *(one for one in candidates if one not in first)]


def _batch_calls(
    calls: Int[np.ndarray, " prompts"], batch_size: int
) -> Int[np.ndarray, " batches"]:
    """Target calls of each batch, which takes as many as its longest row."""
    return np.asarray([max(batch) for batch in batched(calls.tolist(), batch_size)])


def choose(finalists: Sequence[Candidate]) -> Candidate | None:
    """The fastest of those that beat the baseline beyond noise; None if none does."""
    faster = [one for one in finalists if one.measured[0] > 1]
    return max(faster, key=lambda one: one.measured[1], default=None)


def _batch_sizes(settings: TuneSettings) -> list[int]:
    """Those that are tuned for.

    Raises:
      InputError: there are too few prompts for one, which would be measured with fewer rows.
    """
    prompts = len(read_prompts(settings.prompts, settings.prompt_count))
    if settings.batch_sizes is None:
        return [size for size in _BATCH_SIZES if size <= prompts]
    if max(settings.batch_sizes) > prompts:
        raise InputError(
            f"batch_sizes has {max(settings.batch_sizes)}, but only {prompts} prompts are asked; "
            "give as many, or smaller batch_sizes."
        )
    return settings.batch_sizes


def _output(settings: TuneSettings) -> Path:
    """Where the table goes.

    Raises:
      InputError: there is no folder for it.
    """
    output = settings.output or Path(settings.drafter) / DRAFT_TABLE
    if not output.parent.is_dir():
        why = f"the folder {output.parent} is missing"
        if settings.output is None:
            why = f"drafter is {settings.drafter}, no folder here; train it, or if it is on the hub"
        raise InputError(f"{why}, give output=FILE for the trees.")
    if output.is_dir():
        raise InputError(f"output is {output}, a folder; give output=FILE for the trees.")
    return output


def _record(
    target: Target, drafter: DraftModel, asked: Sequence[EncodedPrompts], settings: TuneSettings
) -> list[Recording]:
    """The answers under each sampling.

    Raises:
      InputError: none goes on beyond its first token, which prefill decides.
    """
    layers = bind_drafter(drafter).context_layers
    recordings, samplings = [], settings.samplings
    work = zip(samplings, asked, strict=True)
    for sampling, own in track(work, len(samplings), "record answers"):
        recording = record(target, own, sampling, settings, layers)
        if not recording.baseline_calls.any():
            raise InputError(
                f"{settings.prompts}: every answer ends at its first token "
                f"({describe_sampling(sampling)}), so that there is nothing to measure; raise "
                "max_new_tokens, or give other prompts or another chat_template."
            )
        recordings.append(recording)
    return recordings


def _measure(
    target: Target,
    drafter: DraftModel,
    asked: EncodedPrompts,
    finalists: Sequence[Candidate],
    batch_size: int,
    sampling: SamplingConfig,
    settings: TuneSettings,
) -> list[Candidate]:
    """The finalists with their measured speed-ups, decoding in turns with the baseline."""
    batches = -(-len(asked.rows) // batch_size)
    repeats = max(settings.repeats, -(-_TURNS // batches))
    methods = {BASELINE: Method(target, RootOnly())} | {
        str(index): Method(target, bind_drafter(drafter, one.draft))
        for index, one in enumerate(finalists)
    }
    name = f"measure batch size {batch_size}, {describe_sampling(sampling)}"
    repeated = settings.model_copy(update={"repeats": repeats})
    measures = time_methods(methods, asked, sampling, batch_size, repeated, name)["methods"]
    speeds = [measures[str(index)]["decode_only"] for index in range(len(finalists))]
    return [
        one._replace(measured=(own[0], speed["speedup"], own[1]))
        for one, speed in zip(finalists, speeds, strict=True)
        for own in [speed["speedup_quartiles"]]
    ]


def _table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """A row per finalist, with the one that was chosen."""
    sizes = tree_columns(rows)
    numbers = {"acceptance_length": "length", "cost": "step", "predicted": "predicted"}
    cells = []
    measured = [row for row in rows if row["measured"]]
    for (batch_size, sampling), own in groupby(
        measured, lambda row: (row["batch_size"], row["sampling"])
    ):
        finalists = list(own)
        for row in finalists:
            low, middle, high = row["measured"]
            cells.append(
                [
                    sampling,
                    *(str(row[name]) for name in ("batch_size", *sizes)),
                    *(f"{row[name]:.2f}" for name in numbers),
                    f"{middle:.2f} [{low:.2f} to {high:.2f}]",
                    "chosen" * row["chosen"],
                ]
            )
        if not any(row["chosen"] for row in finalists):
            dashes = ["-"] * (len(sizes) + len(numbers))
            cells.append([sampling, str(batch_size), *dashes, "the baseline", "chosen"])
    columns = ["sampling", "B", *sizes.values(), *numbers.values(), "measured", ""]
    return make_table("", columns, cells)
