"""`python -m pallas_kernels.bench`: how near tree attention comes to the card's copy rate.

The kernel and the reference see the same S tokens, of which the last N are nodes of a tree. How it
is timed:

- One program calls attention many times (`timing.repeat`). The outputs of a call are the queries
  of the next: XLA can neither move a call out of the loop nor drop one. What depends on neither
  queries nor lengths, such as the mask as bits, is computed once, before the loop.
- The GPU would keep a small cache in its second-level cache. So the calls take turns over as many
  caches as together have two and a half times the 50 MiB of an H100 or H200.
- All candidates and a copy take turns in every repeat (`timing.interleave`).
- The rate is the keys and values of S tokens, once, over the time of a call. Its share is that
  rate over what the copy read and wrote per second in the same repeat; reading alone may be a
  little faster than copying. Medians over repeats, with quartiles.
"""

import argparse
import json
import math
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels import timing
from pallas_kernels.timing import beside_copy, repeat, timer
from pallas_kernels.tree_attention import tree_attention

# Query heads, key heads, head dimension.
HEADS = {"llama-3.1-8b": (32, 8, 128), "vicuna-7b": (32, 32, 128)}
CANDIDATES = ("mosaic_gpu", "reference")
CHILDREN = 4  # of every node of the tree that is timed; its shape costs nothing
CACHES = 128 * 2**20  # bytes of all of them together
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
_COLUMNS = "{:<14}{:>3}{:>7}{:>4}  {:<12}{:>10}{:>10}{:>8}{:>12}"


class Case(NamedTuple):
    """Shapes of one call: S keys to see, the last N of them the tree's own."""

    query_heads: int
    key_heads: int
    head_dim: int
    batch: int
    slots: int
    nodes: int
    dtype: str

    @property
    def cache_bytes(self) -> int:
        """The keys and values of S tokens, once: what every implementation must read."""
        size = 2 * self.batch * self.key_heads * self.slots * self.head_dim
        return size * jnp.dtype(self.dtype).itemsize


class Inputs(NamedTuple):
    """Of `tree_attention`, with pairs of keys and values that are read in turns."""

    q: Float[Array, "B N Q H"]
    caches: tuple[tuple[Array, Array], ...]
    lengths: Int[Array, " B"]
    tree: tuple[Array, Array, Array]


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
        rows.append({"heads": heads, **measure(case, settings.repeats)})
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


def measure(case: Case, repeats: int) -> dict[str, Any]:
    """One row of the report: every candidate on one shape, beside a copy."""
    caches = max(1, math.ceil(CACHES / case.cache_bytes))
    turns = max(1, round(timing.RUN / (caches * case.cache_bytes)))
    calls = caches * turns
    zero = jnp.int32(0)
    inputs = draw_inputs(case, caches)
    once = inputs._replace(caches=inputs.caches[:1])
    timers: dict[str, Callable[[], float]] = {}
    found: dict[str, dict[str, Any]] = {}
    expected: Any = None
    for name in sorted(CANDIDATES, key="reference".__ne__):
        try:
            output = np.asarray(attention_program(name, 1)(once, zero), np.float64)
            timers[name] = timer(attention_program(name, turns), inputs, zero)
        except (NotImplementedError, RuntimeError, ValueError) as error:
            found[name] = {"not_run": str(error).partition("\n")[0]}
            continue
        expected = output if name == "reference" else expected
        if expected is not None:
            difference = float(np.linalg.norm(output - expected) / np.linalg.norm(expected))
            found[name] = {"difference": difference if np.isfinite(difference) else None}
    rates, copied = beside_copy(timers, case.cache_bytes, calls, repeats)
    return {
        **case._asdict(),
        "cache_bytes": case.cache_bytes,
        "caches": caches,
        "calls": calls,
        "copy_gigabytes_per_second": copied,
        "candidates": {name: found.get(name, {}) | rates.get(name, {}) for name in CANDIDATES},
    }


def draw_inputs(case: Case, caches: int) -> Inputs:
    """Random arrays, of which S - N tokens are cached and N are the tree's."""
    keys = iter(jax.random.split(jax.random.key(0), 2 * caches + 3))
    B, N, K, S, H = case.batch, case.nodes, case.key_heads, case.slots, case.head_dim

    def draw(*shape: int) -> Array:
        return jax.random.normal(next(keys), shape, jnp.dtype(case.dtype))

    q = draw(B, N, case.query_heads, H)
    pairs = tuple((draw(B, K, S, H), draw(B, K, S, H)) for _ in range(caches))
    tree = draw(B, N, K, H), draw(B, N, K, H), jnp.broadcast_to(tree_mask(N), (B, N, N))
    return Inputs(q, pairs, jnp.full(B, S - N, jnp.int32), tree)


def tree_mask(nodes: int) -> Bool[np.ndarray, "N N"]:
    """The ancestor mask of a tree whose node i is a child of node (i - 1) // 4."""
    mask = np.eye(nodes, dtype=bool)
    for node in range(1, nodes):
        mask[node] |= mask[(node - 1) // CHILDREN]
    return mask


def attention_program(implementation: Any, turns: int) -> Callable[..., Array]:
    """From `Inputs` and 0 to the last outputs; every turn reads each of the caches once.

    The outputs of one call are the queries of the next, so no call can start before it.
    """

    @jax.jit  # traced and lowered once for all caches
    def attend(q: Array, *others: Array) -> Float[Array, "B N Q H"]:
        return tree_attention(q, *others, scale=q.shape[-1] ** -0.5, implementation=implementation)

    def run(inputs: Inputs, zero: Int[Array, ""]) -> Float[Array, "B N Q H"]:
        def turn(q: Array, none: Int[Array, ""]) -> Array:
            for keys, values in inputs.caches:
                q = attend(q, keys, values, inputs.lengths + none, *inputs.tree)
            return q

        return repeat(turn, inputs.q, turns, zero)

    return jax.jit(run)


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
        description="Time tree attention against the copy rate of the same GPU.",
    )
    parser.add_argument("--heads", nargs="+", choices=HEADS, default=list(HEADS))
    for name, default, words in (
        ("--nodes", [1, 7, 32, 64], "N, root included"),
        ("--slots", [1024, 8192, 32768], "S, tokens to see, nodes included"),
        ("--batch", [1, 8], "rows"),
    ):
        parser.add_argument(name, type=int, nargs="+", default=default, help=words)
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--output", type=Path, help="JSON file to write")
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
    if (platform := jax.default_backend()) != "gpu":
        parser.error(f"It measures an NVIDIA GPU, and JAX runs on {platform} here.")
    return settings


if __name__ == "__main__":
    main()
