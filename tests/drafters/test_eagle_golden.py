"""EAGLE heads of every dialect against their authors' own code (tools/goldens/eagle_heads.py)."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from published_heads import (
    BEAMS,
    CHAIN,
    GOLDENS,
    LENGTHS,
    TEXT,
    Read,
    assert_beam_search,
    draft_tree,
    follow_chain,
    heads_for_make_test,
    paths,
)
from published_heads import read_texts as read_all

from redrafter_jax import TreeConfig, load_target
from redrafter_jax.drafters.eagle import EagleDrafter
from redrafter_jax.models.target import Target

pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.fixture(scope="module")
def target() -> Target:
    return load_target(GOLDENS / "eagle/target", "float32")


@pytest.fixture(
    scope="module",
    params=heads_for_make_test("eagle", "deepspec", "safeailab_3", "speculators_norms"),
)
def read(request: pytest.FixtureRequest, target: Target) -> Read:
    return read_all(GOLDENS / "eagle" / request.param, target)


def test_scores_along_a_chain_are_the_authors(target: Target, read: Read) -> None:
    scores, _ = follow_chain(
        read,
        target,
        lambda drafter, decoder, own, cache, tree: drafter.begin(
            decoder, own, cache, jnp.asarray(LENGTHS), tree
        ),
    )
    for row, length in enumerate(LENGTHS):
        expected = read.answers[f"after_{length}"]
        assert np.abs(expected).max() > 1
        np.testing.assert_allclose(scores[:, row], expected, atol=1e-4)


@pytest.mark.long
def test_a_rollout_of_training_is_the_authors(target: Target, read: Read) -> None:
    """SpecForge's and speculators' answers are of their training; the others' say the same."""
    drafter: Any = read.drafter
    head = drafter.model.merge()
    if head.config.version == "1":
        pytest.skip("heads of the first version are not trained here")
    rows = np.zeros((len(LENGTHS), max(LENGTHS) + len(CHAIN)), np.int32)
    for row, length in zip(rows, LENGTHS, strict=True):
        row[: length + len(CHAIN)] = TEXT[:length] + CHAIN

    @jax.jit
    def unroll(target: Target, drafter: EagleDrafter, tokens: jax.Array) -> jax.Array:
        decoder, head, rounds = target.merge(), drafter.model.merge(), len(CHAIN)
        hidden, _, _ = decoder.forward(tokens, None, drafter.layers(target.config))
        embedded = head.embed(jnp.roll(tokens, -1, axis=1), decoder)
        contexts = head.contexts(hidden, embedded, jnp.ones_like(tokens), rounds)
        scores = head.unroll(contexts, embedded, rounds, drafter.scorer(decoder))
        return jnp.stack([*scores], axis=2)

    scores = unroll(target, drafter, jnp.asarray(rows))
    for row, length in enumerate(LENGTHS):
        expected = read.answers[f"after_{length}"]
        np.testing.assert_allclose(scores[row, length - 1], expected, atol=1e-4)


def test_a_tree_is_the_authors(target: Target, read: Read) -> None:
    if "tokens" not in read.answers:
        # The authors' code grows no tree; the golden has a beam search over their scores.
        assert_beam_search(draft_tree(read, target, BEAMS), read.answers)
        return
    # Their `depth` counts the rounds after the first; `total_tokens` is the root's too.
    tree = TreeConfig(beam_width=10, draft_rounds=4, num_nodes=11, rerank=True)
    drafted = draft_tree(read, target, tree)
    ours = set(paths(np.asarray(drafted.tokens[0]), np.asarray(drafted.parents[0])))
    theirs = set(paths(read.answers["tokens"], read.answers["parents"]))
    # They order siblings otherwise.
    assert ours == theirs
    assert len(ours) == tree.budget
    assert max(map(len, ours)) >= 4
