"""The fields that requests of all kinds share: how an answer is decoded."""

from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, BeforeValidator, Field

from redrafter_jax.engine.messages import OWN_STOPS
from redrafter_jax.serving.openai_fields import Fields, Values, whole_text


def _not_empty(text: str) -> str:
    if not text:
        raise ValueError("it is empty; leave it out")
    return text


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _as_biases(value: Any) -> Any:
    """Convert the keys of `logit_bias` to integers; JSON writes token ids as strings."""
    if not isinstance(value, dict):
        return value
    if wrong := next((name for name in value if not (str(name).isdecimal())), None):
        raise ValueError(f"{wrong!r:.80} is not a token id; give the id as a string of digits")
    return {int(name): bias for name, bias in value.items()}


class DecodingFields(Fields):
    """The fields that requests of all kinds share.

    `top_p`, `top_k`, `min_p`, the penalties, `logit_bias` and `min_tokens` have the meaning that
    `SamplingConfig` documents. Extensions are fields that OpenAI's API lacks; `top_k`, `min_p`,
    `repetition_penalty` and `min_tokens` are extensions too.

    Attributes:
      model: name of the served model, which /v1/models returns.
      temperature: temperature of `SamplingConfig`; 1 by default, as in OpenAI's API.
      ignore_eos: whether decoding continues after the target's end tokens. If so, only `stop` and
        the limit on new tokens end an answer. An extension.
      seed: seed of the first choice; choice i has the seed `seed + i`, modulo 2^31. Random by
        default.
      stop: a string or up to four strings that end an answer; a string may be a special token.
      stream: whether to send the answer while it is decoded, as server-sent events.
      priority: number that orders the queue; a request with a lower number is decoded earlier. An
        extension, as in vLLM.
      speculation: False decodes without a drafter; the text is the same. An extension.
    """

    labels: ClassVar[frozenset[str]] = frozenset(
        {
            "user",
            "metadata",
            "safety_identifier",
            # Hints for providers that charge for cached prompts; here prompts are cached anyway.
            "prompt_cache_key",
            "prompt_cache_retention",
            "prompt_cache_options",
            "cache_control",
        }
    )
    off: ClassVar[Values] = {
        "service_tier": ("auto", "default"),
        "store": (False,),
        # Fields of other servers' APIs.
        "top_k": (0, -1),
        "length_penalty": (1,),
        "stop_token_ids": ([],),
        "bad_words": ([],),
        "include_stop_str_in_output": (False,),
        "skip_special_tokens": (True,),
        "spaces_between_special_tokens": (True,),
        "use_beam_search": (False,),
    }

    model: str
    temperature: float = 1.0
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Annotated[dict[int, float], BeforeValidator(_as_biases)] = {}
    min_tokens: Annotated[int, Field(ge=0)] = 0
    ignore_eos: bool = False
    seed: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    stop: Annotated[
        list[Annotated[str, AfterValidator(whole_text), AfterValidator(_not_empty)]],
        Field(max_length=OWN_STOPS, fail_fast=True),
        BeforeValidator(_as_list),
    ] = []
    stream: bool = False
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] = 0
    speculation: bool = True
