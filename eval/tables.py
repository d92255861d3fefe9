"""The tables of `python -m eval compare`, for the terminal and as Markdown, CSV and LaTeX."""

import csv
import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from rich.console import RenderableType

from redrafter_jax.config import TreeConfig
from redrafter_jax.verdict import describe_tree

from .report import make_table, number
from .summary import BASELINE

_ALL = "all prompts"
# Columns of the tables, by their names in `_cells`.
_SCREEN = (
    *("method", "tok/s", "speedup", "quartiles", "decode", "acceptance", "lookup", "identical"),
)
_RATES = "accepted at depth 1, 2, ...:"
_LONG = {"tok/s": "tokens/s", "decode": "decode only"}
_COUNTS = ("method", "acceptance", "lookup", "drafted", "calls", "identical")
_PAGE = (
    *("category", "method", "prompts", "speedup", "quartiles", "acceptance", "rate per depth"),
    *("by source", "drafted", "MB", "calls", "identical"),
)
_TIMES = (
    *("method", "tokens/s", "ms per token", "ms per call", "speedup, interval", "decode only"),
    "acceptance, interval",
)
_LATEX = {
    "tokens/s": "tokens/s",
    "ms/token": "ms per token",
    "speed-up": "speedup, interval",
    "decode only": "decode only",
    "acceptance": "acceptance, interval",
}
_CSV = (
    *("sampling", "category", "method", "prompts", "tokens_per_second", "milliseconds_per_token"),
    *("speedup", "speedup_low", "speedup_high"),
    *("speedup_decode_only", "acceptance_length", "acceptance_low", "acceptance_high"),
    *("target_calls", "identical"),
)
LEGEND = (
    "speedup: median ratio to the baseline in paired runs; decode, decode only: speedup without "
    "prefill. acceptance: tokens per target call; lookup, by source: accepted tokens per target "
    "call that this source proposed. rate per depth: share of drafts accepted, given an accepted "
    "parent. drafted: drafted tokens per step. MB: minimum read per step. calls: target calls. "
    "identical: texts equal to the baseline's. See docs/evaluation.md."
)
_PREFILL = (
    "Speeds are of the whole call, including prefill and the transfer to the host, without "
    'compilation; "decode only" leaves out prefill and the first token, which prefill decides. '
    "Brackets hold 95% intervals of a paired bootstrap over prompts."
)
_ESCAPES = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    # LaTeX's OT1 font encoding has other characters at these positions.
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    # LaTeX would read these characters after the `\\` of a row as its arguments.
    "[": "{[}",
    "*": "{*}",
} | {character: f"\\{character}" for character in "&%$#_{}"}


def screen(report: Mapping[str, Any]) -> Iterator[RenderableType]:
    """Yield the tables for the terminal.

    There is a table for each sampling over all prompts, and one by category if there are several
    categories. If nothing was timed, there is a single table, with a column of acceptance lengths
    for each sampling.
    """
    cases = report["samplings"]
    if not report["config"]["clock"]:
        columns = [case["described"] for case in cases]
        if len(cases) == 1:
            rows = [[cells[name] for name in _COUNTS] for cells in _cells(cases[0], None)]
            yield make_table(columns[0], _COUNTS, rows)
            return
        rows = []
        for name in cases[0]["methods"]:
            own = [case["methods"][name] for case in cases]
            lengths = [number(one["acceptance_length"], ".2f") for one in own]
            rows.append([name, *lengths, f"{min(one['identical'] for one in own):.0%}"])
        yield make_table("acceptance length", ["method", *columns, "identical"], rows)
        return
    for case in cases:
        methods = list(_cells(case, None))
        rows = [[cells[_LONG.get(name, name)] for name in _SCREEN] for cells in methods]
        yield make_table(case["described"], _SCREEN, rows)
        for cells in methods:
            rates = cells["rate per depth"] and f"; {_RATES} {cells['rate per depth']}"
            yield f"{cells['method']}: {cells['ms per call']} ms per target call{rates}"
        if len(case["categories"]) > 1:
            names = ("category", "method", "speedup", "quartiles", "acceptance", "identical")
            rows = [
                [cells[name] for name in names]
                for category in case["categories"]
                for cells in _cells(case, category)
                if cells["method"] != BASELINE
            ]
            yield make_table(f"{case['described']}, by category", names, rows, text_columns=2)


def page(report: Mapping[str, Any], title: str, notes: Mapping[str, Sequence[str]]) -> str:
    """Return a Markdown page with all tables and with the conditions of the measurement.

    Args:
      report: the report.
      title: first line of the page.
      notes: lines to print above the table of each sampling, by its description.
    """
    cases, config = report["samplings"], report["config"]
    lines = [title, ""]
    for case in cases:
        several = case["categories"] if len(case["categories"]) > 1 else ()
        cells = [one for category in (None, *several) for one in _cells(case, category)]
        lines += [f"## {case['described']}", "", *notes[case["described"]], ""]
        lines += [case["verdict"]["sentence"], ""]
        untimed = () if config["clock"] else ("speedup", "quartiles")
        lines += _markdown([name for name in _PAGE if name not in untimed], cells)
    lines += [LEGEND, ""]
    if config["clock"]:
        lines += ["## Times, and how far other prompts may differ", "", _PREFILL, ""]
        for case in cases:
            lines += [f"{case['described']}, {_ALL}:", "", *_markdown(_TIMES, _cells(case, None))]
    lines += ["## What was measured", ""]
    columns = ("sampling", "method", "drafter", "seed of its training", "tree")
    if all(case["ways"] == cases[0]["ways"] for case in cases):
        cases, columns = cases[:1], columns[1:]
    lines += _markdown(columns, (cells for case in cases for cells in _ways(report, case)))
    versions = ", ".join(f"{name} {text}" for name, text in report["versions"].items() if text)
    repeats = f"{config['repeats']} timed runs of each prompt" if config["clock"] else "no clock"
    lines += [
        f"Target {config['target']}; {config['dtype']}, batch {report['batch_size']}, up to "
        f"{config['max_new_tokens']} new tokens, {repeats}; {report['device']}; {versions}; "
        f"{report['timestamp']}.",
        "",
    ]
    return "\n".join(lines)


