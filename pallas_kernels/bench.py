"""`python -m pallas_kernels.bench`: bandwidth of tree attention, relative to a copy.

The kernel and the reference attend to the same S tokens. The last N of them are nodes of a tree.
Timing works as follows:

- One program calls attention many times (`timing.repeat`). The outputs of a call are the queries
  of the next, so XLA can neither hoist nor drop a call. Values that depend on neither queries nor
  lengths, such as the bit mask, are computed once before the loop.
- A small key-value cache would stay in the GPU's L2 cache. So the calls rotate over several
  key-value caches. Together, these are two and a half times as large as the 50 MiB L2 cache of an
  H100 or H200.
- All candidates and a copy take turns in every repeat (`timing.take_turns`).
- The rate of a candidate is the bytes of the keys and values of S tokens, counted once, divided by
  the time of a call. The share is this rate divided by the copy's rate in the same repeat. The
  copy's rate counts bytes read and bytes written; reading alone may be a little faster. Results are
  medians over repeats, with quartiles.
"""

import argparse
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.bench_report import measure_candidates, parse_arguments, require_gpu, run_bench
from pallas_kernels.timing import repeat
from pallas_kernels.tree_attention import PAGE, tree_attention

# Query heads, key heads, head dimension.
HEADS = {"llama-3.1-8b": (32, 8, 128), "vicuna-7b": (32, 32, 128)}
CANDIDATES = ("mosaic_gpu", "reference")
DEFINITIONS = {
    "cache_bytes": "bytes of the keys and values of S tokens: 2 x B x K x S x H elements",
    "microseconds": "time of one call within a program: lower quartile, median, upper quartile",
    "gigabytes_per_second": "cache_bytes / median time",
}
COLUMNS = {"heads": "heads", "batch": "B", "slots": "S", "nodes": "N"}


class Case(NamedTuple):
    """Shapes of one call; the last `nodes` of the `slots` keys of a row are tree nodes."""

    query_heads: int
    key_heads: int
    head_dim: int
    batch: int
    slots: int
    nodes: int
    dtype: str

    @property
    def cache_bytes(self) -> int:
        """Bytes of the keys and values of S tokens, which every implementation must read."""
        size = 2 * self.batch * self.key_heads * self.slots * self.head_dim
        return size * jnp.dtype(self.dtype).itemsize


class Inputs(NamedTuple):
    """Inputs of `tree_attention`, with pairs of key and value caches that are read in turns."""

    q: Float[Array, "B N Q H"]
    caches: tuple[tuple[Array, Array], ...]
    table: Int[Array, "B M"]
    lengths: Int[Array, " B"]
    tree: tuple[Array, Array, Array]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark; an invalid argument exits with code 2 and a one-sentence error."""
    settings = _parse(arguments)
    shapes = product(settings.heads, settings.batch, settings.slots, settings.nodes)
    rows = (measure(settings, *shape) for shape in shapes)
    run_bench(settings, settings.dtype, COLUMNS, rows, DEFINITIONS)


def measure(
    settings: argparse.Namespace, heads: str, batch: int, slots: int, nodes: int
) -> dict[str, Any]:
    """Measure every candidate and a copy on one shape; return a row of the report."""
    case = Case(*HEADS[heads], batch, slots, nodes, settings.dtype)

    def prepare(name: str, caches: int, turns: int) -> tuple[Callable[..., Array], tuple[Any, ...]]:
        return attention_program(name, turns), (draw_inputs(case, caches),)

    measured = measure_candidates(CANDIDATES, prepare, case.cache_bytes, settings.repeats)
    return {"heads": heads, **case._asdict(), "cache_bytes": case.cache_bytes, **measured}


def draw_inputs(case: Case, caches: int) -> Inputs:
    """Draw random inputs with `caches` cache pairs, each of `slots - nodes` tokens per row."""
    keys = iter(jax.random.split(jax.random.key(0), 2 * caches + 4))
    B, N, K, S, H = case.batch, case.nodes, case.key_heads, case.slots, case.head_dim

    def draw(*shape: int) -> Array:
        return jax.random.normal(next(keys), shape, jnp.dtype(case.dtype))

    q = draw(B, N, case.query_heads, H)
    M = -(-S // PAGE)
    pages = B * M, K, PAGE, H
    pairs = tuple((draw(*pages), draw(*pages)) for _ in range(caches))
    # Pages are in random order, as in a server.
    table = jax.random.permutation(next(keys), B * M).reshape(B, M)
    # A chain, since the shape of a tree does not affect the time.
    mask = jnp.broadcast_to(jnp.tri(N, dtype=bool), (B, N, N))
    tree = draw(B, N, K, H), draw(B, N, K, H), mask
    return Inputs(q, pairs, table, jnp.full(B, S - N, jnp.int32), tree)


def attention_program(implementation: Any, turns: int) -> Callable[..., Array]:
    """Make a program that calls attention once for each cache, in each of `turns` turns.

    The program maps `Inputs` and the number 0 to the outputs of the last call. The outputs of one
    call are the queries of the next call, so calls run in sequence.
    """

    @jax.jit  # traced and lowered once for all caches
    def attend(q: Array, *others: Array) -> Float[Array, "B N Q H"]:
        return tree_attention(q, *others, scale=q.shape[-1] ** -0.5, implementation=implementation)

    def run(inputs: Inputs, zero: Int[Array, ""]) -> Float[Array, "B N Q H"]:
        def turn(q: Array, zero: Int[Array, ""]) -> Array:
            for keys, values in inputs.caches:
                q = attend(q, keys, values, inputs.table, inputs.lengths + zero, *inputs.tree)
            return q

        return repeat(turn, inputs.q, turns, zero)

    return jax.jit(run)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m pallas_kernels.bench",
        description="Time tree attention against the copy rate of the same GPU.",
    )
    parser.add_argument("--heads", nargs="+", choices=HEADS, default=list(HEADS))
    for name, default, words in (
        ("--nodes", [1, 7, 32, 64], "N, including the root"),
        ("--slots", [1024, 8192, 32768], "S, tokens attended to, including tree nodes"),
        ("--batch", [1, 8], "B, number of rows"),
    ):
        parser.add_argument(name, type=int, nargs="+", default=default, help=words)
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    settings = parse_arguments(parser, arguments, ("nodes", "slots", "batch"))
    if max(settings.nodes) > min(settings.slots):
        parser.error(
            f"--nodes {max(settings.nodes)} is more than --slots {min(settings.slots)}, which "
            "counts the nodes; give fewer nodes or more slots."
        )
    require_gpu(parser)
    return settings


if __name__ == "__main__":
    main()
