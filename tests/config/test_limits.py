"""Every configuration checks its fields by the limits that they state, when it is made."""

import dataclasses
import re
from typing import Any

import pytest
from tiny_models import tiny_config

from redrafter_jax import InputError, RecurrentConfig, SamplingConfig, TreeConfig
from redrafter_jax.config import LinearScaling
from redrafter_jax.config.quantization import Quantization

pytestmark = pytest.mark.usefixtures("unchecked_shapes")

NAN, INFINITY = float("nan"), float("inf")


def drafter(**changes: Any) -> RecurrentConfig:
    return dataclasses.replace(RecurrentConfig(5, 4, 8, 0), **changes)


SIZES: dict[Any, list[str]] = {
    tiny_config: ["vocab_size", "num_hidden_layers", "head_dim", "sliding_window"],
    drafter: ["exit_dim", "head_rank"],
    TreeConfig: ["beam_width", "draft_rounds", "num_nodes", "candidates"],
    SamplingConfig: ["top_k"],
}
CONSTANTS: dict[Any, list[str]] = {
    tiny_config: ["rope_theta", "rms_norm_eps"],
    LinearScaling: ["factor"],
    TreeConfig: ["sharpness"],
}
BAD_SIZES = [(0, "greater than 0"), (2.0, "a whole number, an int")]
BAD_CONSTANTS = [(-1.0, "greater than 0"), (NAN, "finite"), (INFINITY, "finite")]


@pytest.mark.parametrize(
    ("config", "field", "bad", "needed"),
    [
        *(
            (config, name, *bad)
            for fields, bads in ((SIZES, BAD_SIZES), (CONSTANTS, BAD_CONSTANTS))
            for config, names in fields.items()
            for name in names
            for bad in bads
        ),
        (TreeConfig, "num_nodes", True, "a whole number, an int"),
        (TreeConfig, "sharpness", "1.2", "a number, a float"),
        (TreeConfig, "lookup_tokens", -1, "0 or more"),
        (drafter, "num_draft_layers", -1, "0 or more"),
        (drafter, "cell", "lstm", "one of simple, gru, sum"),
        (drafter, "context_layers", [1], "a tuple of whole numbers, in files a list"),
        (tiny_config, "eos_token_ids", (3.5,), "a tuple of whole numbers, in files a list"),
        (Quantization, "layers", "int9", "one of int8, int4, fp8"),
        (SamplingConfig, "temperature", -0.5, "0 or more"),
        (SamplingConfig, "top_p", 0.0, "greater than 0 and at most 1"),
        (SamplingConfig, "top_p", 1.5, "greater than 0 and at most 1"),
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
    TreeConfig(beam_width=1, draft_rounds=1, num_nodes=1, candidates=1, sharpness=1e-6)
