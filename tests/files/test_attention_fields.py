"""Rotary embedding in `config.json`: what each type states, and what is refused."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from places import GOLDENS

from redrafter_jax import InputError
from redrafter_jax.config import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    RopeScaling,
    YarnScaling,
)
from redrafter_jax.files.attention_fields import read_rotary
from redrafter_jax.models.rotary import rotary_frequencies

PATH = Path("config.json")
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
FLAT = {
    "short_factor": [1.0] * 8,
    "long_factor": [1.0] * 8,
    "original_max_position_embeddings": 64,
}


def read(scaling: Any = None, **values: Any) -> tuple[float, RopeScaling | None]:
    stated = {"rope_theta": 5e3, "max_position_embeddings": 128, "rope_scaling": scaling}
    return read_rotary(stated | values, PATH)


@pytest.mark.parametrize(
    ("stated", "expected"),
    [
        ({"type": "default"}, None),
        ({"type": "linear", "factor": 4}, LinearScaling(4.0)),
        ({"rope_type": "dynamic", "factor": 2.0}, DynamicScaling(2.0)),
        ({"rope_type": "llama3", **LLAMA3}, Llama3Scaling(8.0, 1.0, 4.0, 64)),
    ],
)
def test_each_type_states_its_fields(stated: dict[str, Any], expected: RopeScaling | None) -> None:
    assert read(stated) == (5e3, expected)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=str(case["stated"])[53:])
        for case in json.loads((GOLDENS / "rotary.json").read_text())
    ],
)
def test_fields_mean_what_they_mean_to_transformers(case: dict[str, Any]) -> None:
    """Those that it reads change the result, and those that it does not are no obstacle."""
    theta, scaling = read_rotary(case["stated"], PATH)
    frequencies = rotary_frequencies(16, theta, scaling)
    np.testing.assert_allclose(frequencies, case["frequencies"], rtol=2e-6)
    gain = getattr(scaling, "attention_factor", 1.0)
    assert gain == pytest.approx(case["gain"])


# The gain of factor 4 is 0.1 ln 4 + 1; DeepSeek's files weigh the logarithm instead.
@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, YarnScaling(4.0, 128, 1.1386294, 32.0, 1.0)),
        (
            {"original_max_position_embeddings": 32, "beta_fast": 16, "beta_slow": 2.0},
            YarnScaling(4.0, 32, 1.1386294, 16.0, 2.0),
        ),
        ({"attention_factor": 1.5}, YarnScaling(4.0, 128, 1.5, 32.0, 1.0)),
        (
            {"mscale": 2.0, "mscale_all_dim": 1.0},
            YarnScaling(4.0, 128, 1.2772589 / 1.1386294, 32.0, 1.0),
        ),
        ({"factor": 1.0}, YarnScaling(1.0, 128, 1.0, 32.0, 1.0)),
        # DeepSeek-R1-0528-Qwen3-8B: for vLLM, whose factor times this is 1.
        ({"attn_factor": 0.8782488562869419}, YarnScaling(4.0, 128, 1.0, 32.0, 1.0)),
    ],
)
def test_yarn_has_the_papers_defaults(fields: dict[str, Any], expected: YarnScaling) -> None:
    theta, scaling = read({"rope_type": "yarn", "factor": 4.0, **fields})
    assert theta == 5e3
    assert isinstance(scaling, YarnScaling)
    assert vars(scaling) == pytest.approx(vars(expected))


@pytest.mark.parametrize(
    ("scaling", "sentence"),
    [
        ({"type": "mrope"}, "scaling of type 'mrope'; supported are 'default', 'linear'"),
        ({"rope_type": ["yarn"]}, r"rope_type=\['yarn'\]; it must be a string"),
        ({"type": "linear"}, "does not state 'factor'"),
        ({"type": "linear", "factor": "4"}, "factor is '4'; it must be a number"),
        (
            {"type": "linear", "factor": 2.0, "alpha": 1},
            "alpha=1 for rotary scaling of type 'linear'; the supported .* are 'factor'",
        ),
        ({"full_attention": {"rope_type": "default"}}, "full_attention=.* of this type are none"),
        ({"type": "linear", "partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        (
            {"rope_type": "llama3", **LLAMA3, "original_max_position_embeddings": None},
            "does not state 'original_max_position_embeddings'",
        ),
        ({"rope_type": "yarn", "factor": 4.0, "truncate": "no"}, "'no'; it must be true or false"),
        ({"rope_type": "yarn"}, "does not state 'factor'"),
        ({"rope_type": "yarn", "factor": 4.0, "alpha": 1}, "states alpha=1 for"),
        *(
            ({"rope_type": "yarn", "factor": 4.0, name: value}, f"states {name}={value} for")
            for name, value in (("extrapolation_factor", 0.5), ("apply_yarn_scaling", False))
        ),
        (
            {"rope_type": "yarn", "factor": 4.0, "attn_factor": 0.5, "attention_factor": 1.1},
            "attention_factor=1.1, .* attn_factor=0.5, .*; remove one",
        ),
        ({"factor": 4.0}, "factor=4.0 for rotary scaling of type 'default'; .* are none"),
        (
            {"rope_type": "longrope", **FLAT, "short_factor": 2.0},
            "short_factor is 2.0; it must be a tuple of numbers, in files a list",
        ),
        ({"rope_type": "longrope", "factor": 2.0}, "state 'original_max_position_embeddings'"),
        (
            {"rope_type": "longrope", **FLAT, "original_max_position_embeddings": 1},
            "original_max_position_embeddings=1; without attention_factor, .* greater than 1",
        ),
    ],
)
def test_what_is_missing_or_unknown_is_named(scaling: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        read(scaling)


def test_parameters_may_stand_in_several_places_but_must_agree() -> None:
    linear = {"rope_type": "linear", "factor": 4.0}
    inside = linear | {"rope_theta": 7e3}
    expected = 7e3, LinearScaling(4.0)
    assert read(linear, rope_parameters=inside, rope_theta=None) == expected
    assert read(inside, rope_parameters=linear, rope_theta=None) == expected
    assert read(rope_parameters=inside | {"type": "linear"}, rope_theta=7000) == expected


@pytest.mark.parametrize(
    ("scaling", "values", "sentence"),
    [
        (
            {"factor": 4.0},
            {"factor": 2.0},
            r"rope_parameters\.factor=2\.0 and rope_scaling\.factor",
        ),
        (
            {"original_max_position_embeddings": 64},
            {"original_max_position_embeddings": 32},
            r"original_max_position_embeddings=32 and rope_scaling\.original",
        ),
        ({"rope_theta": 8e3}, {}, r"rope_theta=5000\.0 and rope_scaling\.rope_theta=8000\.0"),
        ({"rope_type": "yarn", "type": "linear"}, {}, r"\.rope_type='yarn' and .*\.type='linear'"),
    ],
)
def test_two_places_may_not_contradict(
    scaling: dict[str, Any], values: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(InputError, match=rf"{sentence}.*, which contradict each other; remove one"):
        read(scaling, rope_parameters=values)


def test_a_base_that_is_not_stated_is_that_of_old_llamas_or_an_error() -> None:
    # Llama 2 and Vicuna come with files from before the field, whose base was in the code.
    for version in ("4.31.0.dev0", "4.32.0"):
        old = {"model_type": "llama", "transformers_version": version}
        assert read(rope_theta=None, **old) == (10000.0, None)
    for model_type, version in (("llama", "4.33.0"), ("llama", None), ("mistral", "4.30.0")):
        with pytest.raises(InputError, match="does not state 'rope_theta'"):
            read(rope_theta=None, model_type=model_type, transformers_version=version)
