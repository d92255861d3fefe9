"""What every report of a command has: its settings, and where, when and with what it was made."""

import json
import os
import platform
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import jax

from redrafter_jax.settings.files import Settings


def write_report(
    path: Path, report: dict[str, Any], settings: Settings, definitions: dict[str, Any]
) -> dict[str, Any]:
    """Write the report as JSON and return it, with its run, settings and definitions added."""
    whole = {
        **report,
        "platform": jax.default_backend(),
        "device": describe_device(),
        # Of the whole process on the first device; None where the platform does not count.
        "peak_memory_bytes": (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use"),
        "versions": _versions(),
        "timestamp": datetime.now(UTC).isoformat(timespec="seconds"),
        "config": settings.model_dump(mode="json"),
        "definitions": definitions,
    }
    path.write_text(json.dumps(whole, indent=2, allow_nan=False) + "\n")
    return whole


def describe_device() -> str:
    """The accelerator's name, or the processor's and how many of its cores may be used."""
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


def _versions() -> dict[str, str | None]:
    """Of Python and of the packages that decode."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in ("redrafter-jax", "jax", "jaxlib", "flax", "numpy"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:  # run from a checkout that is not installed
            found[package] = None
    return found
