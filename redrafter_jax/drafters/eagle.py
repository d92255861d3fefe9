"""EAGLE heads in decoding: what they read of decided tokens, and the trees that they grow."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

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
from redrafter_jax.drafters.tree import build_tree
from redrafter_jax.models.attention import tree_attention
from redrafter_jax.models.cache import append
from redrafter_jax.models.decoder_layer import Attend
from redrafter_jax.models.target import Decoder
from redrafter_jax.parallel.mesh import check_target
from redrafter_jax.types import CacheShape, Decided, DraftReads, KVCache, TokenTree, View


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class EagleDrafter(HeadDrafter):
    """An EAGLE head, and the trees that it grows.

    Its own state is what the layer put out at the last entry, which predicts the token after the
    root: `[B width]`.
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
        """That of EAGLE-2's and EAGLE-3's code: ten beams, eight rounds, and the 59 best nodes.

        Its `depth=7` counts the rounds after the first. A head of very few tokens drafts those.
        """
        U = self.config.draft_vocab_size
        width, nodes = min(10, U), min(60, U + 1)
        return TreeConfig(beam_width=width, draft_rounds=8, num_nodes=nodes, rerank=True)

    def check(self, target: TargetConfig) -> None:
        """Refuse the target of another head, and a mesh that does not divide the head's parts."""
        super().check(target)
        if self.model.mesh is not None:
            check_target(self.config.layer, self.model.mesh, "EAGLE head")

    def empty(self, target: Decoder, rows: int) -> Float[Array, "B width"]:
        del target
        return jnp.zeros((rows, self.config.width), self.model.merge().dtype)

    def read(
        self, target: Decoder, own: Float[Array, "B width"], cache: KVCache, decided: Decided
    ) -> tuple[Float[Array, "B width"], KVCache]:
        """Entries of the decided tokens, with the target's own hidden states."""
        head = self.model.merge()
        B, C = decided.tokens.shape
        places = jnp.arange(C)
        chain = jnp.broadcast_to(jnp.tri(C, dtype=bool), (B, C, C))
        # Past the decided ones a token may be none.
        embedded = head.embed(jnp.maximum(decided.following, 0), target)
        output, keys, values = head.run(
            embedded,
            head.fuse(decided.hidden),
            decided.start[:, None] + places,
            _in_dtype_of(cache, _attend_to_chain(cache, chain, head.config.layer)),
        )
        newest = jnp.maximum(decided.count - 1, 0)[:, None, None]
        last = jnp.take_along_axis(output, newest, axis=1)[:, 0]
        dtype = cache.keys[0].dtype
        cache = append(cache, (keys.astype(dtype),), (values.astype(dtype),), decided.count)
        return jnp.where(decided.count[:, None] > 0, last, own), cache

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
        """How a tree grows, and what it carries before the first round; arguments as in `propose`.

        Beams carry what they see of the tree, and what the layer put out at their newest entry.
        """
        head, scorer, B = self.model.merge(), self.scorer(target), len(lengths)
        scale, dtype = head.config.layer.attention_scale, cache.keys[0].dtype

        def advance(
            grown: Grown, tokens: Int[Array, "B w"], round: Int[Array, ""] | int
        ) -> tuple[Grown, Float[Array, "B w U"]]:
            seen, output = grown.beams
            if isinstance(round, int):  # the root was read with the decided tokens
                return grown, head.logits(output, scorer)
            seen, nodes = see_themselves(seen, round), grown.nodes
            attend = attend_to_ancestors(cache, nodes, 0, seen, round, scale=scale)
            output, keys, values = head.run(
                head.embed(tokens, target),
                head.feed_back(output),
                # The entry of a token stands at the position before it.
                jnp.broadcast_to(lengths[:, None] + round - 1, tokens.shape),
                _in_dtype_of(cache, attend),
            )
            nodes = add_nodes(nodes, (keys.astype(dtype),), (values.astype(dtype),), round)
            return Grown((seen, output), nodes), head.logits(output, scorer)

        beams = init_seen(B, tree), own[:, None]
        return advance, Grown(beams, init_nodes(self.cache, B, tree, dtype))


def _attend_to_chain(cache: KVCache, chain: Bool[Array, "B C C"], layer: TargetConfig) -> Attend:
    """Attention of consecutive entries to those in the cache, to those before them, themselves."""

    def attend(
        q: Float[Array, "B C Q H"], k: Float[Array, "B C K H"], v: Float[Array, "B C K H"]
    ) -> Float[Array, "B C Q H"]:
        return tree_attention(
            q,
            k_cache=cache.keys[0],
            v_cache=cache.values[0],
            table=cache.table,
            lengths=cache.lengths,
            k_tree=k,
            v_tree=v,
            mask=chain,
            scale=layer.attention_scale,
        )

    return attend


def _in_dtype_of(cache: KVCache, attend: Attend) -> Attend:
    """The same attention in the cache's dtype, which is the target's and may not be the head's."""
    dtype = cache.keys[0].dtype

    def cast(
        q: Float[Array, "B T Q H"], k: Float[Array, "B T K H"], v: Float[Array, "B T K H"]
    ) -> Float[Array, "B T Q H"]:
        return attend(*(one.astype(dtype) for one in (q, k, v))).astype(q.dtype)

    return cast


def count_reads(config: EagleConfig, params: Any, tree: TreeConfig) -> DraftReads:
    """The layer reads the accepted path, and the tokens of every round but the last.

    Of an embedding of the head's own its rows are not counted, which are few beside the layer.
    """
    rounds = tree.draft_rounds
    # EAGLE-3 fuses the target's hidden states alone; the first version pairs in every pass.
    once = ("input_norm", "fc_norm", *(("fc",) if config.version == "3" else ()))
    weights = [
        (part, 1 if name in once else rounds)
        for name, part in params.items()
        if name != "embed_tokens"
    ]
    fed = 0 if config.own_embedding else tree.max_path + tree.beam_width * (rounds - 1)
    return DraftReads(weights, rounds if config.head == "target" else 0, fed)
