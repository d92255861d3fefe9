"""`python -m pallas_kernels.bench`: how near tree attention comes to the card's copy rate.

The kernel, the reference and `jax.nn.dot_product_attention` see the same S tokens, of which the
last N are nodes of a tree. How it is timed:

- One program calls attention many times in a loop of constant length, so that launching it from
  Python is no part of the time. The outputs of a call are the queries of the next: XLA can neither
  move a call out of the loop nor drop one. What depends on neither queries nor lengths, such as
  the mask as bits and the padding of the nodes' own keys, is computed once, before the loop.
- A cache smaller than the GPU's own second-level cache would be read from there. So the calls take
  turns over as many caches as together have `--rotate-megabytes`; the default is two and a half
  times the 50 MiB of an H100 or H200.
- All candidates, and a copy of `--copy-megabytes`, run one after the other in every repeat, and
  each repeat begins with another of them: a slow moment of the machine hits them all.
- The rate is the keys and values of S tokens, once, over the time of a call. Its share is that
  rate over what the copy read and wrote per second in the same repeat; reading alone may be a
  little faster than copying. Medians over repeats, with quartiles.

On a CPU it runs small shapes, to show that it runs: its caches have more levels, and XLA may do
once, before the loop, what a decode step does every time.
"""

import argparse
import json
import math
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from itertools import product
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.candidates import (
    CANDIDATES,
    Case,
    attention_program,
    copy_program,
    count_caches,
    draw_tree_inputs,
)
from pallas_kernels.timing import interleave

# Query heads, key heads, head dimension.
HEADS = {"llama-3.1-8b": (32, 8, 128), "vicuna-7b": (32, 32, 128)}
DEFAULTS: dict[str, dict[str, Any]] = {
    "gpu": {
        "nodes": [1, 7, 32, 64],
        "slots": [1024, 8192, 32768],
        "batch": [1, 8],
        "repeats": 10,
        "gigabytes": 32.0,
        "rotate_megabytes": 128.0,
        "copy_megabytes": 1024.0,
    },
    "cpu": {
        "nodes": [1, 7],
        "slots": [256],
        "batch": [1],
        "repeats": 3,
        "gigabytes": 0.05,
        "rotate_megabytes": 4.0,
        "copy_megabytes": 64.0,
    },
}
DEFINITIONS = {
    "cache_bytes": "keys and values of S tokens, once: 2 x B x K x S x H elements",
    "microseconds": "of one call within a program, over repeats: lower quartile, median, upper "
    "quartile",
    "gigabytes_per_second": "cache_bytes / median time",
    "share_of_copy": "rate / bytes that the copy of the same repeat read and wrote per second; "
    "lower quartile, median, upper quartile",
    "difference": "norm of the difference to the reference's outputs / norm of those; null where "
    "that is not finite, absent where the reference did not run",
    "not_run": "why there is no number",
    "copy_gigabytes_per_second": "bytes read and written per second by the copy beside these "
    "candidates: lower quartile, median, upper quartile",
}
_COLUMNS = "{:<14}{:>3}{:>7}{:>4}  {:<18}{:>10}  {:<20}{:>8}  {:<22}{:>10}"


def main(arguments: Sequence[str] | None = None) -> None:
    """The command: exit code 2 and one sentence for values that cannot be used."""
    settings = _parse(arguments)
    cases = {
        (heads, batch, slots, nodes): Case(*HEADS[heads], batch, slots, nodes, settings.dtype)
        for heads, batch, slots, nodes in product(
            settings.heads, settings.batch, settings.slots, settings.nodes
        )
    }
    device = jax.devices()[0]
    print(f"{device.device_kind}; {settings.dtype}, {settings.repeats} repeats")
    print("share: of the copy rate; difference: from the reference; quartiles in brackets\n")
    header = ("heads", "B", "S", "N", "", "us", "", "GB/s", "share", "difference")
    print(_COLUMNS.format(*header))
    rows, reasons = [], set()
    for (heads, *_), case in cases.items():
        row = {"heads": heads, **measure(case, settings)}
        rows.append(row)
        _show(row)
        reasons |= {
            f"{name}: not run: {one['not_run']}"
            for name, one in row["candidates"].items()
            if "not_run" in one
        }
    report = {
        "rows": rows,
        "platform": device.platform,
        "device": device.device_kind,
        "versions": {package: _version(package) for package in ("jax", "jaxlib")},
        "timestamp": datetime.now(UTC).isoformat(timespec="seconds"),
        "settings": {name: value for name, value in vars(settings).items() if name != "output"},
        "definitions": DEFINITIONS,
    }
    print("", *sorted(reasons), sep="\n")
    if settings.output:
        settings.output.write_text(json.dumps(report, indent=2, allow_nan=False) + "\n")
        print(f"The report: {settings.output}")


