"""Charts of the reports on speed."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator


def _figure(title: str, width: float, height: float, *shape: int) -> tuple[Figure, Any]:
    """Create a figure without pyplot, which has global state and may need a display."""
    figure = Figure(figsize=(width, height), layout="constrained")
    figure.suptitle(title, fontsize=9)
    panels = figure.subplots(*shape, squeeze=False)
    for panel in panels.flat:
        panel.spines[["top", "right"]].set_visible(False)
    return figure, panels


def write_comparison_chart(report: Mapping[str, Any], title: str, path: Path) -> None:
    """Write a PNG with a column for each sampling.

    The upper panel shows speed-up by acceptance length. A large point is a method over all prompts,
    with lines for its two intervals. A small point is the method in one category. On each dashed
    line, a step costs the same number of baseline steps. The lower panel shows acceptance rates by
    depth. If nothing was timed, there is only the lower panel.
    """
    cases, clock = report["samplings"], report["config"]["clock"]
    figure, panels = _figure(title, 1.0 + 4 * len(cases), 4.0 + 4 * clock, 1 + clock, len(cases))
    for column, case in zip(panels.T, cases, strict=True):
        column[0].set_title(case["described"], fontsize=9)
        if clock:
            _draw_speedups(column[0], case)
        _draw_rates(column[-1], case["methods"])
    panels[-1, 0].set_ylabel("acceptance rate, parent accepted")
    if clock:
        panels[0, 0].set_ylabel("speed-up over the baseline")
    handles, names = panels[0, 0].get_legend_handles_labels()
    dashed = "dashed: equal cost of a step, in baseline steps" if clock else None
    place = "outside lower center"
    figure.legend(handles, names, loc=place, ncols=4, fontsize=8, title=dashed, title_fontsize=8)
    figure.savefig(path, dpi=150)


def _draw_speedups(panel: Any, case: Mapping[str, Any]) -> None:
    large = _points(case["methods"])
    small = [_points(one["methods"]) for one in case["categories"].values()]
    every = [point for points in (large, *small) for point in points.values()]
    right = 1.15 * max((length for length, _ in every), default=1)
    top = 1.15 * max((speedup for _, speedup in every), default=1)
    dearest = max((length / speedup for length, speedup in every), default=1)
    for cost in (1, 1.5, 2, 3, 4, 6, 8, 12, 16):
        if cost > max(2, 1.5 * dearest):
            break
        panel.plot([0, right], [0, right / cost], "--", color="0.8", linewidth=1, zorder=0)
        x, y = min(right, top * cost), min(right / cost, top)
        behind = {"facecolor": "white", "edgecolor": "none", "pad": 1}
        panel.text(x, y, f"{cost:g}", color="0.5", fontsize=8, ha="right", va="top", bbox=behind)
    for index, (name, measures) in enumerate(case["methods"].items()):
        length, speedup, color = measures["acceptance_length"], measures["speedup"], f"C{index}"
        if speedup is None:
            continue
        panel.scatter(length, speedup, color=color, zorder=3, label=name)
        if name == "baseline":
            continue
        if ends := measures["speedup_interval"]:
            panel.vlines(length, *ends, color=color, linewidth=1, zorder=2)
        if ends := measures["acceptance_interval"]:
            panel.hlines(speedup, *ends, color=color, linewidth=1, zorder=2)
        for points in small:
            if name in points:
                panel.scatter(*points[name], color=color, s=10, alpha=0.45, zorder=2)
    panel.set_xlim(0, right)
    panel.set_ylim(0, top)
    panel.set_xlabel("acceptance length, tokens per target call")


def _points(methods: Mapping[str, Any]) -> dict[str, tuple[float, float]]:
    """Acceptance length and speed-up of each method whose speed-up is known."""
    return {
        name: (measures["acceptance_length"], measures["speedup"])
        for name, measures in methods.items()
        if measures["speedup"]
    }


def _draw_rates(panel: Any, methods: Mapping[str, Any]) -> None:
    """Draw acceptance rates in the colors of the upper panel, with gaps at unreached depths."""
    for index, (name, measures) in enumerate(methods.items()):
        given = measures["acceptance_rate_per_depth"]
        rates = [np.nan if rate is None else rate for rate in given]
        panel.plot(range(1, len(rates) + 1), rates, color=f"C{index}", marker="o", label=name)
    panel.set_ylim(0, 1.05)
    panel.set_xlabel("depth in the tree")
    panel.xaxis.set_major_locator(MaxNLocator(integer=True))


def write_load_chart(report: Mapping[str, Any], title: str, path: Path) -> None:
    """Write a PNG of latency and throughput by request rate, with lines for each method."""
    figure, panels = _figure(title, 9.0, 4.4, 1, 2)
    latency, throughput = panels[0]
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
    for panel in panels[0]:
        panel.set_xlabel("requests per second")
        panel.legend(fontsize=8)
    figure.savefig(path, dpi=150)
