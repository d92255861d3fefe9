"""`python -m eval steps`: cost of a decode step and its parts, in steps of the baseline.

The models have the shapes of a real target and drafter, and random weights. For each tree, batch
size and cache size, all parts and both whole steps are timed under every sampling on the same
cache. The timed runs are interleaved, so that a slow moment of the machine affects all of them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import product
from typing import Any, get_args

import jax
import jax.numpy as jnp
from rich.table import Table

from redrafter_jax.command_line import make_folder
from redrafter_jax.config import TreeConfig
from redrafter_jax.drafters.base import LoadedHead, as_drafter, check_pair
from redrafter_jax.errors import InputError
from redrafter_jax.models.target import Target
from redrafter_jax.progress import track

from .abstract import abstract_drafter, abstract_state, abstract_target, bytes_of, random_weights
from .metrics import quartiles
from .report import describe_device, describe_sampling, make_table, show, write_report
from .shapes import StepsSettings
from .step_parts import Timing, slots_needed, time_parts
from .trees import TREE, build_all

DEFINITIONS = {
    "milliseconds": "lower quartile, median and upper quartile over repeats, per iteration",
    "in_baseline_steps": "quartiles over repeats of the time, divided by the time of the baseline "
    "step under the same sampling in the same repeat; for the whole step, this is the acceptance "
    "length below which speculation gains nothing",
    "over_first_sampling": "quartiles over repeats of the step's time, divided by its time under "
    "the first sampling in the same repeat",
    "propose": "drafting the tree, including prompt lookup",
    "verify": "one target call over the tree",
    "finish": "the target's choice at every node, the accepted path, its commit to the cache, and "
    "the drafter's reading of the path",
    "noise": "sampling noise of the positions of a speculative step; greedy rows have none",
    "parts": "propose, verify, finish and noise are separate programs, which read and write the "
    "arrays that they exchange; the whole step fuses and overlaps them, so their sum may exceed it",
    "step": "a speculative decode step as in `generate`, including noise and loop condition",
    "baseline": "the same with the one-node tree, as in `generate_autoregressive`",
    "cached": "tokens in every row's cache when a timed run begins; whole steps add further tokens",
}
# The fields that identify a row of the report, with their names in the table.
SIZES = TREE | {"batch_size": "B", "slots": "S"}


def measure_steps(settings: StepsSettings) -> None:
    """Time every combination of trees, batch sizes, cache sizes and samplings; write the report.

    Raises:
      InputError: a setting cannot be used, or does not fit the device.
    """
    grid = list(product(build_all(settings.trees), settings.batch_sizes, settings.slots))
    pair = _check(settings, grid)
    make_folder(settings.report_dir, "report_dir")
    target, drafter = map(random_weights, pair)
    rows = [
        row
        for one in track(grid, len(grid), "measure")
        for row in measure(target, drafter, *one, settings)
    ]
    path = settings.report_dir / "steps.json"
    shapes = {"target": asdict(target.config), "drafter": asdict(drafter.config)}
    write_report(path, {"rows": rows, **shapes}, settings, DEFINITIONS)
    title = (
        f"{settings.target.num_hidden_layers} layers of width {settings.target.hidden_size}, "
        f"vocabulary {settings.target.vocab_size}, random weights, {settings.dtype}; "
        f"{describe_device()}"
    )
    show(path, title, *_tables(rows), "The parts' sum may exceed the whole step.")


def measure(
    target: Target,
    drafter: LoadedHead,
    tree: TreeConfig,
    batch_size: int,
    slots: int,
    settings: StepsSettings,
) -> Iterator[dict[str, Any]]:
    """Time every part, the whole step and the baseline's step of one tree, batch and cache size.

    Yields a row of the report for each sampling.
    """
    # The largest number of tokens that leaves room for a run.
    cached = slots - slots_needed(settings.steps, tree.max_path)
    short: dict[Timing, int] = dict.fromkeys(("finish", "noise"), settings.short_turns)
    timed = time_parts(
        target,
        as_drafter(drafter),
        tree,
        settings.samplings,
        batch_size,
        slots,
        turns=dict.fromkeys(get_args(Timing), settings.steps) | short,
        cached=cached,
        repeats=settings.repeats,
    )
    first = timed[0]["step"]
    for sampling, own in zip(settings.samplings, timed, strict=True):
        yield {
            **asdict(tree),
            "batch_size": batch_size,
            "slots": slots,
            "sampling": describe_sampling(sampling),
            "cached": cached,
            "milliseconds": {part: quartiles(1000 * own[part]) for part in own},
            "in_baseline_steps": {part: quartiles(own[part] / own["baseline"]) for part in own},
            "over_first_sampling": quartiles(own["step"] / first),
        }


def _tables(rows: Sequence[dict[str, Any]]) -> Iterator[Table]:
    """One table per sampling, with a row per tree, batch size and cache size.

    The columns are the parts, the whole steps and their ratios.
    """
    # Omit sizes that are equal in all rows; they are in the JSON file.
    sizes = [size for size in SIZES if len({row[size] for row in rows}) > 1]
    samplings = list(dict.fromkeys(row["sampling"] for row in rows))
    ratios = {"/ baseline": lambda row: row["in_baseline_steps"]["step"]}
    if len(samplings) > 1:
        ratios["/ first"] = lambda row: row["over_first_sampling"]

    def cells(row: dict[str, Any]) -> Iterator[str]:
        yield from (str(row[size]) for size in sizes)
        for _, middle, _ in row["milliseconds"].values():
            yield format(middle, ".3f" if middle < 1 else ".4g")
        for low, middle, high in (ratio(row) for ratio in ratios.values()):
            yield f"{middle:.2f}\n{low:.2f}-{high:.2f}"

    for sampling in samplings:
        yield make_table(
            f"milliseconds, medians; {sampling}",
            [*(SIZES[size] for size in sizes), *rows[0]["milliseconds"], *ratios],
            [list(cells(row)) for row in rows if row["sampling"] == sampling],
            text_columns=0,
        )


def _check(
    settings: StepsSettings, grid: Sequence[tuple[TreeConfig, int, int]]
) -> tuple[Target, LoadedHead]:
    """Check the whole grid before anything is compiled, and return the pair as abstract shapes.

    Raises:
      InputError: a tree or the slots do not fit the target or the memory.
    """
    config, dtype = settings.target.build(), jnp.dtype(settings.dtype)
    drafter_config = settings.drafter_config(max(tree.draft_rounds for tree, _, _ in grid))
    limit = (jax.devices()[0].memory_stats() or {}).get("bytes_limit")
    target = abstract_target(config, dtype)
    drafter = abstract_drafter(drafter_config, dtype)
    for tree, batch_size, slots in grid:
        check_pair(config, drafter_config, tree)
        if slots > config.max_position_embeddings:
            raise InputError(
                f"slots is {slots}, but the target has {config.max_position_embeddings} "
                "positions; give fewer slots."
            )
        if slots <= slots_needed(settings.steps, tree.max_path):
            raise InputError(
                f"slots is {slots}, too few for {settings.steps} steps of up to "
                f"{tree.max_path} tokens; give more slots or fewer steps."
            )
        state = abstract_state(target, as_drafter(drafter), batch_size, slots)
        needed = bytes_of((target, drafter, state))
        if limit is not None and needed > limit:
            raise InputError(
                f"slots={slots} with batch size {batch_size} needs {needed / 1e9:.1f} GB for "
                f"weights and cache, but the device has {limit / 1e9:.1f} GB; lower slots or "
                "batch_sizes."
            )
    return target, drafter
