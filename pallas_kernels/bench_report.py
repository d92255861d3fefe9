"""The parts that the kernel benchmarks share: timing beside a copy, a table and a JSON report."""

import argparse
import json
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, UInt

from pallas_kernels.timing import repeat, take_turns

# Total bytes of the arrays that calls read in turns. A small array would stay in the L2 cache, so
# this is two and a half times the L2 cache of an H100 or H200.
READ = 128 * 2**20
# Bytes of the copied array, and bytes that one timed run reads and writes.
COPIED, RUN = 2**30, 32 * 10**9
DEFINITIONS = {
    "share_of_copy": "rate / copy_gigabytes_per_second of the same repeat; quartiles",
    "difference": "norm of the difference to the reference's outputs / norm of the reference's "
    "outputs; null if not finite, absent if there is no reference",
    "not_run": "why the candidate did not run",
    "copy_gigabytes_per_second": "bytes read and written per second by the copy; quartiles",
}
_CELLS = "  {:<12}{:>10}{:>10}{:>8}{:>12}"

# Function that returns a program and its arguments, except the last argument, which is 0. It gets
# the name of a candidate, the number of arrays that calls read in turns, and the number of turns.
Prepare = Callable[[str, int, int], tuple[Callable[..., Array], tuple[Any, ...]]]


