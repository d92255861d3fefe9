"""`python -m eval acceptance`: acceptance length over samplings, node budgets and sharpness.

No clock runs here: rows are decoded together, and the numbers are counts.
"""

from collections.abc import Sequence
from dataclasses import asdict
from itertools import product
from typing import Any, NamedTuple

import numpy as np
from rich.table import Table

from redrafter_jax.config import SamplingConfig, TreeConfig
from redrafter_jax.drafters.base import Drafter, RootOnly
from redrafter_jax.drafters.bind import bind_drafter
from redrafter_jax.files.drafter_files import load_drafter
from redrafter_jax.parallel.processes import is_first
from redrafter_jax.progress import track

from . import metrics
from .benchmark import Method, Run, decode_batch, make_batches
from .config import AcceptanceSettings
from .loading import load
from .metrics import answer_lines, count_accepted, describe_answers
from .rankings import RANKINGS, Ranking, with_ranking
from .report import describe_sampling, make_table, show, tree_columns, write_report

DEFINITIONS = metrics.DEFINITIONS | {
    "lookup_tokens": "nodes of num_nodes that prompt lookup proposes",
    "share_of_greedy": "acceptance length over that of the same tree and ranking at temperature 0; "
    "null where the grid has no temperature 0",
    "rankings": RANKINGS,
}


class Cell(NamedTuple):
    """One point of the grid."""

    tree: TreeConfig
    ranking: Ranking
    sampling: SamplingConfig


def measure_acceptance(settings: AcceptanceSettings) -> None:
    """Decode the prompts at every point of the grid; a table and a JSON file.

    Raises:
      InputError: a file or a prompt cannot be used.
    """
    drafts = settings.trees.build()
    target, ask = load(settings, drafts, settings.batch_size)
    drafter = load_drafter(settings.drafter, settings.dtype, target.mesh)
    asked = {sampling: ask(sampling) for sampling in settings.samplings}
    batches = {
        sampling: make_batches(own, settings.batch_size, sampling, settings)
        for sampling, own in asked.items()
    }

    def decode(drafter: Drafter, sampling: SamplingConfig) -> list[Run]:
        method = Method(target, drafter)
        return [decode_batch(method, batch) for batch in batches[sampling]]

    expected = {
        sampling: _texts(decode(RootOnly(), sampling))
        for sampling in track(settings.samplings, len(settings.samplings), "decode the baseline")
    }
    # Drafts outermost: each is compiled once.
    cells = [Cell(*cell) for cell in product(drafts, settings.rankings, settings.samplings)]
    measures: dict[Cell, dict[str, Any]] = {}
    for cell in track(cells, len(cells), "decode"):
        bound = bind_drafter(drafter, cell.tree)
        runs = decode(with_ranking(bound, cell.ranking, cell.tree), cell.sampling)
        same = [a == b for a, b in zip(_texts(runs), expected[cell.sampling], strict=True)]
        measures[cell] = {**count_accepted(runs), "identical": float(np.mean(same))}
    if not is_first():
        return
    rows = [_row(cell, measures) for cell in cells]
    path = settings.report_dir / "acceptance.json"
    answers = {
        describe_sampling(sampling): describe_answers(asked[sampling], texts)
        for sampling, texts in expected.items()
    }
    prompts = len(asked[settings.samplings[0]].prompts)
    report = {"rows": rows, "prompts": prompts, "answers": answers}
    write_report(path, report, settings, DEFINITIONS)
    lines = (f"{name}: {line}" for name, one in answers.items() for line in answer_lines(one))
    show(path, *lines, _table(rows))


def _texts(runs: Sequence[Run]) -> list[list[int]]:
    """New tokens of every prompt."""
    return [row for run in runs for row in run.tokens]


def _row(cell: Cell, measures: dict[Cell, dict[str, Any]]) -> dict[str, Any]:
    """The report's row of one point of the grid."""
    length = measures[cell]["acceptance_length"]
    greedy = measures.get(cell._replace(sampling=SamplingConfig()))
    return {
        **asdict(cell.tree),
        "ranking": cell.ranking,
        "sampling": describe_sampling(cell.sampling),
        "temperature": cell.sampling.temperature,
        **measures[cell],
        "share_of_greedy": greedy and length / greedy["acceptance_length"],
    }


def _table(rows: Sequence[dict[str, Any]]) -> Table:
    """A row per tree and ranking, a column per sampling."""
    samplings = list(dict.fromkeys(row["sampling"] for row in rows))
    tree, lines = tree_columns(rows), dict[tuple[Any, ...], list[dict[str, Any]]]()
    for row in rows:
        lines.setdefault((row["ranking"], *(row[name] for name in tree)), []).append(row)

    def cell(row: dict[str, Any]) -> str:
        share = row["share_of_greedy"]
        below = "" if share is None or row["temperature"] == 0 else f"\n{share:.2f}"
        return f"{row['acceptance_length']:.2f}{below}"

    return make_table(
        "acceptance length; below it, the share of greedy",
        ["ranking", *tree.values(), *samplings, "same"],
        [
            [
                *(f"{part:g}" if isinstance(part, float) else str(part) for part in parts),
                *map(cell, own),
                f"{min(row['identical'] for row in own):.0%}",
            ]
            for parts, own in lines.items()
        ],
    )
