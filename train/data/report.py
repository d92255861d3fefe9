"""A report on the sources of training data: a table for the terminal, and a JSON file."""

import json
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from .documents import SourceDocuments
from .rows import Rows, Sources
from .types import count_reasons, count_unread, describe_skips, describe_unread

# Warn below this share of tokens that carry loss.
_LITTLE = 0.1
# The notes that are printed if a count of a source is not zero.
_NOTES = {
    "answers_not_learnt": "answers that carry no loss, because a token spans their boundary",
    "cut": "records longer than a row, cut into pieces",
    "unused_pieces": "pieces without a token that carries loss, left out",
}


def print_report(loaded: Sources, console: Console) -> None:
    """Print a row of counts for every source, then notes on skipped, cut and unused data."""
    table, notes = Table(), []
    for column in ("source", "records", "skipped", "tokens", "carry loss", "rows", "weight"):
        table.add_column(column, justify="left" if column == "source" else "right", overflow="fold")
    total = learnt = 0
    for source, rows in loaded:
        counts = _counts(source, rows)
        total += counts["tokens"]
        learnt += counts["learnt"]
        shown = [f"{counts[name]:,}" for name in ("records", "skipped", "tokens", "learnt", "rows")]
        table.add_row(Text(source.name.removeprefix("data.sources.")), *shown, f"{source.weight:g}")
        if source.skips:
            notes.append(f"{source.name}: skipped {describe_skips(source.skips)}")
        if unread := describe_unread(source.documents):
            notes.append(f"{source.name}: unused fields, with the number of records: {unread}")
        for name, note in _NOTES.items():
            if counts[name]:
                notes.append(f"{source.name}: {note}: {counts[name]}")
    if learnt < _LITTLE * total:
        notes.append(
            f"warning: {learnt:,} of {total:,} tokens ({learnt / total:.1%}) carry loss, and a "
            "drafter learns only from these; use data with more or longer answers."
        )
    console.print(table)
    for note in notes:
        print_line(console, note)


def describe_passes(loaded: Sources, steps: int, rows: int) -> str:
    """Say how many times `steps` steps of `rows` rows each read every source."""
    total = sum(source.weight for source, _ in loaded)
    times = ", ".join(
        f"{source.name if len(loaded) > 1 else 'the data'} "
        f"{steps * rows * source.weight / total / len(made.windows.tokens):.3g} times"
        for source, made in loaded
    )
    return f"{steps} steps of {rows} rows read {times}"


def write_report(loaded: Sources, path: Path) -> None:
    """Write the counts of every source, and every skipped record, as JSON."""
    report = [
        {
            "source": source.name,
            "weight": source.weight,
            **_counts(source, rows),
            "unread_fields": count_unread(source.documents),
            "skips_by_reason": count_reasons(source.skips),
            "skips": [skip._asdict() for skip in source.skips],
        }
        for source, rows in loaded
    ]
    path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def _counts(source: SourceDocuments, rows: Rows) -> dict[str, int]:
    return {
        "records": len(source.documents) + len(source.skips),
        "skipped": len(source.skips),
        "tokens": sum(len(document.tokens) for document in source.documents),
        "learnt": sum(int(document.loss_mask.sum()) for document in source.documents),
        "rows": len(rows.windows.tokens),
        "answers_not_learnt": sum(document.left_out for document in source.documents),
        "cut": rows.cut,
        "unused_pieces": rows.unused,
    }


def print_line(console: Console, line: str) -> None:
    """Print a line verbatim, unwrapped and without rich markup, which file names may contain."""
    console.print(line, markup=False, highlight=False, soft_wrap=True)
