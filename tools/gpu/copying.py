"""The card's copy rate: the bytes that one kernel reads and writes in a second."""

import argparse
import time
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.bench_report import copy_program
from redrafter_jax.command_line import run
from tools.gpu.measured import run_piece

_REPEATS = 10


def measure(settings: argparse.Namespace) -> dict[str, Any]:
    """Gigabytes per second of every repeat, in rising order; a run moves sixteen arrays' bytes."""
    size, turns = (2**20, 2) if settings.small else (2**30, 16)
    copy, zero = copy_program(turns), jnp.int32(0)
    array = jax.block_until_ready(copy(jnp.zeros(size // 4, jnp.uint32), zero))
    rates = []
    for _ in range(_REPEATS):
        started = time.perf_counter()
        array = jax.block_until_ready(copy(array, zero))
        rates.append(2 * size * turns / (time.perf_counter() - started) / 1e9)
    return {"array_bytes": size, "gigabytes_per_second": sorted(rates)}


def main() -> None:
    """Write the rate."""
    run_piece(argparse.ArgumentParser(prog="python -m tools.gpu.copying"), measure)


if __name__ == "__main__":
    run(main)
