"""What the compiler for an H200 makes of quantized weights; see `make aot`."""

from dataclasses import replace
from functools import cache
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from needs import needs_compiler
from places import CONFIGS
from written_arrays import written_sizes

from eval.abstract import abstract_drafter, abstract_state, abstract_target, bytes_of
from eval.plan import compile_decode
from eval.shapes import PlanSettings
from pallas_kernels.aot import compile_on, gpu_mesh
from redrafter_jax.drafters.base import RootOnly, bind_drafter
from redrafter_jax.settings.files import load_settings

SETTINGS = load_settings(PlanSettings, CONFIGS / "plan_llama_3_1_8b.yaml")
SHAPE = SETTINGS.target.build()
# Layers are alike: what holds for two holds for all 32.
FEW = replace(SHAPE, num_hidden_layers=2)
# So many nodes that no product of them has as many numbers as a weight.
DRAFT = replace(SETTINGS.tree, num_nodes=24)


def pair(shape: Any, form: Any) -> tuple[Any, Any]:
    """A target, and a drafter of Apple's layout, in 8 bits where the target is quantized."""
    drafter = SETTINGS.drafter_config(DRAFT.draft_rounds)
    heads = abstract_drafter(drafter, jnp.bfloat16, None if form is None else "int8")
    return abstract_target(shape, jnp.bfloat16, form), heads


@pytest.mark.parametrize(
    ("form", "limit"),
    [
        pytest.param("int8", 0.55, marks=pytest.mark.long),
        ("int4", 0.32),
        pytest.param("fp8", 0.55, marks=pytest.mark.long),
    ],
)
def test_arguments_shrink_with_the_weights(form: Any, limit: float) -> None:
    """Of a whole step without a drafter; what compiles has these bytes, as the test below sees."""
    assert bytes_of_a_step(form) < limit * bytes_of_a_step(None)


@cache
def bytes_of_a_step(form: Any) -> int:
    target = abstract_target(SHAPE, jnp.bfloat16, form)
    return bytes_of((target, abstract_state(target, RootOnly(), 1, 4096)))


@needs_compiler
@pytest.mark.parametrize("form", ["int8", "int4", "fp8"])
def test_no_dequantized_weight_is_written(form: Any) -> None:
    target, head = pair(FEW, form)
    drafter, tree = bind_drafter(head, DRAFT)
    # 13 times a power of two: no weight and no sums of groups have as many numbers as the cache.
    state = abstract_state(target, drafter, 1, 3328)
    compiled = compile_decode(gpu_mesh("h200"), target, drafter, state, tree)
    # int4 is packed, and alignment adds some bytes to each argument.
    arguments = bytes_of((target, drafter, state))
    assert arguments <= compiled.memory.argument_size_in_bytes < 1.001 * arguments
    whole, _ = pair(SHAPE, form)
    assert compiled.memory.temp_size_in_bytes < 0.05 * bytes_of(whole)
    plain, heads = pair(FEW, None)
    shapes = {leaf.shape for leaf in jax.tree.leaves((plain, heads)) if leaf.ndim == 2}
    written = written_sizes(compiled.hlo)
    assert not {prod(shape) for shape in shapes} & written
    if form == "int4":
        # Nor are the sums of every group of 128 inputs.
        sums = {inputs // 128 * DRAFT.num_nodes * outputs for inputs, outputs in shapes}
        assert not sums & written
    grouped = [kernel for kernel in compiled.kernels if "grouped_matmul" in kernel.name]
    assert bool(grouped) == (form == "int4")
    assert all(kernel.spill_stores == kernel.spill_loads == 0 for kernel in grouped)
    # In each layer attention and its merge, and the four products of int4; what writes the cache;
    # the filters of the target and of every round.
    calls = compiled.hlo.count('custom_call_target="mosaic_gpu_v2"')
    in_a_layer = 6 if form == "int4" else 2
    assert calls == FEW.num_hidden_layers * in_a_layer + 2 + DRAFT.draft_rounds


@needs_compiler
def test_a_dequantized_weight_would_be_seen() -> None:
    def loop(x: Any, codes: Any, steps: Any) -> Any:
        def step(at: Any, x: Any) -> Any:
            shifted = (codes + at.astype(jnp.int8)).astype(x.dtype)
            return jnp.tanh(x @ jax.lax.optimization_barrier(shifted))

        return jax.lax.fori_loop(0, steps, step, x)

    x = jax.ShapeDtypeStruct((24, 4096), jnp.bfloat16)
    codes = jax.ShapeDtypeStruct((4096, 4096), jnp.int8)
    steps = jax.ShapeDtypeStruct((), jnp.int32)
    compiled = compile_on(gpu_mesh("h200"), jax.jit(loop), x, codes, steps)
    assert 4096 * 4096 in written_sizes(compiled.hlo)
