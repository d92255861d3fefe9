import dataclasses
import re
from typing import Any

import pytest
from tiny_models import tiny_config

from redrafter_jax import DraftConfig, DrafterConfig, InputError, SamplingConfig, TargetConfig
from redrafter_jax.config import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    RopeScaling,
    YarnScaling,
)

NAN, INFINITY = float("nan"), float("inf")


@pytest.mark.parametrize("bad", [0, -1])
@pytest.mark.parametrize(
    "field",
    [
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "max_position_embeddings",
    ],
)
def test_target_sizes_are_positive(field: str, bad: int) -> None:
    with pytest.raises(InputError, match=rf"^TargetConfig\.{field} is {bad}; .* greater than 0\.$"):
        tiny_config(**{field: bad})


@pytest.mark.parametrize("bad", [0.0, -1.0, NAN, INFINITY])
@pytest.mark.parametrize("field", ["rope_theta", "rms_norm_eps"])
def test_target_constants_are_positive_and_finite(field: str, bad: float) -> None:
    with pytest.raises(InputError, match=rf"^TargetConfig\.{field} is {bad}; .* greater than 0\.$"):
        tiny_config(**{field: bad})


def test_key_value_heads_divide_the_query_heads() -> None:
    with pytest.raises(InputError, match=r"num_attention_heads is 4, .*num_key_value_heads=3 "):
        tiny_config(num_key_value_heads=3)


def test_rotary_embedding_needs_an_even_head() -> None:
    with pytest.raises(InputError, match=r"head_dim is 7; .* even"):
        tiny_config(head_dim=7)


@pytest.mark.parametrize("token", [-1, 24])
def test_end_tokens_lie_in_the_vocabulary(token: int) -> None:
    with pytest.raises(InputError, match=f"eos_token_ids holds {token}, .* 24 tokens"):
        tiny_config(eos_token_ids=(3, token))


def test_constants_of_a_target_have_no_defaults_and_variations_are_absent() -> None:
    fields = {field.name: field for field in dataclasses.fields(TargetConfig)}
    absent = {
        "rope_scaling": None,
        "attention_bias": False,
        "attention_output_bias": False,
        "qk_norm": False,
        "sliding_window": None,
        "windowed_layers": (),
    }
    for name, field in fields.items():
        assert field.default_factory is dataclasses.MISSING
        assert field.default == absent.get(name, dataclasses.MISSING)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"sliding_window": 8}, r"sliding_window is 8 and windowed_layers is \(\); give both"),
        ({"windowed_layers": (0,)}, r"sliding_window is None and windowed_layers is \(0,\); give"),
        ({"sliding_window": 0, "windowed_layers": (0,)}, r"sliding_window is 0; .* than 0\.$"),
        ({"sliding_window": 8, "windowed_layers": (2,)}, r"holds 2, but there are 2 layers"),
        ({"rope_scaling": LinearScaling(0.0)}, r"^LinearScaling\.factor is 0\.0; .* than 0\.$"),
        (
            {"rope_theta": 1.0, "rope_scaling": YarnScaling(4.0, 64, 1.0, 32.0, 1.0)},
            r"^TargetConfig\.rope_theta is 1\.0; with YarnScaling it must be greater than 1\.$",
        ),
        ({"rope_scaling": DynamicScaling(NAN)}, r"^DynamicScaling\.factor is nan; .* than 0\.$"),
    ],
)
def test_variations_make_sense(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        tiny_config(**changes)


def test_a_window_belongs_to_its_layers() -> None:
    config = tiny_config(sliding_window=8, windowed_layers=(1,))
    assert [config.window_of(layer) for layer in range(2)] == [None, 8]


@pytest.mark.parametrize(
    ("scaling", "limit"),
    [
        (None, 512),
        (LinearScaling(4.0), 2048),
        (DynamicScaling(4.0), 512),
        (Llama3Scaling(8.0, 1.0, 4.0, 64), 512),
        (YarnScaling(4.0, 512, 1.0, 32.0, 1.0), 2048),
        (YarnScaling(4.0, 64, 1.0, 32.0, 1.0), 512),
    ],
)
def test_scalings_stretch_how_long_a_text_may_be(scaling: RopeScaling | None, limit: int) -> None:
    config = tiny_config(max_position_embeddings=512, rope_scaling=scaling)
    assert config.position_limit == limit


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"vocab_size": 0}, r"^DrafterConfig\.vocab_size is 0; .* greater than 0\.$"),
        ({"hidden_size": -3}, r"^DrafterConfig\.hidden_size is -3; .* greater than 0\.$"),
        ({"exit_dim": 0}, r"^DrafterConfig\.exit_dim is 0; .* greater than 0\.$"),
        ({"draft_tokens": ()}, r"^DrafterConfig\.draft_tokens is empty; .* None for all\.$"),
        ({"draft_tokens": (1, 1)}, r"^DrafterConfig\.draft_tokens holds 1 after 1; .* rise"),
        ({"draft_tokens": (1, 5)}, r"^DrafterConfig\.draft_tokens holds 5 after 1; .* most 4\.$"),
        ({"num_draft_layers": -1}, r"^DrafterConfig\.num_draft_layers is -1; .* 0 or more\.$"),
        ({"cell": "lstm"}, r"^DrafterConfig\.cell is 'lstm'; .* one of simple, gru, sum\.$"),
        ({"head": "tied"}, r"^DrafterConfig\.head is 'tied'; .* one of own, target, low_rank\.$"),
        ({"head": "low_rank"}, r"head_rank is None; .* needs one, less than exit_dim\.$"),
        ({"head": "low_rank", "head_rank": 8}, r"head_rank is 8; .* less than exit_dim=8\.$"),
        ({"head_rank": 2}, r"head_rank is 2 and head is 'own'; .* head='low_rank' alone\.$"),
        ({"context_layers": (3, 1)}, r"context_layers holds 1 after 3; they must rise from 0\.$"),
        ({"context_layers": (-1,)}, r"context_layers holds -1 after -1; they must rise from 0"),
    ],
)
@pytest.mark.usefixtures("unchecked_shapes")
def test_drafter_fields_make_sense(changes: dict[str, Any], sentence: str) -> None:
    good: dict[str, Any] = {"vocab_size": 5, "hidden_size": 4, "exit_dim": 8}
    good |= {"num_draft_layers": 0} | changes
    with pytest.raises(InputError, match=sentence):
        DrafterConfig(**good)


