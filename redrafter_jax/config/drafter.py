"""The shape fields that all kinds of heads share; each kind adds its own."""

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

from redrafter_jax.config.drafting import TreeConfig
from redrafter_jax.config.limits import Checked, Count, out_of_order, require
from redrafter_jax.config.target import TargetConfig
from redrafter_jax.errors import InputError

Head = Literal["own", "target", "low_rank"]


@dataclass(frozen=True)
class HeadConfig(Checked):
    """Shape fields that all kinds of heads share; each kind adds its own.

    Attributes:
      vocab_size: V, the target's vocabulary size.
      hidden_size: D, the target's width.
      draft_tokens: ids of the tokens that can be drafted, in increasing order; None for all V. A
        head over fewer tokens is faster, and the text may still contain the other tokens.
      head: the vocabulary projection: "own" for a matrix of the drafter; "low_rank" for a product
        of two smaller matrices of the drafter; "target" for the target's projection, which the
        drafter does not store.
      context_layers: indices, counted from 0, of the target layers whose outputs the drafter reads
        in addition to the last hidden state.
    """

    vocab_size: Count
    hidden_size: Count
    draft_tokens: tuple[int, ...] | None = field(default=None, kw_only=True)
    head: Head = field(default="own", kw_only=True)
    context_layers: tuple[int, ...] = field(default=(), kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        for before, layer in pairwise((-1, *self.context_layers)):
            problem = f"{out_of_order('layers', layer, before)}, counted from 0."
            require(before < layer, self, "context_layers", problem)
        problem = "is empty; give token ids, or None for all tokens."
        require(self.draft_tokens != (), self, "draft_tokens", problem)
        most = self.vocab_size - 1
        for before, token in pairwise((-1, *(self.draft_tokens or ()))):
            problem = f"{out_of_order('tokens', token, before)}, from 0 to at most {most}."
            require(before < token <= most, self, "draft_tokens", problem)

    def check_tree(self, tree: TreeConfig) -> None:
        """Refuse a tree that keeps more tokens per round than the head can draft.

        Each kind of head adds its own checks.
        """
        tree.check_tokens(self.draft_vocab_size)

    def layers_of(self, target: TargetConfig) -> tuple[int, ...]:
        """The indices of the target's layers whose outputs the drafter reads.

        The drafter also reads the last hidden state, which the result does not name.
        """
        del target
        return self.context_layers

    @property
    def draft_vocab_size(self) -> int:
        """The number of tokens that can be drafted."""
        return self.vocab_size if self.draft_tokens is None else len(self.draft_tokens)

    @property
    def context_size(self) -> int:
        """Z, the width of the concatenated hidden states of the target that the drafter reads."""
        return self.hidden_size * (len(self.context_layers) + 1)


def check_depth(target: TargetConfig, layers: int | None) -> None:
    """Refuse a target whose number of layers is not the one that a head's files state.

    Raises:
      InputError: `layers` is not None, and the target has another number of layers.
    """
    if layers not in (None, target.num_hidden_layers):
        raise InputError(
            f"The drafter was trained for a target with {layers} layers, and this target has "
            f"{target.num_hidden_layers}; use a drafter trained for this target."
        )
