"""`python -m pallas_kernels.bench_matmul`: how near grouped products come to the card's copy rate.

What is timed is a pair of products as a feed-forward block has them: from the model's width to the
inner one and back, each rounded to bfloat16, so that one's result is the next one's rows. Weights
are int4 with a scale and a minimum per group; for comparison the same shapes in bfloat16. As in
`pallas_kernels.bench`, one program calls a pair many times, over as many weights in turns as
together exceed the second-level cache, and candidates and a copy take turns in every repeat. The
rate is the bytes of both int4 weights over the time of a pair, for every candidate.
"""

import argparse
import json
import math
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from pallas_kernels import timing
from pallas_kernels.grouped_matmul import grouped_matmul
from pallas_kernels.timing import beside_copy, repeat, timer

# The model's width, and that inside of its feed-forward block.
WIDTHS = {"llama-3.1-8b": (4096, 14336), "vicuna-7b": (4096, 11008)}
CANDIDATES = ("mosaic_gpu", "reference", "bfloat16")
WEIGHTS = 128 * 2**20  # bytes of all of them together
DEFINITIONS = {
    "weight_bytes": "codes, scales and minima of both int4 weights of a pair",
    "microseconds": "of a pair of products: lower quartile, median, upper quartile",
    "gigabytes_per_second": "weight_bytes / median time, of the bfloat16 weights too",
    "share_of_copy": "rate / copy_gigabytes_per_second of the same repeat; quartiles",
    "difference": "norm of the difference to the reference's outputs / norm of those; null where "
    "it is not finite, absent for other weights",
    "not_run": "why there is no number",
    "copy_gigabytes_per_second": "bytes read and written per second by the copy; quartiles",
}
_COLUMNS = "{:<14}{:>5}  {:<12}{:>10}{:>10}{:>8}{:>12}"


class Case(NamedTuple):
    """Shapes of a pair of products."""

    width: int
    inner: int
    nodes: int
    group: int

    @property
    def weight_bytes(self) -> int:
        """Codes of half a byte, and a scale and a minimum of two bytes for each group."""
        numbers = 2 * self.width * self.inner
        return numbers // 2 + 4 * numbers // self.group


def main(arguments: Sequence[str] | None = None) -> None:
    """The command: exit code 2 and one sentence for values that cannot be used."""
    settings = _parse(arguments)
    device = jax.devices()[0]
    print(f"{device.device_kind}; medians of {settings.repeats} repeats\n")
    print(_COLUMNS.format("weights", "N", "", "us", "GB/s", "share", "difference"))
    rows = []
    for name in settings.weights:
        for nodes in settings.nodes:
            case = Case(*WIDTHS[name], nodes, settings.group)
            rows.append({"weights": name, **measure(case, settings.repeats)})
            _show(rows[-1])
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


def measure(case: Case, repeats: int) -> dict[str, Any]:
    """One row of the report: every candidate on one shape, beside a copy."""
    count = max(1, math.ceil(WEIGHTS / case.weight_bytes))
    turns = max(1, round(timing.RUN / (count * case.weight_bytes)))
    zero = jnp.int32(0)
    timers: dict[str, Callable[[], float]] = {}
    found: dict[str, dict[str, Any]] = {}
    expected: Any = None
    for name in sorted(CANDIDATES, key="reference".__ne__):
        x, pairs = draw_inputs(case, count, plain=name == "bfloat16")
        try:
            output = np.asarray(pair_program(name, 1)(x, pairs[:1], zero), np.float64)
            timers[name] = timer(pair_program(name, turns), x, pairs, zero)
        except (NotImplementedError, RuntimeError, ValueError) as error:
            found[name] = {"not_run": str(error).partition("\n")[0]}
            continue
        expected = output if name == "reference" else expected
        if expected is not None and name != "bfloat16":
            difference = float(np.linalg.norm(output - expected) / np.linalg.norm(expected))
            found[name] = {"difference": difference if np.isfinite(difference) else None}
    rates, copied = beside_copy(timers, case.weight_bytes, count * turns, repeats)
    return {
        **case._asdict(),
        "weight_bytes": case.weight_bytes,
        "copy_gigabytes_per_second": copied,
        "candidates": {name: found.get(name, {}) | rates.get(name, {}) for name in CANDIDATES},
    }


