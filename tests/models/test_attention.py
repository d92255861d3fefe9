from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest

from redrafter_jax.models.attention import prefill_attention

SCALE = 8**-0.5
causal_attention: Callable[..., jax.Array] = jax.jit(
    partial(prefill_attention, scale=SCALE), static_argnames="window"
)


def random_inputs(T: int, dtype: type = np.float32) -> list[np.ndarray]:
    random = np.random.default_rng(T)
    heads = (4, 2, 2)
    return [random.normal(size=(2, T, count, 8)).astype(dtype) for count in heads]


# Blocks are 128 queries long: within one, exactly one, and ragged last blocks. Windows of one
# token, within a block, of exactly one block, over several, and past the text.
@pytest.mark.parametrize(
    ("T", "window"),
    [(1, None), (128, None), (300, None), (270, 1), (270, 5), (270, 128), (270, 140), (270, 300)],
)
def test_each_token_attends_to_itself_and_to_the_window_before(T: int, window: int | None) -> None:
    q, k, v = random_inputs(T)
    out = causal_attention(q, k, v, window=window)
    distance = np.arange(T)[:, None] - np.arange(T)
    visible = (distance >= 0) & (distance < (window or T))
    for row in range(2):
        expected = oracles.attention(q[row], k[row], v[row], visible, SCALE)
        np.testing.assert_allclose(out[row], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("T", [5, 140])
def test_what_lies_beside_a_token_is_seen_by_it_alone(T: int) -> None:
    q, k, v = random_inputs(T)
    beside = np.random.default_rng(1).normal(size=(2, 2, T, 3, 2, 8)).astype(np.float32)
    segments = np.repeat([[1, 2]], [T // 3, T - T // 3], axis=1).repeat(2, axis=0)
    out = causal_attention(q, k, v, segments=segments, beside=tuple(map(jnp.asarray, beside)))
    visible = np.tri(T, dtype=bool) & (segments[0][:, None] == segments[0])
    for row in range(2):
        for place in (0, 1, T // 3, T - 1):
            keys, values = (
                np.concatenate([one[row], more[row, place]])
                for one, more in ((k, beside[0]), (v, beside[1]))
            )
            seen = np.append(visible[place], [True] * 3)[None]
            expected = oracles.attention(q[row, place][None], keys, values, seen, SCALE)
            np.testing.assert_allclose(out[row, place], expected[0], rtol=1e-5, atol=1e-5)


def test_prefill_attention_in_bfloat16_softmaxes_in_float32() -> None:
    q, k, v = (x.astype(jnp.bfloat16) for x in random_inputs(150))
    out = causal_attention(q, k, v)
    assert out.dtype == jnp.bfloat16
    causal = np.tril(np.ones((150, 150), bool))
    expected = oracles.attention(q[0], k[0], v[0], causal, SCALE)
    np.testing.assert_allclose(np.asarray(out[0], np.float64), expected, rtol=0, atol=2e-2)


def test_scores_far_from_zero_do_not_overflow() -> None:
    q, k, v = random_inputs(5)
    out = causal_attention(100 * q, 100 * k, v)
    causal = np.tril(np.ones((5, 5), bool))
    expected = oracles.attention(100 * q[0], 100 * k[0], v[0], causal, SCALE)
    np.testing.assert_allclose(out[0], expected, rtol=1e-3, atol=1e-3)
