"""`python -m eval acceptance`: acceptance length over samplings, node budgets and sharpness.

No clock runs here: rows are decoded together, and the numbers are counts.
"""

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from redrafter_jax.config import DraftConfig, SamplingConfig
from redrafter_jax.drafters.base import RootOnly
from redrafter_jax.drafters.bind import bind_drafter
from redrafter_jax.drafters.recurrent_head import DraftModel
from redrafter_jax.models.target import Target
from redrafter_jax.parallel.processes import is_first

from .benchmark import Method, Run, decode_batch, make_batches, sum_accepted
from .config import AcceptanceSettings
from .loading import load
from .metrics import count_accepted
from .plots import write_acceptance_chart
from .progress import track
from .rankings import RANKINGS, Ranking, rank
from .report import write_report
from .table import describe_sampling, render_acceptance, show

DEFINITIONS = {
    "acceptance_length": "mean tokens gained per target call after prefill, bonus token included",
    "calls_per_depth": "entry d: target calls that accepted a draft at depth d, entry 0 all of "
    "them; the rate at depth d is entry d / entry d - 1",
    "lookup_tokens": "nodes of num_nodes that prompt lookup proposes",
    "accepted_by": "accepted tokens by the source that proposed them; a token that several "
    "proposed counts for the first",
    "share_of_greedy": "acceptance length over that of the same tree, sharpness and ranking at "
    "temperature 0; null where the grid has no temperature 0",
    "identical": "share of prompts whose text equals the baseline's, token for token",
    "rankings": RANKINGS,
}


class Cell(NamedTuple):
    """One point of the grid."""

    draft: DraftConfig
    ranking: Ranking
    sampling: SamplingConfig


def measure_acceptance(settings: AcceptanceSettings) -> None:
    """Decode the prompts at every point of the grid; a table, a JSON file and a chart.

    Raises:
      InputError: a file or a prompt cannot be used.
    """
    drafts = settings.trees.build()
    target, drafter, prompts, token_rows = load(settings, drafts)
    # Drafts outermost: each is compiled once.
    cells = [Cell(*cell) for cell in product(drafts, settings.rankings, settings.samplings)]
    measured = _measure(settings, target, drafter, token_rows, cells)
    rows = list(track(measured, len(cells), "decode"))
    if not is_first():
        return
    _add_shares(rows)
    path = settings.report_dir / "acceptance.json"
    write_report(path, {"rows": rows, "prompts": len(prompts)}, settings, DEFINITIONS)
    write_acceptance_chart(rows, path.with_suffix(".png"))
    show(path, render_acceptance(rows), chart=True)


def _measure(
    settings: AcceptanceSettings,
    target: Target,
    drafter: DraftModel,
    token_rows: Sequence[list[int]],
    cells: Sequence[Cell],
) -> Iterator[dict[str, Any]]:
    expected: dict[SamplingConfig, list[list[int]]] = {}
    for cell in cells:
        batch_size = settings.batch_size or len(token_rows)
        batches = make_batches(token_rows, batch_size, cell.sampling, settings)
        if cell.sampling not in expected:
            baseline = [decode_batch(Method(target, RootOnly()), batch) for batch in batches]
            expected[cell.sampling] = [row for run in baseline for row in run.tokens]
        bound = bind_drafter(drafter, cell.draft)
        method = Method(target, rank(bound, cell.ranking, cell.draft))
        runs = [decode_batch(method, batch) for batch in batches]
        yield _row(cell, runs, expected[cell.sampling])


def _row(cell: Cell, runs: Sequence[Run], expected: Sequence[list[int]]) -> dict[str, Any]:
    tokens = [row for run in runs for row in run.tokens]
    return {
        "sampling": describe_sampling(cell.sampling),
        "temperature": cell.sampling.temperature,
        "num_nodes": cell.draft.budget,
        "lookup_tokens": cell.draft.lookup_tokens,
        "sharpness": cell.draft.sharpness,
        "ranking": cell.ranking,
        **count_accepted(np.concatenate([run.accept_counts for run in runs])),
        "accepted_by": sum_accepted(runs),
        "target_calls": sum(sum(run.steps) for run in runs),
        "identical": float(np.mean([a == b for a, b in zip(tokens, expected, strict=True)])),
    }


def _add_shares(rows: Sequence[dict[str, Any]]) -> None:
    """The share of the greedy acceptance length, where the grid has it."""

    def tree_of(row: dict[str, Any]) -> tuple[Any, ...]:
        return row["num_nodes"], row["lookup_tokens"], row["sharpness"], row["ranking"]

    greedy = {tree_of(row): row["acceptance_length"] for row in rows if row["sampling"] == "greedy"}
    for row in rows:
        whole = greedy.get(tree_of(row))
        row["share_of_greedy"] = row["acceptance_length"] / whole if whole else None
