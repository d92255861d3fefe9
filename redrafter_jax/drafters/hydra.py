"""The Hydra drafter, which reads decided tokens and grows trees with Hydra heads."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from redrafter_jax.config import TargetConfig, TreeConfig
from redrafter_jax.drafters.grow import Advance, Grown, grow
from redrafter_jax.drafters.head_drafter import HeadDrafter
from redrafter_jax.drafters.hydra_head import HydraConfig
from redrafter_jax.drafters.own_layer import read_decided
from redrafter_jax.drafters.tree import build_tree
from redrafter_jax.errors import InputError
from redrafter_jax.models.target import Decoder
from redrafter_jax.parallel.mesh import check_target
from redrafter_jax.types import CacheShape, Decided, DraftReads, KVCache, TokenTree, View

# Fields that the authors' code copies from the target to the layer of Hydra++.
_COPIED = (
    *("num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size"),
    *("rms_norm_eps", "rope_scaling"),
)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class HydraDrafter(HeadDrafter):
    """Drafts with Hydra heads.

    The state `own`, `[B D]`, is the hidden state at the last read token. If the heads have the
    layer of Hydra++, the state is that layer's output.
    """

    @property
    def name(self) -> str:
        return "hydra"

    @property
    def config(self) -> HydraConfig:
        return self.model.config

    @property
    def cache(self) -> CacheShape | None:
        prefix = self.config.prefix
        if prefix is None:
            return None
        return CacheShape(1, prefix.num_key_value_heads, prefix.head_dim)

    @property
    def default_tree(self) -> TreeConfig:
        """A tree with one round per head and at most 64 nodes, as many as in the authors' code."""
        U, rounds = self.config.draft_vocab_size, self.config.num_heads
        width, nodes = min(10, U), min(64, U + 1)
        return TreeConfig(beam_width=width, draft_rounds=rounds, num_nodes=nodes, rerank=True)

    def check(self, target: TargetConfig) -> None:
        """Refuse a target that does not fit, or a mesh that cannot split the layer of Hydra++."""
        super().check(target)
        prefix = self.config.prefix
        if prefix is None:
            return
        for name in _COPIED:
            ours, theirs = getattr(prefix, name), getattr(target, name)
            if ours != theirs:
                raise InputError(
                    f"The {name} of the Hydra++ layer is {ours}, but the target's {name} is "
                    f"{theirs}, and the authors' code makes them equal; state {name} in the head's "
                    "config.json if it is missing there, or use a head trained for this target."
                )
        if self.model.mesh is not None:
            check_target(self.config.layer, self.model.mesh, "Hydra++ layer")

    def empty(self, target: Decoder, rows: int) -> Float[Array, "B D"]:
        del target
        return jnp.zeros((rows, self.config.hidden_size), self.model.merge().dtype)

    def read(
        self, target: Decoder, own: Float[Array, "B D"], cache: KVCache, decided: Decided
    ) -> tuple[Float[Array, "B D"], KVCache]:
        """Keep the hidden state at the last token.

        The layer of Hydra++ also adds its keys and values of every token to the cache.
        """
        del target
        heads = self.model.merge()
        # If there are two hidden states, the first is that of the requested layer.
        hidden = decided.hidden[..., : self.config.hidden_size].astype(heads.dtype)
        if self.config.prefix is not None:
            run = partial(heads.pass_layer, hidden)
            return read_decided(run, own, cache, decided, self.config.layer.attention_scale)
        newest = jnp.maximum(decided.count - 1, 0)[:, None, None]
        last = jnp.take_along_axis(hidden, newest, axis=1)[:, 0]
        return jnp.where(decided.count[:, None] > 0, last, own), cache

    def propose(
        self,
        target: Decoder,
        own: Float[Array, "B D"],
        cache: KVCache,
        view: View,
        noise: Float[Array, "B P V"],
        tree: TreeConfig,
    ) -> TokenTree:
        del cache
        heads = self.model.merge()
        advance, start = self.begin(target, own)
        beams = grow(
            advance,
            start,
            view.root,
            noise,
            view.sampling,
            tree,
            heads.draft_token_ids,
            unrolled=True,
        )
        return build_tree(view.root, beams, tree)

    def begin(self, target: Decoder, own: Float[Array, "B D"]) -> tuple[Advance, Grown]:
        """Return the heads' `Advance` function, and the beams before the first draft round.

        The state of a beam is the concatenated embeddings of the root and of the beam's drafted
        tokens.
        """
        heads, scorer = self.model.merge(), self.scorer(target)

        def advance(
            grown: Grown, tokens: Int[Array, "B w"], round: Int[Array, ""] | int
        ) -> tuple[Grown, Float[Array, "B _ U"]]:
            assert isinstance(round, int), "every round has a head of its own: unroll them"
            head = heads.heads[round]
            if not heads.config.grounded:
                return grown, head(own[:, None], scorer)
            embedded = target.stored_embeddings(tokens).astype(own.dtype)
            fed = jnp.concatenate([grown.beams, embedded], axis=-1)
            context = jnp.broadcast_to(own[:, None], embedded.shape)
            return Grown(fed), head(jnp.concatenate([context, fed], axis=-1), scorer)

        nothing = jnp.zeros((len(own), 1, 0), own.dtype)
        return advance, Grown(nothing if heads.config.grounded else ())


def count_reads(config: HydraConfig, params: Any, tree: TreeConfig) -> DraftReads:
    """Count the weights that drafting one tree reads, for cost estimates.

    Each round reads one head; a block that is applied several times is read each time. The layer of
    Hydra++ is read once, for the decided tokens.
    """
    weights, rounds = [], tree.draft_rounds
    for number in range(rounds):
        for name, part in params["heads"][number].items():
            repeated = config.num_draft_layers - (1 if config.grounded else 0)
            weights.append((part, repeated if name == "again" else 1))
    reading = [part for name, part in params.items() if name != "heads"]
    # The first round reads the embedding of the root, every later round those of W tokens.
    fed = 1 + tree.beam_width * (rounds - 1) if config.grounded else 0
    return DraftReads(weights, rounds if config.head == "target" else 0, fed, reading=reading)
