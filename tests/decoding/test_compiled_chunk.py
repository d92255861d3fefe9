"""What the compiler for an H200 makes of a prompt's chunk that joins a decode step; `make aot`."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from needs import needs_compiler
from places import CONFIGS
from written_arrays import moved_sizes

from eval.abstract import abstract_state, abstract_target, bytes_of
from eval.shapes import PlanSettings
from pallas_kernels.aot import Compilation, compile_on, gpu_mesh
from pallas_kernels.launches import step_launches
from redrafter_jax.drafters.base import RootOnly
from redrafter_jax.engine.chunks import idle_row, next_chunk
from redrafter_jax.engine.device import decode_rows, read_and_decode_rows, read_rows
from redrafter_jax.models.target import Target
from redrafter_jax.settings.files import load_settings
from redrafter_jax.types import DecodeState

pytestmark = needs_compiler

# Two layers are like 32; eight rows decode, and 256 tokens of one prompt are read.
LLAMA = replace(
    load_settings(PlanSettings, CONFIGS / "plan_llama_3_1_8b.yaml").target.build(),
    num_hidden_layers=2,
)
ROWS, SLOTS, CHUNK = 9, 4096, 256


@pytest.fixture(scope="module")
def target() -> Target:
    return abstract_target(LLAMA, jnp.bfloat16)


@pytest.fixture(scope="module")
def programs(target: Target) -> dict[str, Compilation]:
    """Each in a loop, so that its state is donated and its launches can be told."""
    drafter: Any = RootOnly()
    state = abstract_state(target, drafter, ROWS, SLOTS)
    chunk = next_chunk([None], {}, ROWS, (1, CHUNK), idle_row(target, ()))
    rows = np.arange(8, dtype=np.int32)

    def compiled(step: Any, *arguments: Any) -> Compilation:
        def run(target: Target, state: DecodeState, turns: Any, *arguments: Any) -> DecodeState:
            def turn(carry: Any) -> Any:
                at, state = carry
                return at + 1, step(target, drafter, state, *arguments)[0]

            return jax.lax.while_loop(lambda carry: carry[0] < turns, turn, (0, state))[1]

        turns = jax.ShapeDtypeStruct((), jnp.int32)
        program = jax.jit(run, donate_argnums=1)
        return compile_on(gpu_mesh("h200"), program, target, state, turns, *arguments)

    return {
        "read": compiled(read_rows, chunk),
        "decode": compiled(partial(decode_rows, tree=None, steps=1), rows, np.int32(1)),
        "both": compiled(read_and_decode_rows, chunk, rows),
    }


def test_every_weight_is_read_once_for_both(
    target: Target, programs: dict[str, Compilation]
) -> None:
    moved = {
        name: sum(one.times * (one.reads + one.writes) for one in step_launches(one.hlo, (), 1))
        for name, one in programs.items()
    }
    layers = bytes_of(target.params["layers"])
    assert moved["both"] < moved["read"] + moved["decode"] - 0.95 * layers


def test_no_weight_and_no_cache_is_copied(target: Target, programs: dict[str, Compilation]) -> None:
    cache = abstract_state(target, RootOnly(), ROWS, SLOTS).cache
    arrays = jax.tree.leaves((target, cache.keys, cache.values))
    large = {leaf.size for leaf in arrays if leaf.ndim > 1}
    assert not large & moved_sizes(programs["both"].hlo)
