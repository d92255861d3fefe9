"""What a paper needs of `python -m eval compare`: intervals, CSV, LaTeX, how it was measured."""

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from redrafter_jax.config import TreeConfig
from redrafter_jax.verdict import describe_tree

from .report import number

_RESAMPLES, _LEVEL = 9999, 0.95
DEFINITIONS = {
    "speedup_interval": f"{_LEVEL:.0%} percentile interval of the median speed-up by a paired "
    "bootstrap: batches, which are single prompts at batch size 1, are drawn again with the runs "
    "of all methods in them, so that it tells how far other prompts of this kind may differ",
    "acceptance_interval": "the same of the acceptance length, over prompts",
    "training_seeds": "of the runs that trained the heads, by the config.yaml beside their folders",
}
COLUMNS = (
    *("sampling", "category", "method", "prompts", "tokens_per_second", "milliseconds_per_token"),
    *("speedup", "speedup_low", "speedup_high"),
    *("speedup_decode_only", "acceptance_length", "acceptance_low", "acceptance_high"),
    *("target_calls", "identical"),
)
_LATEX = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"} | {
    character: f"\\{character}" for character in "&%$#_{}"
}
_PREFILL = (
    "Speeds are of the whole call, with prefill and the way to the host and without compilation; "
    '"decode only" leaves out prefill and the first token, which it decides.'
)


def add_intervals(case: dict[str, Any]) -> None:
    """Add the intervals to the measures of every method, over all prompts and in each category."""
    for category, part in {None: case, **case["categories"]}.items():
        prompts = [row for row in case["prompts"] if category in (None, row["category"])]
        for name, measures in part["methods"].items():
            own = [(row["batch"], row["methods"][name]) for row in prompts]
            measures["speedup_interval"] = _speedup_interval(own)
            counts = [np.asarray(one["accept_counts"]) for _, one in own]
            calls = np.asarray([each.sum() for each in counts], float)
            tokens = np.asarray([each @ np.arange(1, len(each) + 1) for each in counts], float)
            measures["acceptance_interval"] = _interval(
                [tokens, calls], lambda tokens, calls, axis: tokens.sum(axis) / calls.sum(axis)
            )


def training_seeds(drafters: Mapping[str, str | None]) -> dict[str, int]:
    """By the method's name, the seed of its head's training, where the run's folder tells it."""
    seeds = {}
    for name, drafter in drafters.items():
        path = Path(drafter or "").parent / "config.yaml"
        if drafter and path.is_file():
            values = yaml.safe_load(path.read_text(encoding="utf-8"))
            if isinstance(values, dict) and type(values.get("seed")) is int:
                seeds[name] = values["seed"]
    return seeds


def markdown(report: Mapping[str, Any]) -> str:
    """How it was measured, and a table of times and intervals for every sampling."""
    lines = ["## Times, and how far other prompts may differ", "", _PREFILL, ""]
    columns = {
        "method": "method",
        "tokens/s": "tokens_per_second",
        "ms per token": "milliseconds_per_token",
        "speedup": "speedup",
        "decode only": "speedup_decode_only",
        "acceptance": "acceptance_length",
    }
    for case in report["samplings"]:
        lines += [f"{case['described']}, all prompts:", "", f"| {' | '.join(columns)} |"]
        lines += ["|---" * len(columns) + "|"]
        for row in rows([case]):
            if row["category"] == "":
                cells = [_cell(row, column) for column in columns.values()]
                lines += [f"| {' | '.join(cells)} |"]
        lines += [""]
    lines += [
        f"In brackets {_LEVEL:.0%} intervals by a paired bootstrap over prompts "
        f"({_RESAMPLES} samples).",
        "",
        "## What was measured",
        "",
        "| method | drafter | seed of its training | tree |",
        "|---|---|---|---|",
    ]
    config = report["config"]
    for name, drafting in config["drafters"].items():
        tree = TreeConfig(**drafting["tree"])
        described = describe_tree(tree) if drafting["drafter"] else f"C={tree.lookup_tokens}"
        seed = report["training_seeds"].get(name, "-")
        lines += [f"| {name} | {drafting['drafter'] or 'prompt lookup'} | {seed} | {described} |"]
    versions = ", ".join(f"{name} {text}" for name, text in report["versions"].items() if text)
    lines += [
        "",
        f"Target {config['target']}; {config['dtype']}, batch {config['batch_size']}, up to "
        f"{config['max_new_tokens']} new tokens, {config['repeats']} timed runs of each prompt; "
        f"{report['device']}; {versions}; {report['timestamp']}.",
        "",
    ]
    return "\n".join(lines)


