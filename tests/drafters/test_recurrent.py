import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from tiny_models import cast, random_drafter

from redrafter_jax.config import DrafterConfig
from redrafter_jax.drafters.bind import init_drafter
from redrafter_jax.errors import InputError
from redrafter_jax.types import Scorer

D, V = 6, 11
CONFIGS = [
    # 2 D needs no projection; the others are narrower and wider.
    DrafterConfig(V, D, exit_dim=2 * D, num_draft_layers=0),
    DrafterConfig(V, D, exit_dim=4, num_draft_layers=1),
    DrafterConfig(V, D, exit_dim=16, num_draft_layers=2),
    DrafterConfig(V, D, exit_dim=2 * D, num_draft_layers=1, cell="sum"),
    DrafterConfig(V, D, exit_dim=2 * D, num_draft_layers=1, cell="gru"),
    DrafterConfig(V, D, exit_dim=8, num_draft_layers=1, head="low_rank", head_rank=3),
    DrafterConfig(V, D, exit_dim=8, num_draft_layers=1, head="target"),
    DrafterConfig(V, D, exit_dim=D, num_draft_layers=1, head="target", draft_tokens=(1, 4, 9)),
    DrafterConfig(V, D, exit_dim=8, num_draft_layers=0, context_layers=(0, 3)),
]
by_config = pytest.mark.parametrize("config", CONFIGS, ids=str)
VOCABULARY = np.random.default_rng(9).normal(size=(D, V)).astype(np.float32)


def borrowed(config: DrafterConfig) -> tuple[Scorer | None, np.ndarray | None]:
    """A target's vocabulary projection, as the drafter takes it and as the oracle does."""
    if config.head != "target":
        return None, None
    columns = VOCABULARY[:, list(config.draft_tokens or range(V))]
    return lambda features: features @ columns, columns


@by_config
def test_step_is_the_recurrence_of_the_paper(config: DrafterConfig) -> None:
    head = random_drafter(config).merge()
    weights = oracles.DrafterWeights.of(head, borrowed(config)[1])
    state, embedding = np.random.default_rng(0).normal(size=(2, D)).astype(np.float32)
    out = head.step(jnp.asarray(state), jnp.asarray(embedding))
    np.testing.assert_allclose(out, weights.step(state, embedding), rtol=1e-5, atol=1e-6)


@by_config
def test_one_context_serves_all_beams(config: DrafterConfig) -> None:
    head = random_drafter(config).merge()
    scorer, columns = borrowed(config)
    weights = oracles.DrafterWeights.of(head, columns)
    random = np.random.default_rng(0)
    contexts = random.normal(size=(2, config.context_size)).astype(np.float32)
    states = random.normal(size=(2, 3, D)).astype(np.float32)
    read = head.read_context(jnp.asarray(contexts))
    out = head.logits(read[:, None], jnp.asarray(states), scorer)
    expected = [
        [weights.logits(context, state) for state in row]
        for context, row in zip(contexts, states, strict=True)
    ]
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)


def test_several_layers_begin_as_the_last_alone() -> None:
    config = DrafterConfig(V, D, exit_dim=8, num_draft_layers=0, context_layers=(0, 3))
    context = jnp.arange(3.0 * D)
    read = init_drafter(config, 0).merge().read_context(context)
    np.testing.assert_array_equal(read, context[-D:])


def test_a_borrowed_head_must_be_lent() -> None:
    head = init_drafter(DrafterConfig(V, D, exit_dim=8, num_draft_layers=0, head="target"), 0)
    assert "lm_head" not in head.params
    with pytest.raises(InputError, match=r"head='target' and no vocabulary .*; pass scorer="):
        head.merge().logits(jnp.zeros(D), jnp.zeros(D))


def test_bfloat16_states_stay_bfloat16_and_logits_are_float32() -> None:
    config = DrafterConfig(V, D, exit_dim=16, num_draft_layers=2)
    head = cast(random_drafter(config), jnp.bfloat16).merge()
    weights = oracles.DrafterWeights.of(head)
    context, state = np.random.default_rng(0).normal(size=(2, D)).astype(jnp.bfloat16)
    stepped = head.step(jnp.asarray(state), jnp.asarray(context))
    logits = head.logits(jnp.asarray(context), jnp.asarray(state))
    assert stepped.dtype == jnp.bfloat16
    assert logits.dtype == jnp.float32
    expected = weights.logits(context.astype(np.float64), state.astype(np.float64))
    np.testing.assert_allclose(logits, expected, rtol=0, atol=0.1)
