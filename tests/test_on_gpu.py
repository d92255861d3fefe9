"""On a real card: the kernel at real shapes, in a whole step and in a text, and float32 texts.

`make gpu` runs these; test_tree_attention_mosaic.py has more, against float64.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from needs import needs_hopper
from tiny_models import cast, forgetful_target, imitating_drafter, tiny_config
from trees import tree_of

from eval.abstract import abstract_target, random_state, random_weights
from eval.benchmark import Batch
from eval.parity import compare_batch
from eval.step_parts import reset_state
from pallas_kernels.bench import Case as Shape
from pallas_kernels.bench import draw_inputs
from pallas_kernels.tree_attention import tree_attention
from redrafter_jax import (
    SamplingConfig,
    TreeConfig,
    generate,
    generate_autoregressive,
)
from redrafter_jax.config import TargetConfig
from redrafter_jax.drafters.base import RootOnly
from redrafter_jax.models import attention
from redrafter_jax.models.target import Target
from redrafter_jax.types import KVCache, TokenTree, Verified

pytestmark = pytest.mark.gpu
PROMPTS = [[3, 1, 4], [1], [5, 9, 2, 6, 5, 3, 5], [8, 9]]
SEEDS = [11, 12, 13, 14]


@needs_hopper
@pytest.mark.parametrize("slots", [1024, 32768])
@pytest.mark.parametrize("nodes", [1, 7, 32, 64])
@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("key_heads", [8, 32], ids=["Llama-3.1-8B", "Vicuna-7B"])
def test_the_kernel_is_the_reference_at_real_shapes(
    key_heads: int, batch: int, nodes: int, slots: int
) -> None:
    shape = Shape(32, key_heads, 128, batch, slots, nodes, "bfloat16")
    q, [(keys, values)], table, _, tree = draw_inputs(shape, caches=1)
    # Ragged: from an empty row to a full one.
    lengths = jnp.asarray(np.linspace(slots, 0, batch), jnp.int32)

    def run(implementation: Any) -> np.ndarray:
        attend = jax.jit(partial(tree_attention, scale=0.1, implementation=implementation))
        return np.asarray(attend(q, keys, values, table, lengths, *tree), np.float64)

    expected = run("reference")
    error = np.linalg.norm(run("mosaic_gpu") - expected, axis=-1)
    assert (error < 1e-2 * np.linalg.norm(expected, axis=-1)).all()


def wide_config() -> TargetConfig:
    """Heads that the kernel takes."""
    return tiny_config(
        hidden_size=128, intermediate_size=192, head_dim=64, max_position_embeddings=4096
    )


@needs_hopper
def test_a_target_call_is_the_same_with_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    target = random_weights(abstract_target(wide_config(), jnp.bfloat16))
    filled = random_state(target, RootOnly(), 3, 2048)
    state = reset_state(filled, 2000, filled.sampling, done=False)
    tree = tree_of([[3, 1, 4, 1, 5, 9]] * 3, [[0, 0, 0, 1, 1, 3]] * 3)

    def call(target: Target, tree: TokenTree, cache: KVCache) -> Verified:
        return target.merge().tree_forward(tree, cache)

    traced = jax.jit(call).trace(target, tree, state.cache)
    with_kernel = traced.lower().compile()
    assert "mosaic_gpu" in (with_kernel.as_text() or "")
    monkeypatch.setattr(
        attention,
        "tree_attention_kernel",
        partial(tree_attention, implementation="reference"),
    )
    without = jax.jit(lambda *arguments: call(*arguments))(target, tree, state.cache)
    ours = np.asarray(with_kernel(target, tree, state.cache).hidden, np.float64)
    expected = np.asarray(without.hidden, np.float64)
    error = np.linalg.norm(ours - expected, axis=-1)
    assert (error < 3e-2 * np.linalg.norm(expected, axis=-1)).all()


@needs_hopper
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_texts_are_the_targets_own_but_for_ties(temperature: float) -> None:
    habitual = forgetful_target(memory=0.15, config=wide_config())
    target, drafter = cast(habitual, jnp.bfloat16), cast(imitating_drafter(habitual), jnp.bfloat16)
    batch = Batch(
        prompts=PROMPTS,
        seeds=SEEDS,
        max_new_tokens=200,
        sampling=SamplingConfig(temperature),
        eos_token_ids=(),
    )
    draft = TreeConfig(beam_width=4, draft_rounds=3)
    compared = compare_batch(target, drafter, draft, batch, tolerance=0.25)
    assert [row for row in compared.divergences if row is not None and not row["tie"]] == []
    # It did speculate.
    assert sum(compared.speculative.steps) < 0.7 * sum(compared.baseline.steps)


@pytest.mark.parametrize("copied", [0, 4])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_float32_texts_are_plain_decodings_at_full_precision(
    temperature: float, copied: int
) -> None:
    target = forgetful_target(memory=0.15, config=wide_config())
    drafter = imitating_drafter(target)
    asked: dict[str, Any] = {
        "max_new_tokens": 100,
        "sampling": SamplingConfig(temperature),
        "seeds": SEEDS,
        "eos_token_ids": (),
    }
    # By default JAX multiplies float32 in TF32 here: three digits, of which two texts may part.
    with jax.default_matmul_precision("highest"):
        plain = generate_autoregressive(target, PROMPTS, **asked)
        draft = TreeConfig(beam_width=4, draft_rounds=3, lookup_tokens=copied)
        ours = generate(target, drafter, PROMPTS, tree=draft, **asked)
    assert ours.tokens == plain.tokens
    # It did speculate.
    assert sum(ours.steps) < 0.7 * sum(plain.steps)
