"""Token trees by their parents, and beam traces drawn by hand and at random."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import oracles

from redrafter_jax.config import TreeConfig
from redrafter_jax.drafters.tree import build_tree
from redrafter_jax.types import Beams, TokenTree

build = partial(jax.jit, static_argnames="tree")(build_tree)

B, R, W = 3, 3, 4
ALL = 1 + R * W


def numpy_tree(root: Any, beams: Any, draft: TreeConfig) -> TokenTree:
    tree = build(jnp.asarray(root), Beams(*map(jnp.asarray, beams)), draft)
    return jax.tree.map(np.asarray, tree)


# The beams of both drawings: two rounds of two.
#
#   root 7 --+-- 3, at -1.0 --+-- 4, at -1.5
#            |                +-- 6, at -1.8
#            +-- 5, at -2.0
DRAWN = Beams(
    tokens=jnp.asarray([[[3, 5], [4, 6]]], jnp.int32),
    parents=jnp.asarray([[[0, 0], [0, 0]]], jnp.int32),
    log_probs=jnp.asarray([[[-1.0, -2.0], [-1.5, -1.8]]], jnp.float32),
)
ROOT = np.asarray([7], np.int32)


class NumpyBeams(NamedTuple):
    """`Beams` on the test's side."""

    tokens: np.ndarray
    parents: np.ndarray
    log_probs: np.ndarray


def random_beams(seed: int) -> tuple[np.ndarray, NumpyBeams]:
    """A trace as beam search may emit it: distinct pairs, children never above their parents.

    Scores are whole numbers, so ties are common; some beams are impossible (-inf), and so are
    all beams below them.
    """
    random = np.random.default_rng(seed)
    vocabulary = W
    tokens, parents = np.zeros((2, B, R, W), np.int32)
    log_probs = np.zeros((B, R, W), np.float32)
    for row in range(B):
        above = np.zeros(1)
        for step in range(R):
            pairs = random.choice(len(above) * vocabulary, size=W, replace=False)
            parents[row, step], tokens[row, step] = np.divmod(pairs, vocabulary)
            drop = random.choice([0, 1, 2, 3, np.inf], size=W, p=[0.3, 0.3, 0.2, 0.1, 0.1])
            log_probs[row, step] = above[parents[row, step]] - drop
            above = log_probs[row, step]
    root = random.integers(0, 100, B).astype(np.int32)
    return root, NumpyBeams(tokens, parents, log_probs)


def tree_of(tokens: Any, parents: Any) -> TokenTree:
    """A tree per row; nodes of token -1 are padding nodes."""
    tokens = np.asarray(tokens)
    padding = tokens < 0
    N = tokens.shape[1]
    depth = np.asarray([oracles.depth_of(row) for row in parents])
    mask = np.stack([oracles.ancestor_mask(row) for row in parents])
    return TokenTree(
        tokens=jnp.asarray(tokens, jnp.int32),
        parents=jnp.asarray(np.where(padding, 0, parents), jnp.int32),
        depth=jnp.asarray(np.where(padding, 0, depth), jnp.int32),
        mask=jnp.asarray(np.where(padding[:, :, None], np.eye(N, dtype=bool), mask)),
        log_probs=jnp.asarray(np.where(padding, -np.inf, 0.0), jnp.float32),
        origin=jnp.asarray(np.where(padding | (np.arange(N) == 0), -1, 0), jnp.int32),
    )


def live_paths(tree: TokenTree, row: int) -> list[tuple[int, ...]]:
    """The tokens that lead to every live node of a row, which keeps the rules of `TokenTree`."""
    arrays: list[Any] = [np.asarray(values[row]) for values in tree]
    tokens, parents, depth, mask, log_probs, origin = arrays
    live, padding = tokens >= 0, tokens == -1
    assert live[0]
    assert (live | padding).all()
    assert (parents[1:] < np.arange(1, len(parents))).all(), "parents come first"
    assert live[parents].all()
    assert (parents[padding] == 0).all()
    np.testing.assert_array_equal(depth, np.where(live, oracles.depth_of(parents), 0))
    seen = np.where(live[:, None], oracles.ancestor_mask(parents), np.eye(len(live), dtype=bool))
    np.testing.assert_array_equal(mask, seen)
    np.testing.assert_array_equal(log_probs > -np.inf, live)
    assert log_probs[0] == 0
    np.testing.assert_array_equal(origin < 0, padding | (np.arange(len(live)) == 0))
    assert origin.min() == -1
    paths = [
        tuple(tokens[oracles.ancestors(parents, int(node))[::-1]].tolist())
        for node in np.flatnonzero(live)
    ]
    assert len(set(paths)) == len(paths), "siblings differ"
    return paths
