"""`python -m eval acceptance`: acceptance length over samplings, node budgets and sharpness.

No clock runs here: rows are decoded together, and the numbers are counts.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console

from redrafter_jax.acceptance import acceptance_length, acceptance_rate_per_depth
from redrafter_jax.config import DraftConfig, SamplingConfig
from redrafter_jax.drafters.recurrent_head import DraftModel
from redrafter_jax.generation import collect
from redrafter_jax.models.target import Target
from redrafter_jax.parallel.processes import is_first
from redrafter_jax.settings.arguments import parse_settings

from .benchmark import Batch, Method, begin, decode_batch, make_batches
from .config import AcceptanceSettings
from .loading import load
from .plots import write_acceptance_chart
from .progress import make_progress
from .rankings import RANKINGS, Ranking, decode_ranked, shown_to_drafts
from .report import describe_run, write_report
from .table import describe_sampling, render_acceptance

DEFINITIONS = {
    "acceptance_length": "mean tokens gained per target call after prefill, bonus token included",
    "lookup_tokens": "nodes of num_nodes that copy what followed earlier in the text, which is no "
    "gain of the drafter's",
    "copied_tokens": "accepted tokens of those nodes; what the beams had as well is the drafter's",
    "share_of_greedy": "acceptance length over that of the same tree, sharpness and ranking at "
    "temperature 0; null where the grid has no temperature 0",
    "identical": "share of prompts whose text equals plain decoding's, token for token",
    "rankings": RANKINGS,
}


class Cell(NamedTuple):
    """One point of the grid."""

    sampling: SamplingConfig
    draft: DraftConfig
    ranking: Ranking


def measure_acceptance(arguments: Sequence[str] | None = None) -> None:
    """Decode the prompts at every point of the grid; a table, a JSON file and a chart.

    Args:
      arguments: of the command line; None takes the process's own.

    Raises:
      InputError: a setting, a file or a prompt cannot be used.
    """
    settings = parse_settings(
        AcceptanceSettings,
        "Acceptance length over samplings and trees.",
        arguments,
        processes=True,
        command="acceptance",
    )
    drafts = settings.trees.build()
    target, drafter, prompts, token_rows = load(
        settings, drafts, settings.mesh.build(), settings.batch_size
    )

    # Drafts outermost: each is compiled once.
    cells = [
        Cell(sampling, draft, ranking)
        for draft in drafts
        for ranking in settings.rankings
        for sampling in settings.samplings
    ]
    console = Console(quiet=not is_first())
    with make_progress(console) as progress:
        measured = _measure(settings, target, drafter, token_rows, cells)
        rows = list(progress.track(measured, total=len(cells), description="decode"))
    if not is_first():
        return
    _add_shares(rows)
    report = {
        "rows": rows,
        "prompts": len(prompts),
        **describe_run(),
        "config": settings.model_dump(mode="json"),
        "definitions": DEFINITIONS,
    }
    path = settings.report_dir / "acceptance.json"
    write_report(report, path)
    write_acceptance_chart(rows, path.with_suffix(".png"))
    console.print(render_acceptance(rows))
    print(f"The report: {path}, the chart: {path.with_suffix('.png')}")


def _measure(
    settings: AcceptanceSettings,
    target: Target,
    drafter: DraftModel,
    token_rows: Sequence[list[int]],
    cells: Sequence[Cell],
) -> Iterator[dict[str, Any]]:
    plain: dict[SamplingConfig, list[list[int]]] = {}
    for cell in cells:
        batches = make_batches(
            token_rows,
            settings.batch_size or len(token_rows),
            settings.first_seed,
            settings.max_new_tokens,
            cell.sampling,
            settings.eos_token_ids,
        )
        if cell.sampling not in plain:
            method = Method(target, None, None)
            plain[cell.sampling] = [
                row for batch in batches for row in decode_batch(method, batch).tokens
            ]
        yield _decode_cell(target, drafter, batches, cell, plain[cell.sampling])


def _decode_cell(
    target: Target,
    drafter: DraftModel,
    batches: Sequence[Batch],
    cell: Cell,
    expected: Sequence[list[int]],
) -> dict[str, Any]:
    sampling, draft, ranking = cell
    tokens, calls, copied = [], 0, 0
    counts = np.zeros(draft.max_path, int)
    for batch in batches:
        state, slots = begin(Method(target, drafter, draft), batch)
        shown = shown_to_drafts(ranking, state.sampling, draft)
        state = decode_ranked(target, drafter, state, shown, slots, draft=draft)
        result = collect(state, batch.prompts)
        tokens += result.tokens
        counts += result.accept_counts.sum(axis=0)
        calls += sum(result.steps)
        copied += sum(result.copied_tokens)
    same = sum(ours == theirs for ours, theirs in zip(tokens, expected, strict=True))
    return {
        "sampling": describe_sampling(sampling),
        "temperature": sampling.temperature,
        "num_nodes": draft.budget,
        "lookup_tokens": draft.lookup_tokens,
        "sharpness": draft.sharpness,
        "ranking": ranking,
        "acceptance_length": acceptance_length(counts),
        "acceptance_rate_per_depth": [
            None if np.isnan(rate) else float(rate) for rate in acceptance_rate_per_depth(counts)
        ],
        "accept_counts": counts.tolist(),
        "copied_tokens": copied,
        "target_calls": calls,
        "identical": same / len(tokens),
    }


def _add_shares(rows: Sequence[dict[str, Any]]) -> None:
    """The share of the greedy acceptance length, where the grid has it."""

    def tree_of(row: dict[str, Any]) -> tuple[Any, ...]:
        return row["num_nodes"], row["lookup_tokens"], row["sharpness"], row["ranking"]

    greedy = {tree_of(row): row["acceptance_length"] for row in rows if row["sampling"] == "greedy"}
    for row in rows:
        whole = greedy.get(tree_of(row))
        row["share_of_greedy"] = row["acceptance_length"] / whole if whole else None