def rows(cases: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """A row for every sampling, category ("" is all prompts) and method, by `COLUMNS`."""
    for case in cases:
        for category, part in {"": case, **case["categories"]}.items():
            count = len(case["prompts"]) if category == "" else part["prompts"]
            for name, measures in part["methods"].items():
                rate = measures["tokens_per_second"]
                low, high = measures["speedup_interval"] or (None, None)
                least, most = measures["acceptance_interval"] or (None, None)
                values = (
                    *(case["described"], category, name, count, rate, rate and 1000 / rate),
                    *(measures["speedup"], low, high, measures["decode_only"]["speedup"]),
                    *(measures["acceptance_length"], least, most),
                    *(measures["target_calls"], measures["identical"]),
                )
                yield dict(zip(COLUMNS, values, strict=True))


def as_csv(report: Mapping[str, Any]) -> str:
    """All rows; a value that is not known is empty."""
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows(report["samplings"]))
    return text.getvalue()


def as_latex(report: Mapping[str, Any]) -> str:
    """A `tabular` over all prompts, with the rules of the package booktabs."""
    columns = {
        "tokens/s": "tokens_per_second",
        "ms/token": "milliseconds_per_token",
        "speed-up": "speedup",
        "decode only": "speedup_decode_only",
        "acceptance": "acceptance_length",
    }
    lines = [
        r"% \usepackage{booktabs}",
        rf"\begin{{tabular}}{{l{'r' * len(columns)}}}",
        r"\toprule",
        " & ".join(["", *columns]) + r" \\",
    ]
    for case in report["samplings"]:
        described = escape_latex(case["described"])
        lines += [
            r"\midrule",
            rf"\multicolumn{{{1 + len(columns)}}}{{l}}{{{described}}} \\",
        ]
        for row in rows([case]):
            if row["category"] == "":
                cells = [_cell(row, column) for column in columns.values()]
                # A bracket after a row's end would be read as its distance to the next.
                lines += [" & ".join([escape_latex(row["method"]), *cells]) + r" \\"]
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", ""])


def escape_latex(text: str) -> str:
    """The text with LaTeX's own characters written out."""
    return "".join(_LATEX.get(character, character) for character in text)


def _cell(row: Mapping[str, Any], column: str) -> str:
    """A number in few digits, with its interval if it has one."""
    ends = {"speedup": "speedup", "acceptance_length": "acceptance"}.get(column)
    if column == "method":
        return row[column].replace("|", "\\|")
    if row["method"] == "baseline":
        ends = None
    text = number(row[column], ".1f" if column == "tokens_per_second" else ".2f")
    if ends is None or row[f"{ends}_low"] is None:
        return text
    return f"{text} [{row[f'{ends}_low']:.2f}, {row[f'{ends}_high']:.2f}]"


def _speedup_interval(own: Sequence[tuple[int, Mapping[str, Any]]]) -> list[float] | None:
    by_batch: dict[int, list[float]] = {}
    for batch, measures in own:
        if measures["speedup"] is not None:
            by_batch.setdefault(batch, []).append(measures["speedup"])
    medians = np.asarray([np.median(each) for each in by_batch.values()])
    return _interval([medians], np.median)


def _interval(samples: Sequence[np.ndarray], statistic: Any) -> list[float] | None:
    """The percentile interval over samples that are drawn together; None of fewer than two."""
    if len(samples[0]) < 2:
        return None
    from scipy.stats import bootstrap  # slow to import

    if len({tuple(row) for row in np.stack(samples, axis=1).tolist()}) == 1:
        one = float(statistic(*samples, axis=0))
        return [one, one]
    found = bootstrap(
        samples,
        statistic,
        paired=True,
        vectorized=True,
        n_resamples=_RESAMPLES,
        confidence_level=_LEVEL,
        method="percentile",
        rng=np.random.default_rng(0),
    )
    low, high = found.confidence_interval
    return None if np.isnan(low) or np.isnan(high) else [float(low), float(high)]