def measure(case: Case, settings: argparse.Namespace) -> dict[str, Any]:
    """One row of the report: every candidate on one shape, beside a copy."""
    caches = count_caches(case, int(settings.rotate_megabytes * 2**20))
    calls = caches * max(1, round(settings.gigabytes * 1e9 / (caches * case.cache_bytes)))
    zero = jnp.int32(0)
    tree_inputs = draw_tree_inputs(case, caches)
    timers: dict[str, Callable[[], float]] = {}
    found: dict[str, dict[str, Any]] = {}
    expected: Any = None
    for name in ("reference", *(name for name in CANDIDATES if name != "reference")):
        prepare, attend = CANDIDATES[name]
        try:
            inputs = prepare(tree_inputs)
            keys, values = inputs.caches[0]
            output = jax.jit(attend)(inputs.q, keys, values, zero, *inputs.rest)
            output = np.asarray(output, np.float64)
            program = attention_program(attend, calls // caches)
            timer = _timer(program, inputs, zero)
            timer()  # compiles
        except (NotImplementedError, RuntimeError, ValueError) as error:
            found[name] = {"not_run": str(error).partition("\n")[0]}
            continue
        expected = output if name == "reference" else expected
        timers[name] = timer
        found[name] = {}
        if expected is not None:  # or the reference did not run
            found[name]["difference"] = _difference(output, expected)
    copied = _copy_timer(settings, zero)
    copied()
    timers["copy"] = copied

    seconds = interleave(timers, settings.repeats)
    copy_rates = _copied_bytes(settings) / seconds.pop("copy")
    for name, times in seconds.items():
        rates = case.cache_bytes * calls / times
        found[name] |= {
            "microseconds": _quartiles(1e6 * times / calls),
            "gigabytes_per_second": case.cache_bytes * calls / float(np.median(times)) / 1e9,
            "share_of_copy": _quartiles(rates / copy_rates),
        }
    return {
        **case._asdict(),
        "cache_bytes": case.cache_bytes,
        "caches": caches,
        "calls": calls,
        "copy_gigabytes_per_second": _quartiles(copy_rates / 1e9),
        "candidates": {name: found[name] for name in CANDIDATES},
    }


def _difference(output: np.ndarray, expected: np.ndarray) -> float | None:
    difference = float(np.linalg.norm(output - expected) / np.linalg.norm(expected))
    return difference if math.isfinite(difference) else None


def _timer(program: Callable[..., Any], *arguments: Any) -> Callable[[], float]:
    def run() -> float:
        started = time.perf_counter()
        jax.block_until_ready(program(*arguments))
        return time.perf_counter() - started

    return run


def _copy_timer(settings: argparse.Namespace, zero: Any) -> Callable[[], float]:
    """It hands every run the array that the one before gave back: nothing is made anew."""
    array = [jnp.zeros(_copy_elements(settings), jnp.uint32)]
    program = copy_program(_copy_turns(settings))

    def run() -> float:
        started = time.perf_counter()
        array[0] = jax.block_until_ready(program(array[0], zero))
        return time.perf_counter() - started

    return run


def _copy_elements(settings: argparse.Namespace) -> int:
    return max(1, int(settings.copy_megabytes * 2**20) // 4)


def _copy_turns(settings: argparse.Namespace) -> int:
    return max(1, round(settings.gigabytes * 1e9 / (2 * 4 * _copy_elements(settings))))


def _copied_bytes(settings: argparse.Namespace) -> int:
    """Read and written by one run of the copy."""
    return 2 * 4 * _copy_elements(settings) * _copy_turns(settings)


def _quartiles(values: np.ndarray) -> list[float]:
    return [float(value) for value in np.quantile(values, (0.25, 0.5, 0.75))]


def _show(row: dict[str, Any]) -> None:
    shape = row["heads"], row["batch"], row["slots"], row["nodes"]
    for name, one in row["candidates"].items():
        if "not_run" in one:
            cells = "not run", "", "", "", ""
        else:
            low, middle, high = one["microseconds"]
            least, share, most = one["share_of_copy"]
            cells = (
                f"{middle:.1f}",
                f"[{low:.1f}, {high:.1f}]",
                f"{one['gigabytes_per_second']:.1f}",
                f"{share:.2f} [{least:.2f}, {most:.2f}]",
                _show_difference(one),
            )
        print(_COLUMNS.format(*shape, name, *cells))
        shape = "", "", "", ""
    low, middle, high = row["copy_gigabytes_per_second"]
    span = f"[{low:.1f}, {high:.1f}]"
    print(_COLUMNS.format(*shape, "copy", "", span, f"{middle:.1f}", "", ""), flush=True)


def _show_difference(one: dict[str, Any]) -> str:
    if "difference" not in one:
        return "-"
    # JSON has no number for it.
    return "not finite" if one["difference"] is None else f"{one['difference']:.1e}"


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    default = DEFAULTS["gpu" if jax.default_backend() == "gpu" else "cpu"]
    parser = argparse.ArgumentParser(
        prog="python -m pallas_kernels.bench",
        description="Time tree attention against the copy rate of the same device. On a CPU the "
        "defaults are small shapes.",
    )
    positive: dict[str, Any] = {"type": _positive_int, "nargs": "+"}
    parser.add_argument("--heads", nargs="+", choices=HEADS, default=list(HEADS))
    parser.add_argument("--nodes", **positive, help="N, root included", metavar="N")
    parser.add_argument("--slots", **positive, help="S, tokens to see, nodes included", metavar="S")
    parser.add_argument("--batch", **positive, help="rows", metavar="B")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--repeats", type=_positive_int)
    parser.add_argument("--gigabytes", type=_positive, help="read by one timed run")
    parser.add_argument("--rotate-megabytes", type=_positive, help="of all caches, at least")
    parser.add_argument("--copy-megabytes", type=_positive, help="of the array that is copied")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    parser.set_defaults(**default)
    settings = parser.parse_args(arguments)
    if max(settings.nodes) > min(settings.slots):
        parser.error(
            f"--nodes {max(settings.nodes)} is more than --slots {min(settings.slots)}, which "
            "counts the nodes; give fewer nodes or more slots."
        )
    if settings.output and not settings.output.parent.is_dir():
        parser.error(f"--output {settings.output}: there is no folder {settings.output.parent}.")
    if reason := _too_large(settings):
        parser.error(reason)
    return settings


def _too_large(settings: argparse.Namespace) -> str | None:
    """A sentence where the caches of the largest shape would not fit; None where nobody knows."""
    limit = (jax.devices()[0].memory_stats() or {}).get("bytes_limit")
    largest = max(
        (
            Case(*HEADS[heads], batch, slots, 1, settings.dtype)
            for heads, batch, slots in product(settings.heads, settings.batch, settings.slots)
        ),
        key=lambda case: case.cache_bytes,
    )
    # In the layout of the kernel, and twice joined with the tree.
    needed = 3 * count_caches(largest, int(settings.rotate_megabytes * 2**20)) * largest.cache_bytes
    if limit is None or needed <= limit:
        return None
    return (
        f"--slots {largest.slots} with --batch {largest.batch} needs {needed / 1e9:.1f} GB for "
        f"caches and the device has {limit / 1e9:.1f} GB; give fewer."
    )


def _positive_int(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} must be 1 or more")
    return value


def _positive(text: str) -> float:
    value = float(text)
    if not (math.isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError(f"{text} must be greater than 0")
    return value


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


if __name__ == "__main__":
    main()
