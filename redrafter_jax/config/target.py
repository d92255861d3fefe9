"""The shape of a target."""

import math
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from redrafter_jax.config.limits import Checked, Count, Positive, require


@dataclass(frozen=True)
class LinearScaling(Checked):
    """Rotary scaling that divides every position by `factor` (arXiv 2306.15595)."""

    factor: Positive


@dataclass(frozen=True)
class DynamicScaling(Checked):
    """A base that grows with the text once it is longer than `max_position_embeddings`.

    Up to there the frequencies are unscaled, and no longer text is taken: past it a token's
    keys depend on how long the text was when they were computed, so that one text has as many
    answers as there are ways to cut it into calls.
    """

    factor: Positive


@dataclass(frozen=True)
class Llama3Scaling(Checked):
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
        super().__post_init__()
        low, high = self.low_freq_factor, self.high_freq_factor
        problem = f"is {high}; it must be greater than low_freq_factor={low}."
        require(low < high, self, "high_freq_factor", problem)


@dataclass(frozen=True)
class YarnScaling(Checked):
    """Llama 3.1's scaling with the ramp over dimensions and sharpened scores (arXiv 2309.00071).

    Attributes:
      factor: divides the slow frequencies.
      original_max_position_embeddings: the original context.
      attention_factor: multiplies cosine and sine, so that scores grow by its square.
      beta_fast: turns within the original context above which a frequency is kept.
      beta_slow: turns below which it is divided by the whole factor.
      truncate: the ramp begins and ends at whole dimensions.
    """

    factor: Positive
    original_max_position_embeddings: Count
    attention_factor: Positive
    beta_fast: Positive
    beta_slow: Positive
    truncate: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        slow, fast = self.beta_slow, self.beta_fast
        problem = f"is {fast}; it must be greater than beta_slow={slow}."
        require(slow < fast, self, "beta_fast", problem)


@dataclass(frozen=True)
class LongRopeScaling(Checked):
    """A divisor for each pair of the head, another list for long texts (arXiv 2402.13753).

    Where the lists differ, no text longer than the original context is taken: past it the keys of
    all earlier tokens would change. Files that state one list, such as GGUF files of Llama 3.1,
    state it twice here.

    Attributes:
      short_factor: divides the frequencies, the fastest first.
      long_factor: would divide them in texts longer than the original context.
      original_max_position_embeddings: the original context.
      attention_factor: multiplies cosine and sine, so that scores grow by its square.
    """

    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]
    original_max_position_embeddings: Count
    attention_factor: Positive

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("short_factor", "long_factor"):
            for factor in getattr(self, name):
                problem = f"holds {factor!r}; they must be numbers greater than 0."
                require(0 < factor < math.inf, self, name, problem)
        short, long = len(self.short_factor), len(self.long_factor)
        problem = f"holds {long} numbers, short_factor {short}; they must be as many."
        require(short == long, self, "long_factor", problem)


RopeScaling: TypeAlias = (
    LinearScaling | DynamicScaling | Llama3Scaling | YarnScaling | LongRopeScaling
)
Activation = Literal["silu", "gelu_pytorch_tanh"]
# Of the parameters that a model is loaded with.
WeightFormat = Literal["int8", "int4", "fp8"]
Dtype = Literal["float32", "bfloat16"]


