"""The weights, projections and embeddings that a drafted tree reads, counted by hand."""

import jax.numpy as jnp
import pytest
from kind_shapes import D, V
from tiny_models import ATTENTION

from eval.abstract import abstract_drafter, bytes_of
from redrafter_jax import MedusaConfig, RecurrentConfig, TreeConfig
from redrafter_jax.config.drafter import HeadConfig
from redrafter_jax.drafters.block_head import BlockConfig
from redrafter_jax.drafters.eagle_head import EagleConfig
from redrafter_jax.drafters.hydra_head import HydraConfig, PrefixLayer
from redrafter_jax.drafters.kinds import kind_of


@pytest.mark.parametrize(
    ("config", "weights", "projections", "embeddings"),
    [
        # Two matrices 8 x 8 and a bias, the projection of 16, one block, 13 tokens; three rounds.
        # The root alone is fed in the first, W = 2 tokens in each later one.
        (
            RecurrentConfig(V, D, 5, 1),
            3 * (2 * 64 + 8 + 16 * 5 + 5 + 25 + 5 + 5 * 13),
            0,
            5,
        ),
        # Three layers of the target are read once; the target's projection scores in every round.
        (
            RecurrentConfig(V, D, 5, 0, context_layers=(0, 2), head="target"),
            3 * 8 * 8 + 3 * (2 * 64 + 8 + 16 * 5 + 5 + 5 * 8),
            3,
            5,
        ),
        # The layer that attends once: three norms, queries, keys and values of twice the width, the
        # output, the feed-forward block; a path of four tokens is embedded for it.
        (
            RecurrentConfig(V, D, 5, 0, **ATTENTION),
            3 * 8
            + 16 * (24 + 12 + 12)
            + 24 * 8
            + 3 * 8 * 24
            + 3 * (2 * 64 + 8 + 16 * 5 + 5 + 5 * 13),
            0,
            5 + 4,
        ),
        # Three of the four heads, each of one block.
        (MedusaConfig(V, D, 4, 1), 3 * (64 + 8 + 8 * 13), 0, 0),
        (MedusaConfig(V, D, 4, 1, head="target"), 3 * (64 + 8), 1, 0),
        # The projection of three fused states once; three times four norms, queries, keys and
        # values of twice the width, the output, the feed-forward block, 13 tokens. Embedded are
        # the four tokens of a path that is read, and two in each of two rounds.
        (
            EagleConfig(V, D, "3", D, 12, 2, 1, 4),
            24 * 8 + 3 * (4 * 8 + 16 * (8 + 4 + 4) + 64 + 3 * 8 * 12 + 8 * 13),
            0,
            4 + 2 * 2,
        ),
        # The first version projects its pair in every pass, and has one norm.
        (
            EagleConfig(V, D, "1", D, 12, 2, 2, 4, head="target", fc_bias=True),
            3 * (16 * 8 + 8 + 8 + 4 * 64 + 3 * 8 * 12),
            3,
            4 + 2 * 2,
        ),
        # The first three of four heads: two matrices from as many widths as there are tokens before
        # and one for the hidden state, a block that is run twice, 13 tokens with a bias.
        (
            HydraConfig(V, D, 4, 3, prefix=PrefixLayer(12, 4, 2, 2)),
            2 * 64 * (2 + 3 + 4) + 3 * (2 * 8 + 2 * 72 + 8 * 13 + 13),
            0,
            5,
        ),
        # One block, run twice; the target's projection scores.
        (HydraConfig(V, D, 4, 2, grounded=False, head="target"), 3 * 2 * 72, 3, 0),
        # The last norm, and a layer: its norms, those of queries and keys, queries and output,
        # keys and values, the feed-forward block. The gate and the 13 tokens of the sequential head
        # and the confidence head three times, of the block of four the embeddings.
        (
            BlockConfig(
                *(V, D, 1, 12, 2, 1, 4, 4, 5),
                context_layers=(0, 1),
                markov_rank=3,
                markov_head_type="gated",
                confidence=True,
            ),
            8 + 2 * 8 + 2 * 4 + 2 * 64 + 2 * 32 + 3 * 8 * 12 + 3 * (3 * 11 + 3 + 3 * 13 + 8 + 1),
            1,
            4,
        ),
    ],
)
def test_a_tree_reads_what_its_kind_says(
    config: HeadConfig, weights: int, projections: int, embeddings: int
) -> None:
    kind = kind_of(config)
    assert kind is not None
    drafter = abstract_drafter(config, jnp.bfloat16)
    reads = kind.count_reads(config, drafter.params, TreeConfig(beam_width=2, draft_rounds=3))
    assert sum(times * bytes_of(part) for part, times in reads.weights) == 2 * weights
    assert (reads.projections, reads.embeddings) == (projections, embeddings)
