"""The recurrent drafter, which reads decided tokens and runs a beam search with a recurrent head.

The beams of the search form the token tree.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from redrafter_jax.config import TargetConfig, TreeConfig
from redrafter_jax.drafters.grow import Grown, grow
from redrafter_jax.drafters.head_drafter import HeadDrafter
from redrafter_jax.drafters.own_layer import read_decided
from redrafter_jax.drafters.recurrent_head import RecurrentConfig, RecurrentHead
from redrafter_jax.drafters.tree import build_tree
from redrafter_jax.models.linear import QuantizedWeight, Weight, read_rows
from redrafter_jax.models.projection import Lender
from redrafter_jax.models.target import Decoder
from redrafter_jax.parallel.mesh import check_target
from redrafter_jax.parallel.model import Model
from redrafter_jax.sampling import on_gpu
from redrafter_jax.types import (
    Beams,
    CacheShape,
    Decided,
    DraftReads,
    KVCache,
    Sampling,
    Scorer,
    TokenTree,
    View,
)


def beam_search(
    drafter: RecurrentHead,
    embedding: Weight,
    context: Float[Array, "B D"],
    root: Int[Array, " B"],
    noise: Float[Array, "B P V"],
    sampling: Sampling,
    tree: TreeConfig,
    scorer: Scorer | None = None,
) -> Beams:
    """Draft R tokens (one per round) on each of W beams below the root, by `grow`.

    Each beam has its own recurrent state.

    Args:
      drafter: the recurrent head.
      embedding: the target's token embedding; on a mesh, this device's shard.
      context: context vector, which all rounds use, from `read_context` or the attention layer.
      root: the last decided token.
      noise: noise at the positions after the root, from `draw_noise`.
      sampling: sampling settings of the rows.
      tree: the shape of the tree; see `grow`.
      scorer: the target's projection to the U draftable tokens; None if the head has its own.
    """

    def advance(
        grown: Grown, tokens: Int[Array, "B w"], round: Int[Array, ""] | int
    ) -> tuple[Grown, Float[Array, "B w U"]]:
        V = drafter.config.vocab_size
        embedded = read_rows(embedding, tokens, V, grown.beams.dtype)
        is_first = isinstance(round, int) and round == 0
        inputs = drafter.inputs(
            context[:, None], drafter.step(None if is_first else grown.beams, embedded)
        )
        if not is_first:
            # Barrier: XLA for GPUs would write the states twice, once beside the context.
            inputs = jax.lax.optimization_barrier(inputs)
        return Grown(inputs[..., context.shape[-1] :]), drafter.logits(inputs, scorer)

    start = Grown(jnp.zeros_like(context)[:, None])
    # Unrolled on GPUs, where a loop launches extra kernels to count turns and copy its carry.
    drafted = drafter.draft_token_ids
    return grow(advance, start, root, noise, sampling, tree, drafted, unrolled=on_gpu())


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RecurrentDrafter(HeadDrafter):
    """Drafts with a recurrent head.

    With `attention`, the state `own`, `[B D]`, is the output of the attention layer at its last
    entry. Otherwise it is the hidden state at the last read token, as for any `HeadDrafter`.
    """

    @property
    def name(self) -> str:
        return "recurrent"

    @property
    def config(self) -> RecurrentConfig:
        return self.model.config

    @property
    def cache(self) -> CacheShape | None:
        if not self.config.attention:
            return None
        layer = self.config.layer
        return CacheShape(1, layer.num_key_value_heads, layer.head_dim)

    def check(self, target: TargetConfig) -> None:
        """Refuse a target that does not fit, or a mesh that cannot split the attention layer."""
        super().check(target)
        if self.config.attention and self.model.mesh is not None:
            check_target(self.config.layer, self.model.mesh, "recurrent head")

    def prepare(self, lender: Lender) -> "RecurrentDrafter":
        """Return the drafter with the projection that it borrows.

        On a GPU, the two weights of the simple cell are also joined into one.
        """
        prepared = super().prepare(lender)
        assert isinstance(prepared, RecurrentDrafter)
        model, config = self.model, self.config
        if not on_gpu() or config.cell != "simple" or model.mesh is not None:
            return prepared
        head: RecurrentHead = model.merge()
        kernels = head.rnn_w.kernel.get_value(), head.rnn_u.kernel.get_value()
        if hasattr(head, "rnn_joined") or any(isinstance(one, QuantizedWeight) for one in kernels):
            return prepared
        head.join_cell()
        return replace(prepared, model=Model.split(model.config, head))

    def apart(self) -> "RecurrentDrafter":
        head: RecurrentHead = self.model.merge()
        if not hasattr(head, "rnn_joined"):
            return self
        del head.rnn_joined
        return replace(self, model=Model.split(self.model.config, head))

    def empty(self, target: Decoder, rows: int) -> Float[Array, "B own"]:
        if not self.config.attention:
            return super().empty(target, rows)
        return jnp.zeros((rows, self.config.hidden_size), target.dtype)

    def read(
        self, target: Decoder, own: Float[Array, "B own"], cache: KVCache, decided: Decided
    ) -> tuple[Float[Array, "B own"], KVCache]:
        """Keep the hidden state at the last token, or the output of the attention layer there.

        The attention layer adds an entry for every decided token.
        """
        if not self.config.attention:
            return super().read(target, own, cache, decided)
        head = self.model.merge()
        context = head.read_context(target.of_one_scale(decided.hidden))
        # `following` may be -1 past the decided tokens.
        embedded = target.stored_embeddings(jnp.maximum(decided.following, 0))
        run = partial(head.attention, context, embedded.astype(context.dtype))
        return read_decided(run, own, cache, decided, self.config.layer.attention_scale)

    def propose(
        self,
        target: Decoder,
        own: Float[Array, "B own"],
        cache: KVCache,
        view: View,
        noise: Float[Array, "B P V"],
        tree: TreeConfig,
    ) -> TokenTree:
        del cache
        head = self.model.merge()
        beams = beam_search(
            head,
            target.embed_tokens.get_value(),
            own if self.config.attention else head.read_context(own),
            view.root,
            noise,
            view.sampling,
            tree,
            self.scorer(target),
        )
        return build_tree(view.root, beams, tree)


def count_reads(config: RecurrentConfig, params: Any, tree: TreeConfig) -> DraftReads:
    """Count the weights that drafting one tree reads, for cost estimates.

    `context_proj` and `attention` are read once, and all other weights in every round. The
    attention layer reads the tokens of the accepted path and their embeddings.
    """
    rounds = tree.draft_rounds
    once = ("context_proj", "attention")
    weights = [(part, 1 if name in once else rounds) for name, part in params.items()]
    # The first round reads the embedding of the root, every later round those of W tokens.
    fed = 1 + tree.beam_width * (rounds - 1) + (tree.max_path if config.attention else 0)
    return DraftReads(weights, rounds if config.head == "target" else 0, fed)
