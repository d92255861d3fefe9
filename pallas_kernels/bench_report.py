"""What the benches of kernels share: candidates in turns with a copy, a table, a JSON report."""

import argparse
import json
import math
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from pallas_kernels import timing
from pallas_kernels.timing import beside_copy, timer

# Bytes of all arrays together that calls read in turns: two and a half times the second-level
# cache of an H100 or H200, in which the GPU would keep a small array.
READ = 128 * 2**20
DEFINITIONS = {
    "share_of_copy": "rate / copy_gigabytes_per_second of the same repeat; quartiles",
    "difference": "norm of the difference to the reference's outputs / norm of those; null where "
    "it is not finite, absent where there is none to compare with",
    "not_run": "why there is no number",
    "copy_gigabytes_per_second": "bytes read and written per second by the copy; quartiles",
}
_CELLS = "  {:<12}{:>10}{:>10}{:>8}{:>12}"

# From a candidate's name, how many arrays its calls read in turns, and how often, to a program and
# its arguments but the last, which is 0.
Prepare = Callable[[str, int, int], tuple[Callable[..., Array], tuple[Any, ...]]]


def measure_candidates(
    names: Sequence[str], prepare: Prepare, size: int, repeats: int, other: Sequence[str] = ()
) -> dict[str, Any]:
    """How fast each candidate reads, beside a copy, and how far it is from the one "reference".

    Args:
      names: of the candidates.
      prepare: makes their programs.
      size: bytes that a call reads.
      repeats: timed runs of each, in turns.
      other: candidates that compute something else than the reference.
    """
    arrays = max(1, math.ceil(READ / size))
    turns = max(1, round(timing.RUN / (arrays * size)))
    zero = jnp.int32(0)
    timers: dict[str, Callable[[], float]] = {}
    found: dict[str, dict[str, Any]] = {}
    expected: Any = None
    for name in sorted(names, key="reference".__ne__):
        try:
            program, arguments = prepare(name, 1, 1)
            output = np.asarray(program(*arguments, zero), np.float64)
            program, arguments = prepare(name, arrays, turns)
            timers[name] = timer(program, *arguments, zero)
        except (NotImplementedError, RuntimeError, ValueError) as error:
            found[name] = {"not_run": str(error).partition("\n")[0]}
            continue
        expected = output if name == "reference" else expected
        if expected is not None and name not in other:
            difference = float(np.linalg.norm(output - expected) / np.linalg.norm(expected))
            found[name] = {"difference": difference if np.isfinite(difference) else None}
    rates, copied = beside_copy(timers, size, arrays * turns, repeats)
    return {
        "calls": arrays * turns,
        "copy_gigabytes_per_second": copied,
        "candidates": {name: found.get(name, {}) | rates.get(name, {}) for name in names},
    }


def show_candidates(shape: str, row: Mapping[str, Any]) -> None:
    """Lines of the table, the copy's own last.

    Args:
      shape: the cells that all of them begin with.
      row: from `measure_candidates`.
    """
    for name, one in row["candidates"].items():
        if "not_run" in one:
            print(shape + _CELLS.format(name, "not run", "", "", ""), one["not_run"])
            continue
        time, rate = f"{one['microseconds'][1]:.1f}", f"{one['gigabytes_per_second']:.1f}"
        share = f"{one['share_of_copy'][1]:.2f}"
        error = ""
        if "difference" in one:
            error = "not finite" if one["difference"] is None else f"{one['difference']:.1e}"
        print(shape + _CELLS.format(name, time, rate, share, error))
    copied = f"{row['copy_gigabytes_per_second'][1]:.1f}"
    print(shape + _CELLS.format("copy", "", copied, "", ""), flush=True)


def show_columns(shape: str, number_format: str, settings: argparse.Namespace) -> None:
    """The device, the format of what is read, and the heads of the columns."""
    device = jax.devices()[0].device_kind
    print(f"{device}; {number_format}, medians of {settings.repeats} repeats")
    print("share: of the copy's rate; difference: from the reference\n")
    print(shape + _CELLS.format("", "us", "GB/s", "share", "difference"))


def write_report(
    rows: Sequence[Mapping[str, Any]],
    settings: argparse.Namespace,
    definitions: Mapping[str, str],
) -> None:
    """The report in JSON, if `--output` asks for one."""
    if settings.output is None:
        return
    device = jax.devices()[0]
    report = {
        "rows": rows,
        "platform": device.platform,
        "device": device.device_kind,
        "versions": {package: version(package) for package in ("jax", "jaxlib")},
        "timestamp": datetime.now(UTC).isoformat(timespec="seconds"),
        "settings": {name: value for name, value in vars(settings).items() if name != "output"},
        "definitions": {**definitions, **DEFINITIONS},
    }
    settings.output.write_text(json.dumps(report, indent=2, allow_nan=False) + "\n")
    print(f"The report: {settings.output}")


def parse(
    parser: argparse.ArgumentParser, arguments: Sequence[str] | None, counts: Sequence[str]
) -> argparse.Namespace:
    """The arguments, `--repeats` and `--output` among them; exit code 2 where one cannot be used.

    Args:
      parser: of the arguments that a bench has for itself.
      arguments: of the command line.
      counts: names of those that must be 1 or more.
    """
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--output", type=Path, help="JSON file to write")
    settings = parser.parse_args(arguments)
    for name in (*counts, "repeats"):
        if (least := np.min(getattr(settings, name))) < 1:
            parser.error(f"--{name} {least} must be 1 or more.")
    if settings.output and not settings.output.parent.is_dir():
        parser.error(f"--output {settings.output}: there is no folder {settings.output.parent}.")
    if settings.output and settings.output.is_dir():
        parser.error(f"--output {settings.output} is a folder; name a file in it.")
    return settings


def need_gpu(parser: argparse.ArgumentParser) -> None:
    """Exit code 2 and one sentence where there is no GPU to measure."""
    if (platform := jax.default_backend()) != "gpu":
        parser.error(f"It measures an NVIDIA GPU, and JAX runs on {platform} here.")
