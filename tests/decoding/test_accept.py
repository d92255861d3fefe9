from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import oracles
from hypothesis import given
from hypothesis import strategies as st
from trees import tree_of

from redrafter_jax.config import SamplingConfig
from redrafter_jax.decoding.accept import accept, choose_tokens
from redrafter_jax.types import Accepted, TokenTree

jitted_accept = partial(jax.jit, static_argnames="max_path")(accept)


def run(tree: TokenTree, chosen: object, max_path: int) -> Accepted:
    accepted = jitted_accept(tree, jnp.asarray(chosen, jnp.int32), max_path)
    return jax.tree.map(np.asarray, accepted)


# Both rows of the literal cases:
#
#   7 --+-- 3 --+-- 4
#       |       +-- 6 ---- 8
#       +-- 5
DRAWN_TOKENS = [7, 3, 5, 4, 6, 8]
DRAWN_PARENTS = [0, 0, 0, 1, 1, 4]


def test_the_path_follows_the_targets_own_choices() -> None:
    tree = tree_of([DRAWN_TOKENS], [DRAWN_PARENTS])
    # After 7 the target says 3, after it 6, after it 8, after it 9.
    accepted = run(tree, [[3, 6, 0, 0, 8, 9]], max_path=4)
    assert accepted.path.tolist() == [[0, 1, 4, 5]]
    assert accepted.count.tolist() == [4]


def test_the_path_stops_where_the_target_says_something_else() -> None:
    tree = tree_of([DRAWN_TOKENS], [DRAWN_PARENTS])
    # After 3 the target says 9, which nobody drafted: 8 below 6 is right but not reached.
    accepted = run(tree, [[3, 9, 0, 0, 8, 9]], max_path=4)
    assert accepted.path.tolist() == [[0, 1, 1, 1]]
    assert accepted.count.tolist() == [2]


def walk(tokens: list[int], parents: list[int], chosen: list[int]) -> list[int]:
    """Brute force: from the root, go to the child that carries the chosen token."""
    path = [0]
    while True:
        children = [
            node
            for node in range(1, len(tokens))
            if parents[node] == path[-1] and tokens[node] == chosen[path[-1]]
        ]
        if not children:
            return path
        assert len(children) == 1, "siblings carry distinct tokens"
        path += children


@given(st.integers(0, 2**32 - 1))
def test_acceptance_is_a_walk_down_the_tree(seed: int) -> None:
    random = np.random.default_rng(seed)
    B, N, vocabulary, max_depth = 4, 12, 4, 4
    tokens, parents = [], []
    for _ in range(B):
        row_parents = [0]
        row_tokens = [int(random.integers(vocabulary))]
        used: set[tuple[int, int]] = set()
        depth = [0]
        while len(row_tokens) < N:
            parent, token = int(random.integers(len(row_tokens))), int(random.integers(vocabulary))
            if (parent, token) in used or depth[parent] == max_depth or row_tokens[parent] < 0:
                continue
            if random.random() < 0.15:
                parent, token = 0, -1
            else:
                used.add((parent, token))
            row_parents.append(parent)
            row_tokens.append(token)
            depth.append(0 if token < 0 else depth[parent] + 1)
        tokens.append(row_tokens)
        parents.append(row_parents)
    chosen = random.integers(vocabulary, size=(B, N))
    accepted = run(tree_of(tokens, parents), chosen, max_path=max_depth + 1)
    for row in range(B):
        path = walk(tokens[row], parents[row], chosen[row].tolist())
        padding = [path[-1]] * (max_depth + 1 - len(path))
        assert accepted.path[row].tolist() == path + padding
        assert accepted.count[row] == len(path)
        assert all(tokens[row][node] >= 0 for node in path), "a padding node was accepted"


def test_a_node_chooses_with_the_noise_of_its_depth() -> None:
    logits = jnp.zeros((1, 4, 5))
    noise = jnp.asarray([[[0, 9, 0, 0, 0], [0, 0, 0, 9, 0], [9, 0, 0, 0, 0]]], jnp.float32)
    sampling = oracles.sampling_arrays([SamplingConfig(temperature=1.0)], [0], 5)
    chosen = jax.jit(choose_tokens)(logits, jnp.asarray([[0, 1, 1, 2]]), noise, sampling)
    assert chosen.tolist() == [[1, 3, 3, 0]]


def test_choices_weigh_filtered_scores_over_temperature_against_noise() -> None:
    configs = [
        SamplingConfig(),
        SamplingConfig(temperature=0.5),
        SamplingConfig(temperature=2.0),
        SamplingConfig(temperature=0.5, top_k=1),
    ]
    # 1.0 apart: at temperature 0.5 noise 1.5 does not lift token 1 over token 0, at 2.0 it does.
    logits = jnp.tile(jnp.asarray([3.0, 2.0, 0.0]), (4, 1, 1))
    noise = np.tile(np.asarray([0.0, 1.5, 0.0], np.float32), (4, 1, 1))
    noise[0] = 0
    noise[3] = [0, 100, 100]
    sampling = oracles.sampling_arrays(configs, [0] * 4, 3)
    chosen = jax.jit(choose_tokens)(logits, jnp.zeros((4, 1), jnp.int32), noise, sampling)
    assert chosen.tolist() == [[0], [0], [1], [0]]
