"""The parts that all reports share: the JSON file, and tables for the terminal."""

import json
import os
import platform
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import jax
from rich.box import SIMPLE_HEAD
from rich.console import Console, RenderableType
from rich.table import Table

from redrafter_jax.config import SamplingConfig
from redrafter_jax.settings.files import Settings


def write_report(
    path: Path, measures: dict[str, Any], settings: Settings, definitions: dict[str, Any]
) -> dict[str, Any]:
    """Write a JSON report of measures, definitions and settings, and return the report.

    The report also states the device, its peak memory, the time and the versions.
    """
    report = {
        **measures,
        "platform": jax.default_backend(),
        "device": describe_device(),
        # Peak of the whole process on the first device; None if the platform has no statistics.
        "peak_memory_bytes": (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use"),
        "versions": describe_versions(),
        "timestamp": datetime.now(UTC).isoformat(timespec="seconds"),
        "config": settings.model_dump(mode="json"),
        "definitions": definitions,
    }
    path.write_text(json.dumps(report, indent=2, allow_nan=False) + "\n")
    return report


def show(path: Path, *parts: RenderableType) -> None:
    """Print the parts, then `path`, the path of the report."""
    console = Console()
    for part in parts:
        console.print(part, markup=False, highlight=False)
    print(f"The report: {path}")


def make_table(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], text_columns: int = 1
) -> Table:
    """Make a table without edges.

    The first `text_columns` columns are text, which wraps; the others are right-aligned numbers.
    """
    table = Table(
        title=title,
        title_justify="left",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
        show_edge=False,
    )
    for index, name in enumerate(columns):
        is_text = index < text_columns
        table.add_column(name, justify="left" if is_text else "right", no_wrap=not is_text)
    for cells in rows:
        table.add_row(*cells)
    return table


def number(value: float | None, form: str) -> str:
    """Format a number by a format specification; None becomes a dash."""
    return "-" if value is None else format(value, form)


def describe_sampling(sampling: SamplingConfig) -> str:
    """Describe temperature and filters in a few words."""
    if sampling.temperature == 0:
        return "greedy"
    filters = {"top_k": sampling.top_k, "top_p": sampling.top_p, "min_p": sampling.min_p}
    given = [f"{name} {value:.15g}" for name, value in filters.items() if value is not None]
    return ", ".join([f"T {sampling.temperature:.15g}", *given])


def describe_versions() -> dict[str, str | None]:
    """Return the versions of Python and of packages; None for a package that is not installed."""
    packages = ("redrafter-jax", "jax", "jaxlib", "flax", "numpy")
    return {"python": platform.python_version(), **{name: _version(name) for name in packages}}


def describe_device() -> str:
    """Return the name and the number of the accelerators, or of the processor's usable cores."""
    device = jax.local_devices()[0]
    if device.platform != "cpu":
        return f"{jax.device_count()} x {device.device_kind}"
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    return f"{_processor()}, {cores} cores"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:  # a checkout that is not installed
        return None
