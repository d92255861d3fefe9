import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from tiny_models import cast, random_drafter

from redrafter_jax.config import DrafterConfig
from redrafter_jax.drafter import init_drafter

D, V = 6, 11
CONFIGS = [
    DrafterConfig(V, D, exit_dim=exit_dim, num_draft_layers=layers, rnn=rnn)
    # 2 D needs no projection; the others are narrower, as wide as the target, and wider.
    for exit_dim, layers, rnn in [
        (2 * D, 0, True),
        (2 * D, 2, True),
        (4, 1, True),
        (D, 0, True),
        (16, 2, True),
        (2 * D, 1, False),
        (D, 1, False),
    ]
]
by_config = pytest.mark.parametrize("config", CONFIGS, ids=str)


@by_config
def test_step_is_the_recurrence_of_the_paper(config: DrafterConfig) -> None:
    head = random_drafter(config).merge()
    weights = oracles.DrafterWeights.of(head)
    state, embedding = np.random.default_rng(0).normal(size=(2, D)).astype(np.float32)
    out = head.step(jnp.asarray(state), jnp.asarray(embedding))
    np.testing.assert_allclose(out, weights.step(state, embedding), rtol=1e-5, atol=1e-6)


@by_config
def test_logits_are_projection_blocks_and_vocabulary(config: DrafterConfig) -> None:
    head = random_drafter(config).merge()
    weights = oracles.DrafterWeights.of(head)
    context, state = np.random.default_rng(0).normal(size=(2, D)).astype(np.float32)
    out = head.logits(jnp.asarray(context), jnp.asarray(state))
    np.testing.assert_allclose(out, weights.logits(context, state), rtol=1e-5, atol=1e-5)


@by_config
def test_one_context_serves_all_beams(config: DrafterConfig) -> None:
    head = random_drafter(config).merge()
    weights = oracles.DrafterWeights.of(head)
    random = np.random.default_rng(0)
    contexts = random.normal(size=(2, D)).astype(np.float32)
    states = random.normal(size=(2, 3, D)).astype(np.float32)
    out = head.logits(jnp.asarray(contexts)[:, None], jnp.asarray(states))
    expected = [
        [weights.logits(context, state) for state in row]
        for context, row in zip(contexts, states, strict=True)
    ]
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)


def test_a_recurrence_worked_by_hand() -> None:
    # Width 1: W = 2, U = 3, b = -1; state 0.5 and embedding 1 give SiLU(2 + 1.5 - 1).
    head = init_drafter(DrafterConfig(1, 1, exit_dim=2, num_draft_layers=0), 0).merge()
    head.rnn_w.kernel[...] = jnp.asarray([[2.0]])
    head.rnn_u.kernel[...] = jnp.asarray([[3.0]])
    head.rnn_u.bias[...] = jnp.asarray([-1.0])
    out = head.step(jnp.asarray([0.5]), jnp.asarray([1.0]))
    np.testing.assert_allclose(out, [2.5 / (1 + np.exp(-2.5))], rtol=1e-6)


def test_without_a_recurrence_the_state_is_a_running_sum() -> None:
    config = DrafterConfig(1, 2, exit_dim=4, num_draft_layers=0, rnn=False)
    head = init_drafter(config, 0).merge()
    state = jnp.zeros(2)
    for embedding in ([1.0, 2.0], [10.0, 20.0], [100.0, 200.0]):
        state = head.step(state, jnp.asarray(embedding))
    np.testing.assert_array_equal(state, [111.0, 222.0])


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


def test_random_initialisation_depends_on_the_seed_alone() -> None:
    first, again, other = (init_drafter(CONFIGS[4], seed).params for seed in (0, 0, 1))
    leaves = [jax.tree.leaves(params) for params in (first, again, other)]
    for one, same, different in zip(*leaves, strict=True):
        np.testing.assert_array_equal(one, same)
        assert one.ndim == 1 or (np.asarray(one) != np.asarray(different)).any()
