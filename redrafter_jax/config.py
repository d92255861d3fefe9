"""Frozen, hashable configurations: static under `jax.jit`, validated on construction."""

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, TypeAlias, get_args

from redrafter_jax.errors import InputError

Cell = Literal["simple", "gru", "sum"]
Head = Literal["own", "target", "low_rank"]


def _require_positive(owner: str, **values: int | float) -> None:
    for name, value in values.items():
        if not (math.isfinite(value) and value > 0):
            raise InputError(f"{owner}.{name} is {value}; it must be greater than 0.")


def _require_whole(owner: str, **values: int | None) -> None:
    for name, value in values.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise InputError(f"{owner}.{name} is {value!r}; it must be a whole number, an int.")


def _require_numbers(owner: str, **values: float | None) -> None:
    for name, value in values.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise InputError(f"{owner}.{name} is {value!r}; it must be a number, a float.")


@dataclass(frozen=True)
class LinearScaling:
    """Every position divided by `factor` (arXiv 2306.15595)."""

    factor: float


@dataclass(frozen=True)
class DynamicScaling:
    """A base that grows with the text once it is longer than `max_position_embeddings`.

    Up to there the frequencies are the plain ones, and no longer text is taken: past it a token's
    keys depend on how long the text was when they were computed, so that one text has as many
    answers as there are ways to cut it into calls.
    """

    factor: float


