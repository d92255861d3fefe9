"""The shape of a target model."""

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
    """Rotary scaling whose base grows once a text exceeds `max_position_embeddings`.

    Up to that length the frequencies are unscaled. Longer texts are refused: a token's keys would
    depend on the length of the text when they were computed, so the answer would depend on how the
    text was split into calls.
    """

    factor: Positive


@dataclass(frozen=True)
class Llama3Scaling(Checked):
    """Rotary scaling that divides slow frequencies by `factor` and keeps fast ones (Llama 3.1).

    The frequencies in between are interpolated.

    Attributes:
      factor: divisor of the slow frequencies.
      low_freq_factor: number of turns within the original context below which a frequency is slow.
      high_freq_factor: number of turns above which a frequency is fast.
      original_max_position_embeddings: the original context length in tokens.
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
    """Rotary scaling that interpolates over dimensions and sharpens the scores (arXiv 2309.00071).

    Attributes:
      factor: divisor of the slow frequencies.
      original_max_position_embeddings: the original context length in tokens.
      attention_factor: factor on cosine and sine; the attention scores grow by its square.
      beta_fast: number of turns within the original context above which a frequency is not divided.
      beta_slow: number of turns below which a frequency is divided by the whole factor.
      truncate: whether the interpolated range is rounded to whole dimensions.
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
    """Rotary scaling with a divisor per frequency, and other divisors for long texts.

    This is LongRoPE (arXiv 2402.13753). If the two lists differ, texts longer than the original
    context are refused, because the keys of all earlier tokens would change there. For files with a
    single list, such as GGUF files of Llama 3.1, both fields hold this list.

    Attributes:
      short_factor: divisors of the frequencies, the fastest first.
      long_factor: divisors of the frequencies in texts longer than the original context.
      original_max_position_embeddings: the original context length in tokens.
      attention_factor: factor on cosine and sine; the attention scores grow by its square.
    """

    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]
    original_max_position_embeddings: Count
    attention_factor: Positive

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("short_factor", "long_factor"):
            for factor in getattr(self, name):
                problem = f"holds {factor!r}; all numbers must be finite and greater than 0."
                require(0 < factor < math.inf, self, name, problem)
        short, long = len(self.short_factor), len(self.long_factor)
        problem = f"holds {long} numbers, but short_factor holds {short}; give the same number."
        require(short == long, self, "long_factor", problem)


RopeScaling: TypeAlias = (
    LinearScaling | DynamicScaling | Llama3Scaling | YarnScaling | LongRopeScaling
)
Activation = Literal["silu", "gelu_pytorch_tanh"]
# The formats of quantized weights.
WeightFormat = Literal["int8", "int4", "fp8"]
Dtype = Literal["float32", "bfloat16"]


@dataclass(frozen=True)
class TargetConfig(Checked):
    """The shape of a Llama-style decoder, with its variations.

    A field with the same name as in Hugging Face's `config.json` has the same meaning. Sizes and
    constants have no defaults here; if a checkpoint lacks one, loading fails or uses the default of
    transformers (`redrafter_jax.files.families`). Variations from Llama are off by default.

    Attributes:
      eos_token_ids: ids of the tokens that end a text.
      rope_scaling: scaling of the rotary frequencies; None for no scaling.
      attention_bias: whether queries, keys and values have a bias.
      attention_output_bias: whether the attention block's output has a bias.
      qk_norm: whether every head's queries and keys are normalised before they are rotated.
      sliding_window: number of positions that a token attends to in a windowed layer, including its
        own; None without windowed layers.
      windowed_layers: indices, counted from 0, of the layers with a sliding window.
      rope_local_base_freq: rotary base of windowed layers, whose frequencies are not scaled. With
        None, windowed layers use `rope_theta` and `rope_scaling` like the other layers.
      query_pre_attn_scalar: number whose square root divides the attention scores; None for
        `head_dim`.
      hidden_act: activation of the feed-forward gate; "gelu_pytorch_tanh" is GELU's tanh
        approximation.
      output_norms: whether the outputs of attention and feed-forward blocks are normalised before
        they are added to the residual.
      zero_centered_norms: whether norms multiply by one plus their weight, in float32.
      scaled_embeddings: whether embeddings are multiplied by the square root of `hidden_size`,
        rounded to their dtype, before the first layer. A drafter reads the unscaled embeddings.
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
        problem = f"is {heads}; it must be a multiple of num_key_value_heads={shared}."
        require(heads % shared == 0, self, "num_attention_heads", problem)
        problem = f"is {self.head_dim}; rotary embedding needs an even number."
        require(self.head_dim % 2 == 0, self, "head_dim", problem)
        for token in self.eos_token_ids:
            problem = f"holds {token}, outside the vocabulary of {self.vocab_size} tokens."
            require(0 <= token < self.vocab_size, self, "eos_token_ids", problem)
        if isinstance(self.rope_scaling, YarnScaling):  # YaRN divides by the base's logarithm
            problem = f"is {self.rope_theta}; with YarnScaling it must be greater than 1."
            require(self.rope_theta > 1, self, "rope_theta", problem)
        if isinstance(self.rope_scaling, LongRopeScaling):
            count = len(self.rope_scaling.short_factor)
            problem = f"has {count} factors; head_dim={self.head_dim} needs {self.head_dim // 2}."
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
        """The configuration with `count` layers; layers that are added have no window."""
        windowed = tuple(layer for layer in self.windowed_layers if layer < count)
        window = self.sliding_window if windowed else None
        return replace(
            self, num_hidden_layers=count, windowed_layers=windowed, sliding_window=window
        )

    def window_of(self, layer: int) -> int | None:
        """Number of positions that a token attends to in this layer, with its own; None for all."""
        return self.sliding_window if layer in self.windowed_layers else None

    def rotary_of(self, layer: int) -> tuple[float, RopeScaling | None]:
        """The rotary base of this layer, and the scaling of its frequencies."""
        if self.rope_local_base_freq is None or layer not in self.windowed_layers:
            return self.rope_theta, self.rope_scaling
        return self.rope_local_base_freq, None

    @property
    def attention_scale(self) -> float:
        """Factor on the attention scores."""
        return (self.query_pre_attn_scalar or self.head_dim) ** -0.5

    @property
    def position_limit(self) -> int:
        """Limit on the tokens of a text, prompt included: the context length after scaling.

        With linear scaling and YaRN, `max_position_embeddings` should be the length before scaling.
        But some files with YaRN, and all files that state a rotary base for windowed layers (Gemma
        3), state the length after scaling. The limit is right for these files. Some files with
        linear scaling also state the length after scaling. They cannot be recognised, so the limit
        is too high for them.
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
