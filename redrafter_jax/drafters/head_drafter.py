"""What drafters with a head have in common: it reads the hidden state that chose the root."""

from dataclasses import dataclass, field, replace
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from redrafter_jax.config import DraftConfig, DrafterConfig, MedusaConfig, TargetConfig
from redrafter_jax.drafters.base import Drafter, check_context_layers
from redrafter_jax.errors import InputError
from redrafter_jax.models.target import Decoder
from redrafter_jax.parallel.model import Model
from redrafter_jax.types import Scorer, StepTrace, Verified

# A trained head of any kind, from `load_drafter`; `bind` lists the kinds.
DraftModel = Model[Any, Any]


@dataclass(frozen=True)
class HeadDrafter(Drafter):
    """A head and the trees that it drafts; its state is the context, `[B Z]`.

    Attributes:
      model: the head.
      draft: beam width, draft rounds, node budget; `lookup_tokens` belong to `Combined`.
      scorer: the target's vocabulary projection, from `prepare`, for a head that has none.
    """

    model: DraftModel
    draft: DraftConfig = field(metadata={"static": True})
    scorer: Scorer | None = field(default=None, metadata={"static": True})

    @property
    def max_path(self) -> int:
        return self.draft.draft_rounds + 1

    @property
    def num_nodes(self) -> int:
        return self.draft.beam_nodes

    @property
    def context_layers(self) -> tuple[int, ...]:
        return self.model.config.context_layers

    @property
    def models(self) -> tuple[Model[Any, Any], ...]:
        return (self.model,)

    def check(self, target: TargetConfig) -> None:
        """Refuse a target that the head was not trained for; see `check_pair`.

        Raises:
          InputError: as said, or `draft` asks for prompt lookup, which is another drafter's.
        """
        if self.draft.lookup_tokens:
            raise InputError(
                f"DraftConfig.lookup_tokens is {self.draft.lookup_tokens}, but "
                f"{type(self).__name__} does no prompt lookup; use bind_drafter, or Combined with "
                "PromptLookup."
            )
        check_pair(target, self.model.config, self.draft)

    def prepare(self, decoder: Decoder) -> "HeadDrafter":
        """With the target's projection gathered for the head's tokens, if the head has none."""
        if self.model.config.head != "target":
            return self
        return replace(self, scorer=decoder.scorer(self.model.merge().draft_token_ids))

    def init(self, hidden: Float[Array, "B Z"]) -> Float[Array, "B context"]:
        return self._own(hidden)

    def observe(
        self, drafter_state: Float[Array, "B context"], verified: Verified, trace: StepTrace
    ) -> Float[Array, "B context"]:
        """The hidden state at the last accepted node, which chose the new root."""
        newest = jnp.maximum(trace.gained - 1, 0)[:, None]
        node = jnp.take_along_axis(trace.accepted.path, newest, axis=1)
        context = jnp.take_along_axis(verified.hidden, node[..., None], axis=1)[:, 0]
        return jnp.where(trace.gained[:, None] > 0, self._own(context), drafter_state)

    def _own(self, hidden: Float[Array, "B Z"]) -> Float[Array, "B context"]:
        size = self.model.config.context_size
        if hidden.shape[-1] < size:
            raise InputError(
                f"The hidden states are {hidden.shape[-1]} wide and the drafter reads {size}; "
                f"prefill with context_layers={self.context_layers}."
            )
        # Another drafter's layers, which this one does not read, may come before.
        return hidden[..., -size:]


def check_pair(
    target: TargetConfig, drafter: DrafterConfig | MedusaConfig, draft: DraftConfig
) -> None:
    """Refuse a head that was trained for another target, and trees that cannot be drafted.

    Raises:
      InputError: width, vocabulary or layers differ, the head cannot draft such trees, or a tree
        reaches further than the target has positions.
    """
    for name in ("hidden_size", "vocab_size"):
        ours, theirs = getattr(drafter, name), getattr(target, name)
        if ours != theirs:
            raise InputError(
                f"The drafter's {name} is {ours} and the target's is {theirs}; use a drafter "
                "trained for this target."
            )
    check_context_layers(target, drafter.context_layers, "The drafter's context_layers")
    if draft.max_path > target.position_limit:
        lookup = f" and lookup_tokens {draft.lookup_tokens}" if draft.lookup_tokens else ""
        raise InputError(
            f"DraftConfig.draft_rounds is {draft.draft_rounds}{lookup}, but the target has "
            f"{target.position_limit} positions; draft fewer."
        )
    drafter.check_draft(draft)
