"""`python -m pallas_kernels.bench`: how near tree attention comes to the card's copy rate.

The kernel, the reference and `jax.nn.dot_product_attention` see the same S tokens, of which the
last N are nodes of a tree. How it is timed:

- One program calls attention many times (`timing.repeat`). The outputs of a call are the queries
  of the next: XLA can neither move a call out of the loop nor drop one. What depends on neither
  queries nor lengths, such as the mask as bits, is computed once, before the loop.
- The GPU would keep a small cache in its second-level cache. So the calls take turns over as many
  caches as together have two and a half times the 50 MiB of an H100 or H200.
- All candidates and a copy take turns in every repeat (`timing.interleave`).
- The rate is the keys and values of S tokens, once, over the time of a call. Its share is that
  rate over what the copy read and wrote per second in the same repeat; reading alone may be a
  little faster than copying. Medians over repeats, with quartiles.

On a CPU it runs small shapes, to show that it runs.
"""

import argparse
import json
import math
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.candidates import (
    CANDIDATES,
    Case,
    attention_program,
    copy_program,
    draw_tree_inputs,
)
from pallas_kernels.timing import interleave

# Query heads, key heads, head dimension.
HEADS = {"llama-3.1-8b": (32, 8, 128), "vicuna-7b": (32, 32, 128)}


class Sizes(NamedTuple):
    """Bytes: of all caches together, of the array that is copied, and read by one timed run."""

    caches: int
    copied: int
    run: int


SIZES = {"gpu": Sizes(128 * 2**20, 2**30, 32 * 10**9), "cpu": Sizes(4 * 2**20, 2**26, 5 * 10**7)}
DEFAULTS: dict[str, dict[str, Any]] = {
    "gpu": {"nodes": [1, 7, 32, 64], "slots": [1024, 8192, 32768], "batch": [1, 8], "repeats": 10},
    "cpu": {"nodes": [1, 7], "slots": [256], "batch": [1], "repeats": 3},
}
DEFINITIONS = {
    "cache_bytes": "keys and values of S tokens, once: 2 x B x K x S x H elements",
    "microseconds": "of one call within a program: lower quartile, median, upper quartile",
    "gigabytes_per_second": "cache_bytes / median time",
    "share_of_copy": "rate / copy_gigabytes_per_second of the same repeat; quartiles",
    "difference": "norm of the difference to the reference's outputs / norm of those; null where "
    "it is not finite, absent where the reference did not run",
    "not_run": "why there is no number",
    "copy_gigabytes_per_second": "bytes read and written per second by the copy; quartiles",
}
_COLUMNS = "{:<14}{:>3}{:>7}{:>4}  {:<18}{:>10}{:>10}{:>8}{:>12}"


def main(arguments: Sequence[str] | None = None) -> None:
    """The command: exit code 2 and one sentence for values that cannot be used."""
    settings = _parse(arguments)
    device = jax.devices()[0]
    print(f"{device.device_kind}; {settings.dtype}, medians of {settings.repeats} repeats")
    print("share: of the copy's rate; difference: from the reference\n")
    print(_COLUMNS.format("heads", "B", "S", "N", "", "us", "GB/s", "share", "difference"))
    rows = []
    shapes = product(settings.heads, settings.batch, settings.slots, settings.nodes)
    for heads, batch, slots, nodes in shapes:
        case = Case(*HEADS[heads], batch, slots, nodes, settings.dtype)
        row = measure(case, settings.repeats, SIZES["gpu" if device.platform == "gpu" else "cpu"])
        rows.append({"heads": heads, **row})
        _show(rows[-1])
    candidates = [one for row in rows for one in row["candidates"].items()]
    reasons = {f"{name}: not run: {one['not_run']}" for name, one in candidates if "not_run" in one}
    print("", *sorted(reasons), sep="\n")
    if settings.output:
        report = {
            "rows": rows,
            "platform": device.platform,
            "device": device.device_kind,
            "versions": {package: version(package) for package in ("jax", "jaxlib")},
            "timestamp": datetime.now(UTC).isoformat(timespec="seconds"),
            "settings": {name: value for name, value in vars(settings).items() if name != "output"},
            "definitions": DEFINITIONS,
        }
        settings.output.write_text(json.dumps(report, indent=2, allow_nan=False) + "\n")
        print(f"The report: {settings.output}")


