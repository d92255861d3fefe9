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
    """Biases by token, whose numbers JSON spells as texts."""
    if not isinstance(value, dict):
        return value
    if wrong := next((name for name in value if not (str(name).isdecimal())), None):
        raise ValueError(f"{wrong!r:.80} is no token; give the number of one as a string")
    return {int(name): bias for name, bias in value.items()}


class DecodingFields(Fields):
    """The fields that all kinds of request share.

    Attributes:
      model: the name that /v1/models gives.
      temperature: temperature and filters of `SamplingConfig`; 1 by default, as in OpenAI's API.
      seed: seed of the first choice's noise; choice i is drawn with seed + i. Random by default.
      presence_penalty: penalties, biases and `min_tokens` of `SamplingConfig`; the last one and
        `repetition_penalty` are not OpenAI's.
      ignore_eos: let `stop` alone end an answer, and not what ends the target's texts. Not
        OpenAI's.
      stop: texts that end an answer; one that is a special token ends it too.
      stream: send the answer as it is decided, by server-sent events.
      priority: requests with a lower one are taken in first. Not OpenAI's; vLLM's.
      speculation: False decodes without a drafter; the text is the same. Not OpenAI's.
    """

    labels: ClassVar[frozenset[str]] = frozenset(
        {
            "user",
            "metadata",
            "safety_identifier",
            # Hints to providers who charge for caches; here they are reused unasked.
            "prompt_cache_key",
            "prompt_cache_retention",
            "prompt_cache_options",
            "cache_control",
        }
    )
    off: ClassVar[Values] = {
        "service_tier": ("auto", "default"),
        "store": (False,),
        # Of other servers' APIs.
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
