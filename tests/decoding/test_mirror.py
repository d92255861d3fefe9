"""Which outcomes are guessed, and what would be decided by them."""

import jax.numpy as jnp
import numpy as np

from redrafter_jax.decoding.mirror import (
    EarlyExit,
    Outcomes,
    assume,
    fork_pages,
    forked_pages,
    guess_outcomes,
    pick,
)
from redrafter_jax.drafters.tree import chain_tree
from redrafter_jax.models.attention import PAGE
from redrafter_jax.types import KVCache

# One row: the root 7 and the chain 1, 2 below it.
TREE = chain_tree(jnp.asarray([7]), jnp.asarray([[1, 2]]), jnp.asarray([True]))


def guessed(tokens: list[list[int]], probabilities: list[list[float]]) -> EarlyExit:
    log_probs = jnp.log(jnp.asarray([probabilities]))
    return EarlyExit(jnp.asarray([tokens]), log_probs, jnp.zeros((1, 3, 0)))


def told(outcomes: Outcomes) -> list[tuple[int, ...]]:
    """Node, token and rank of every outcome of the row."""
    return list(zip(*(np.asarray(one[0]).tolist() for one in outcomes), strict=True))


def test_the_likeliest_outcomes_come_first() -> None:
    guesses = guessed(
        [[1, 4, 5], [3, 2, 6], [8, 9, 0]], [[0.7, 0.2, 0.1], [0.6, 0.3, 0.1], [0.9, 0.05, 0.05]]
    )
    # Node 1 is reached with 0.7, node 2 with 0.7 * 0.3; 1 and 2 are children of their nodes.
    # Likelihoods: 0.42, 0.2, 0.189, 0.1, 0.07 and 0.0105.
    by_hand = [(1, 3, 0), (0, 4, 0), (2, 8, 0), (0, 5, 1), (1, 6, 1), (2, 9, 1)]
    assert told(guess_outcomes(TREE, guesses, 2, 6)) == by_hand
    assert told(guess_outcomes(TREE, guesses, 1, 2)) == [(1, 3, 0), (0, 4, 0)]


def test_the_roots_own_token_may_come_again() -> None:
    guesses = guessed([[7, 1], [3, 2], [8, 9]], [[0.9, 0.1], [0.6, 0.4], [0.9, 0.1]])
    assert told(guess_outcomes(TREE, guesses, 1, 1)) == [(0, 7, 0)]


def test_a_node_that_was_not_guessed_is_as_likely_as_what_is_left() -> None:
    guesses = guessed([[4, 5], [3, 2], [8, 9]], [[0.5, 0.4], [0.6, 0.3], [0.9, 0.05]])
    # 0.1 is left for token 1; below it node 1 keeps 0.06 for token 3, and 0.03 reach node 2.
    assert told(guess_outcomes(TREE, guesses, 1, 3)) == [(0, 4, 0), (1, 3, 0), (2, 8, 0)]


def test_what_would_be_decided_is_the_path_and_the_token() -> None:
    outcomes = Outcomes(*(jnp.asarray([one]) for one in ([0, 2], [4, 8], [0, 0])))
    hidden = jnp.asarray([[[0.0], [1.0], [2.0]]])
    decided = assume(TREE, hidden, outcomes, jnp.asarray([10]), 3)
    assert decided.count.tolist() == [1, 3]
    assert decided.start.tolist() == [10, 10]
    rows = [
        [np.asarray(one)[row, :count].tolist() for one in (decided.tokens, decided.following)]
        for row, count in enumerate([1, 3])
    ]
    assert rows == [[[7], [4]], [[7, 1, 2], [1, 2, 8]]]
    assert decided.hidden[1, :, 0].tolist() == [0, 1, 2]


def test_pages_of_outcomes_begin_as_the_texts_end_and_are_no_others() -> None:
    span, rows, count = forked_pages(4), 2, 2
    assert [forked_pages(path) for path in (1, 2, PAGE + 1, PAGE + 2)] == [1, 2, 2, 3]
    pages = 6 + rows * count * span
    layer = jnp.arange(pages, dtype=jnp.float32)[:, None, None, None] * jnp.ones((1, 1, PAGE, 1))
    table, lengths = jnp.asarray([[0, 1, 2], [5, 4, 3]]), jnp.asarray([PAGE + 1, 3])
    forked = fork_pages(KVCache((layer,), (layer,), table, lengths), count, 4)
    assert forked.table.tolist() == [[0, 6, 7], [0, 8, 9], [10, 11, 3], [12, 13, 3]]
    first = np.asarray(forked.keys[0])[[6, 8, 10, 12], 0, 0, 0]
    assert first.tolist() == [1, 1, 5, 5]
    # The texts' own pages are as they were.
    assert np.array_equal(forked.values[0][:6], layer[:6])


def test_the_tree_of_what_came_true_is_picked() -> None:
    trees = chain_tree(
        jnp.asarray([3, 4, 8, 5]), jnp.asarray([[1], [2], [6], [7]]), jnp.ones(4, bool)
    )
    nodes, tokens, ranks = [[1, 0], [2, 2]], [[3, 4], [8, 5]], [[0, 2], [0, 1]]
    outcomes = Outcomes(*map(jnp.asarray, (nodes, tokens, ranks)))
    picked, rank = pick(trees, outcomes, jnp.asarray([0, 2]), jnp.asarray([4, 6]))
    # The second row's node was guessed, but not with this token.
    assert rank.tolist() == [2, -1]
    assert picked.tokens[0].tolist() == [4, 2]