def draw_inputs(
    case: Case, count: int, *, plain: bool
) -> tuple[Float[Array, "N width"], tuple[Any, ...]]:
    """Random rows, and pairs of weights: codes with scales and minima, or plain bfloat16."""
    keys = iter(jax.random.split(jax.random.key(0), 2 * count + 1))

    def draw(inputs: int, outputs: int) -> Any:
        # Products keep the size of the rows.
        size = inputs**-0.5
        if plain:
            return size * jax.random.normal(next(keys), (inputs, outputs), jnp.bfloat16)
        codes = jax.random.randint(next(keys), (inputs, outputs), -8, 8, jnp.int8)
        scale = jnp.full((inputs // case.group, outputs), size / 4.6, jnp.bfloat16)
        return codes.astype(jnp.int4), scale, -7.5 * scale

    x = jax.random.normal(next(keys), (case.nodes, case.width), jnp.bfloat16)
    sizes = (case.width, case.inner), (case.inner, case.width)
    return x, tuple(tuple(draw(*size) for size in sizes) for _ in range(count))


def pair_program(name: str, turns: int) -> Callable[..., Array]:
    """From rows, pairs of weights and 0 to the last rows; every turn reads each pair once."""

    def multiply(x: Float[Array, "N I"], weight: Any) -> Float[Array, "N O"]:
        if name == "bfloat16":
            return x @ weight
        implementation: Any = name
        return grouped_matmul(x, *weight, implementation=implementation).astype(x.dtype)

    def run(x: Float[Array, "N width"], pairs: Any, zero: Int[Array, ""]) -> Array:
        def turn(x: Array, _: Int[Array, ""]) -> Array:
            for up, down in pairs:
                x = multiply(multiply(x, up), down)
            return x

        return repeat(turn, x, turns, zero)

    return jax.jit(run)


def _show(row: dict[str, Any]) -> None:
    show = partial(_COLUMNS.format, row["weights"], row["nodes"])
    for name, one in row["candidates"].items():
        if "not_run" in one:
            print(show(name, "not run", "", "", ""), one["not_run"])
            continue
        difference = one.get("difference", math.nan)
        rate, share = one["gigabytes_per_second"], one["share_of_copy"][1]
        error = "not finite" if difference is None else f"{difference:.1e}"
        print(show(name, f"{one['microseconds'][1]:.1f}", f"{rate:.1f}", f"{share:.2f}", error))
    print(show("copy", "", f"{row['copy_gigabytes_per_second'][1]:.1f}", "", ""), flush=True)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m pallas_kernels.bench_matmul",
        description="Time int4 products against the copy rate of the same GPU.",
    )
    parser.add_argument("--weights", nargs="+", choices=WIDTHS, default=list(WIDTHS))
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 8, 32, 64], help="N, rows")
    parser.add_argument("--group", type=int, choices=(16, 32, 64, 128), default=128)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--output", type=Path, help="JSON file to write")
    settings = parser.parse_args(arguments)
    for name in ("nodes", "repeats"):
        if (least := np.min(getattr(settings, name))) < 1:
            parser.error(f"--{name} {least} must be 1 or more.")
    if settings.output and not settings.output.parent.is_dir():
        parser.error(f"--output {settings.output}: there is no folder {settings.output.parent}.")
    if (platform := jax.default_backend()) != "gpu":
        parser.error(f"It measures an NVIDIA GPU, and JAX runs on {platform} here.")
    return settings


if __name__ == "__main__":
    main()
