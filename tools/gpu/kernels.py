"""Compares the kernels on this GPU with their references, at shapes of real models.

With small shapes, the kernels run in Pallas' interpreter and need no GPU.
"""

import argparse
from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from pallas_kernels import bench, bench_matmul
from pallas_kernels.add_norm import add_norm
from pallas_kernels.grouped_matmul import grouped_matmul
from pallas_kernels.lowest_kept import lowest_kept
from pallas_kernels.tree_attention import PAGE, tree_attention
from pallas_kernels.write_rows import write_rows
from redrafter_jax.command_line import run
from tools.gpu.measured import run_piece

# Limits of the relative error: norm of the difference over norm of the reference, worst row.
_LARGEST = {
    "tree_attention": 1e-2,
    "grouped_matmul": 1e-2,
    "lowest_kept": 0.0,
    "add_norm": 1e-2,
    "write_rows": 0.0,
}
# A kernel's name, a description of its shapes, and a function that runs an implementation.
_Case = tuple[str, str, Any]


def measure(settings: argparse.Namespace) -> dict[str, Any]:
    """Measure, for each kernel and shape, the error and whether the error is small enough."""
    chosen = "mosaic_gpu_interpret" if settings.small else "mosaic_gpu"
    rows = []
    for name, shape, call in _small_cases() if settings.small else _cases():
        row: dict[str, Any] = {"kernel": name, "shape": shape, "largest": _LARGEST[name]}
        try:
            difference = _difference(call(chosen), call("reference"))
        # Report a kernel that does not compile and go on with the others.
        except (NotImplementedError, RuntimeError, ValueError) as error:
            rows.append(row | {"right": False, "not_run": str(error).partition("\n")[0]})
            continue
        # The comparison is also false for NaN.
        right = difference <= _LARGEST[name]
        finite = difference if np.isfinite(difference) else None
        rows.append(row | {"right": bool(right), "difference": finite})
    return {"rows": rows, "right": all(row["right"] for row in rows)}


def _difference(ours: Array, reference: Array) -> float:
    got, right = (np.asarray(one, np.float64) for one in (ours, reference))
    error, norm = np.linalg.norm(got - right, axis=-1), np.linalg.norm(right, axis=-1)
    return float(np.max(error / np.where(norm == 0, 1, norm)))


def _cases() -> Iterator[_Case]:
    for heads, batch, nodes in product(bench.HEADS, (1, 8), (1, 8, 32, 64)):
        yield _attention(heads, bench.Case(*bench.HEADS[heads], batch, 4096, nodes, "bfloat16"))
    for weights, nodes in product(bench_matmul.WIDTHS, (1, 32)):
        yield _product(weights, bench_matmul.Case(*bench_matmul.WIDTHS[weights], nodes, 128))
    for vocabulary in (32000, 128256):
        yield _bound(8, vocabulary)
    for rows, width in product((8, 32), (4096, 8192)):
        yield _norm(rows, width)
    for batch in (1, 8):
        yield _writing(64, batch, 5)


def _small_cases() -> Iterator[_Case]:
    yield _attention("two heads", bench.Case(2, 1, 64, 1, 128, 8, "bfloat16"))
    yield _product("small", bench_matmul.Case(128, 128, 8, 64))
    yield _bound(1, 2048)
    yield _norm(2, 512)
    yield _writing(2, 2, 2)


def _attention(heads: str, case: bench.Case) -> _Case:
    inputs = bench.draw_inputs(case, caches=1)
    # Ragged lengths, from an empty row (half full for a single row) to a full one.
    full = case.slots - case.nodes
    lengths = jnp.asarray(
        np.linspace(full // 2 if case.batch == 1 else 0, full, case.batch), "int32"
    )
    arrays = inputs.q, *inputs.caches[0], inputs.table, lengths, *inputs.tree

    def call(implementation: Any) -> Array:
        attend = partial(tree_attention, scale=0.1, implementation=implementation)
        return jax.jit(attend)(*arrays)

    return "tree_attention", f"{heads}, B={case.batch}, N={case.nodes}", call


def _product(weights: str, case: bench_matmul.Case) -> _Case:
    x, [(weight, _)] = bench_matmul.draw_inputs(case, 1, plain=False)

    def call(implementation: Any) -> Array:
        multiply = partial(grouped_matmul, implementation=implementation)
        return jax.jit(multiply)(x, *weight)

    return "grouped_matmul", f"{weights}, int4, N={case.nodes}", call


def _bound(rows: int, vocabulary: int) -> _Case:
    logits = 3 * jax.random.normal(jax.random.key(1), (rows, 4, vocabulary))
    of_rows = jnp.linspace(0.7, 1.3, rows), jnp.full(rows, 50.0), jnp.full(rows, 0.9)

    def call(implementation: Any) -> Float[Array, "B M"]:
        find = partial(lowest_kept, implementation=implementation)
        return jax.jit(find)(logits, *of_rows, jnp.full(rows, 0.05))

    return "lowest_kept", f"{4 * rows} rows of {vocabulary}", call


def _norm(rows: int, width: int) -> _Case:
    def draw(seed: int, *shape: int) -> Array:
        return jax.random.normal(jax.random.key(seed), shape)

    x, weight = (one.astype("bfloat16") for one in (draw(2, rows, width), draw(3, width)))
    parts = draw(4, 8, rows, width)

    def call(implementation: Any) -> Float[Array, "both rows D"]:
        add = partial(add_norm, epsilon=1e-5, implementation=implementation)
        return jnp.stack(jax.jit(add)(x, parts, weight))

    return "add_norm", f"{rows} rows of {width}", call


def _writing(layers: int, batch: int, tokens: int) -> _Case:
    """Write tokens across the end of each row's first page.

    If there are more than two tokens, the last token has no page.
    """

    def draw(seed: int, *shape: int) -> tuple[Array, ...]:
        whole = jax.random.normal(jax.random.key(seed), (layers, *shape), "bfloat16")
        return tuple(whole)

    pages = 2 * batch
    at = PAGE - 1 + jnp.arange(tokens)
    page = 2 * jnp.arange(batch)[:, None] + at // PAGE
    page = page.at[:, -1].set(pages) if tokens > 2 else page
    arrays = draw(5, pages, 8, PAGE, 128), draw(6, batch, tokens, 8, 128)

    def call(implementation: Any) -> Float[Array, "layers pages K page H"]:
        write = partial(write_rows, implementation=implementation)
        return jnp.stack(jax.jit(write)(*arrays, page, jnp.broadcast_to(at % PAGE, page.shape)))

    return "write_rows", f"{layers} layers, B={batch}, {tokens} tokens", call


def main() -> None:
    """Measure, and write the rows."""
    run_piece(argparse.ArgumentParser(prog="python -m tools.gpu.kernels"), measure)


if __name__ == "__main__":
    run(main)
