"""The shape of a target."""

from dataclasses import dataclass
from typing import TypeAlias

from redrafter_jax.config.limits import Count, FieldError, Positive, check_fields


@dataclass(frozen=True)
class LinearScaling:
    """Every position divided by `factor` (arXiv 2306.15595)."""

    factor: Positive

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True)
class DynamicScaling:
    """A base that grows with the text once it is longer than `max_position_embeddings`.

    Up to there the frequencies are the plain ones, and no longer text is taken: past it a token's
    keys depend on how long the text was when they were computed, so that one text has as many
    answers as there are ways to cut it into calls.
    """

    factor: Positive

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True)
class Llama3Scaling:
    """Slow frequencies divided by `factor`, fast ones kept, a ramp between (Llama 3.1).

    Attributes:
      factor: divides the slow frequencies.
      low_freq_factor: turns within the original context below which a frequency is slow.
      high_freq_factor: turns above which it is fast.
      original_max_position_embeddings: the original context.
    """

    factor: Positive
    low_freq_factor: Positive
    high_freq_factor: Positive
    original_max_position_embeddings: Count

    def __post_init__(self) -> None:
        check_fields(self)
        if self.high_freq_factor <= self.low_freq_factor:
            raise FieldError(
                self,
                "high_freq_factor",
                f"is {self.high_freq_factor}; it must be greater than "
                f"low_freq_factor={self.low_freq_factor}.",
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

    factor: Positive
    original_max_position_embeddings: Count
    attention_factor: Positive
    beta_fast: Positive
    beta_slow: Positive

    def __post_init__(self) -> None:
        check_fields(self)
        if self.beta_fast <= self.beta_slow:
            raise FieldError(
                self,
                "beta_fast",
                f"is {self.beta_fast}; it must be greater than beta_slow={self.beta_slow}.",
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

    vocab_size: Count
    hidden_size: Count
    intermediate_size: Count
    num_hidden_layers: Count
    num_attention_heads: Count
    num_key_value_heads: Count
    head_dim: Count
    rope_theta: Positive
    rms_norm_eps: Positive
    max_position_embeddings: Count
    tie_word_embeddings: bool
    eos_token_ids: tuple[int, ...]
    rope_scaling: RopeScaling | None = None
    attention_bias: bool = False
    attention_output_bias: bool = False
    qk_norm: bool = False
    sliding_window: Count | None = None
    windowed_layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        check_fields(self)
        if self.num_attention_heads % self.num_key_value_heads:
            raise FieldError(
                self,
                "num_attention_heads",
                f"is {self.num_attention_heads}, which "
                f"num_key_value_heads={self.num_key_value_heads} does not divide.",
            )
        if self.head_dim % 2:
            raise FieldError(
                self, "head_dim", f"is {self.head_dim}; rotary embedding needs an even number."
            )
        for token in self.eos_token_ids:
            if not 0 <= token < self.vocab_size:
                raise FieldError(
                    self,
                    "eos_token_ids",
                    f"holds {token}, outside the vocabulary of {self.vocab_size} tokens.",
                )
        # YaRN divides by the logarithm of the base.
        if isinstance(self.rope_scaling, YarnScaling) and self.rope_theta <= 1:
            raise FieldError(
                self,
                "rope_theta",
                f"is {self.rope_theta}; with YarnScaling it must be greater than 1.",
            )
        if (self.sliding_window is None) == bool(self.windowed_layers):
            raise FieldError(
                self,
                "sliding_window",
                f"is {self.sliding_window} and windowed_layers is {self.windowed_layers}; give "
                "both, or leave both out.",
            )
        for layer in self.windowed_layers:
            if not 0 <= layer < self.num_hidden_layers:
                raise FieldError(
                    self,
                    "windowed_layers",
                    f"holds {layer}, but there are {self.num_hidden_layers} layers, counted from "
                    "0.",
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
