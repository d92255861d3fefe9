"""What a decode step leaves in the state, on literal paths."""

import jax.numpy as jnp
import pytest
from tiny_models import PARITY_CONFIG

from redrafter_jax.decoding.finish import advance
from redrafter_jax.decoding.prefill import prefill
from redrafter_jax.models.target import Target
from redrafter_jax.requests import prepare
from redrafter_jax.types import Accepted, Verified

pytestmark = pytest.mark.usefixtures("quick_compilation")

PROMPTS = [[3, 1, 4], [9], [2, 6, 5, 3], [11, 0]]


def test_accepted_copies_are_counted_apart(target: Target) -> None:
    requests, _ = prepare(PARITY_CONFIG, PROMPTS, [1, 3, 9, 9], None, None, (), 4)
    state = prefill(target, requests, max_path=4)
    # Root, two drafts and three copies, in paths of a row that is done, one that has room for two
    # tokens, one with a draft above its copies, and one of drafts alone.
    path = jnp.asarray([[0, 3, 4, 5], [0, 3, 4, 5], [0, 1, 3, 4], [0, 1, 2, 2]])
    accepted = Accepted(path, jnp.asarray([4, 4, 4, 3]), bonus=path[:, 0], last=path[:, 3])
    _, K, _, H = state.cache.keys[0].shape
    nodes = tuple(jnp.zeros((4, 6, K, H)) for _ in state.cache.keys)
    verified = Verified(
        logits=jnp.zeros((4, 6, PARITY_CONFIG.vocab_size)),
        hidden=jnp.zeros((4, 6, state.context.shape[1])),
        keys=nodes,
        values=nodes,
    )
    chosen = jnp.full((4, 6), 3)
    stats = advance(state, verified, chosen, accepted, copies=3).stats
    assert stats.copied_tokens.tolist() == [0, 1, 2, 0]
    assert stats.accept_counts.tolist() == [[0] * 4, [0, 1, 0, 0], [0, 0, 0, 1], [0, 0, 1, 0]]
