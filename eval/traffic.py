"""Bytes that the parts of a decode step must read, from shapes alone."""

from typing import NamedTuple

import jax

from redrafter_jax.config import DraftConfig
from redrafter_jax.drafters.recurrent_head import DraftModel
from redrafter_jax.models.target import Target
from redrafter_jax.parallel.collectives import MODEL
from redrafter_jax.parallel.mesh import data_shards
from redrafter_jax.types import DecodeState

from .abstract import bytes_of


class Traffic(NamedTuple):
    """Bytes that a part of a decode step must read."""

    draft: int
    verification: int
    baseline: int


def bytes_read(
    target: Target, drafter: DraftModel, state: DecodeState, draft: DraftConfig
) -> Traffic:
    """The least that a decode step reads from one device's memory, its cache full."""
    config = target.config
    rows = len(state.root) // data_shards(target.mesh)
    row_bytes = config.hidden_size * state.cache.keys[0].dtype.itemsize
    once = bytes_of(target) + bytes_of((state.cache.keys, state.cache.values))
    if not config.tie_word_embeddings:
        once -= bytes_of(target.params["embed_tokens"])

    def target_call(nodes: int) -> int:
        return once + rows * nodes * row_bytes * (not config.tie_word_embeddings)

    # The root alone is fed in the first round, W tokens in every later one.
    fed = 1 + draft.beam_width * (draft.draft_rounds - 1)
    return Traffic(
        draft=draft_weight_bytes(drafter, draft) + rows * fed * row_bytes,
        verification=target_call(draft.budget),
        baseline=target_call(1),
    )


def draft_weight_bytes(drafter: DraftModel, draft: DraftConfig) -> int:
    """Weights that drafting one tree reads.

    Every round reads all of the drafter's, and where it has no vocabulary projection those of the
    target's for the tokens that can be drafted. What projects the context is read once.
    """
    config = drafter.config
    whole = bytes_of(drafter)
    once = bytes_of(drafter.params["context_proj"]) if config.context_layers else 0
    borrowed = 0
    if config.head == "target":
        itemsize = jax.tree.leaves(drafter.params)[0].dtype.itemsize
        parts = 1 if drafter.mesh is None else drafter.mesh.shape[MODEL]
        V, tokens = config.vocab_size, config.draft_vocab_size
        # On a mesh each device reads its part of all tokens' weights, however few are drafted.
        tokens = tokens if parts == 1 or V % parts else V // parts
        borrowed = tokens * config.hidden_size * itemsize
    return once + draft.draft_rounds * (whole - once + borrowed)
