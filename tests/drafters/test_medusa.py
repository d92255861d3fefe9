"""Medusa heads and their trees, against loops over every product of ranks."""

from functools import partial
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_batch import MIXED, PROMPTS
from tiny_models import cast, imitating_medusa, random_drafter
from trees import live_paths

from redrafter_jax import (
    MedusaConfig,
    SamplingConfig,
    TreeConfig,
    generate,
    generate_autoregressive,
)
from redrafter_jax.drafters.base import bind_drafter
from redrafter_jax.drafters.medusa import paths_of
from redrafter_jax.drafters.tree import rank_tree
from redrafter_jax.models.target import Target
from redrafter_jax.parallel.mesh import make_mesh, place
from redrafter_jax.types import KVCache, TokenTree, View

pytestmark = pytest.mark.usefixtures("quick_compilation")

D, V = 6, 11
CONFIGS = [
    MedusaConfig(V, D, num_heads=2, num_draft_layers=0),
    MedusaConfig(V, D, num_heads=3, num_draft_layers=2),
    MedusaConfig(V, D, num_heads=2, num_draft_layers=1, draft_tokens=(1, 4, 9)),
    MedusaConfig(V, D, num_heads=3, num_draft_layers=1, head="target"),
    MedusaConfig(V, D, num_heads=1, num_draft_layers=1, head="target", draft_tokens=(0, 5)),
]
VOCABULARY = np.random.default_rng(9).normal(size=(D, V)).astype(np.float32)


def scores_of(head: Any, hidden: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """One head on one vector, as the paper writes it: W_2 (SiLU(W_1 h) + h), block by block."""
    x = hidden.astype(np.float64)
    for block in head.blocks:
        x = x + oracles.silu(x @ np.asarray(block.kernel[...]) + np.asarray(block.bias[...]))
    own = getattr(head, "lm_head", None)
    return x @ (columns if own is None else np.asarray(own.kernel[...]))


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_every_head_reads_the_same_hidden_state(config: MedusaConfig) -> None:
    medusa = random_drafter(config).merge()
    columns = VOCABULARY[:, list(config.draft_tokens or range(V))]
    scorer = (lambda features: features @ columns) if config.head == "target" else None
    hidden = np.random.default_rng(1).normal(size=(2, 4, D)).astype(np.float32)
    expected = [
        [[scores_of(head, one, columns) for head in medusa.heads] for one in row] for row in hidden
    ]
    logits = medusa.logits(jnp.asarray(hidden), config.num_heads, scorer)
    np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-4)
    # In training a round is a head, whatever tokens are fed.
    rounds = medusa.unroll(jnp.asarray(hidden), jnp.zeros((2, 9, D)), config.num_heads, scorer)
    np.testing.assert_array_equal(np.stack(list(rounds), axis=2), logits)
    halved = cast(random_drafter(config), jnp.bfloat16).merge()
    half = (lambda x: (x @ columns).astype(jnp.float32)) if scorer else None
    assert halved.logits(jnp.asarray(hidden, jnp.bfloat16), 1, half).dtype == jnp.float32


W, R, B = 4, 3, 2


def most_probable(log_probs: np.ndarray, count: int) -> dict[tuple[int, ...], float]:
    """The best paths of all there are, ties to the shorter one and then to the lower ranks."""
    paths = [path for depth in range(1, R + 1) for path in product(range(W), repeat=depth)]
    scores = {path: float(sum(log_probs[i, rank] for i, rank in enumerate(path))) for path in paths}
    best = sorted(paths, key=lambda path: (-scores[path], len(path), path))[:count]
    return {path: scores[path] for path in best if scores[path] > -np.inf}


@partial(jax.jit, static_argnames="draft")
def tree_of(log_probs: jax.Array, tokens: jax.Array, draft: TreeConfig) -> TokenTree:
    root = jnp.asarray([7, 8])
    return rank_tree(root, tokens, log_probs, paths_of(draft), draft.beam_nodes)


def live_nodes(
    random: np.random.Generator, log_probs: np.ndarray, draft: TreeConfig
) -> list[dict[tuple[int, ...], float]]:
    """For each row of a tree of random tokens its nodes below the root, as ranks, with scores."""
    tokens = np.stack([random.permutation(20)[: R * W].reshape(R, W) for _ in range(B)])
    tree = jax.tree.map(np.asarray, tree_of(jnp.asarray(log_probs), jnp.asarray(tokens), draft))
    rows = []
    for row in range(B):
        ranks = [
            tuple(tokens[row, head].tolist().index(token) for head, token in enumerate(path[1:]))
            for path in live_paths(tree, row)
        ]
        scores = tree.log_probs[row, tree.tokens[row] >= 0].tolist()
        rows.append(dict(zip(ranks[1:], scores[1:], strict=True)))
    return rows