@dataclass(frozen=True)
class TargetConfig(Checked):
    """Shape of a decoder of the Llama kind, and which of its variations it has.

    What is named as in Hugging Face's `config.json` means the same. Constants have no defaults:
    what a checkpoint leaves out is an error at loading, or is filled in as transformers does it
    (`redrafter_jax.files.families`), never a guess. Variations default to their absence.

    Attributes:
      eos_token_ids: tokens that end a text.
      rope_scaling: how rotary frequencies are stretched; None leaves them plain.
      attention_bias: queries, keys and values have a bias.
      attention_output_bias: the attention block's output has a bias.
      qk_norm: every head's queries and keys are normalised before they are rotated.
      sliding_window: positions that a token sees in a windowed layer, its own included.
      windowed_layers: the layers that have the window.
      rope_local_base_freq: the rotary base of windowed layers, which are not stretched; None is
        `rope_theta` and `rope_scaling` for all layers.
      query_pre_attn_scalar: scores are divided by its square root; None is `head_dim`.
      hidden_act: activation of the feed-forward gate; "gelu_pytorch_tanh" is GELU by tanh.
      output_norms: attention and feed-forward have a norm behind them too, before the residual.
      zero_centered_norms: norms multiply by one plus their weight, in float32.
      scaled_embeddings: embeddings that enter the layers are multiplied by the square root of
        `hidden_size`, rounded to their dtype. A drafter reads them as they are stored.
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
    rope_local_base_freq: Positive | None = None
    query_pre_attn_scalar: Positive | None = None
    hidden_act: Activation = "silu"
    output_norms: bool = False
    zero_centered_norms: bool = False
    scaled_embeddings: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        heads, shared = self.num_attention_heads, self.num_key_value_heads
        problem = f"is {heads}, which num_key_value_heads={shared} does not divide."
        require(heads % shared == 0, self, "num_attention_heads", problem)
        problem = f"is {self.head_dim}; rotary embedding needs an even number."
        require(self.head_dim % 2 == 0, self, "head_dim", problem)
        for token in self.eos_token_ids:
            problem = f"holds {token}, outside the vocabulary of {self.vocab_size} tokens."
            require(0 <= token < self.vocab_size, self, "eos_token_ids", problem)
        if isinstance(self.rope_scaling, YarnScaling):  # it divides by the logarithm of the base
            problem = f"is {self.rope_theta}; with YarnScaling it must be greater than 1."
            require(self.rope_theta > 1, self, "rope_theta", problem)
        if isinstance(self.rope_scaling, LongRopeScaling):
            count = len(self.rope_scaling.short_factor)
            problem = (
                f"has {count} factors; heads of {self.head_dim} have {self.head_dim // 2} pairs."
            )
            require(count == self.head_dim // 2, self, "rope_scaling", problem)
        problem = (
            f"is {self.sliding_window} and windowed_layers is {self.windowed_layers}; give both, "
            "or leave both out."
        )
        agree = (self.sliding_window is not None) == bool(self.windowed_layers)
        require(agree, self, "sliding_window", problem)
        layers = self.num_hidden_layers
        for layer in self.windowed_layers:
            problem = f"holds {layer}, but there are {layers} layers, counted from 0."
            require(0 <= layer < layers, self, "windowed_layers", problem)

    def with_layers(self, count: int) -> "TargetConfig":
        """The first `count` layers; further ones have no window."""
        windowed = tuple(layer for layer in self.windowed_layers if layer < count)
        window = self.sliding_window if windowed else None
        return replace(
            self, num_hidden_layers=count, windowed_layers=windowed, sliding_window=window
        )

    def window_of(self, layer: int) -> int | None:
        """Positions that a token sees in this layer, its own included; None for all before it."""
        return self.sliding_window if layer in self.windowed_layers else None

    def rotary_of(self, layer: int) -> tuple[float, RopeScaling | None]:
        """The rotary base of this layer, and how its frequencies are stretched."""
        if self.rope_local_base_freq is None or layer not in self.windowed_layers:
            return self.rope_theta, self.rope_scaling
        return self.rope_local_base_freq, None

    @property
    def attention_scale(self) -> float:
        """Factor on the scores of attention."""
        return (self.query_pre_attn_scalar or self.head_dim) ** -0.5

    @property
    def position_limit(self) -> int:
        """Tokens that a text may have, prompt included: `max_position_embeddings`, stretched.

        Linear scaling and YaRN state the context before they stretch it; YaRN's files may also
        state the one after, and files with a base for windowed layers (Gemma 3) always do. So do
        some others with linear scaling, which nothing tells apart: of those this is an upper bound.
        """
        match self.rope_scaling:
            case LinearScaling(factor) if self.rope_local_base_freq is None:
                return int(self.max_position_embeddings * factor)
            case YarnScaling(factor, original):
                return max(self.max_position_embeddings, int(original * factor))
            case LongRopeScaling(short, long, original) if short != long:
                return min(self.max_position_embeddings, original)
            case _:
                return self.max_position_embeddings