def measure_candidates(
    names: Sequence[str], prepare: Prepare, size: int, repeats: int, other: Sequence[str] = ()
) -> dict[str, Any]:
    """Time each candidate beside a copy, and compare its output with that of "reference".

    Args:
      names: names of the candidates.
      prepare: function that makes a candidate's program and arguments.
      size: bytes that one call reads.
      repeats: number of timed runs of each candidate and of the copy.
      other: candidates that compute something different; their outputs are not compared.

    Returns:
      The fields of a row of the report, with quartiles over the repeats.
    """
    arrays = max(1, math.ceil(READ / size))
    turns = max(1, round(RUN / (arrays * size)))
    zero = jnp.int32(0)
    timers: dict[str, Callable[[], float]] = {}
    found: dict[str, dict[str, Any]] = {}
    expected: Any = None
    for name in sorted(names, key="reference".__ne__):
        try:
            program, arguments = prepare(name, 1, 1)
            output = np.asarray(program(*arguments, zero), np.float64)
            program, arguments = prepare(name, arrays, turns)
            timers[name] = _timer(program, *arguments, zero)
        except (NotImplementedError, RuntimeError, ValueError) as error:
            found[name] = {"not_run": str(error).partition("\n")[0]}
            continue
        expected = output if name == "reference" else expected
        if expected is not None and name not in other:
            difference = float(np.linalg.norm(output - expected) / np.linalg.norm(expected))
            found[name] = {"difference": difference if np.isfinite(difference) else None}

    copies = max(1, round(RUN / (2 * COPIED)))
    copy, array = copy_program(copies), [jnp.zeros(COPIED // 4, jnp.uint32)]

    def copy_again() -> Any:
        """Copy the array that the previous run returned, so that nothing is allocated."""
        array[0] = copy(array[0], zero)
        return array[0]

    seconds: dict[str, list[float]] = defaultdict(list)
    for name, taken in take_turns({**timers, "copy": _timer(copy_again)}, repeats):
        seconds[name].append(taken)
    copied = 2 * COPIED * copies / np.asarray(seconds.pop("copy"))
    calls = arrays * turns
    for name, taken in seconds.items():
        times = np.asarray(taken)
        found.setdefault(name, {}).update(
            microseconds=_quartiles(1e6 * times / calls),
            gigabytes_per_second=size * calls / float(np.median(times)) / 1e9,
            share_of_copy=_quartiles(size * calls / times / copied),
        )
    return {
        "calls": calls,
        "copy_gigabytes_per_second": _quartiles(copied / 1e9),
        "candidates": {name: found[name] for name in names},
    }


def copy_program(turns: int) -> Callable[..., UInt[Array, " n"]]:
    """Make a program that reads and writes its whole array, which is donated, in every turn."""

    def run(array: UInt[Array, " n"], zero: Int[Array, ""]) -> UInt[Array, " n"]:
        return repeat(
            lambda array, zero: array + (zero + 1).astype(array.dtype), array, turns, zero
        )

    return jax.jit(run, donate_argnums=0)


def _timer(program: Callable[..., Any], *arguments: Any) -> Callable[[], float]:
    """Compile the program, and return a function that runs the program and returns the seconds."""

    def run() -> float:
        started = time.perf_counter()
        jax.block_until_ready(program(*arguments))
        return time.perf_counter() - started

    run()
    return run


def _quartiles(values: np.ndarray) -> list[float]:
    """Lower quartile, median and upper quartile."""
    return [float(value) for value in np.quantile(values, (0.25, 0.5, 0.75))]


def run_bench(
    settings: argparse.Namespace,
    numbers: str,
    columns: Mapping[str, str],
    rows: Iterable[dict[str, Any]],
    definitions: Mapping[str, str],
) -> None:
    """Print the table row by row, then write the JSON report if `--output` is given.

    Args:
      settings: settings from `parse_arguments`.
      numbers: number format of the data, for the heading.
      columns: keys of a row that identify a shape, with their column headings.
      rows: rows with a shape and the result of `measure_candidates`.
      definitions: definitions of the fields that only this benchmark has.
    """
    device = jax.devices()[0]
    layout = "{:<14}" + "{:>7}" * (len(columns) - 1)
    print(f"{device.device_kind}; {numbers}, medians of {settings.repeats} repeats")
    print("share: rate / the copy's rate; difference: relative to the reference's outputs\n")
    heads = _CELLS.format("", "us", "GB/s", "share", "difference")
    print(layout.format(*columns.values()) + heads)
    done = []
    for row in rows:
        _show(layout.format(*(row[name] for name in columns)), row)
        done.append(row)
    if settings.output is None:
        return
    report = {
        "rows": done,
        "platform": device.platform,
        "device": device.device_kind,
        "versions": {package: version(package) for package in ("jax", "jaxlib")},
        "timestamp": datetime.now(UTC).isoformat(timespec="seconds"),
        "settings": {name: value for name, value in vars(settings).items() if name != "output"},
        "definitions": {**definitions, **DEFINITIONS},
    }
    settings.output.write_text(json.dumps(report, indent=2, allow_nan=False) + "\n")
    print(f"The report: {settings.output}")


def _show(shape: str, row: Mapping[str, Any]) -> None:
    """Print the lines of the table for a shape, the copy last."""
    for name, one in row["candidates"].items():
        if "not_run" in one:
            print(shape + _CELLS.format(name, "not run", "", "", ""), one["not_run"])
            continue
        taken, rate = f"{one['microseconds'][1]:.1f}", f"{one['gigabytes_per_second']:.1f}"
        share, error = f"{one['share_of_copy'][1]:.2f}", ""
        if "difference" in one:
            error = "not finite" if one["difference"] is None else f"{one['difference']:.1e}"
        print(shape + _CELLS.format(name, taken, rate, share, error))
    copied = f"{row['copy_gigabytes_per_second'][1]:.1f}"
    print(shape + _CELLS.format("copy", "", copied, "", ""), flush=True)


def parse_arguments(
    parser: argparse.ArgumentParser, arguments: Sequence[str] | None, counts: Sequence[str]
) -> argparse.Namespace:
    """Add `--repeats` and `--output` and parse; unusable arguments exit with code 2.

    The arguments named in `counts` must be 1 or more.
    """
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--output", type=Path, help="JSON file to write")
    settings = parser.parse_args(arguments)
    for name in (*counts, "repeats"):
        if (least := np.min(getattr(settings, name))) < 1:
            parser.error(f"--{name} is {least}, but must be 1 or more.")
    if settings.output and not settings.output.parent.is_dir():
        parser.error(
            f"--output is {settings.output}, whose folder does not exist; create the folder "
            f"{settings.output.parent} first."
        )
    if settings.output and settings.output.is_dir():
        parser.error(f"--output {settings.output} is a folder; give a file in it.")
    return settings


def require_gpu(parser: argparse.ArgumentParser) -> None:
    """Exit with code 2 and a one-sentence error if JAX does not run on a GPU."""
    if (platform := jax.default_backend()) != "gpu":
        parser.error(
            f"This benchmark needs an NVIDIA GPU, but JAX runs on {platform}; run it on a machine "
            "with a GPU and JAX's CUDA packages."
        )
