"""What the compiler for an H200 makes of quantized weights; see `make aot`."""

import re
from dataclasses import replace
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from needs import needs_compiler
from places import CONFIGS

from eval.abstract import abstract_drafter, abstract_state, abstract_target, bytes_of
from eval.shapes import PlanSettings
from pallas_kernels.aot import compile_on, gpu_mesh
from redrafter_jax.decoding.step import decode
from redrafter_jax.drafters.bind import bind_drafter
from redrafter_jax.settings.files import load_settings

SETTINGS = load_settings(PlanSettings, CONFIGS / "plan_llama_3_1_8b.yaml")
SHAPE = SETTINGS.target.build()
# Layers are alike: what holds for two holds for all 32.
FEW = replace(SHAPE, num_hidden_layers=2)
# So many nodes that no product of them has as many numbers as a weight.
DRAFT = replace(SETTINGS.draft, num_nodes=24)


def pair(shape: Any, form: Any) -> tuple[Any, Any]:
    """A target, and a drafter of Apple's layout, in 8 bits where the target is quantized."""
    drafter = SETTINGS.drafter_config(DRAFT.draft_rounds)
    heads = abstract_drafter(drafter, jnp.bfloat16, None if form is None else "int8")
    return abstract_target(shape, jnp.bfloat16, form), heads


@pytest.mark.parametrize(("form", "limit"), [("int8", 0.55), ("int4", 0.32)])
def test_arguments_shrink_with_the_weights(form: Any, limit: float) -> None:
    """Of a whole step without a drafter; what compiles has these bytes, as the test below sees."""
    sizes = []
    for one in (form, None):
        target, _ = pair(SHAPE, one)
        state = abstract_state(target, bind_drafter(None), 1, 4096)
        sizes.append(bytes_of((target, state)))
    assert sizes[0] < limit * sizes[1]


@needs_compiler
@pytest.mark.parametrize("form", ["int8", "int4"])
def test_no_dequantized_weight_is_written(form: Any) -> None:
    target, head = pair(FEW, form)
    drafter = bind_drafter(head, DRAFT)
    state = abstract_state(target, drafter, 1, 4096)
    loop = jax.jit(decode, donate_argnames="state")
    steps = jax.ShapeDtypeStruct((), jnp.int32)
    compiled = compile_on(gpu_mesh("h200"), loop, target, drafter, state, steps)
    # int4 is packed, and alignment adds some bytes to each argument.
    arguments = bytes_of((target, drafter, state))
    assert arguments <= compiled.memory.arguments < 1.001 * arguments
    whole, _ = pair(SHAPE, form)
    assert compiled.memory.temporaries < 0.05 * bytes_of(whole)
    plain, heads = pair(FEW, None)
    weights = {leaf.size for leaf in jax.tree.leaves((plain, heads)) if leaf.ndim == 2}
    assert not weights & written_sizes(compiled.hlo)


def written_sizes(hlo: str) -> set[int]:
    """Numbers of every floating-point array that is made outside of fusions."""
    sizes = set()
    for computation in re.split(r"\n(?=[%E])", hlo):
        if computation.startswith(("%fused", "%gemm", "%wrapped", "%region", "%triton")):
            continue
        made = re.findall(
            r"= (?:bf16|f16|f32)\[([\d,]+)\]\S* (?!parameter|get-tuple-element|bitcast)",
            computation,
        )
        sizes |= {prod(map(int, shape.split(","))) for shape in made}
    return sizes


@needs_compiler
def test_a_dequantized_weight_would_be_seen() -> None:
    weight = jax.ShapeDtypeStruct((4096, 1024), jnp.int8)
    dequantized = jax.jit(lambda codes: codes.astype(jnp.bfloat16))
    assert 4096 * 1024 in written_sizes(compile_on(gpu_mesh("h200"), dequantized, weight).hlo)