@pytest.mark.parametrize("nodes", [2, 6, 1 + W * R])
@given(seed=st.integers(0, 2**32 - 1))
def test_a_dynamic_tree_is_the_most_probable_of_all_products(nodes: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    # Whole numbers, of which many are equal, and tokens that a filter forbids.
    drops = random.choice([0, 1, 2, 3, np.inf], (B, R, W), p=[0.3, 0.3, 0.2, 0.1, 0.1])
    log_probs = -np.cumsum(drops, axis=-1).astype(np.float32)
    rows = live_nodes(random, log_probs, TreeConfig(W, R, num_nodes=nodes))
    assert rows == [most_probable(row, nodes - 1) for row in log_probs]


def greedy_expansion(count: int) -> set[tuple[int, ...]]:
    """Section 2.3.3 of the paper: add the likeliest node that the tree can have next, and again."""
    chance: dict[tuple[int, ...], float] = {(): 1.0}
    while len(chance) <= count:
        candidates = {
            (*path, rank): chance[path] * 0.55 * 0.8 ** len(path) / (rank + 1) ** 2
            for path in chance
            if len(path) < R
            for rank in range(W)
        }
        new = max((one for one in candidates if one not in chance), key=lambda one: candidates[one])
        chance[new] = candidates[new]
    return set(chance) - {()}


PATHS = ((1,), (0,), (0, 3), (0, 3, 0))


@pytest.mark.parametrize(
    ("draft", "expected"),
    [
        (TreeConfig(W, R, static_tree=PATHS), set(PATHS)),
        (TreeConfig(W, R, static_tree=True), greedy_expansion(W * R)),
        (TreeConfig(W, R, num_nodes=6, static_tree=True), greedy_expansion(5)),
        (TreeConfig(W, R, num_nodes=1), set()),
    ],
    ids=["given", "likeliest", "five likeliest", "none"],
)
def test_a_static_tree_has_the_same_ranks_whatever_the_heads_say(
    draft: TreeConfig, expected: set[tuple[int, ...]]
) -> None:
    assert draft.beam_nodes == 1 + len(expected)
    random = np.random.default_rng(0)
    log_probs = -np.cumsum(random.random((B, R, W)), axis=-1).astype(np.float32)
    for row, nodes in enumerate(live_nodes(random, log_probs, draft)):
        assert nodes.keys() == expected
        for path, score in nodes.items():
            total = sum(log_probs[row, head, rank] for head, rank in enumerate(path))
            assert score == pytest.approx(total, rel=1e-6)


@pytest.mark.parametrize(
    ("draft", "variant"),
    [
        pytest.param(TreeConfig(4, 3), {}, marks=pytest.mark.long),
        pytest.param(
            TreeConfig(4, 2, num_nodes=6, sharpness=1.5, candidates=9),
            {"corruption": 0.5},
            marks=pytest.mark.long,
        ),
        pytest.param(TreeConfig(4, 3, static_tree=True), {}, marks=pytest.mark.long),
        (TreeConfig(4, 3, static_tree=PATHS, lookup_tokens=3), {}),
        pytest.param(
            TreeConfig(3, 3, num_nodes=9, lookup_tokens=3),
            {"draft_tokens": tuple(range(0, 24, 2))},
            marks=pytest.mark.long,
        ),
    ],
    ids=["dynamic", "budget", "static", "paths and lookup", "few tokens and lookup"],
)
def test_texts_are_the_targets_own(
    habitual_target: Target, draft: TreeConfig, variant: dict[str, Any]
) -> None:
    run: dict[str, Any] = {"max_new_tokens": 24, "sampling": MIXED}
    plain = generate_autoregressive(habitual_target, PROMPTS, **run)
    medusa = imitating_medusa(habitual_target, **variant)
    result = generate(habitual_target, medusa, PROMPTS, tree=draft, **run)
    assert result.tokens == plain.tokens
    assert sum(result.accepted_by["medusa"]) > 8, "some drafts came true"
    assert list(result.accepted_by) == ["medusa", "lookup"][: 1 + (draft.lookup_tokens > 0)]


def test_a_head_drafts_with_the_noise_of_its_own_position(habitual_target: Target) -> None:
    medusa = imitating_medusa(habitual_target)
    drafter, tree = bind_drafter(medusa, TreeConfig(1, 3))
    assert tree is not None
    config = habitual_target.config
    random = np.random.default_rng(4)
    hidden = jnp.asarray(random.normal(size=(2, config.hidden_size)), jnp.float32)
    noise = random.gumbel(size=(2, tree.max_path, config.vocab_size)).astype(np.float32)
    root = jnp.asarray([7, 8])
    sampling = oracles.sampling_arrays([SamplingConfig(1.0)] * 2, [0, 1], config.vocab_size)
    view = View(root[:, None], jnp.zeros(2, jnp.int32), root, sampling)
    nothing = KVCache((), (), jnp.zeros((len(view.lengths), 0), jnp.int32), view.lengths)
    propose = jax.jit(drafter.propose, static_argnames="tree")
    drafted = propose(habitual_target.merge(), hidden, nothing, view, noise, tree=tree)
    logits = medusa.merge().logits(hidden, 3)
    np.testing.assert_array_equal(drafted.tokens[:, 1:], np.argmax(logits + noise[:, :3], axis=-1))


@pytest.mark.long
def test_parts_of_the_heads_on_a_mesh_draft_the_same(habitual_target: Target) -> None:
    run = partial(
        generate,
        prompts=PROMPTS,
        max_new_tokens=24,
        tree=TreeConfig(4, 3, num_nodes=8),
        sampling=MIXED,
    )
    medusa, mesh = imitating_medusa(habitual_target, corruption=0.5), make_mesh(1, 2)
    alone = run(habitual_target, medusa)
    split = run(place(habitual_target, mesh), place(medusa, mesh))
    assert split.tokens == alone.tokens
    assert split.steps == alone.steps


@pytest.mark.long
def test_heads_without_a_projection_change_no_text_either(habitual_target: Target) -> None:
    config = habitual_target.config
    shape = MedusaConfig(
        config.vocab_size, config.hidden_size, 2, 1, draft_tokens=(0, 3, 7, 20), head="target"
    )
    run: dict[str, Any] = {"max_new_tokens": 12, "sampling": MIXED}
    plain = generate_autoregressive(habitual_target, PROMPTS, **run)
    drafted = generate(
        habitual_target, random_drafter(shape), PROMPTS, tree=TreeConfig(4, 2), **run
    )
    assert drafted.tokens == plain.tokens