def measure(case: Case, repeats: int, sizes: Sizes) -> dict[str, Any]:
    """One row of the report: every candidate on one shape, beside a copy."""
    caches = max(1, math.ceil(sizes.caches / case.cache_bytes))
    turns = max(1, round(sizes.run / (caches * case.cache_bytes)))
    calls = caches * turns
    zero = jnp.int32(0)
    tree_inputs = draw_tree_inputs(case, caches)
    timers: dict[str, Callable[[], float]] = {}
    found: dict[str, dict[str, Any]] = {}
    expected: Any = None
    for name in ("reference", *(name for name in CANDIDATES if name != "reference")):
        prepare, attend = CANDIDATES[name]
        try:
            inputs = prepare(tree_inputs)
            output = jax.jit(attend)(inputs.q, *inputs.caches[0], zero, *inputs.rest)
            output = np.asarray(output, np.float64)
            timers[name] = _timer(attention_program(attend, turns), inputs, zero)
        except (NotImplementedError, RuntimeError, ValueError) as error:
            found[name] = {"not_run": str(error).partition("\n")[0]}
            continue
        expected = output if name == "reference" else expected
        if expected is not None:
            difference = float(np.linalg.norm(output - expected) / np.linalg.norm(expected))
            found[name] = {"difference": difference if np.isfinite(difference) else None}
    elements = sizes.copied // 4
    copies = max(1, round(sizes.run / (2 * 4 * elements)))
    copy, array = copy_program(copies), [jnp.zeros(elements, jnp.uint32)]

    def copy_again() -> Any:
        """It is given the array that the run before returned: nothing is allocated."""
        array[0] = copy(array[0], zero)
        return array[0]

    timers["copy"] = _timer(copy_again)

    seconds = interleave(timers, repeats)
    copy_rates = 2 * 4 * elements * copies / seconds.pop("copy")
    for name, times in seconds.items():
        rates = case.cache_bytes * calls / times
        found[name] = found.get(name, {}) | {
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


def _timer(program: Callable[..., Any], *arguments: Any) -> Callable[[], float]:
    """Seconds of one run; compiled and run once here."""

    def run() -> float:
        started = time.perf_counter()
        jax.block_until_ready(program(*arguments))
        return time.perf_counter() - started

    run()
    return run


def _quartiles(values: np.ndarray) -> list[float]:
    return [float(value) for value in np.quantile(values, (0.25, 0.5, 0.75))]


def _show(row: dict[str, Any]) -> None:
    shape = row["heads"], row["batch"], row["slots"], row["nodes"]
    for name, one in row["candidates"].items():
        cells = ["not run", "", "", ""]
        if "not_run" not in one:
            difference = one.get("difference", math.nan)
            cells = [
                f"{one['microseconds'][1]:.1f}",
                f"{one['gigabytes_per_second']:.1f}",
                f"{one['share_of_copy'][1]:.2f}",
                "not finite" if difference is None else f"{difference:.1e}",
            ]
        print(_COLUMNS.format(*shape, name, *cells))
    copied = f"{row['copy_gigabytes_per_second'][1]:.1f}"
    print(_COLUMNS.format(*shape, "copy", "", copied, "", ""), flush=True)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m pallas_kernels.bench",
        description="Time tree attention against the copy rate of the same device. On a CPU the "
        "defaults are small shapes.",
    )
    several: dict[str, Any] = {"type": int, "nargs": "+"}
    parser.add_argument("--heads", nargs="+", choices=HEADS, default=list(HEADS))
    parser.add_argument("--nodes", **several, help="N, root included", metavar="N")
    parser.add_argument("--slots", **several, help="S, tokens to see, nodes included", metavar="S")
    parser.add_argument("--batch", **several, help="rows", metavar="B")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--repeats", type=int)
    parser.add_argument("--output", type=Path, help="JSON file to write")
    parser.set_defaults(**DEFAULTS["gpu" if jax.default_backend() == "gpu" else "cpu"])
    settings = parser.parse_args(arguments)
    for name in ("nodes", "slots", "batch", "repeats"):
        if (least := np.min(getattr(settings, name))) < 1:
            parser.error(f"--{name} {least} must be 1 or more.")
    if max(settings.nodes) > min(settings.slots):
        parser.error(
            f"--nodes {max(settings.nodes)} is more than --slots {min(settings.slots)}, which "
            "counts the nodes; give fewer nodes or more slots."
        )
    if settings.output and not settings.output.parent.is_dir():
        parser.error(f"--output {settings.output}: there is no folder {settings.output.parent}.")
    return settings


if __name__ == "__main__":
    main()
