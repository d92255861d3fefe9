"""The EAGLE drafter, which reads decided tokens and grows trees with an EAGLE head."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from redrafter_jax.config import TargetConfig, TreeConfig
from redrafter_jax.drafters.eagle_head import EagleConfig
from redrafter_jax.drafters.grow import Advance, Grown, grow
from redrafter_jax.drafters.head_drafter import HeadDrafter
from redrafter_jax.drafters.node_cache import (
    add_nodes,
    attend_to_ancestors,
    init_nodes,
    init_seen,
    see_themselves,
)
from redrafter_jax.drafters.own_layer import read_decided
from redrafter_jax.drafters.text_attention import in_dtype_of
from redrafter_jax.drafters.tree import build_tree
from redrafter_jax.models.target import Decoder
from redrafter_jax.parallel.mesh import check_target
from redrafter_jax.types import CacheShape, Decided, DraftReads, KVCache, TokenTree, View


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class EagleDrafter(HeadDrafter):
    """Drafts with an EAGLE head.

    The state `own`, `[B width]`, is the output of the head's layer at its last cache entry. From
    this output, the first round predicts the token after the root.
    """

    @property
    def name(self) -> str:
        return "eagle"

    @property
    def config(self) -> EagleConfig:
        return self.model.config

    @property
    def cache(self) -> CacheShape:
        return CacheShape(1, self.config.num_key_value_heads, self.config.head_dim)

    @property
    def default_tree(self) -> TreeConfig:
        """The tree of EAGLE-2's and EAGLE-3's code: ten beams, eight rounds, the root and 59 nodes.

        The `depth=7` of that code does not count the first round. A head with few draftable tokens
        gets fewer beams and nodes.
        """
        U = self.config.draft_vocab_size
        width, nodes = min(10, U), min(60, U + 1)
        return TreeConfig(beam_width=width, draft_rounds=8, num_nodes=nodes, rerank=True)

    def check(self, target: TargetConfig) -> None:
        """Refuse a target that does not fit, or a mesh that cannot split the head."""
        super().check(target)
        if self.model.mesh is not None:
            check_target(self.config.layer, self.model.mesh, "EAGLE head")

    def empty(self, target: Decoder, rows: int) -> Float[Array, "B width"]:
        del target
        return jnp.zeros((rows, self.config.width), self.model.merge().dtype)

    def read(
        self, target: Decoder, own: Float[Array, "B width"], cache: KVCache, decided: Decided
    ) -> tuple[Float[Array, "B width"], KVCache]:
        """Run the head's layer on decided tokens, and add their keys and values to the cache."""
        head = self.model.merge()
        # `following` may be -1 past the decided tokens.
        embedded = head.embed(jnp.maximum(decided.following, 0), target)
        run = partial(head.run, embedded, head.fuse(decided.hidden))
        return read_decided(run, own, cache, decided, head.config.layer.attention_scale)

    def propose(
        self,
        target: Decoder,
        own: Float[Array, "B width"],
        cache: KVCache,
        view: View,
        noise: Float[Array, "B P V"],
        tree: TreeConfig,
    ) -> TokenTree:
        advance, start = self.begin(target, own, cache, view.lengths, tree)
        drafted = self.model.merge().draft_token_ids
        beams = grow(advance, start, view.root, noise, view.sampling, tree, drafted)
        return build_tree(view.root, beams, tree)

    def begin(
        self,
        target: Decoder,
        own: Float[Array, "B width"],
        cache: KVCache,
        lengths: Int[Array, " B"],
        tree: TreeConfig,
    ) -> tuple[Advance, Grown]:
        """Return the head's `Advance` function, and the beams before the first draft round.

        `lengths` is `View.lengths`; the other arguments are those of `propose`. `Grown.beams` holds
        two arrays: the mask of the nodes that each beam attends to, and the layer's output for the
        last token that the layer has read on each beam.
        """
        head, scorer, B = self.model.merge(), self.scorer(target), len(lengths)
        scale, dtype = head.config.layer.attention_scale, cache.keys[0].dtype

        def advance(
            grown: Grown, tokens: Int[Array, "B w"], round: Int[Array, ""] | int
        ) -> tuple[Grown, Float[Array, "B w U"]]:
            seen, output = grown.beams
            if isinstance(round, int):  # the first call: `read` has run the layer on the root
                return grown, head.logits(output, scorer)
            seen, nodes = see_themselves(seen, round), grown.nodes
            attend = attend_to_ancestors(cache, nodes, 0, seen, round, scale=scale)
            output, keys, values = head.run(
                head.embed(tokens, target),
                head.feed_back(output),
                # The entry of a token is at the position before the token.
                jnp.broadcast_to(lengths[:, None] + round - 1, tokens.shape),
                in_dtype_of(cache, attend),
            )
            nodes = add_nodes(nodes, (keys.astype(dtype),), (values.astype(dtype),), round)
            return Grown((seen, output), nodes), head.logits(output, scorer)

        beams = init_seen(B, tree), own[:, None]
        return advance, Grown(beams, init_nodes(self.cache, B, tree, dtype))


def count_reads(config: EagleConfig, params: Any, tree: TreeConfig) -> DraftReads:
    """Count the weights that drafting one tree reads, for cost estimates.

    The layer is read once for the accepted path, and once for every draft round but the last. Rows
    of the head's own embedding are not counted, because they are much smaller than the layer.
    """
    rounds = tree.draft_rounds
    # EAGLE-3 applies `fc` only to the target's hidden states, but version 1 in every pass.
    once = ("input_norm", "fc_norm", *(("fc",) if config.version == "3" else ()))
    weights = [
        (part, 1 if name in once else rounds)
        for name, part in params.items()
        if name != "embed_tokens"
    ]
    fed = 0 if config.own_embedding else tree.max_path + tree.beam_width * (rounds - 1)
    return DraftReads(weights, rounds if config.head == "target" else 0, fed)
