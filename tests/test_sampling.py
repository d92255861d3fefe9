from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from jax.extend.random import threefry_2x32
from places import GOLDENS

from redrafter_jax.config import SamplingConfig
from redrafter_jax.sampling import draw_noise, filter_logits
from redrafter_jax.types import Sampling

filtered = jax.jit(filter_logits)
noise_of = partial(jax.jit, static_argnames=("count", "vocab_size"))(draw_noise)


V = 13


def arrays(configs: list[SamplingConfig], seeds: list[int] | None = None) -> Sampling:
    numbers = list(range(len(configs))) if seeds is None else seeds
    return oracles.sampling_arrays(configs, numbers, V)


class FilterGolden(NamedTuple):
    """What Hugging Face's processors keep: S settings, R rows, a vocabulary of V."""

    logits: np.ndarray[Any, Any]  # [R V]
    configs: list[SamplingConfig]  # S of them
    scaled: np.ndarray[Any, Any]  # [S R V], float32 quotients, which theirs are bit for bit
    kept: np.ndarray[Any, Any]  # [S R V] bool


def filter_golden(kind: str, vocab_size: int) -> FilterGolden:
    with np.load(GOLDENS / "filters.npz") as golden:
        settings = golden[f"settings_{vocab_size}"]
        logits = golden[f"{kind}_{vocab_size}_logits"]
        bits = golden[f"{kind}_{vocab_size}_kept"]
    configs = [SamplingConfig(t, int(k), p, m) for t, k, p, m in settings.tolist()]
    scaled = logits / settings[:, 0].astype(np.float32)[:, None, None]
    kept = np.unpackbits(bits, axis=-1, count=vocab_size).astype(bool)
    return FilterGolden(logits, configs, scaled, kept)


def ties_kept_whole(golden: FilterGolden) -> np.ndarray:
    """Hugging Face's tokens, and those equal to the lowest of them."""
    lowest = np.where(golden.kept, golden.scaled, np.inf).min(axis=-1, keepdims=True)
    return golden.kept | (golden.scaled == lowest)


every_size = pytest.mark.parametrize("vocab_size", [13, 130, 1000])


@every_size
@pytest.mark.parametrize("kind", ["distinct", "tied"])
def test_library_and_oracle_keep_hugging_faces_tokens_and_ties_whole(
    kind: str, vocab_size: int
) -> None:
    golden = filter_golden(kind, vocab_size)
    expected = ties_kept_whole(golden)
    everywhere = np.broadcast_to(golden.logits, golden.scaled.shape)
    out = np.asarray(filtered(jnp.asarray(everywhere), arrays(golden.configs)))
    np.testing.assert_array_equal(out > -np.inf, expected)
    # XLA may multiply by a reciprocal where PyTorch divides: two roundings in place of one.
    np.testing.assert_array_max_ulp(out[expected], golden.scaled[expected], maxulp=2)
    for s in range(0, len(golden.configs), 11):  # meets every value of every parameter
        for logits, kept in zip(golden.logits, expected[s], strict=True):
            oracle = oracles.filtered_scores(logits, golden.configs[s])
            np.testing.assert_array_equal(np.isfinite(oracle), kept)


@every_size
def test_they_are_exactly_hugging_faces_but_where_top_p_splits_a_tie(vocab_size: int) -> None:
    # Hugging Face's top-p keeps as many of the tied tokens as it needs, by their place in its sort.
    golden = filter_golden("distinct", vocab_size)
    np.testing.assert_array_equal(ties_kept_whole(golden), golden.kept)
    golden = filter_golden("tied", vocab_size)
    expected = ties_kept_whole(golden)
    whole: Any = np.asarray([config.top_p == 1 for config in golden.configs])
    np.testing.assert_array_equal(expected[whole], golden.kept[whole])
    top_k = np.asarray([config.top_k for config in golden.configs])[whole, None]
    assert (golden.kept[whole].sum(axis=-1) > top_k).any(), "no tie at the end of top-k"
    assert (expected[~whole] != golden.kept[~whole]).any(), "no tie that top-p splits"


def test_a_rows_filters_change_no_other_row_whatever_its_scores() -> None:
    scores = np.random.default_rng(0).normal(size=(4, 1, V)).astype(np.float32)
    scores[0, 0, 3], scores[1, 0, 3], scores[2, 0, 3] = np.inf, np.nan, -np.inf
    configs = [SamplingConfig(), SamplingConfig(1.0), SamplingConfig(1.0)]
    out = filtered(jnp.asarray(scores), arrays([*configs, SamplingConfig(1.0, 2, 0.5, 0.1)]))
    np.testing.assert_array_equal(out[:3], scores[:3])


@pytest.mark.parametrize("vocab_size", [V, 40])
def test_noise_is_made_of_threefrys_words_for_seed_and_position(vocab_size: int) -> None:
    """JAX's own Threefry; the counter of two neighbouring tokens is half of the even one."""
    greedy, sampled = SamplingConfig(), SamplingConfig(temperature=1.0)
    seeds, positions = [0, 7, 2**31 - 1, 7], jnp.asarray([0, 100, 12345, 100])
    sampling = arrays([sampled, sampled, sampled, greedy], seeds)
    drawn = np.asarray(noise_of(sampling, positions, 3, vocab_size))
    half = -(-vocab_size // 2)
    counters = np.concatenate([np.arange(half), np.zeros(half)]).astype(np.uint32)
    for row, ahead in np.ndindex(3, 3):
        key = jnp.asarray([seeds[row], positions[row] + ahead], jnp.uint32)
        words = threefry_2x32(key, jnp.asarray(counters))
        bits = np.stack(np.split(np.asarray(words, np.float64), 2), axis=-1).ravel()[:vocab_size]
        expected = -np.log(-np.log1p(-(bits + 0.5) / 2**32))
        np.testing.assert_allclose(drawn[row, ahead], expected, rtol=1e-4, atol=1e-5)
    assert not drawn[3].any(), "greedy rows have no noise"
    assert not np.asarray(noise_of(arrays([greedy] * 4), positions, 3, vocab_size)).any()
