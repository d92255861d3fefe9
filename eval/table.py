"""The reports on screen."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from redrafter_jax.config import SamplingConfig

# Of a report of `eval steps`: what tells its rows apart, and how columns call it.
STEP_SIZES = {
    "beam_width": "W",
    "draft_rounds": "R",
    "num_nodes": "N",
    "lookup_tokens": "C",
    "batch_size": "B",
    "slots": "S",
}
LEGEND = {
    "ratio": "Of speeds, the median of the pairs. Below 1 where a call over the tree, its draft "
    "included, costs more baseline calls than the tokens it gains: a small target on a CPU, say.",
    "acceptance length": "Tokens per target call, 1.00 for the baseline. Published ReDrafter "
    "heads for 7B chat models reach 2.2 with one beam and about 4 with wide ones. Near 1 after a "
    "training that went well: the drafter belongs to another target, or prompts are tokenised or "
    "templated otherwise than in training. Prompt lookup gains where the text repeats itself, "
    "whatever the drafter: draft.lookup_tokens=0 measures the drafter alone.",
    "acceptance rate": "Of drafts whose parent was accepted. Flat or slowly falling is normal; "
    "a steep fall after depth 1 means that later rounds are poorly trained. With prompt lookup it "
    "may rise with the depth: deep nodes are looked up, and a text that repeats itself goes on so.",
    "identical texts": "All of them in float32; in bfloat16 a near tie may fall either way.",
}


def show(path: Path, *parts: RenderableType, chart: bool = False) -> None:
    """Print what was measured, then where its files are."""
    console = Console()
    for part in parts:
        console.print(part, markup=False, highlight=False)
    print(f"The report: {path}" + (f", the chart: {path.with_suffix('.png')}" if chart else ""))


def render_report(report: dict[str, Any]) -> RenderableType:
    """Setting, measures side by side, categories if there are any, and how to read them."""
    parts: list[RenderableType] = [Text(describe_setting(report)), _measures(report)]
    if len(report["categories"]) > 1:
        parts.append(_categories(report["categories"]))
    parts.append(_legend(LEGEND))
    return Group(*parts)


def render_parity(report: dict[str, Any]) -> RenderableType:
    """For each dtype one line per case; then the verdict."""
    config = report["config"]
    heading = f"{config['target']} with {config['drafter']}\n{report['device']}"
    parts: list[RenderableType] = [Text(heading)]
    for dtype in config["dtypes"]:
        table = Table(title=dtype, title_justify="left")
        table.add_column("case", no_wrap=True)
        for column in ("tokens", "identical", "ties", "largest gap", "acceptance length"):
            table.add_column(column, justify="right")
        for case in report["cases"]:
            if case["dtype"] != dtype:
                continue
            parted = len(case["divergences"])
            table.add_row(
                case["case"],
                str(case["new_tokens"]),
                f"{case['rows'] - parted} of {case['rows']}",
                f"{case['ties']} of {parted}" if parted else "-",
                _number(case["largest_gap"], ".2g"),
                _number(case["acceptance_length"], ".2f"),
            )
        parts.append(table)
    return Group(*parts, Text(report["verdict"]))


def render_acceptance(rows: Sequence[dict[str, Any]]) -> Table:
    """A row per tree and ranking, a column per sampling."""
    columns = list(dict.fromkeys(row["sampling"] for row in rows))
    table = Table(title="acceptance length; below it, the share of greedy")
    for name in ("ranking", "N", "C", "sharp", *columns, "same"):
        table.add_column(name, justify="left" if name == "ranking" else "right")
    lines: dict[tuple[Any, ...], dict[str, dict[str, Any]]] = {}
    for row in rows:
        line = (row["ranking"], row["num_nodes"], row["lookup_tokens"], row["sharpness"])
        lines.setdefault(line, {})[row["sampling"]] = row
    for (ranking, nodes, lookup_tokens, sharpness), cells in lines.items():
        texts = []
        for name in columns:
            share = cells[name]["share_of_greedy"]
            below = "" if share is None or name == "greedy" else f"\n{share:.2f}"
            texts.append(f"{cells[name]['acceptance_length']:.2f}{below}")
        identical = min(cell["identical"] for cell in cells.values())
        sizes = (str(nodes), str(lookup_tokens), f"{sharpness:g}")
        table.add_row(ranking, *sizes, *texts, f"{identical:.0%}")
    return table


def render_steps(rows: Sequence[dict[str, Any]]) -> Group:
    """For each sampling a row per tree, batch and cache: parts, both whole steps, their ratio."""
    # A size that is the same throughout is left to the JSON file.
    sizes = {
        size: name for size, name in STEP_SIZES.items() if len({row[size] for row in rows}) > 1
    }
    samplings = dict.fromkeys(row["sampling"] for row in rows)
    ratios = ["/ baseline", "/ first"] if len(samplings) > 1 else ["/ baseline"]
    parts = list(rows[0]["milliseconds"])
    tables = []
    for sampling in samplings:
        # Without edges it is narrow enough for 80 columns.
        table = Table(
            title=f"milliseconds, medians; {sampling}",
            box=SIMPLE_HEAD,
            padding=(0, 1, 0, 0),
            show_edge=False,
            pad_edge=False,
        )
        for column in (*sizes.values(), *parts, *ratios):
            table.add_column(column, justify="right", no_wrap=True)
        for row in rows:
            if row["sampling"] != sampling:
                continue
            medians = [row["milliseconds"][part][1] for part in parts]
            times = [format(middle, ".3f" if middle < 1 else ".4g") for middle in medians]
            spreads = (row["in_baseline_steps"]["step"], row["over_first_sampling"])
            shown = [f"{spread[1]:.2f}\n{spread[0]:.2f}-{spread[2]:.2f}" for spread in spreads]
            cells = (*(str(row[size]) for size in sizes), *times, *shown[: len(ratios)])
            table.add_row(*cells)
        tables.append(table)
    return Group(*tables)


def render_drafters(rows: Sequence[dict[str, Any]]) -> Table:
    """A row per tree and drafter: weights, what a step reads of them, and the time of drafting."""
    table = Table(title="drafting, per step", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in ("W", "R", "drafter", "weights, MB", "read, MB", "ms", "of the first's time"):
        table.add_column(column, justify="left" if column == "drafter" else "right", no_wrap=True)
    for row in rows:
        low, middle, high = row["relative"]
        table.add_row(
            str(row["beam_width"]),
            str(row["draft_rounds"]),
            row["drafter"],
            f"{row['weight_bytes'] / 1e6:.2f}",
            f"{row['bytes_per_step'] / 1e6:.2f}",
            f"{row['milliseconds'][1]:.3g}",
            f"{middle:.2f} ({low:.2f} to {high:.2f})",
        )
    return table


def describe_setting(report: dict[str, Any]) -> str:
    """Models, tree, sampling and device in three lines."""
    config = report["config"]
    draft, sampling = config["draft"], config["sampling"]
    tree = (
        f"W={draft['beam_width']} R={draft['draft_rounds']} N={report['num_nodes']}"
        f"{f' lookup {draft["lookup_tokens"]}' if draft['lookup_tokens'] else ''}"
        f"{' final beams only' if draft['final_beams_only'] else ''}"
        f" sharpness {draft['sharpness']:g}"
        f"{f' candidates {draft["candidates"]}' if draft['candidates'] else ''}"
    )
    chosen = ", ".join(f"{key} {value:g}" for key, value in sampling.items() if value is not None)
    return (
        f"{config['target']} with {config['drafter']}\n"
        f"{tree}; {chosen}; {config['dtype']}, batch {config['batch_size']}\n"
        f"{len(report['prompts'])} prompts, up to {config['max_new_tokens']} new tokens; "
        f"{report['device']}"
    )


def describe_sampling(sampling: SamplingConfig) -> str:
    """Temperature and filters in a few words."""
    if sampling.temperature == 0:
        return "greedy"
    filters = {"top_k": sampling.top_k, "top_p": sampling.top_p, "min_p": sampling.min_p}
    given = [f"{name} {value:g}" for name, value in filters.items() if value is not None]
    return ", ".join([f"T {sampling.temperature:g}", *given])


def _measures(report: dict[str, Any]) -> Table:
    table = Table()
    table.add_column("")
    for column in ("baseline", "speculative", "ratio [quartiles]"):
        table.add_column(column, justify="right")
    decode_only = report["decode_only"]
    for name, speeds in {"tokens/s": report, "tokens/s, decode only": decode_only}.items():
        table.add_row(
            name,
            _number(speeds["autoregressive_tokens_per_second"], ".1f"),
            _number(speeds["tokens_per_second"], ".1f"),
            _ratio(speeds["speedup"], speeds["speedup_quartiles"]),
        )
    table.add_row(
        "ms per target call",
        _number(decode_only["autoregressive_milliseconds_per_target_call"], ".2f"),
        _number(decode_only["milliseconds_per_target_call"], ".2f"),
    )
    table.add_row(
        "target calls",
        str(report["autoregressive_target_calls"]),
        str(report["target_calls"]),
    )
    table.add_row("acceptance length", "1.00", _number(report["acceptance_length"], ".2f"))
    if len(report["accepted_by"]) > 1:
        calls = max(report["target_calls"], 1)
        table.add_row("  of it bonus", "", "1.00")
        for name, accepted in report["accepted_by"].items():
            table.add_row(f"  of it {name}", "", f"{accepted / calls:.2f}")
    identical = sum(row["identical"] for row in report["prompts"])
    table.add_row("identical texts", "", f"{identical} of {len(report['prompts'])}")
    reached = report["calls_per_depth"]
    for depth, rate in enumerate(report["acceptance_rate_per_depth"], start=1):
        counts = f"{reached[depth]} of {reached[depth - 1]}"
        table.add_row(f"acceptance rate at depth {depth}", "", _number(rate, ".2f"), counts)
    return table


def _legend(legend: dict[str, str]) -> Table:
    """What is normal."""
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    for name, meaning in legend.items():
        table.add_row(name, meaning, style="dim")
    return table


def _categories(categories: dict[str, dict[str, Any]]) -> Table:
    table = Table()
    table.add_column("category")
    for column in ("prompts", "acceptance length", "identical", "speedup"):
        table.add_column(column, justify="right")
    for name, measures in categories.items():
        table.add_row(
            name,
            str(measures["prompts"]),
            _number(measures["acceptance_length"], ".2f"),
            _number(measures["identical"], ".0%"),
            _number(measures["speedup"], ".2f"),
        )
    return table


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _ratio(middle: float | None, quartiles: list[float] | None) -> str:
    if middle is None or quartiles is None:
        return "-"
    return f"{middle:.2f} [{quartiles[0]:.2f} to {quartiles[1]:.2f}]"
