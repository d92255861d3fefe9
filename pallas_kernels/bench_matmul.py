"""`python -m pallas_kernels.bench_matmul`: bandwidth of grouped products, relative to a copy.

The benchmark times a pair of products as in a feed-forward block: from the model's width to the
inner width and back. Each result is rounded to bfloat16 and is the input of the next product.
Weights are int4 with a scale and a minimum per group. The same shapes in bfloat16 are timed for
comparison.

As in `pallas_kernels.bench`, one program computes pairs many times, with weights that together
exceed the L2 cache, and all candidates and a copy take turns in every repeat. For every candidate,
the rate is the bytes of both int4 weights divided by the time of a pair.
"""

import argparse
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.bench_report import measure_candidates, parse_arguments, require_gpu, run_bench
from pallas_kernels.grouped_matmul import grouped_matmul
from pallas_kernels.timing import repeat

# Width of the model, and inner width of its feed-forward block.
WIDTHS = {"llama-3.1-8b": (4096, 14336), "vicuna-7b": (4096, 11008)}
CANDIDATES = ("mosaic_gpu", "reference", "bfloat16")
DEFINITIONS = {
    "weight_bytes": "bytes of codes, scales and minima of both int4 weights of a pair",
    "microseconds": "time of a pair of products: lower quartile, median, upper quartile",
    "gigabytes_per_second": "weight_bytes / median time, also for bfloat16 weights",
}
COLUMNS = {"weights": "weights", "nodes": "N"}


class Case(NamedTuple):
    """Shapes of a pair of products."""

    width: int
    inner: int
    nodes: int
    group: int

    @property
    def weight_bytes(self) -> int:
        """Bytes of both weights.

        A code takes half a byte, and each group takes four bytes for its scale and minimum.
        """
        numbers = 2 * self.width * self.inner
        return numbers // 2 + 4 * numbers // self.group


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark; an invalid argument exits with code 2 and a one-sentence error."""
    settings = _parse(arguments)
    shapes = product(settings.weights, settings.nodes)
    rows = (measure(settings, *shape) for shape in shapes)
    run_bench(settings, f"int4 in groups of {settings.group}", COLUMNS, rows, DEFINITIONS)


def measure(settings: argparse.Namespace, weights: str, nodes: int) -> dict[str, Any]:
    """Measure every candidate and a copy on one shape; return a row of the report."""
    case = Case(*WIDTHS[weights], nodes, settings.group)

    def prepare(name: str, count: int, turns: int) -> tuple[Callable[..., Array], tuple[Any, ...]]:
        return pair_program(name, turns), draw_inputs(case, count, plain=name == "bfloat16")

    size, other = case.weight_bytes, ("bfloat16",)
    measured = measure_candidates(CANDIDATES, prepare, size, settings.repeats, other)
    return {"weights": weights, **case._asdict(), "weight_bytes": size, **measured}


def draw_inputs(
    case: Case, count: int, *, plain: bool
) -> tuple[Float[Array, "N width"], tuple[Any, ...]]:
    """Draw random rows and pairs of weights: codes with scales and minima, or plain bfloat16."""
    keys = iter(jax.random.split(jax.random.key(0), 2 * count + 1))

    def draw(inputs: int, outputs: int) -> Any:
        # This scale keeps the norm of the rows.
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
    """Make a program that multiplies rows by each pair of weights, in each of `turns` turns.

    The program maps the rows, the pairs and the number 0 to the last rows.
    """

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


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m pallas_kernels.bench_matmul",
        description="Time int4 products against the copy rate of the same GPU.",
    )
    parser.add_argument("--weights", nargs="+", choices=WIDTHS, default=list(WIDTHS))
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 8, 32, 64], help="N, rows")
    parser.add_argument("--group", type=int, choices=(16, 32, 64, 128), default=128)
    settings = parse_arguments(parser, arguments, ("nodes",))
    require_gpu(parser)
    return settings


if __name__ == "__main__":
    main()
