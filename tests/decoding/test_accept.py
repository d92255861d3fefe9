from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from hypothesis import given
from hypothesis import strategies as st
from trees import R, W, numpy_tree, random_beams, tree_of

from redrafter_jax.config import SamplingConfig, TreeConfig
from redrafter_jax.decoding import accept as accept_module
from redrafter_jax.decoding.accept import accept, choose_tokens
from redrafter_jax.types import NO_CHOICE, Accepted, TokenTree

jitted_accept = partial(jax.jit, static_argnames="max_path")(accept)


def run(tree: TokenTree, chosen: object, max_path: int) -> Accepted:
    accepted = jitted_accept(tree, jnp.asarray(chosen, jnp.int32), max_path)
    return jax.tree.map(np.asarray, accepted)


def test_the_path_follows_the_targets_own_choices_and_stops_where_it_says_something_else() -> None:
    #   7 --+-- 3 --+-- 4
    #       |       +-- 6 ---- 8
    #       +-- 5
    tree = tree_of([[7, 3, 5, 4, 6, 8]] * 2, [[0, 0, 0, 1, 1, 4]] * 2)
    # After 7 the target says 3, and then 6 and 8 in row 0. In row 1 it says 9, which nobody
    # drafted: 8 below 6 is right but not reached.
    accepted = run(tree, [[3, 6, 0, 0, 8, 9], [3, 9, 0, 0, 8, 9]], max_path=4)
    assert accepted.path.tolist() == [[0, 1, 4, 5], [0, 1, 1, 1]]
    assert accepted.count.tolist() == [4, 2]


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
    root, beams = random_beams(seed)
    tree = numpy_tree(root, beams, TreeConfig(W, R))
    B, N = tree.tokens.shape
    chosen = np.random.default_rng(seed).integers(W, size=(B, N))
    accepted = run(tree, chosen, max_path=R + 1)
    for row in range(B):
        tokens = tree.tokens[row].tolist()
        path = walk(tokens, tree.parents[row].tolist(), chosen[row].tolist())
        assert accepted.path[row].tolist() == path + [path[-1]] * (R + 1 - len(path))
        assert accepted.count[row] == len(path)
        assert all(tokens[node] >= 0 for node in path), "a padding node was accepted"


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


def test_a_gpu_finds_the_choices_in_one_pass_and_they_are_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    random = np.random.default_rng(3)
    # Few values, so that many tokens tie; rows with what is no number, and one of nothing.
    logits = random.integers(-3, 4, size=(6, 5, 33)).astype(np.float32)
    logits[0, 0, 7], logits[1, 1, 3], logits[2, 2, 32] = np.nan, np.inf, -np.inf
    logits[3, 3] = -np.inf
    logits[4, 4, [0, 32]] = 9
    depth = jnp.zeros((6, 5), jnp.int32)
    configs = [SamplingConfig()] * 6
    configs[2] = SamplingConfig(0.7, top_k=9, min_p=0.01)
    configs[5] = SamplingConfig(1.3, top_p=0.8)
    sampling = oracles.sampling_arrays(configs, [0] * 6, 33)
    noise = random.gumbel(size=(6, 1, 33)).astype(np.float32)
    noise[[0, 1, 3, 4]] = 0

    def choose() -> np.ndarray:
        return np.asarray(jax.jit(partial(choose_tokens))(logits, depth, noise, sampling))

    expected = choose()
    monkeypatch.setattr(accept_module, "on_gpu", lambda: True)
    np.testing.assert_array_equal(choose(), expected)
    assert expected[0, 0] == expected[1, 1] == expected[3, 3] == NO_CHOICE
    assert expected[4, 4] == 0
