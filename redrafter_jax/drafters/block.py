"""The drafter of DFlash and DSpark heads, which grows trees from a block of predicted tokens."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from redrafter_jax.config import TargetConfig, TreeConfig
from redrafter_jax.drafters.block_head import BlockConfig
from redrafter_jax.drafters.grow import Advance, Grown, grow
from redrafter_jax.drafters.head_drafter import HeadDrafter
from redrafter_jax.drafters.text_attention import attend_to_text
from redrafter_jax.drafters.tree import build_tree
from redrafter_jax.errors import InputError
from redrafter_jax.models.cache import append
from redrafter_jax.models.target import Decoder
from redrafter_jax.parallel.mesh import check_target
from redrafter_jax.types import CacheShape, Decided, DraftReads, KVCache, TokenTree, View


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class BlockDrafter(HeadDrafter):
    """Drafts with a DFlash or DSpark head.

    The drafter keeps no state other than its layers of the cache.
    """

    @property
    def name(self) -> str:
        return "block"

    @property
    def config(self) -> BlockConfig:
        return self.model.config

    @property
    def cache(self) -> CacheShape:
        config = self.config
        return CacheShape(config.num_layers, config.num_key_value_heads, config.head_dim)

    @property
    def default_tree(self) -> TreeConfig:
        """A chain of all tokens that the block predicts, as in the authors' code."""
        return TreeConfig(beam_width=1, draft_rounds=self.config.places)

    def check(self, target: TargetConfig) -> None:
        """Refuse a target that does not fit, or a mesh that cannot split the head."""
        super().check(target)
        if target.scaled_embeddings:
            raise InputError(
                "The target scales its embeddings, and programs disagree on whether a DFlash or "
                "DSpark head reads scaled embeddings; use a head of another kind."
            )
        if self.model.mesh is not None:
            check_target(self.config.layer, self.model.mesh, "head")

    def empty(self, target: Decoder, rows: int) -> Any:
        del target, rows
        return ()

    def read(
        self, target: Decoder, own: Any, cache: KVCache, decided: Decided
    ) -> tuple[Any, KVCache]:
        """Append keys and values of decided tokens, computed from the target's hidden states."""
        del target
        positions = decided.start[:, None] + jnp.arange(decided.tokens.shape[1])
        keys, values = self.model.merge().remember(decided.hidden, positions)
        return own, append(cache, keys, values, decided.count)

    def propose(
        self,
        target: Decoder,
        own: Any,
        cache: KVCache,
        view: View,
        noise: Float[Array, "B P V"],
        tree: TreeConfig,
    ) -> TokenTree:
        del own
        advance, start = self.begin(target, cache, view.root, view.lengths, tree)
        drafted = self.model.merge().draft_token_ids
        beams = grow(advance, start, view.root, noise, view.sampling, tree, drafted)
        return build_tree(view.root, beams, tree)

    def begin(
        self,
        target: Decoder,
        cache: KVCache,
        root: Int[Array, " B"],
        lengths: Int[Array, " B"],
        tree: TreeConfig,
    ) -> tuple[Advance, Grown]:
        """Return the head's `Advance` function, and the beams before the first draft round.

        This function runs the head's layers once, which scores all places (positions in the block).
        The rounds run only the small heads of DSpark, if there are any. They correct the scores
        from the tokens drafted before. The state of a beam is the state of the sequential head.

        `root` and `lengths` are fields of `View`; the other arguments are those of `propose`.
        """
        head, rounds = self.model.merge(), tree.draft_rounds
        scale = head.config.layer.attention_scale
        M = head.config.block_size
        # Attention within the block is bidirectional.
        mask = jnp.ones((len(root), M, M), bool)
        hidden = head.fill(
            root, lengths, target, lambda layer: attend_to_text(cache, layer, mask, scale)
        )
        hidden = hidden[:, :rounds]
        scores = head.logits(hidden, self.scorer(target))

        def advance(
            grown: Grown, tokens: Int[Array, "B w"], round: Int[Array, ""] | int
        ) -> tuple[Grown, Float[Array, "B _ U"]]:
            at_round = (
                jax.lax.dynamic_slice_in_dim(places, round, 1, axis=1)
                for places in (hidden, scores)
            )
            state, corrected, trust = head.follow(grown.beams, tokens, *at_round)
            return Grown(state, trust=trust), corrected

        state = jnp.zeros((len(root), 1, head.config.markov_rank), head.dtype)
        return advance, Grown(state)


def count_reads(config: BlockConfig, params: Any, tree: TreeConfig) -> DraftReads:
    """Count the weights that drafting one tree reads, for cost estimates.

    The layers are read once. The sequential head's projections and the confidence head are read in
    every round; the sequential head's embedding is not counted. For decided tokens, `fc` and the
    query, key and value projections of the layers are read.
    """
    rounds = tree.draft_rounds
    weights, reading = [], [params["fc"], params["hidden_norm"]]
    for name, part in params.items():
        if name == "markov":
            kept = {key: inner for key, inner in part.items() if key != "embed_tokens"}
            weights.append((kept, rounds))
        elif name not in ("fc", "hidden_norm"):
            weights.append((part, rounds if name == "confidence" else 1))
    for layer in params["layers"].values():
        attention = layer["self_attn"]
        # Query, key and value weights are one parameter.
        reading += [attention[name] for name in attention if name not in ("o_proj", "q_norm")]
    projections = 1 if config.head == "target" else 0
    return DraftReads(weights, projections, config.block_size, reading=reading)
