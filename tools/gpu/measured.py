"""The parts that the programs of all pieces share: arguments, device check, and output file."""

import argparse
import json
import resource
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import jax

from redrafter_jax.errors import InputError


def run_piece(
    parser: argparse.ArgumentParser,
    measure: Callable[[argparse.Namespace], dict[str, Any]],
    arguments: Sequence[str] | None = None,
) -> None:
    """Parse arguments, measure, and write the result with the device and the peak memory.

    Raises:
      InputError: there is no GPU, and `--small` is not given.
    """
    parser.add_argument("--output", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--small", action="store_true", help="small shapes, for a CPU too")
    settings = parser.parse_args(arguments)
    device, started = jax.devices()[0], time.perf_counter()
    if device.platform != "gpu" and not settings.small:
        raise InputError(
            f"This measurement needs an NVIDIA GPU, but JAX runs on {device.platform}; use --small "
            "to try it on small shapes."
        )
    measures = measure(settings)
    record = {
        **measures,
        "platform": device.platform,
        "device": device.device_kind,
        "seconds": time.perf_counter() - started,
        "peak_memory_bytes": (device.memory_stats() or {}).get("peak_bytes_in_use"),
        # Linux reports units of 1024 bytes.
        "peak_host_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "versions": {name: _version(name) for name in ("jax", "jaxlib", "flax", "numpy")},
        "timestamp": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    write_json(settings.output, record)


def write_json(path: Path, record: dict[str, Any]) -> None:
    """Write a record as JSON; the file is replaced atomically."""
    beside = path.with_suffix(".part")
    beside.write_text(json.dumps(record, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    beside.replace(path)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
