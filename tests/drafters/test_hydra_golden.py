"""Hydra heads against their authors' own code (tools/goldens/hydra_heads.py)."""

import numpy as np
import pytest
from published_heads import (
    BEAMS,
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


@pytest.fixture(scope="module", params=heads_for_make_test("hydra", "mlp", "prefix"))
def read(request: pytest.FixtureRequest, target: Target) -> Read:
    return read_all(GOLDENS / "hydra" / request.param, target)


def test_scores_along_a_chain_are_the_authors(target: Target, read: Read) -> None:
    scores, _ = follow_chain(
        read,
        target,
        lambda drafter, decoder, own, cache, tree: drafter.begin(decoder, own),
        unrolled=True,
    )
    for row, length in enumerate(LENGTHS):
        expected = read.answers[f"after_{length}"]
        assert np.abs(expected).max() > 1
        np.testing.assert_allclose(scores[:, row], expected, atol=1e-4)


def test_a_tree_is_a_beam_search_over_the_authors_scores(target: Target, read: Read) -> None:
    assert_beam_search(draft_tree(read, target, BEAMS), read.answers)