def test_what_apples_layout_does_not_know_is_named() -> None:
    assert DrafterConfig(5, 4, 8, 1).beyond_apple == {}
    assert DrafterConfig(5, 4, 8, 1, cell="sum").beyond_apple == {}
    other = DrafterConfig(5, 4, 8, 1, "gru", (0, 2), "low_rank", 3, (1,))
    assert other.beyond_apple == {
        "cell": "gru",
        "draft_tokens": (0, 2),
        "head": "low_rank",
        "head_rank": 3,
        "context_layers": (1,),
    }


@pytest.mark.parametrize(("exit_dim", "projected"), [(8, False), (4, True), (16, True)])
def test_the_input_projection_is_left_out_at_twice_the_width(
    exit_dim: int, projected: bool
) -> None:
    config = DrafterConfig(vocab_size=5, hidden_size=4, exit_dim=exit_dim, num_draft_layers=1)
    assert config.has_input_projection is projected


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"beam_width": 0}, r"^DraftConfig\.beam_width is 0; .* greater than 0\.$"),
        ({"draft_rounds": 0}, r"^DraftConfig\.draft_rounds is 0; .* greater than 0\.$"),
        ({"candidates": 3}, r"^DraftConfig\.candidates is 3; .* beam_width=4 needs that many"),
        ({"sharpness": 0.0}, r"^DraftConfig\.sharpness is 0\.0; .* greater than 0\.$"),
        ({"sharpness": -1.0}, r"^DraftConfig\.sharpness is -1\.0; "),
        ({"sharpness": NAN}, r"^DraftConfig\.sharpness is nan; "),
        ({"sharpness": INFINITY}, r"^DraftConfig\.sharpness is inf; "),
        ({"num_nodes": 0}, r"^DraftConfig\.num_nodes is 0; .* 1 to 13 nodes\.$"),
        ({"num_nodes": 14}, r"^DraftConfig\.num_nodes is 14; .* 1 to 13 nodes\.$"),
        ({"lookup_tokens": -1}, r"^DraftConfig\.lookup_tokens is -1; it must be 0 or more\.$"),
        (
            {"lookup_tokens": 5, "num_nodes": 5},
            r"^DraftConfig\.num_nodes is 5; .* give 6 to 18 nodes, lookup_tokens=5 included\.$",
        ),
        ({"lookup_tokens": 5, "num_nodes": 19}, r"^DraftConfig\.num_nodes is 19; .* 6 to 18 nodes"),
    ],
)
def test_drafts_make_sense(changes: dict[str, Any], sentence: str) -> None:
    good: dict[str, Any] = {"beam_width": 4, "draft_rounds": 3} | changes
    with pytest.raises(InputError, match=sentence):
        DraftConfig(**good)


