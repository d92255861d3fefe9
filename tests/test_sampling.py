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


def check_kept(golden: FilterGolden, expected: np.ndarray) -> None:
    """The library keeps exactly these tokens, with their scores."""
    everywhere = np.broadcast_to(golden.logits, golden.scaled.shape)
    out = np.asarray(filtered(jnp.asarray(everywhere), arrays(golden.configs)))
    np.testing.assert_array_equal(out > -np.inf, expected)
    # XLA may multiply by a reciprocal where PyTorch divides: two roundings in place of one.
    np.testing.assert_array_max_ulp(out[expected], golden.scaled[expected], maxulp=2)


def ties_kept_whole(golden: FilterGolden) -> np.ndarray:
    """Hugging Face's tokens, and those equal to the lowest of them."""
    lowest = np.where(golden.kept, golden.scaled, np.inf).min(axis=-1, keepdims=True)
    return golden.kept | (golden.scaled == lowest)


every_size = pytest.mark.parametrize("vocab_size", [13, 130, 1000])


@every_size
def test_without_ties_the_kept_tokens_are_exactly_hugging_faces(vocab_size: int) -> None:
    golden = filter_golden("distinct", vocab_size)
    check_kept(golden, golden.kept)


@every_size
def test_ties_are_kept_as_hugging_face_keeps_them_but_top_p_keeps_them_whole(
    vocab_size: int,
) -> None:
    # Hugging Face's top-p keeps as many of the tied tokens as it needs, by their place in its sort.
    golden = filter_golden("tied", vocab_size)
    expected = ties_kept_whole(golden)
    whole: Any = np.asarray([config.top_p == 1 for config in golden.configs])
    np.testing.assert_array_equal(expected[whole], golden.kept[whole])
    top_k = np.asarray([config.top_k for config in golden.configs])[whole, None]
    assert (golden.kept[whole].sum(axis=-1) > top_k).any(), "no tie at the end of top-k"
    assert (expected[~whole] != golden.kept[~whole]).any(), "no tie that top-p splits"
    check_kept(golden, expected)


@every_size
@pytest.mark.parametrize("kind", ["distinct", "tied"])
def test_the_oracle_keeps_what_hugging_face_keeps_and_ties_whole(
    kind: str, vocab_size: int
) -> None:
    golden = filter_golden(kind, vocab_size)
    expected = ties_kept_whole(golden)
    for s in range(0, len(golden.configs), 11):  # meets every value of every parameter
        for logits, kept in zip(golden.logits, expected[s], strict=True):
            oracle = oracles.filtered_scores(logits, golden.configs[s])
            np.testing.assert_array_equal(np.isfinite(oracle), kept)


def test_a_rows_filters_change_no_other_row_whatever_its_scores() -> None:
    scores = np.random.default_rng(0).normal(size=(4, 1, V)).astype(np.float32)
    scores[0, 0, 3], scores[1, 0, 3], scores[2, 0, 3] = np.inf, np.nan, -np.inf
    configs = [SamplingConfig(), SamplingConfig(1.0), SamplingConfig(1.0)]
    out = filtered(jnp.asarray(scores), arrays([*configs, SamplingConfig(1.0, 2, 0.5, 0.1)]))
    np.testing.assert_array_equal(out[:3], scores[:3])


SAMPLED = SamplingConfig(temperature=1.0)


def draw(seeds: list[int], positions: list[int], count: int, vocab_size: int = V) -> np.ndarray:
    sampling = arrays([SAMPLED] * len(seeds), seeds)
    return np.asarray(noise_of(sampling, jnp.asarray(positions, jnp.int32), count, vocab_size))


@pytest.mark.parametrize("vocab_size", [V, 40])
def test_noise_is_made_of_threefrys_words_for_seed_and_position(vocab_size: int) -> None:
    """JAX's own Threefry; the counter of two neighbouring tokens is half of the even one."""
    seeds, positions = [0, 7, 2**31 - 1], [0, 100, 12345]
    drawn = draw(seeds, positions, 3, vocab_size)
    half = -(-vocab_size // 2)
    counters = np.concatenate([np.arange(half), np.zeros(half)]).astype(np.uint32)
    for row, ahead in np.ndindex(3, 3):
        key = jnp.asarray([seeds[row], positions[row] + ahead], jnp.uint32)
        words = threefry_2x32(key, jnp.asarray(counters))
        bits = np.stack(np.split(np.asarray(words, np.float64), 2), axis=-1).ravel()[:vocab_size]
        expected = -np.log(-np.log1p(-(bits + 0.5) / 2**32))
        np.testing.assert_allclose(drawn[row, ahead], expected, rtol=1e-4, atol=1e-5)


def test_greedy_rows_have_no_noise() -> None:
    sampling = arrays([SamplingConfig(), SAMPLED], [7, 7])
    noise = noise_of(sampling, jnp.asarray([5, 5]), 3, V)
    assert (np.asarray(noise[0]) == 0).all()
    np.testing.assert_array_equal(noise[1], draw([7], [5], 3)[0])
    noise = noise_of(arrays([SamplingConfig()] * 2), jnp.asarray([5, 5]), 3, V)
    assert (np.asarray(noise) == 0).all()


LAW = np.asarray([0.4, 0.25, 0.2, 0.1, 0.05])


def choices(seeds: int, count: int, logits: np.ndarray) -> np.ndarray:
    """argmax(logits + noise) for `seeds` rows and `count` positions each."""
    return (draw(list(range(seeds)), [11] * seeds, count, len(logits)) + logits).argmax(axis=-1)


@pytest.mark.parametrize("axis", ["positions", "seeds"])
def test_neighbouring_choices_are_independent(axis: str) -> None:
    drawn = choices(40, 500, np.log(LAW))
    first, second = (
        (drawn[:, ::2], drawn[:, 1::2]) if axis == "positions" else (drawn[::2], drawn[1::2])
    )
    pairs = np.bincount((first * 5 + second).ravel(), minlength=25)
    assert oracles.chi_square(pairs, np.outer(LAW, LAW).ravel()) < oracles.CHI_SQUARE_BOUND[24]
