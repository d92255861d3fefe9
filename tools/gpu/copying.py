"""Measures the GPU's copy rate: bytes read and written per second by one kernel."""

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
    """Measure gigabytes per second in every repeat; return the rates in ascending order."""
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
    """Measure, and write the rates."""
    run_piece(argparse.ArgumentParser(prog="python -m tools.gpu.copying"), measure)


if __name__ == "__main__":
    run(main)
