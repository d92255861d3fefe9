"""A language model as the drafter of another model with the same vocabulary (arXiv 2211.17192).

The drafter either reads the text into its own layers of the cache, or attends to the target's keys
and values. In the second case, the drafter's keys and values must have the shape of the target's. A
beam search grows the trees; each drafted token attends to the text and to its own ancestors.
"""

from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from redrafter_jax.config import TargetConfig, TreeConfig
from redrafter_jax.drafters.base import Drafter
from redrafter_jax.drafters.grow import Grown, grow
from redrafter_jax.drafters.node_cache import (
    add_nodes,
    attend_to_ancestors,
    init_nodes,
    init_seen,
    see_themselves,
)
from redrafter_jax.drafters.tree import build_tree, pad_nodes
from redrafter_jax.errors import InputError
from redrafter_jax.models.decoder_layer import Attend
from redrafter_jax.models.target import Decoder, Target
from redrafter_jax.parallel.model import Model
from redrafter_jax.types import CacheShape, Decided, DraftReads, KVCache, TokenTree, View


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ModelDrafter(Drafter):
    """Drafts with a language model; past the context limit of this model, nothing is drafted.

    Attributes:
      model: the model that drafts.
      shares_cache: whether the model attends to the target's keys and values instead of its own.
        Only a part of the target itself can do this; see `self_drafter`.
    """

    model: Target
    shares_cache: bool = field(default=False, metadata={"static": True})

    @property
    def name(self) -> str:
        return "self" if self.shares_cache else "model"

    @property
    def cache(self) -> CacheShape | None:
        return None if self.shares_cache else self._layers

    @property
    def target_layers(self) -> int:
        return self._layers.layers if self.shares_cache else 0

    @property
    def reads_hidden(self) -> bool:
        return False

    def apart(self) -> "ModelDrafter":
        return replace(self, shares_cache=False)

    @property
    def _layers(self) -> CacheShape:
        config = self.model.config
        return CacheShape(config.num_hidden_layers, config.num_key_value_heads, config.head_dim)

    @property
    def models(self) -> tuple[Model[Any, Any], ...]:
        return (self.model,)

    @property
    def default_tree(self) -> TreeConfig:
        return TreeConfig(beam_width=1, draft_rounds=4)

    def check(self, target: TargetConfig) -> None:
        """Refuse a target with another vocabulary size."""
        ours, theirs = self.model.config.vocab_size, target.vocab_size
        if ours != theirs:
            raise InputError(
                f"The drafter's vocabulary has {ours} tokens, but the target's has {theirs}; use a "
                "model with the target's vocabulary, such as a smaller one of the same family."
            )

    def check_tree(self, tree: TreeConfig) -> None:
        """Refuse a static tree, and a tree that is wider or deeper than the model allows."""
        tree.check_beams("a model")
        tree.check_tokens(self.model.config.vocab_size)
        limit = self.model.config.position_limit
        if tree.max_path > limit:
            raise InputError(
                f"TreeConfig.draft_rounds is {tree.draft_rounds}, but the drafter has {limit} "
                "positions; draft fewer tokens."
            )

    def read(
        self, target: Decoder, own: Any, cache: KVCache, decided: Decided
    ) -> tuple[Any, KVCache]:
        """Read the tokens into the model's own layers; with `shares_cache`, read nothing."""
        del target
        if self.shares_cache:
            return own, cache
        _, cache = self.model.merge().extend(decided.tokens, cache, decided.count)
        return own, cache

    def propose(
        self,
        target: Decoder,
        own: Any,
        cache: KVCache,
        view: View,
        noise: Float[Array, "B P V"],
        tree: TreeConfig,
    ) -> TokenTree:
        del target, own
        decoder, B = self.model.merge(), len(view.root)
        config = decoder.config

        def advance(
            grown: Grown, tokens: Int[Array, "B w"], round: Int[Array, ""] | int
        ) -> tuple[Grown, Float[Array, "B w V"]]:
            seen = see_themselves(grown.beams, round)

            def attend_in(layer: int) -> Attend:
                return attend_to_ancestors(
                    cache,
                    grown.nodes,
                    layer,
                    seen,
                    round,
                    scale=config.attention_scale,
                    window=config.window_of(layer),
                )

            positions = jnp.broadcast_to(view.lengths[:, None] + round, tokens.shape)
            hidden, keys, values = decoder.run(tokens, positions, attend_in)
            nodes = add_nodes(grown.nodes, keys, values, round)
            return Grown(seen, nodes), decoder.logits(hidden)

        start = Grown(init_seen(B, tree), init_nodes(self._layers, B, tree, decoder.dtype))
        beams = grow(advance, start, view.root, noise, view.sampling, tree)
        drafted = build_tree(view.root, beams, tree)
        within = view.lengths + tree.draft_rounds < config.position_limit
        return pad_nodes(drafted, within[:, None] | (drafted.depth == 0))


def count_reads(config: TargetConfig, params: Any, tree: TreeConfig) -> DraftReads:
    """Count the weights that drafting one tree reads: all weights, in every round.

    Rows of the embedding are not counted, unless the embedding is also the vocabulary projection.
    """
    rounds, embedding = tree.draft_rounds, "embed_tokens"
    head = embedding if config.tie_word_embeddings else "lm_head"
    layers = [part for name, part in params.items() if name not in (embedding, head)]
    return DraftReads([(layers, rounds), (params[head], rounds)], 0, 0, reading=layers)
