"""The recurrent drafter (arXiv 2403.09919): a beam search whose trace is the tree."""

from dataclasses import dataclass

import jax
from jaxtyping import Array, Float

from redrafter_jax.drafters.beam import beam_search
from redrafter_jax.drafters.head_drafter import HeadDrafter
from redrafter_jax.drafters.tree import build_tree
from redrafter_jax.models.target import Decoder
from redrafter_jax.types import DecodeState, TokenTree


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RecurrentDrafter(HeadDrafter):
    """A recurrent head, `RecurrentHead`, and the beams that it drafts."""

    @property
    def names(self) -> tuple[str, ...]:
        return ("recurrent",)

    def propose(
        self, decoder: Decoder, state: DecodeState, noise: Float[Array, "B P V"]
    ) -> TokenTree:
        beams = beam_search(
            self.model.merge(),
            decoder.embed_tokens.get_value(),
            state.drafter,
            state.root,
            noise,
            state.sampling,
            self.draft,
            self.scorer or self.prepare(decoder).scorer,
        )
        return build_tree(state.root, beams, self.draft)
