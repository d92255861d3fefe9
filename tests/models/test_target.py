from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from tiny_models import cast, random_target, tiny_config
from trees import tree_of

from redrafter_jax.models.cache import append, init_cache
from redrafter_jax.models.target import Target
from redrafter_jax.types import KVCache, TokenTree, Verified

S = 32

pytestmark = pytest.mark.usefixtures("quick_compilation")


@jax.jit
def forward(target: Target, tokens: Any) -> tuple[jax.Array, jax.Array]:
    decoder = target.merge()
    hidden, _, _ = decoder.forward(tokens)
    return hidden, decoder.logits(hidden)


@jax.jit
def cached_prefix(target: Target, tokens: Any, lengths: Any) -> KVCache:
    _, keys, values = target.merge().forward(tokens)
    empty = init_cache(target.config, tokens.shape[0], S, keys[0].dtype)
    return append(empty, keys, values, lengths)


@jax.jit
def verify(target: Target, tree: TokenTree, cache: KVCache) -> Verified:
    return target.merge().tree_forward(tree, cache)


def pad(sequences: list[list[int]], width: int = S) -> np.ndarray:
    return np.asarray([row + [0] * (width - len(row)) for row in sequences], np.int32)


PREFIXES = [[3, 1, 4, 1, 5, 9, 2], [6, 5, 3]]


def random_trees(nodes: int) -> tuple[np.ndarray, list[list[int]]]:
    random = np.random.default_rng(2)
    parents = [oracles.random_parents(random, nodes, max_depth=4) for _ in PREFIXES]
    return random.integers(24, size=(len(PREFIXES), nodes)), parents


def test_each_node_says_what_the_text_that_leads_to_it_says(target: Target) -> None:
    nodes = 9
    tokens, parents = random_trees(nodes)
    cache = cached_prefix(target, pad(PREFIXES), np.asarray([7, 3], np.int32))
    verified = verify(target, tree_of(tokens, parents), cache)
    texts = [
        PREFIXES[row] + tokens[row, oracles.ancestors(parents[row], node)[::-1]].tolist()
        for row in range(2)
        for node in range(nodes)
    ]
    hidden, logits = forward(target, pad(texts))
    last = jnp.asarray([len(text) - 1 for text in texts])
    every = jnp.arange(len(texts))
    np.testing.assert_allclose(
        np.asarray(verified.hidden).reshape(18, -1), hidden[every, last], rtol=0, atol=2e-5
    )
    np.testing.assert_allclose(
        np.asarray(verified.logits).reshape(18, -1), logits[every, last], rtol=0, atol=5e-5
    )


def test_sequences_that_share_a_row_do_not_know_of_each_other() -> None:
    # One layer with a window, one without.
    target = random_target(tiny_config(sliding_window=3, windowed_layers=(0,)))
    random = np.random.default_rng(8)
    # Longer than a block of queries, and with a segment of one token.
    texts = [random.integers(24, size=size) for size in (7, 1, 140)]
    tokens = np.concatenate([*texts, [0, 0]])[None]
    numbers = [[number] * len(text) for number, text in enumerate(texts, start=1)]
    segments = np.concatenate([*numbers, [0, 0]])[None]
    forward = jax.jit(target.merge().forward)
    together, keys, _ = forward(jnp.asarray(tokens), jnp.asarray(segments))
    start = 0
    for text in texts:
        alone, alone_keys, _ = forward(pad([text.tolist()], 140))
        part, own = slice(start, start := start + len(text)), slice(len(text))
        np.testing.assert_allclose(together[:, part], alone[:, own], rtol=1e-4, atol=1e-4)
        # Rotated as from position 0.
        np.testing.assert_allclose(keys[-1][:, part], alone_keys[-1][:, own], rtol=1e-4, atol=1e-4)


def test_bfloat16_targets_give_float32_logits(target: Target) -> None:
    tokens, parents = random_trees(9)
    half = cast(target, jnp.bfloat16)
    cache = cached_prefix(half, pad(PREFIXES), np.asarray([7, 3], np.int32))
    assert cache.keys[0].dtype == jnp.bfloat16
    verified = verify(half, tree_of(tokens, parents), cache)
    assert verified.logits.dtype == jnp.float32
    assert verified.hidden.dtype == jnp.bfloat16


@pytest.mark.parametrize("tied", [False, True])
def test_some_tokens_are_scored_as_among_all_by_the_last_hidden_state(tied: bool) -> None:
    decoder = random_target(tiny_config(tie_word_embeddings=tied)).merge()
    wide = np.random.default_rng(0).normal(size=(2, 3, 64)).astype(np.float32)
    head = decoder.embed_tokens[...].T if tied else decoder.lm_head[...]
    expected = wide[..., 32:].astype(np.float64) @ np.asarray(head, np.float64)
    scores = decoder.logits(jnp.asarray(wide))
    np.testing.assert_allclose(scores, expected, rtol=1e-4, atol=1e-4)
    some = decoder.scorer(jnp.asarray([20, 3, 7]))(jnp.asarray(wide[..., 32:]))
    np.testing.assert_allclose(some, expected[..., [20, 3, 7]], rtol=1e-4, atol=1e-4)