def test_a_draft_counts_its_nodes_and_its_longest_path() -> None:
    # Three rounds of four beams below the root; a path is the root and one node per round.
    draft = DraftConfig(beam_width=4, draft_rounds=3)
    assert (draft.max_nodes, draft.budget, draft.max_path) == (13, 13, 4)
    draft = DraftConfig(beam_width=4, draft_rounds=3, num_nodes=6)
    assert (draft.max_nodes, draft.budget, draft.max_path) == (13, 6, 4)


def test_copied_tokens_are_of_the_nodes_and_reach_further_than_beams() -> None:
    draft = DraftConfig(beam_width=4, draft_rounds=3, lookup_tokens=5)
    assert (draft.max_nodes, draft.budget, draft.beam_nodes, draft.max_path) == (18, 18, 13, 9)
    draft = DraftConfig(beam_width=4, draft_rounds=3, num_nodes=6, lookup_tokens=2)
    assert (draft.max_nodes, draft.budget, draft.beam_nodes, draft.max_path) == (15, 6, 4, 6)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"temperature": -0.5}, r"^SamplingConfig\.temperature is -0\.5; .* from 1e-6 to 1e6\.$"),
        ({"temperature": 1e-38}, r"^SamplingConfig\.temperature is 1e-38; "),
        ({"temperature": 1e39}, r"^SamplingConfig\.temperature is 1e\+39; "),
        ({"temperature": NAN}, r"^SamplingConfig\.temperature is nan; "),
        ({"temperature": INFINITY}, r"^SamplingConfig\.temperature is inf; "),
        ({"top_k": 0}, r"^SamplingConfig\.top_k is 0; .* 1 or more\.$"),
        ({"top_k": -2}, r"^SamplingConfig\.top_k is -2; "),
        ({"top_p": 0.0}, r"^SamplingConfig\.top_p is 0\.0; .* in \(0, 1\]\.$"),
        ({"top_p": 1.5}, r"^SamplingConfig\.top_p is 1\.5; "),
        ({"top_p": NAN}, r"^SamplingConfig\.top_p is nan; "),
        ({"min_p": -0.1}, r"^SamplingConfig\.min_p is -0\.1; .* in \[0, 1\]\.$"),
        ({"min_p": 1.1}, r"^SamplingConfig\.min_p is 1\.1; "),
        ({"min_p": NAN}, r"^SamplingConfig\.min_p is nan; "),
    ],
)
def test_sampling_makes_sense(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        SamplingConfig(**changes)


def test_sampling_bounds_are_allowed() -> None:
    SamplingConfig(temperature=0.0, top_k=1, top_p=1.0, min_p=0.0)
    SamplingConfig(temperature=100.0, top_k=10**6, top_p=1e-6, min_p=1.0)


def test_configs_are_hashable_and_frozen() -> None:
    for config in (
        tiny_config(),
        DrafterConfig(5, 4, 8, 0),
        DraftConfig(),
        SamplingConfig(),
    ):
        assert hash(config) == hash(dataclasses.replace(config))
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(config, dataclasses.fields(config)[0].name, 1)


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize(
    ("config", "name", "value", "kind"),
    [
        (DraftConfig, "beam_width", 2.5, "a whole number, an int"),
        (DraftConfig, "num_nodes", True, "a whole number, an int"),
        (DraftConfig, "sharpness", "1.2", "a number, a float"),
        (SamplingConfig, "temperature", "0.7", "a number, a float"),
        (SamplingConfig, "top_k", 1.0, "a whole number, an int"),
        (SamplingConfig, "top_p", "0.9", "a number, a float"),
    ],
)
def test_values_of_another_type_are_refused(
    config: Any, name: str, value: object, kind: str
) -> None:
    sentence = f"{config.__name__}.{name} is {value!r}; it must be {kind}."
    with pytest.raises(InputError, match=f"^{re.escape(sentence)}$"):
        config(**{name: value})
