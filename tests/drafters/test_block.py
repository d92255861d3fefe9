"""DFlash and DSpark heads in decoding; what they compute is held to the authors' code in
test_block_golden."""

import re
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from small_batch import MIXED, PROMPTS
from tiny_models import cast, imitating_block, random_drafter

from redrafter_jax import InputError, TreeConfig, generate, generate_autoregressive, make_mesh
from redrafter_jax.drafters.base import as_drafter
from redrafter_jax.drafters.block_head import BlockConfig
from redrafter_jax.drafters.grow import Grown, grow
from redrafter_jax.models.target import Target
from redrafter_jax.parallel.mesh import place
from redrafter_jax.types import Sampling

pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.mark.parametrize(
    ("variant", "tree"),
    [
        pytest.param({}, None, marks=pytest.mark.long),
        pytest.param(
            {"confidence": True, "confidence_with_markov": True},
            TreeConfig(5, 4, 9),
            marks=pytest.mark.long,
        ),
        (
            {"draft_tokens": tuple(range(0, 24, 2))},
            TreeConfig(beam_width=3, draft_rounds=2, num_nodes=12, rerank=True, lookup_tokens=2),
        ),
        pytest.param(
            {"markov_head_type": "gated"},
            TreeConfig(2, 2, candidates=6, sharpness=2.0),
            marks=pytest.mark.long,
        ),
        pytest.param(
            {"markov_head_type": "rnn"},
            TreeConfig(2, 3, final_beams_only=True),
            marks=pytest.mark.long,
        ),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.long)])
def test_texts_are_the_targets_own_with_every_tree(
    habitual_target: Target, variant: dict[str, Any], tree: TreeConfig | None, dtype: str
) -> None:
    """Also with a head of another dtype than the target's, in whose dtype the cache is."""
    head = cast(imitating_block(habitual_target, sequential=True, **variant), dtype)
    options: dict[str, Any] = {"max_new_tokens": 16, "sampling": MIXED}
    result = generate(habitual_target, head, PROMPTS, tree=tree, **options)
    expected = generate_autoregressive(habitual_target, PROMPTS, **options)
    assert result.tokens == expected.tokens
    if not variant:
        assert result.acceptance_length > 1.3


def test_the_chain_of_the_whole_block_is_the_default() -> None:
    shape = BlockConfig(24, 32, 1, 48, 4, 2, 8, 6, 5, context_layers=(0,))
    drafter = as_drafter(random_drafter(shape))
    assert drafter.default_tree == TreeConfig(beam_width=1, draft_rounds=5)
    assert drafter.cache == (1, 2, 8)


def test_a_mesh_that_does_not_divide_the_heads_is_refused(habitual_target: Target) -> None:
    shape = BlockConfig(24, 32, 1, 48, 3, 3, 8, 4, 5, context_layers=(0,))
    mesh = make_mesh(model=2)
    words = "model=2, which does not divide the head's num_attention_heads of 3; give model=1"
    head, target = place(random_drafter(shape), mesh), place(habitual_target, mesh)
    with pytest.raises(InputError, match=re.escape(words)):
        generate(target, head, PROMPTS, max_new_tokens=2)


@pytest.mark.long
@pytest.mark.parametrize("variant", [{}, {"confidence": True, "draft_tokens": tuple(range(20))}])
def test_on_a_mesh_that_splits_the_model_it_drafts_the_same(
    habitual_target: Target, variant: dict[str, Any]
) -> None:
    head = imitating_block(habitual_target, sequential=True, **variant)
    mesh = make_mesh(model=2)
    options: dict[str, Any] = {"max_new_tokens": 12, "tree": TreeConfig(3, 3, 7)}
    ours = generate(place(habitual_target, mesh), place(head, mesh), PROMPTS, **options)
    alone = generate(habitual_target, head, PROMPTS, **options)
    assert (ours.tokens, ours.steps) == (alone.tokens, alone.steps)


def test_a_beam_that_is_not_trusted_drafts_less() -> None:
    """Two beams with the same scores: the second has half of the first's probability, by trust."""
    scores = jnp.log(jnp.asarray([0.6, 0.4]))

    def advance(grown: Grown, tokens: Any, round: Any) -> tuple[Grown, Any]:
        trust = jnp.where(tokens == 0, jnp.log(0.5), jnp.where(tokens == 1, jnp.nan, 0.0))
        return Grown(grown.beams, trust=trust), scores[None, None]

    one = jnp.ones(1)
    sampling = Sampling(0 * one, jnp.asarray([2]), one, 0 * one, jnp.asarray([0]))
    beams = grow(
        advance,
        Grown(()),
        jnp.asarray([7]),
        jnp.zeros((1, 3, 2)),
        sampling,
        TreeConfig(beam_width=2, draft_rounds=2),
    )
    np.testing.assert_array_equal(beams.tokens[0], [[0, 1], [0, 1]])
    np.testing.assert_allclose(
        np.exp(beams.log_probs[0]), [[0.6, 0.4], [0.6 * 0.5 * 0.6, 0.6 * 0.5 * 0.4]], rtol=1e-5
    )
