"""The charts beside the reports."""

import logging
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

# A first import builds a font cache and says so on stderr.
logging.getLogger("matplotlib").setLevel(logging.ERROR)

from matplotlib.axes import Axes  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402
from matplotlib.ticker import MaxNLocator  # noqa: E402

_BASELINE, _SPECULATIVE = "#7f7f7f", "#1f6fb4"


def write_chart(report: dict[str, Any], title: str, path: Path) -> None:
    """A PNG of three panels: tokens/s of every batch, rate per depth, tokens per call.

    Args:
      report: from `eval.speed_report.build_report`.
      title: models, tree and device; printed above the panels.
      path: the file to write.
    """
    # A figure of its own needs no window system and keeps no global state, unlike pyplot.
    figure = Figure(figsize=(12, 4.4), layout="constrained")
    figure.suptitle(title, fontsize=9)
    speeds, depths, calls = figure.subplots(1, 3)
    _draw_speeds(speeds, report)
    _draw_depths(depths, report)
    _draw_calls(calls, report)
    for panel in (speeds, depths, calls):
        panel.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


def _draw_speeds(panel: Axes, report: dict[str, Any]) -> None:
    """One line per batch, from baseline to speculative; thick marks at the medians."""
    baseline, speculative = defaultdict(list), defaultdict(list)
    for run in report["runs"]:
        seconds = run["prefill_seconds"] + run["decode_seconds"]
        speculative[run["batch"]].append(run["new_tokens"] / seconds)
        seconds = run["autoregressive_prefill_seconds"] + run["autoregressive_decode_seconds"]
        baseline[run["batch"]].append(run["autoregressive_new_tokens"] / seconds)
    for batch in baseline:
        ends = [float(np.median(baseline[batch])), float(np.median(speculative[batch]))]
        panel.plot([0, 1], ends, color=_BASELINE, alpha=0.35, linewidth=1, zorder=1)
        panel.scatter([0, 1], ends, color=[_BASELINE, _SPECULATIVE], alpha=0.6, s=18, zorder=2)
    medians = [report["autoregressive_tokens_per_second"], report["tokens_per_second"]]
    for place, (median, color) in enumerate(zip(medians, (_BASELINE, _SPECULATIVE), strict=True)):
        panel.hlines(median, place - 0.22, place + 0.22, color=color, linewidth=3, zorder=3)
        panel.annotate(f"{median:.0f}", (place + 0.25, median), va="center", fontsize=9)
    panel.set_xticks([0, 1], ["baseline", "speculative"])
    panel.set_xlim(-0.5, 1.6)
    panel.set_ylim(bottom=0)
    panel.set_ylabel("tokens per second")
    panel.set_title(
        f"{report['speedup']:.2f} times as fast; {report['identical']:.0%} of texts identical",
        fontsize=10,
    )


def _draw_depths(panel: Axes, report: dict[str, Any]) -> None:
    rates = report["acceptance_rate_per_depth"]
    depths = np.arange(1, len(rates) + 1)
    heights = [0.0 if rate is None else rate for rate in rates]
    bars = panel.bar(depths, heights, color=_SPECULATIVE, width=0.6)
    labels = ["-" if rate is None else f"{rate:.2f}" for rate in rates]
    # So that those of many depths stay apart.
    panel.bar_label(bars, labels, fontsize=9 if len(rates) <= 8 else 6, padding=2)
    panel.set_xticks(depths)
    panel.set_ylim(0, 1.08)
    panel.set_xlabel("depth in the tree")
    panel.set_ylabel("acceptance rate, parent accepted")
    panel.set_title("Acceptance rate per depth", fontsize=10)


def _draw_calls(panel: Axes, report: dict[str, Any]) -> None:
    counts = np.asarray(report["accept_counts"])
    gains = np.arange(1, len(counts) + 1)
    panel.bar(gains, counts / max(counts.sum(), 1), color=_SPECULATIVE, width=0.6)
    panel.axvline(report["acceptance_length"], color="black", linewidth=1, linestyle="--")
    panel.set_xticks(gains)
    panel.set_xlabel("tokens gained by a target call")
    panel.set_ylabel("share of target calls")
    panel.set_title(f"Acceptance length {report['acceptance_length']:.2f} (dashed)", fontsize=10)


def write_acceptance_chart(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """A PNG with a panel per sampling: acceptance length over N, a line per ranking and the rest.

    Args:
      rows: the grid's, from `eval.acceptance`.
      path: the file to write.
    """
    samplings = list(dict.fromkeys(row["sampling"] for row in rows))
    figure = Figure(figsize=(3.2 * len(samplings) + 1.6, 3.6), layout="constrained")
    panels = figure.subplots(1, len(samplings), sharey=True, squeeze=False)[0]
    for panel, sampling in zip(panels, samplings, strict=True):
        lines: dict[str, list[tuple[int, float]]] = defaultdict(list)
        for row in rows:
            if row["sampling"] == sampling:
                lookup = f", lookup {row['lookup_tokens']}" if row["lookup_tokens"] else ""
                name = f"{row['ranking']}, sharpness {row['sharpness']:g}{lookup}"
                lines[name].append((row["num_nodes"], row["acceptance_length"]))
        for name, points in lines.items():
            panel.plot(*zip(*sorted(points), strict=True), marker="o", markersize=3, label=name)
        panel.set_title(sampling, fontsize=10)
        panel.set_xlabel("tree nodes N")
        panel.xaxis.set_major_locator(MaxNLocator(integer=True))
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("acceptance length")
    panels[-1].legend(fontsize=6)
    figure.savefig(path, dpi=150)


def write_steps_chart(rows: Sequence[dict[str, Any]], title: str, path: Path) -> None:
    """A PNG: per row of the report the parts stacked, beside the whole step, in baseline steps.

    Args:
      rows: the report's, from `eval.steps`.
      title: models and device.
      path: the file to write.
    """
    parts = [name for name in rows[0]["in_baseline_steps"] if name not in ("step", "baseline")]
    figure = Figure(figsize=(9, 1.6 + 0.42 * len(rows)), layout="constrained")
    figure.suptitle(title, fontsize=9)
    panel = figure.subplots()
    places = np.arange(len(rows))
    left = np.zeros(len(rows))
    for name, color in zip(parts, ("#9ecae1", _SPECULATIVE, "#fdae6b", "#a1d99b"), strict=True):
        widths = np.asarray([row["in_baseline_steps"][name][1] for row in rows])
        panel.barh(places, widths, 0.6, left=left, color=color, label=name)
        left += widths
    for place, row in zip(places, rows, strict=True):
        low, middle, high = row["in_baseline_steps"]["step"]
        panel.hlines(place, low, high, color="black", linewidth=1)
        label = "whole step, quartiles" if place == 0 else None
        panel.plot(middle, place, "k|", markersize=16, markeredgewidth=2, label=label)
    panel.axvline(1, color=_BASELINE, linewidth=1, linestyle="--", label="baseline step")
    names = [
        f"W={row['beam_width']} R={row['draft_rounds']} N={row['num_nodes']} "
        f"C={row['lookup_tokens']}, B={row['batch_size']}, S={row['slots']}, {row['sampling']}"
        for row in rows
    ]
    panel.set_yticks(places, names, fontsize=8)
    panel.invert_yaxis()
    panel.set_xlabel("time, in baseline steps of the same batch, cache and sampling")
    panel.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=6, fontsize=7)
    figure.savefig(path, dpi=150)
