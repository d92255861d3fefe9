"""The shape of a drafter, how it drafts, and how the target chooses."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le

from redrafter_jax.config.limits import Count, Natural, Positive, check_fields, require
from redrafter_jax.errors import InputError

Cell = Literal["simple", "gru", "sum"]
Head = Literal["own", "target", "low_rank"]
_FILTERS = ("top_k", "top_p", "min_p")


@dataclass(frozen=True)
class DrafterConfig:
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
            problem = f"holds {layer} after {before}; they must rise from 0."
            require(before < layer, self, "context_layers", problem)
        problem = "is empty; name tokens, or None for all."
        require(self.draft_tokens != (), self, "draft_tokens", problem)
        most = self.vocab_size - 1
        for before, token in pairwise((-1, *(self.draft_tokens or ()))):
            problem = f"holds {token} after {before}; they must rise from 0 to at most {most}."
            require(before < token <= most, self, "draft_tokens", problem)

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
class DraftConfig:
    """How a tree is drafted in one decode step.

    Attributes:
      beam_width: W, beams kept per round.
      draft_rounds: R, tokens drafted per beam (Apple's "beam length" is R + 1).
      num_nodes: N, tree nodes that the target verifies, root and lookup tokens included; by default
        all `1 + R * W + lookup_tokens`.
      final_beams_only: keep only nodes that a final beam descends from, the paper's tree.
      sharpness: factor on the draft scores before they are normalised and summed along a beam; 1.0
        ranks beams by the drafter's own log-probabilities.
      candidates: a beam's scores are normalised over this many of its best tokens, W or more; by
        default over all, in Apple's code over 50.
      lookup_tokens: C, how many of the N nodes prompt lookup drafts: the tokens that followed the
        last earlier occurrence of the text's suffix; 0 for none, as in the paper.
    """

    beam_width: Count = 8
    draft_rounds: Count = 4
    num_nodes: Count | None = None
    final_beams_only: bool = False
    sharpness: Positive = 1.0
    candidates: Count | None = None
    lookup_tokens: Natural = 0

    def __post_init__(self) -> None:
        check_fields(self)
        width, least = self.beam_width, 1 + self.lookup_tokens
        lookup = f", lookup_tokens={self.lookup_tokens} included" if self.lookup_tokens else ""
        problem = (
            f"is {self.num_nodes}; beam_width={width} and draft_rounds={self.draft_rounds} give "
            f"{least} to {self.max_nodes} nodes{lookup}."
        )
        require(least <= self.budget <= self.max_nodes, self, "num_nodes", problem)
        problem = f"is {self.candidates}; a beam of beam_width={width} needs that many or more."
        require((self.candidates or width) >= width, self, "candidates", problem)

    @property
    def max_nodes(self) -> int:
        """Nodes of the whole beam trace, root included, and of prompt lookup."""
        return 1 + self.beam_width * self.draft_rounds + self.lookup_tokens

    @property
    def budget(self) -> int:
        """N, the number of node slots in the tree."""
        return self.max_nodes if self.num_nodes is None else self.num_nodes

    @property
    def beam_nodes(self) -> int:
        """How many of the N nodes the beam search drafts, root included."""
        return self.budget - self.lookup_tokens

    @property
    def max_path(self) -> int:
        """P, the longest path one target call can accept."""
        return self.draft_rounds + self.lookup_tokens + 1


@dataclass(frozen=True)
class SamplingConfig:
    """How the target's next token is chosen, speculatively or autoregressively.

    Attributes:
      temperature: 0 takes the most likely token; above 0 draws from `softmax(logits / t)`.
      top_k: keep only the k most likely tokens; by default all.
      top_p: keep the smallest set of most likely tokens whose probability reaches top_p.
      min_p: drop tokens less likely than min_p times the most likely one.
    """

    temperature: Annotated[float, Ge(0)] = 0.0
    top_k: Count | None = None
    top_p: Annotated[float, Gt(0), Le(1)] | None = None
    min_p: Annotated[float, Ge(0), Le(1)] | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        # Beyond these, logits over the temperature leave float32's range.
        fits = self.temperature == 0 or 1e-6 <= self.temperature <= 1e6
        problem = f"is {self.temperature}; it must be 0 for greedy decoding, or from 1e-6 to 1e6."
        require(fits, self, "temperature", problem)

    def refuse_idle_filters(self, spelled: Callable[[str], str] = str) -> "SamplingConfig":
        """The configuration itself, if no filter is set at temperature 0, where none has an effect.

        Args:
          spelled: a field's name as the user writes it.

        Raises:
          InputError: there are some.
        """
        names = [spelled(name) for name in _FILTERS if getattr(self, name) is not None]
        if names and self.temperature == 0:
            idle, temperature = " and ".join(names), spelled("temperature")
            raise InputError(
                f"{temperature} is 0, which takes the most likely token whatever {idle} would "
                f"keep; give a {temperature} above 0, or leave {idle} out."
            )
        return self
