"""What the compiler for an H200 makes of one target call and its commit; see `make aot`.

Of the shapes of several families, without sampling: launches in a layer, and no products written.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest
from needs import needs_compiler
from places import CONFIGS
from written_arrays import written_shapes

from eval.abstract import abstract_state, abstract_target, bytes_of
from eval.shapes import PlanSettings
from pallas_kernels.aot import compile_on, gpu_mesh
from pallas_kernels.launches import Launch, step_launches
from redrafter_jax.config import TargetConfig
from redrafter_jax.drafters.base import RootOnly
from redrafter_jax.models.cache import commit
from redrafter_jax.models.target import Target
from redrafter_jax.settings.files import load_settings
from redrafter_jax.types import KVCache, TokenTree

pytestmark = needs_compiler

LLAMA = load_settings(PlanSettings, CONFIGS / "plan_llama_3_1_8b.yaml").target.build()
VICUNA = load_settings(PlanSettings, CONFIGS / "plan_vicuna_7b.yaml").target.build()
FAMILIES = {
    "Llama-3.1-8B": LLAMA,
    "Vicuna-7B": VICUNA,
    "Qwen3-8B": replace(LLAMA, vocab_size=151936, intermediate_size=12288, qk_norm=True),
    "Gemma-3-1B": replace(
        LLAMA,
        vocab_size=262144,
        hidden_size=1152,
        intermediate_size=6912,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=256,
        tie_word_embeddings=True,
        hidden_act="gelu_pytorch_tanh",
        qk_norm=True,
        output_norms=True,
        zero_centered_norms=True,
        scaled_embeddings=True,
    ),
}


class Call(NamedTuple):
    target: Target
    hlo: str


def compile_call(config: TargetConfig, nodes: int, batch_size: int) -> Call:
    """A loop over target calls on so many nodes, each of which commits a path of up to five."""
    target = abstract_target(config, jnp.bfloat16)
    state = abstract_state(target, RootOnly(), batch_size, 4096)

    def run(
        target: Target, cache: KVCache, tree: TokenTree, path: Any, count: Any, turns: Any
    ) -> KVCache:
        decoder = target.merge()

        def turn(carry: Any) -> Any:
            at, cache, chosen = carry
            verified = decoder.tree_forward(tree._replace(tokens=chosen), cache)
            chosen = jnp.argmax(verified.logits, axis=-1).astype(jnp.int32)
            # As in a step: what is chosen comes before what is written.
            lengths, chosen = jax.lax.optimization_barrier((cache.lengths, chosen))
            cache = cache._replace(lengths=lengths)
            return at + 1, commit(cache, verified.keys, verified.values, path, count), chosen

        return jax.lax.while_loop(lambda c: c[0] < turns, turn, (0, cache, tree.tokens))[1]

    def shape(*lengths: int, dtype: Any = jnp.int32) -> Any:
        return jax.ShapeDtypeStruct((batch_size, *lengths), dtype)

    numbers, mask = shape(nodes), shape(nodes, nodes, dtype=bool)
    tree = TokenTree(numbers, numbers, numbers, mask, shape(nodes, dtype=jnp.float32), numbers)
    turns = jax.ShapeDtypeStruct((), jnp.int32)
    arguments = target, state.cache, tree, shape(min(nodes, 5)), shape(), turns
    compiled = compile_on(gpu_mesh("h200"), jax.jit(run, donate_argnums=1), *arguments)
    return Call(target, compiled.hlo)


@pytest.mark.parametrize("batch_size", [1, 8])
@pytest.mark.parametrize("family", FAMILIES)
def test_no_product_of_a_whole_weight_is_written(family: str, batch_size: int) -> None:
    config = replace(FAMILIES[family], num_hidden_layers=1)
    call = compile_call(config, 1, batch_size)
    weights = {leaf.shape for leaf in jax.tree.leaves(call.target) if leaf.ndim == 2}
    assert not weights & written_shapes(call.hlo)


def test_a_product_of_a_whole_weight_would_be_seen() -> None:
    def product(x: jax.Array, weight: jax.Array) -> jax.Array:
        return jax.lax.optimization_barrier(x[:, None] * weight)

    x = jax.ShapeDtypeStruct((4096,), jnp.bfloat16)
    weight = jax.ShapeDtypeStruct((4096, 1024), jnp.bfloat16)
    compiled = compile_on(gpu_mesh("h200"), jax.jit(product), x, weight)
    assert weight.shape in written_shapes(compiled.hlo)


# Projections; their rotation; attention; its merge; output; the residual's sum and its norm; gate
# and up; their product; down; the residual's sum and its norm.
@pytest.mark.parametrize(("nodes", "batch_size"), [(1, 1), (32, 1), (1, 8)])
def test_a_layer_is_ten_launches_that_read_little_but_its_weights(
    nodes: int, batch_size: int
) -> None:
    few, more = (
        compile_call(replace(LLAMA, num_hidden_layers=layers), nodes, batch_size)
        for layers in (1, 3)
    )
    one, three = step_launches(few.hlo), step_launches(more.hlo)
    assert len(three) - len(one) <= 2 * 10

    def moved(launches: list[Launch]) -> int:
        return sum(launch.times * (launch.reads + launch.writes) for launch in launches)

    layer = bytes_of(few.target.params["layers"]) + batch_size * 2 * 8 * 4096 * 128 * 2
    assert moved(three) - moved(one) < 2 * layer * (1.03 if nodes == batch_size == 1 else 1.13)
