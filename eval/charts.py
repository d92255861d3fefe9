"""The charts beside the reports of speeds."""

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator


def _figure(title: str, width: float, height: float, panels: int) -> tuple[Figure, list[Any]]:
    """Not by pyplot, which needs a window system and keeps global state."""
    figure = Figure(figsize=(width, height), layout="constrained")
    figure.suptitle(title, fontsize=9)
    axes = list(figure.subplots(1, panels, squeeze=False)[0])
    for panel in axes:
        panel.spines[["top", "right"]].set_visible(False)
    return figure, axes


def write_speed_chart(report: Mapping[str, Any], title: str, path: Path) -> None:
    """A PNG of two panels: tokens/s of every method and batch, acceptance rate per depth."""
    figure, (speeds, depths) = _figure(title, 9.0, 4.4, 2)
    for index, (name, measures) in enumerate(report["methods"].items()):
        color = f"C{index}"
        batches = defaultdict(list)
        for run in report["runs"]:
            if run["method"] == name:
                seconds = run["prefill_seconds"] + run["decode_seconds"]
                batches[run["batch"]].append(run["new_tokens"] / seconds)
        medians = [float(np.median(rates)) for rates in batches.values()]
        speeds.scatter([index] * len(medians), medians, color=color, alpha=0.5, s=18)
        middle = measures["tokens_per_second"]
        speeds.hlines(middle, index - 0.2, index + 0.2, color=color, linewidth=3)
        speeds.annotate(f"{middle:.0f}", (index + 0.24, middle), va="center", fontsize=9)
        # A depth that no call reached leaves a gap.
        given = measures["acceptance_rate_per_depth"]
        rates = [np.nan if rate is None else rate for rate in given]
        label = f"{name}, acceptance length {measures['acceptance_length']:.2f}"
        depths.plot(range(1, len(rates) + 1), rates, color=color, marker="o", label=label)
    speeds.set_xticks(range(len(report["methods"])), list(report["methods"]))
    speeds.set_xlim(-0.5, len(report["methods"]) - 0.2)
    speeds.set_ylim(bottom=0)
    speeds.set_ylabel("tokens per second, batches and median")
    depths.set_ylim(0, 1.05)
    depths.set_xlabel("depth in the tree")
    depths.set_ylabel("acceptance rate, parent accepted")
    depths.legend(fontsize=8)
    depths.xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.savefig(path, dpi=150)


def write_comparison_chart(report: Mapping[str, Any], title: str, path: Path) -> None:
    """A PNG of speed-up against acceptance length, a panel for each sampling.

    A large point is a method over all prompts, its lines the intervals of both; a small point is
    the method in a category. On a dashed line all steps cost the same number of baseline steps.
    """
    cases = report["samplings"]
    figure, panels = _figure(title, 1.0 + 4 * len(cases), 5.0, len(cases))
    for panel, case in zip(panels, cases, strict=True):
        large = _points(case["methods"])
        small = [_points(one["methods"]) for one in case["categories"].values()]
        every = [point for points in (large, *small) for point in points.values()]
        right = 1.15 * max(length for length, _ in every)
        top = 1.15 * max(speedup for _, speedup in every)
        dearest = max(length / speedup for length, speedup in every)
        for cost in (1, 1.5, 2, 3, 4, 6, 8, 12, 16):
            if cost > max(2, 1.5 * dearest):
                break
            panel.plot([0, right], [0, right / cost], "--", color="0.8", linewidth=1, zorder=0)
            x, y = min(right, top * cost), min(right / cost, top)
            behind = {"facecolor": "white", "edgecolor": "none", "pad": 1}
            panel.text(
                x, y, f"{cost:g}", color="0.5", fontsize=8, ha="right", va="top", bbox=behind
            )
        for index, (name, point) in enumerate(large.items()):
            color = f"C{index}"
            panel.scatter(*point, color=color, zorder=3, label=name)
            if name != "baseline":
                _draw_intervals(panel, case["methods"][name], color)
            for points in small if name != "baseline" else ():
                if name in points:
                    panel.scatter(*points[name], color=color, s=10, alpha=0.45, zorder=2)
        panel.set_xlim(0, right)
        panel.set_ylim(0, top)
        panel.set_title(case["described"], fontsize=9)
        panel.set_xlabel("acceptance length, tokens per target call")
    panels[0].set_ylabel("speed-up over the baseline")
    handles, names = panels[0].get_legend_handles_labels()
    figure.legend(
        handles,
        names,
        loc="outside lower center",
        ncols=4,
        fontsize=8,
        title="dashed: equal cost of a step, in baseline steps",
        title_fontsize=8,
    )
    figure.savefig(path, dpi=150)


def write_load_chart(report: Mapping[str, Any], title: str, path: Path) -> None:
    """A PNG of latency and of throughput against the rate of requests, a line for each method."""
    figure, (latency, throughput) = _figure(title, 9.0, 4.4, 2)
    for index, method in enumerate(dict.fromkeys(run["method"] for run in report["runs"])):
        runs = [run for run in report["runs"] if run["method"] == method and run["latency"]]
        rates, color = [run["rate"] for run in runs], f"C{index}"
        for which, (name, line) in enumerate((("median", "-"), ("90%", "--"))):
            values = [run["latency"][which] for run in runs]
            latency.plot(rates, values, line, color=color, marker="o", label=f"{method}, {name}")
        values = [run["tokens_per_second"] for run in runs]
        throughput.plot(rates, values, color=color, marker="o", label=method)
    latency.set_yscale("log")
    latency.set_ylabel("seconds from arrival to the end of the answer")
    throughput.set_ylim(bottom=0)
    throughput.set_ylabel("tokens per second")
    for panel in (latency, throughput):
        panel.set_xlabel("requests per second")
        panel.legend(fontsize=8)
    figure.savefig(path, dpi=150)


def _draw_intervals(panel: Any, measures: Mapping[str, Any], color: str) -> None:
    length, speedup = measures["acceptance_length"], measures["speedup"]
    if ends := measures["speedup_interval"]:
        panel.vlines(length, *ends, color=color, linewidth=1, zorder=2)
    if ends := measures["acceptance_interval"]:
        panel.hlines(speedup, *ends, color=color, linewidth=1, zorder=2)


def _points(methods: Mapping[str, Any]) -> dict[str, tuple[float, float]]:
    """Acceptance length and speed-up of the methods that have one."""
    return {
        name: (measures["acceptance_length"], measures["speedup"])
        for name, measures in methods.items()
        if measures["speedup"]
    }