def _ways(report: Mapping[str, Any], case: Mapping[str, Any]) -> Iterator[dict[str, str]]:
    for name, way in case["ways"].items():
        if name == BASELINE:
            continue
        tree = None if way["tree"] is None else TreeConfig(**way["tree"])
        described = describe_tree(tree)
        if tree is not None and way["drafter"] is None:
            described = f"C={tree.lookup_tokens}"
        yield {
            "sampling": case["described"],
            "method": name,
            "drafter": way["drafter"] or "prompt lookup",
            "seed of its training": str(report["training_seeds"].get(way["drafter"], "-")),
            "tree": described,
        }


def _markdown(columns: Sequence[str], rows: Iterable[Mapping[str, str]]) -> list[str]:
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for row in rows:
        lines += [f"| {' | '.join(row[name].replace('|', '\\|') for name in columns)} |"]
    return [*lines, ""]


def _cells(case: Mapping[str, Any], category: str | None) -> Iterator[dict[str, str]]:
    """The cells of every method by column, over the prompts of a category; None for all prompts."""
    part = case if category is None else case["categories"][category]
    prompts = [row for row in case["prompts"] if category in (None, row["category"])]
    for name, measures in part["methods"].items():
        calls = max(measures["target_calls"], 1)
        quartiles, reached = measures["speedup_quartiles"], measures["calls_per_depth"]
        accepted, decoding = measures["accepted_by"], measures["decode_only"]
        rate = measures["tokens_per_second"]
        same = [row["methods"][name]["identical"] == 1 for row in prompts]
        intervals = {
            one: _interval(None if name == BASELINE else measures[f"{one}_interval"])
            for one in ("speedup", "acceptance")
        }
        speedup, length = (number(measures[one], ".2f") for one in ("speedup", "acceptance_length"))
        yield {
            "category": category or _ALL,
            "method": name,
            "prompts": str(len(prompts)),
            "tokens/s": number(rate, ".1f"),
            "ms per token": number(rate and 1000 / rate, ".2f"),
            "ms per call": number(decoding["milliseconds_per_target_call"], ".2f"),
            "speedup": speedup,
            "quartiles": "{:.2f} to {:.2f}".format(*quartiles) if quartiles else "-",
            "speedup, interval": speedup + intervals["speedup"],
            "decode only": number(decoding["speedup"], ".2f"),
            "acceptance": length,
            "acceptance, interval": length + intervals["acceptance"],
            "rate per depth": ", ".join(
                f"{number(rate, '.2f')} ({reached[depth]} of {reached[depth - 1]})"
                for depth, rate in enumerate(measures["acceptance_rate_per_depth"], start=1)
                if reached[depth - 1]
            ),
            "by source": ", ".join(
                f"{source} {count / calls:.2f}" for source, count in accepted.items()
            ),
            "lookup": number(accepted["lookup"] / calls if "lookup" in accepted else None, ".2f"),
            "drafted": str(measures["drafted_per_step"]),
            "MB": f"{measures['bytes_per_step'] / 1e6:.4g}",
            "calls": str(measures["target_calls"]),
            "identical": f"{sum(same)} of {len(same)}",
        }


def _interval(ends: Sequence[float] | None) -> str:
    return "" if ends is None else f" [{ends[0]:.2f}, {ends[1]:.2f}]"


def as_csv(report: Mapping[str, Any]) -> str:
    """Return a CSV text with a row per sampling, category and method.

    The category is "" for all prompts, and a cell is "" if its value is unknown.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(_CSV)
    for case in report["samplings"]:
        for category, part in {"": case, **case["categories"]}.items():
            count = part["prompts"] if category else len(part["prompts"])
            for name, one in part["methods"].items():
                rate = one["tokens_per_second"]
                writer.writerow(
                    [
                        *(case["described"], category, name, count, rate, rate and 1000 / rate),
                        *(one["speedup"], *(one["speedup_interval"] or (None, None))),
                        *(one["decode_only"]["speedup"], one["acceptance_length"]),
                        *(one["acceptance_interval"] or (None, None)),
                        *(one["target_calls"], one["identical"]),
                    ]
                )
    return text.getvalue()


def as_latex(report: Mapping[str, Any]) -> str:
    """Return a LaTeX `tabular` of the measures over all prompts; it needs the package booktabs."""
    lines = [
        r"% \usepackage{booktabs}",
        rf"\begin{{tabular}}{{l{'r' * len(_LATEX)}}}",
        r"\toprule",
        " & ".join(["", *_LATEX]) + r" \\",
    ]
    for case in report["samplings"]:
        described = escape_latex(case["described"])
        lines += [r"\midrule", rf"\multicolumn{{{1 + len(_LATEX)}}}{{l}}{{{described}}} \\"]
        for cells in _cells(case, None):
            row = [escape_latex(cells["method"]), *(cells[name] for name in _LATEX.values())]
            lines += [" & ".join(row) + r" \\"]
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", ""])


def escape_latex(text: str) -> str:
    """Escape the special characters of LaTeX."""
    return "".join(_ESCAPES.get(character, character) for character in text)