@dataclass(frozen=True)
class Llama3Scaling:
    """Slow frequencies divided by `factor`, fast ones kept, a ramp between (Llama 3.1).

    Attributes:
      factor: divides the slow frequencies.
      low_freq_factor: turns within the original context below which a frequency is slow.
      high_freq_factor: turns above which it is fast.
      original_max_position_embeddings: the original context.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    def __post_init__(self) -> None:
        if self.high_freq_factor <= self.low_freq_factor:
            raise InputError(
                f"Llama3Scaling.high_freq_factor is {self.high_freq_factor}; it must be greater "
                f"than low_freq_factor={self.low_freq_factor}."
            )


@dataclass(frozen=True)
class YarnScaling:
    """As Llama 3.1's, but the ramp is over dimensions, and scores are sharpened (arXiv 2309.00071).

    Attributes:
      factor: divides the slow frequencies.
      original_max_position_embeddings: the original context.
      attention_factor: multiplies cosine and sine, so that scores grow by its square.
      beta_fast: turns within the original context above which a frequency is kept.
      beta_slow: turns below which it is divided by the whole factor.
    """

    factor: float
    original_max_position_embeddings: int
    attention_factor: float
    beta_fast: float
    beta_slow: float

    def __post_init__(self) -> None:
        if self.beta_fast <= self.beta_slow:
            raise InputError(
                f"YarnScaling.beta_fast is {self.beta_fast}; it must be greater than "
                f"beta_slow={self.beta_slow}."
            )


RopeScaling: TypeAlias = LinearScaling | DynamicScaling | Llama3Scaling | YarnScaling


@dataclass(frozen=True)
class TargetConfig:
    """Shape of a decoder of the Llama kind, and which of its variations it has.

    What is named as in Hugging Face's `config.json` means the same. Constants have no defaults:
    what a checkpoint leaves out is an error at loading, or is filled in as transformers does it
    (`redrafter_jax.checkpoints.families`), never a guess. Variations default to their absence.

    Attributes:
      eos_token_ids: tokens that end a text.
      rope_scaling: how rotary frequencies are stretched; None leaves them plain.
      attention_bias: queries, keys and values have a bias.
      attention_output_bias: the attention block's output has a bias.
      qk_norm: every head's queries and keys are normalised before they are rotated.
      sliding_window: positions that a token sees in a windowed layer, its own included.
      windowed_layers: the layers that have the window.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rope_theta: float
    rms_norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    eos_token_ids: tuple[int, ...]
    rope_scaling: RopeScaling | None = None
    attention_bias: bool = False
    attention_output_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None
    windowed_layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        _require_positive(
            "TargetConfig",
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_hidden_layers=self.num_hidden_layers,
            num_attention_heads=self.num_attention_heads,
            num_key_value_heads=self.num_key_value_heads,
            head_dim=self.head_dim,
            rope_theta=self.rope_theta,
            rms_norm_eps=self.rms_norm_eps,
            max_position_embeddings=self.max_position_embeddings,
        )
        if self.num_attention_heads % self.num_key_value_heads:
            raise InputError(
                f"TargetConfig.num_attention_heads is {self.num_attention_heads}, which "
                f"num_key_value_heads={self.num_key_value_heads} does not divide."
            )
        if self.head_dim % 2:
            raise InputError(
                f"TargetConfig.head_dim is {self.head_dim}; rotary embedding needs an even number."
            )
        for token in self.eos_token_ids:
            if not 0 <= token < self.vocab_size:
                raise InputError(
                    f"TargetConfig.eos_token_ids holds {token}, outside the vocabulary of "
                    f"{self.vocab_size} tokens."
                )
        if self.rope_scaling is not None:
            _require_positive(type(self.rope_scaling).__name__, **vars(self.rope_scaling))
        # YaRN divides by the logarithm of the base.
        if isinstance(self.rope_scaling, YarnScaling) and self.rope_theta <= 1:
            raise InputError(
                f"TargetConfig.rope_theta is {self.rope_theta}; with YarnScaling it must be "
                "greater than 1."
            )
        self._check_windows()

    def _check_windows(self) -> None:
        if (self.sliding_window is None) == bool(self.windowed_layers):
            raise InputError(
                f"TargetConfig.sliding_window is {self.sliding_window} and windowed_layers is "
                f"{self.windowed_layers}; give both, or leave both out."
            )
        if self.sliding_window is not None:
            _require_positive("TargetConfig", sliding_window=self.sliding_window)
        for layer in self.windowed_layers:
            if not 0 <= layer < self.num_hidden_layers:
                raise InputError(
                    f"TargetConfig.windowed_layers holds {layer}, but there are "
                    f"{self.num_hidden_layers} layers, counted from 0."
                )

    def window_of(self, layer: int) -> int | None:
        """Positions that a token sees in this layer, its own included; None for all before it."""
        return self.sliding_window if layer in self.windowed_layers else None

    @property
    def position_limit(self) -> int:
        """Tokens that a text may have, prompt included: `max_position_embeddings`, stretched.

        Linear scaling and YaRN state the context before they stretch it; YaRN's files may also
        state the one after. So do some with linear scaling, which nothing tells apart: of those
        this is an upper bound.
        """
        match self.rope_scaling:
            case LinearScaling(factor):
                return int(self.max_position_embeddings * factor)
            case YarnScaling(factor, original):
                return max(self.max_position_embeddings, int(original * factor))
            case _:
                return self.max_position_embeddings


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

    vocab_size: int
    hidden_size: int
    exit_dim: int
    num_draft_layers: int
    cell: Cell = "simple"
    draft_tokens: tuple[int, ...] | None = None
    head: Head = "own"
    head_rank: int | None = None
    context_layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        _require_positive(
            "DrafterConfig",
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            exit_dim=self.exit_dim,
        )
        if self.num_draft_layers < 0:
            raise InputError(
                f"DrafterConfig.num_draft_layers is {self.num_draft_layers}; it must be 0 or more."
            )
        for name, kinds in (("cell", Cell), ("head", Head)):
            if getattr(self, name) not in get_args(kinds):
                raise InputError(
                    f"DrafterConfig.{name} is {getattr(self, name)!r}; it must be one of "
                    f"{', '.join(get_args(kinds))}."
                )
        self._check_head_rank()
        for before, layer in pairwise((-1, *self.context_layers)):
            if layer <= before:
                raise InputError(
                    f"DrafterConfig.context_layers holds {layer} after {before}; they must rise "
                    "from 0."
                )
        if self.draft_tokens is not None:
            self._check_draft_tokens(self.draft_tokens)

    def _check_head_rank(self) -> None:
        if self.head != "low_rank":
            if self.head_rank is not None:
                raise InputError(
                    f"DrafterConfig.head_rank is {self.head_rank} and head is {self.head!r}; give "
                    "a rank to head='low_rank' alone."
                )
        elif self.head_rank is None:
            raise InputError(
                "DrafterConfig.head_rank is None; head='low_rank' needs one, less than exit_dim."
            )
        elif not 1 <= self.head_rank < self.exit_dim:
            raise InputError(
                f"DrafterConfig.head_rank is {self.head_rank}; it must be 1 or more, and less than "
                f"exit_dim={self.exit_dim}."
            )

    def _check_draft_tokens(self, tokens: tuple[int, ...]) -> None:
        if not tokens:
            raise InputError("DrafterConfig.draft_tokens is empty; name tokens, or None for all.")
        for before, token in pairwise((-1, *tokens)):
            if not before < token < self.vocab_size:
                raise InputError(
                    f"DrafterConfig.draft_tokens holds {token} after {before}; they must rise from "
                    f"0 to at most {self.vocab_size - 1}."
                )

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
      num_nodes: N, tree nodes the target verifies, root and copied tokens included; None for all
        `1 + R * W + lookup_tokens`.
      final_beams_only: keep only nodes that a final beam descends from, the paper's tree.
      sharpness: factor on the draft scores before they are normalised and summed along a beam;
        1.0 ranks beams by the drafter's plain log-probabilities.
      candidates: a beam's scores are normalised over this many of its best tokens, W or more;
        None takes all tokens, Apple's code 50.
      lookup_tokens: C, nodes of the N that copy what followed the last place where the text read
        as it does now (prompt lookup, `drafters.lookup`); 0 for none, as in the paper.
    """

    beam_width: int = 8
    draft_rounds: int = 4
    num_nodes: int | None = None
    final_beams_only: bool = False
    sharpness: float = 1.0
    candidates: int | None = None
    lookup_tokens: int = 0

    def __post_init__(self) -> None:
        _require_whole(
            "DraftConfig",
            beam_width=self.beam_width,
            draft_rounds=self.draft_rounds,
            num_nodes=self.num_nodes,
            candidates=self.candidates,
            lookup_tokens=self.lookup_tokens,
        )
        _require_numbers("DraftConfig", sharpness=self.sharpness)
        _require_positive(
            "DraftConfig",
            beam_width=self.beam_width,
            draft_rounds=self.draft_rounds,
            sharpness=self.sharpness,
        )
        if self.lookup_tokens < 0:
            raise InputError(
                f"DraftConfig.lookup_tokens is {self.lookup_tokens}; it must be 0 or more."
            )
        least = 1 + self.lookup_tokens
        if self.num_nodes is not None and not least <= self.num_nodes <= self.max_nodes:
            copied = f", lookup_tokens={self.lookup_tokens} included" if self.lookup_tokens else ""
            raise InputError(
                f"DraftConfig.num_nodes is {self.num_nodes}; beam_width={self.beam_width} and "
                f"draft_rounds={self.draft_rounds} give {least} to {self.max_nodes} nodes{copied}."
            )
        if self.candidates is not None and self.candidates < self.beam_width:
            raise InputError(
                f"DraftConfig.candidates is {self.candidates}; a beam of beam_width="
                f"{self.beam_width} needs that many or more."
            )

    @property
    def max_nodes(self) -> int:
        """Nodes of the whole beam trace, root included, and the copied ones."""
        return 1 + self.beam_width * self.draft_rounds + self.lookup_tokens

    @property
    def budget(self) -> int:
        """N, the number of node slots in the tree."""
        return self.max_nodes if self.num_nodes is None else self.num_nodes

    @property
    def beam_nodes(self) -> int:
        """The nodes of the N that the beams have, root included."""
        return self.budget - self.lookup_tokens

    @property
    def max_path(self) -> int:
        """P, the longest path one target call can accept."""
        return self.draft_rounds + self.lookup_tokens + 1


@dataclass(frozen=True)
class SamplingConfig:
    """How the target's next token is chosen, in speculative and in plain decoding alike.

    Attributes:
      temperature: 0 takes the most likely token; above 0 draws from `softmax(logits / t)`.
      top_k: keep only the k most likely tokens; None keeps all.
      top_p: keep the smallest set of most likely tokens whose probability reaches top_p.
      min_p: drop tokens less likely than min_p times the most likely one.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None

    def __post_init__(self) -> None:
        _require_numbers(
            "SamplingConfig", temperature=self.temperature, top_p=self.top_p, min_p=self.min_p
        )
        # Beyond these, logits over the temperature leave float32's range.
        if not (self.temperature == 0 or 1e-6 <= self.temperature <= 1e6):
            raise InputError(
                f"SamplingConfig.temperature is {self.temperature}; it must be 0 for greedy "
                "decoding, or from 1e-6 to 1e6."
            )
        _require_whole("SamplingConfig", top_k=self.top_k)
        if self.top_k is not None and self.top_k < 1:
            raise InputError(f"SamplingConfig.top_k is {self.top_k}; it must be 1 or more.")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise InputError(f"SamplingConfig.top_p is {self.top_p}; it must be in (0, 1].")
        if self.min_p is not None and not 0 <= self.min_p <= 1:
            raise InputError(f"SamplingConfig.min_p is {self.min_p}; it must be in [0, 1].")
