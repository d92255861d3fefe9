import math
from typing import Any

import pytest
from tiny_models import tiny_config

from redrafter_jax import InputError
from redrafter_jax.config import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    RopeScaling,
    YarnScaling,
)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"num_key_value_heads": 3}, r"num_attention_heads is 4; .*num_key_value_heads=3\."),
        ({"head_dim": 7}, r"head_dim is 7; .* even"),
        ({"eos_token_ids": (24,)}, r"eos_token_ids holds 24, .* 24 tokens"),
        ({"sliding_window": 8}, r"sliding_window is 8 and windowed_layers is \(\); give both"),
        ({"windowed_layers": (0,)}, r"sliding_window is None and windowed_layers is \(0,\); give"),
        ({"sliding_window": 8, "windowed_layers": (2,)}, r"holds 2, but there are 2 layers"),
        (
            {"rope_theta": 1.0, "rope_scaling": YarnScaling(4.0, 64, 1.0, 32.0, 1.0)},
            r"^TargetConfig\.rope_theta is 1\.0; with YarnScaling it must be greater than 1\.$",
        ),
    ],
)
def test_fields_that_contradict_each_other_are_refused(
    changes: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(InputError, match=sentence):
        tiny_config(**changes)


@pytest.mark.parametrize(
    ("scaling", "values", "sentence"),
    [
        (Llama3Scaling, (8.0, 4.0, 1.0, 64), r"factor is 1\.0; .* low_freq_factor=4\.0\.$"),
        (YarnScaling, (4.0, 64, 1.0, 1.0, 1.0), r"is 1\.0; .* greater than beta_slow=1\.0\.$"),
        (
            LongRopeScaling,
            ((1.0,), (1.0, 2.0), 64, 1.0),
            r"long_factor holds 2 .* short_factor holds 1;",
        ),
        (LongRopeScaling, ((0.0,), (1.0,), 64, 1.0), r"short_factor holds 0\.0; .* than 0\.$"),
        (LongRopeScaling, ((1.0,), (math.inf,), 64, 1.0), r"long_factor holds inf; all numbers"),
    ],
)
def test_numbers_of_scalings_that_contradict_each_other_are_refused(
    scaling: Any, values: tuple[Any, ...], sentence: str
) -> None:
    with pytest.raises(InputError, match=sentence):
        scaling(*values)


@pytest.mark.parametrize(
    ("scaling", "limit"),
    [
        (None, 512),
        (LinearScaling(4.0), 2048),
        (DynamicScaling(4.0), 512),
        (Llama3Scaling(8.0, 1.0, 4.0, 64), 512),
        (YarnScaling(4.0, 512, 1.0, 32.0, 1.0), 2048),
        (YarnScaling(4.0, 64, 1.0, 32.0, 1.0), 512),
        (LongRopeScaling((1.0,) * 4, (1.0,) * 4, 64, 1.0), 512),
        (LongRopeScaling((1.0,) * 4, (2.0,) * 4, 64, 1.0), 64),
    ],
)
def test_scalings_stretch_how_long_a_text_may_be(scaling: RopeScaling | None, limit: int) -> None:
    config = tiny_config(max_position_embeddings=512, rope_scaling=scaling)
    assert config.position_limit == limit


def test_gemma_3_states_the_context_after_it_is_stretched() -> None:
    scaled = {"max_position_embeddings": 512, "rope_scaling": LinearScaling(8.0)}
    assert tiny_config(rope_local_base_freq=1e4, **scaled).position_limit == 512
