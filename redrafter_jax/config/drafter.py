"""The shape of a drafter."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, TypeAlias

from redrafter_jax.config.drafting import TreeConfig
from redrafter_jax.config.limits import Count, Natural, check_fields, out_of_order, require
from redrafter_jax.errors import InputError

Cell = Literal["simple", "gru", "sum"]
Head = Literal["own", "target", "low_rank"]


@dataclass(frozen=True)
class RecurrentConfig:
    """Shape of a recurrent drafter; the defaults are Apple's layout.

    Attributes:
      vocab_size: the target's vocabulary, V.
      hidden_size: the target's width, D; the recurrent state has the same width.
      exit_dim: width of the residual blocks and of what they hand to the head.
      num_draft_layers: number of residual blocks.
      cell: "simple" for `SiLU(W e + U s + b)` and "sum" for a running sum of embeddings, both of
        Apple's layout; "gru" for a gated recurrent unit.
      draft_tokens: the tokens that can be drafted, in rising order: a head over few of V tokens is
        read faster, and a token it cannot draft is still decoded, by the target. None for all V.
      head: "own" for a vocabulary projection of the drafter's; "low_rank" for one in two factors,
        exit_dim to head_rank to the tokens; "target" for a projection to the target's width that
        the target's own vocabulary projection scores, which the drafter does not store.
      head_rank: of the two factors; None for the other heads.
      context_layers: layers of the target, counted from 0, whose hidden states condition the
        drafter beside the last one; empty in Apple's layout.
    """

    vocab_size: Count
    hidden_size: Count
    exit_dim: Count
    num_draft_layers: Natural
    cell: Cell = "simple"
    draft_tokens: tuple[int, ...] | None = None
    head: Head = "own"
    head_rank: Count | None = None
    context_layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        check_fields(self)
        rank, low = self.head_rank, self.head == "low_rank"
        problem = f"is {rank} and head is {self.head!r}; give it to head='low_rank' alone."
        require(low or rank is None, self, "head_rank", problem)
        problem = f"is {rank}; head='low_rank' needs one, less than exit_dim={self.exit_dim}."
        fits = rank is not None and rank < self.exit_dim
        require(fits or not low, self, "head_rank", problem)
        for before, layer in pairwise((-1, *self.context_layers)):
            problem = f"{out_of_order('layers', layer, before)}, counted from 0."
            require(before < layer, self, "context_layers", problem)
        _check_draft_tokens(self)

    def check_draft(self, tree: TreeConfig) -> None:
        """Refuse Medusa's trees, and those whose beams take more tokens than can be drafted."""
        if tree.static_tree:
            raise InputError(
                "TreeConfig.static_tree is for Medusa heads, and this is a recurrent head, whose "
                "trees follow its beams; leave it out."
            )
        _check_width(self, tree)

    @property
    def beyond_apple(self) -> dict[str, Any]:
        """The fields that Apple's layout does not have, where they say more than it does.

        Empty for a drafter that Apple's code can read.
        """
        fields = {
            "cell": self.cell if self.cell == "gru" else None,
            "draft_tokens": self.draft_tokens,
            "head": self.head if self.head != "own" else None,
            "head_rank": self.head_rank,
            "context_layers": self.context_layers or None,
        }
        return {name: value for name, value in fields.items() if value is not None}

    @property
    def draft_vocab_size(self) -> int:
        """The number of tokens that can be drafted."""
        return self.vocab_size if self.draft_tokens is None else len(self.draft_tokens)

    @property
    def context_size(self) -> int:
        """Z, the width of what conditions the drafter."""
        return self.hidden_size * (len(self.context_layers) + 1)

    @property
    def has_input_projection(self) -> bool:
        """Apple's layout leaves the projection out when `[h ; s]` already has the exit width."""
        return self.exit_dim != 2 * self.hidden_size


@dataclass(frozen=True)
class MedusaConfig:
    """Shape of Medusa heads (arXiv 2401.10774, section 2.1.1).

    Attributes:
      vocab_size: the target's vocabulary, V.
      hidden_size: the target's width, D; the residual blocks have the same width.
      num_heads: K, how many tokens after the next one are predicted, each by a head of its own.
      num_draft_layers: number of residual blocks of every head.
      draft_tokens: the tokens that can be drafted, in rising order; None for all V.
      head: "own" for a vocabulary projection of every head's; "target" for the target's own.
    """

    vocab_size: Count
    hidden_size: Count
    num_heads: Count
    num_draft_layers: Natural
    draft_tokens: tuple[int, ...] | None = None
    head: Literal["own", "target"] = "own"

    def __post_init__(self) -> None:
        check_fields(self)
        problem = "is 0 and head is 'target', which leaves nothing to train; give 1 or more."
        trains = self.num_draft_layers > 0 or self.head == "own"
        require(trains, self, "num_draft_layers", problem)
        _check_draft_tokens(self)

    def check_draft(self, tree: TreeConfig) -> None:
        """Refuse beams, more draft rounds than heads, and more tokens than can be drafted."""
        if tree.draft_rounds > self.num_heads:
            raise InputError(
                f"TreeConfig.draft_rounds is {tree.draft_rounds}, more than the {self.num_heads} "
                "Medusa heads that the drafter has; draft fewer."
            )
        for name in ("final_beams_only", "rerank"):
            if getattr(tree, name):
                raise InputError(
                    f"TreeConfig.{name} is for a recurrent head, and Medusa heads draft without "
                    "beams; leave it out."
                )
        _check_width(self, tree)

    @property
    def draft_vocab_size(self) -> int:
        """The number of tokens that can be drafted."""
        return self.vocab_size if self.draft_tokens is None else len(self.draft_tokens)

    @property
    def context_layers(self) -> tuple[int, ...]:
        """None: the heads read the target's last hidden state alone."""
        return ()

    @property
    def context_size(self) -> int:
        """Z, the width of what the heads read."""
        return self.hidden_size


# Of a head of any kind; whatever depends on the kind matches it to the end.
HeadConfig: TypeAlias = RecurrentConfig | MedusaConfig


def _check_draft_tokens(config: HeadConfig) -> None:
    problem = "is empty; name tokens, or None for all."
    require(config.draft_tokens != (), config, "draft_tokens", problem)
    most = config.vocab_size - 1
    for before, token in pairwise((-1, *(config.draft_tokens or ()))):
        problem = f"{out_of_order('tokens', token, before)}, from 0 to at most {most}."
        require(before < token <= most, config, "draft_tokens", problem)


def _check_width(config: HeadConfig, tree: TreeConfig) -> None:
    for name in ("beam_width", "candidates"):
        asked = getattr(tree, name) or 0
        if asked > config.draft_vocab_size:
            raise InputError(
                f"TreeConfig.{name} is {asked}, more than the {config.draft_vocab_size} tokens "
                "that the drafter can draft."
            )
    if tree.rerank and tree.extensions > config.draft_vocab_size:
        raise InputError(
            f"TreeConfig.num_nodes is {tree.budget}; with rerank it may be at most "
            f"{config.draft_vocab_size + 1 + tree.lookup_tokens}, for the drafter can draft "
            f"{config.draft_vocab_size} tokens."
        )
