"""Results of `python -m eval tune`: the chosen tree, the table and the verdicts."""

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from rich.table import Table

from redrafter_jax.config import TreeConfig
from redrafter_jax.verdict import MeasuredWay, Texts, judge

from .report import make_table
from .trees import tree_columns


class Candidate(NamedTuple):
    """Measurements of a tree at one batch size and sampling.

    `eval.tune.DEFINITIONS` defines the fields.
    """

    tree: TreeConfig
    acceptance_length: float
    cost: float
    predicted: float
    turns: int
    faster: int
    measured: tuple[float, float, float]
    accepted_by: Mapping[str, int]


def choose(finalists: Sequence[Candidate]) -> Candidate | None:
    """Choose the finalist with the largest median speed-up; None chooses the baseline.

    Only trees whose lower quartile is above 1 are considered. A tree without accepted tokens is
    never chosen, because its speed-up is noise.
    """
    faster = [one for one in finalists if one.measured[0] > 1 and any(one.accepted_by.values())]
    return max(faster, key=lambda one: one.measured[1], default=None)


def verdict(finalists: Sequence[Candidate], best: Candidate | None, texts: Texts) -> str:
    """Return a sentence on the chosen tree, or on the finalists if the baseline was chosen.

    Args:
      finalists: measurements of the finalists.
      best: the chosen finalist; None for the baseline.
      texts: counts of the baseline's texts.
    """
    judged = finalists if best is None else [best]
    ways = [
        MeasuredWay(
            "head and lookup" if one.tree.lookup_tokens else "head",
            one.tree,
            True,
            one.measured,
            one.accepted_by,
            one.turns,
            one.faster,
        )
        for one in judged
    ]
    found = judge(ways, texts)
    if found.kind == "too little data":
        kept = "no tree" if best is None else "the tree that was fastest on these prompts"
        return found.then(
            f"the table has {kept}; tune again with more prompts, other prompts or more minutes"
        )
    if best is None:
        return found.then("the table says to decode without the head")
    if found.kind == "no difference":
        return found.then(
            "the table nevertheless has this tree; tune again with more prompts or minutes"
        )
    if found.way.is_heads_own:
        return found.then("the table has this tree")
    tokens = best.tree.lookup_tokens
    return found.then(
        f"the table has this tree, but it needs no head: --no-drafter --lookup-tokens {tokens}"
    )


def table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Make a table for the terminal: a row for each finalist, and a mark at the chosen one."""
    sizes = tree_columns(rows)
    numbers = {"acceptance_length": "length", "cost": "step"}
    cells = []
    measured = [row for row in rows if row["finalist"]]
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
