"""The tables of `python -m eval compare`, for a screen and for a page."""

from collections.abc import Iterator, Mapping
from typing import Any

from rich.table import Table

from . import speed
from .metrics import answer_lines, lookup_lines
from .report import make_table, number

_ALL = "all prompts"
# On the page, and those of them that fit on a screen: over all prompts, and by category.
_COLUMNS = (
    *("category", "method", "prompts", "speedup", "quartiles", "acceptance"),
    *("rate per depth", "lookup", "drafted", "MB", "calls", "identical"),
)
_SCREEN = ("method", "speedup", "quartiles", "acceptance", "lookup", "MB", "identical")
_BY_CATEGORY = ("category", "method", "speedup", "quartiles", "acceptance", "identical")
LEGEND = (
    "speedup: median of the pairs with the baseline. acceptance: tokens per target call; lookup: "
    "those of them that prompt lookup proposed. rate per depth: drafts accepted of those whose "
    "parent was. drafted: tokens per step. MB: least that a step reads. calls: of the target. "
    "identical: texts that are the baseline's."
)


def markdown(report: Mapping[str, Any], title: str) -> str:
    """A page with the tables of all samplings."""
    lines = [title, ""]
    for case in report["samplings"]:
        lines += [f"## {case['described']}", "", *_notes(case), ""]
        lines += [f"| {' | '.join(_COLUMNS)} |", "|---" * len(_COLUMNS) + "|"]
        for row in _rows(case):
            cells = [row[name].replace("|", "\\|") for name in _COLUMNS]
            lines += [f"| {' | '.join(cells)} |"]
        lines += [""]
    return "\n".join([*lines, LEGEND, ""])


def _notes(case: Mapping[str, Any]) -> Iterator[str]:
    verdict = case["verdict"]
    yield from (*answer_lines(case["answers"]), *lookup_lines(verdict), "", verdict["sentence"])


def tables(case: Mapping[str, Any]) -> Iterator[Table]:
    """What fits on a screen: over all prompts, then by category where there are several."""
    rows = list(_rows(case))
    whole = [[row[name] for name in _SCREEN] for row in rows if row["category"] == _ALL]
    yield make_table(case["described"], _SCREEN, whole)
    others = [
        [row[name] for name in _BY_CATEGORY]
        for row in rows
        if row["category"] != _ALL and row["method"] != speed.BASELINE
    ]
    if others:
        yield make_table(f"{case['described']}, by category", _BY_CATEGORY, others, text_columns=2)


def prompts_of(case: Mapping[str, Any], category: str | None) -> list[dict[str, Any]]:
    """The prompts of one category; None is all."""
    return [row for row in case["prompts"] if category in (None, row["category"])]


def _rows(case: Mapping[str, Any]) -> Iterator[dict[str, str]]:
    """A sampling's table by column: all prompts, then each category where there are several."""
    parts: list[tuple[str | None, Any]] = [(None, case)]
    if len(case["categories"]) > 1:
        parts += case["categories"].items()
    for category, part in parts:
        prompts = prompts_of(case, category)
        for name, measures in part["methods"].items():
            calls = max(measures["target_calls"], 1)
            ends, reached = measures["speedup_quartiles"], measures["calls_per_depth"]
            looked_up = measures["accepted_by"].get("lookup")
            same = sum(row["methods"][name]["identical"] == 1 for row in prompts)
            yield {
                "category": category or _ALL,
                "method": name,
                "prompts": str(len(prompts)),
                "speedup": number(measures["speedup"], ".2f"),
                "quartiles": "-" if ends is None else f"{ends[0]:.2f} to {ends[1]:.2f}",
                "acceptance": number(measures["acceptance_length"], ".2f"),
                "rate per depth": ", ".join(
                    f"{number(rate, '.2f')} ({reached[depth]} of {reached[depth - 1]})"
                    for depth, rate in enumerate(measures["acceptance_rate_per_depth"], start=1)
                ),
                "lookup": number(None if looked_up is None else looked_up / calls, ".2f"),
                "drafted": str(measures["drafted_per_step"]),
                "MB": f"{measures['bytes_per_step'] / 1e6:.4g}",
                "calls": str(measures["target_calls"]),
                "identical": f"{same} of {len(prompts)}",
            }
