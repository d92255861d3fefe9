"""The chart beside the report of speeds."""

import logging
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

# A first import builds a font cache and says so on stderr.
logging.getLogger("matplotlib").setLevel(logging.ERROR)

from matplotlib.figure import Figure  # noqa: E402
from matplotlib.ticker import MaxNLocator  # noqa: E402


def write_speed_chart(report: Mapping[str, Any], title: str, path: Path) -> None:
    """A PNG of two panels: tokens/s of every method and batch, acceptance rate per depth.

    Args:
      report: with the measures of `eval.speed.summarize`.
      title: printed above the panels.
      path: the file to write.
    """
    # A figure of its own needs no window system and keeps no global state, unlike pyplot.
    figure = Figure(figsize=(9, 4.4), layout="constrained")
    figure.suptitle(title, fontsize=9)
    speeds, depths = figure.subplots(1, 2)
    for place, (name, measures) in enumerate(report["methods"].items()):
        color = f"C{place}"
        batches = defaultdict(list)
        for run in report["runs"]:
            if run["method"] == name:
                seconds = run["prefill_seconds"] + run["decode_seconds"]
                batches[run["batch"]].append(run["new_tokens"] / seconds)
        medians = [float(np.median(rates)) for rates in batches.values()]
        speeds.scatter([place] * len(medians), medians, color=color, alpha=0.5, s=18)
        middle = measures["tokens_per_second"]
        speeds.hlines(middle, place - 0.2, place + 0.2, color=color, linewidth=3)
        speeds.annotate(f"{middle:.0f}", (place + 0.24, middle), va="center", fontsize=9)
        rates = [rate or 0.0 for rate in measures["acceptance_rate_per_depth"]]
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
    for panel in (speeds, depths):
        panel.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
