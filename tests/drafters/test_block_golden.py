"""DFlash and DSpark heads against their authors' own code (tools/goldens/block_heads.py)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from published_heads import (
    BEAMS,
    CHAIN,
    GOLDENS,
    LENGTHS,
    Read,
    assert_beam_search,
    draft_tree,
    follow_chain,
    heads_for_make_test,
)
from published_heads import read_texts as read_all

from redrafter_jax import load_target
from redrafter_jax.models.target import Target

pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.fixture(scope="module")
def target() -> Target:
    return load_target(GOLDENS / "eagle/target", "float32")


@pytest.fixture(scope="module", params=heads_for_make_test("block", "deepspec_dspark", "zlab"))
def read(request: pytest.FixtureRequest, target: Target) -> Read:
    return read_all(GOLDENS / "block" / request.param, target)


def test_scores_and_confidence_along_a_chain_are_the_authors(target: Target, read: Read) -> None:
    root = jnp.full(len(LENGTHS), CHAIN[0])
    scores, trust = follow_chain(
        read,
        target,
        lambda drafter, decoder, own, cache, tree: drafter.begin(
            decoder, cache, root, jnp.asarray(LENGTHS), tree
        ),
    )
    assert (trust is not None) == ("confidence_63" in read.answers)
    for row, length in enumerate(LENGTHS):
        expected = read.answers[f"after_{length}"]
        assert np.abs(expected).max() > 1
        np.testing.assert_allclose(scores[:, row], expected, atol=1e-4)
        if trust is not None:
            confidence = jax.nn.log_sigmoid(read.answers[f"confidence_{length}"])
            np.testing.assert_allclose(trust[:, row], confidence, atol=1e-4)


def test_a_tree_is_a_beam_search_over_the_authors_scores(target: Target, read: Read) -> None:
    assert_beam_search(draft_tree(read, target, BEAMS), read.answers)
