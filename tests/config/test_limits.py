"""Every configuration checks its fields by the limits that they state, when it is made."""

import dataclasses
import re
from typing import Any

import pytest
from tiny_models import tiny_config

from redrafter_jax import DraftConfig, DrafterConfig, InputError, SamplingConfig
from redrafter_jax.config import DynamicScaling, LinearScaling, Llama3Scaling

pytestmark = pytest.mark.usefixtures("unchecked_shapes")

NAN, INFINITY = float("nan"), float("inf")


def drafter(**changes: Any) -> DrafterConfig:
    return dataclasses.replace(DrafterConfig(5, 4, 8, 0), **changes)


SIZES = [
    (tiny_config, "vocab_size"),
    (tiny_config, "hidden_size"),
    (tiny_config, "intermediate_size"),
    (tiny_config, "num_hidden_layers"),
    (tiny_config, "num_attention_heads"),
    (tiny_config, "num_key_value_heads"),
    (tiny_config, "head_dim"),
    (tiny_config, "max_position_embeddings"),
    (tiny_config, "sliding_window"),
    (drafter, "vocab_size"),
    (drafter, "hidden_size"),
    (drafter, "exit_dim"),
    (drafter, "head_rank"),
    (DraftConfig, "beam_width"),
    (DraftConfig, "draft_rounds"),
    (DraftConfig, "num_nodes"),
    (DraftConfig, "candidates"),
    (SamplingConfig, "top_k"),
]
CONSTANTS = [
    (tiny_config, "rope_theta"),
    (tiny_config, "rms_norm_eps"),
    (LinearScaling, "factor"),
    (DynamicScaling, "factor"),
    (DraftConfig, "sharpness"),
]


@pytest.mark.parametrize(
    ("config", "field", "bad", "needed"),
    [
        *((config, field, 0, "greater than 0") for config, field in SIZES),
        *((config, field, 2.0, "a whole number, an int") for config, field in SIZES),
        *((config, field, -1.0, "greater than 0") for config, field in CONSTANTS),
        *((config, field, NAN, "finite") for config, field in CONSTANTS),
        *((config, field, INFINITY, "finite") for config, field in CONSTANTS),
        (DraftConfig, "num_nodes", True, "a whole number, an int"),
        (DraftConfig, "sharpness", "1.2", "a number, a float"),
        (DraftConfig, "lookup_tokens", -1, "0 or more"),
        (drafter, "num_draft_layers", -1, "0 or more"),
        (drafter, "cell", "lstm", "one of simple, gru, sum"),
        (drafter, "head", "tied", "one of own, target, low_rank"),
        (SamplingConfig, "temperature", "0.7", "a number, a float"),
        (SamplingConfig, "temperature", NAN, "finite"),
        (SamplingConfig, "temperature", -0.5, "0 or more"),
        (SamplingConfig, "top_p", "0.9", "a number, a float"),
        (SamplingConfig, "top_p", 0.0, "greater than 0 and at most 1"),
        (SamplingConfig, "top_p", 1.5, "greater than 0 and at most 1"),
        (SamplingConfig, "min_p", -0.1, "0 or more and at most 1"),
        (SamplingConfig, "min_p", 1.1, "0 or more and at most 1"),
    ],
)
def test_a_value_that_a_field_cannot_have_is_refused_by_name(
    config: Any, field: str, bad: object, needed: str
) -> None:
    sentence = f".{field} is {bad!r}; it must be {needed}."
    with pytest.raises(InputError, match=rf"^\w+{re.escape(sentence)}$"):
        config(**{field: bad})


def test_the_bounds_themselves_are_allowed() -> None:
    SamplingConfig(temperature=0.0, top_k=1, top_p=1.0, min_p=0.0)
    SamplingConfig(temperature=100, top_k=10**6, top_p=1e-6, min_p=1)
    DraftConfig(beam_width=1, draft_rounds=1, num_nodes=1, candidates=1, sharpness=1e-6)


def test_configurations_are_hashable_and_frozen() -> None:
    scalings = (LinearScaling(2.0), Llama3Scaling(8.0, 1.0, 4.0, 64))
    for config in (tiny_config(), drafter(), DraftConfig(), SamplingConfig(), *scalings):
        assert hash(config) == hash(dataclasses.replace(config))
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(config, dataclasses.fields(config)[0].name, 1)
