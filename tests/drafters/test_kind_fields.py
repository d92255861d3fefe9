"""Fields that a kind of drafter refuses, and trees that it cannot draft."""

from dataclasses import replace
from typing import Any

import pytest
from kind_shapes import SHAPES, V, every_shape
from tiny_models import ATTENTION

from redrafter_jax import InputError, MedusaConfig, RecurrentConfig, TreeConfig
from redrafter_jax.config import DynamicScaling
from redrafter_jax.config.drafter import HeadConfig
from redrafter_jax.drafters.block_head import BlockConfig
from redrafter_jax.drafters.eagle_head import EagleConfig
from redrafter_jax.drafters.hydra_head import HydraConfig
from redrafter_jax.drafters.kinds import Kind, kind_of


@every_shape
@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"draft_tokens": ()}, "draft_tokens is empty; give token ids, or None"),
        ({"draft_tokens": (1, 1)}, "draft_tokens holds 1 after 1; list tokens in increasing"),
        ({"draft_tokens": (1, V)}, "draft_tokens holds 13 after 1; .*, from 0 to at most 12"),
        ({"draft_tokens": (-3,)}, "draft_tokens holds -3; list tokens in increasing"),
        ({"vocab_size": 0}, "vocab_size is 0; it must be greater than 0"),
        ({"head": "lent"}, "head is 'lent'; it must be one of own, target"),
        ({"context_layers": (-1,)}, "context_layers holds -1; list layers in increasing"),
    ],
)
@pytest.mark.usefixtures("unchecked_shapes")
def test_no_kind_takes_tokens_or_layers_that_cannot_be(
    kind: Kind, config: HeadConfig, changes: dict[str, Any], problem: str
) -> None:
    assert kind_of(config) is kind
    with pytest.raises(InputError, match=rf"{kind.config.__name__}\.{problem}"):
        replace(config, **changes)


RECURRENT_SHAPE = {"vocab_size": 5, "hidden_size": 4, "exit_dim": 8, "num_draft_layers": 0}
MEDUSA_SHAPE = {"vocab_size": 5, "hidden_size": 4, "num_heads": 2, "num_draft_layers": 0}
EAGLE_SHAPE = {
    "vocab_size": 5,
    "hidden_size": 4,
    "version": "3",
    "width": 4,
    "intermediate_size": 6,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 2,
}
BLOCK_SHAPE = {
    "vocab_size": 5,
    "hidden_size": 4,
    "num_layers": 1,
    "intermediate_size": 6,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 2,
    "block_size": 3,
    "mask_token": 4,
    "context_layers": (0,),
}
HYDRA_SHAPE = {"vocab_size": 5, "hidden_size": 4, "num_heads": 2, "num_draft_layers": 1}
FIRST_EAGLE_SHAPE = {**EAGLE_SHAPE, "version": "1", "head": "target"}
CONFIGS = {
    id(RECURRENT_SHAPE): RecurrentConfig,
    id(MEDUSA_SHAPE): MedusaConfig,
    id(EAGLE_SHAPE): EagleConfig,
    id(FIRST_EAGLE_SHAPE): EagleConfig,
    id(BLOCK_SHAPE): BlockConfig,
    id(HYDRA_SHAPE): HydraConfig,
}


@pytest.mark.parametrize(
    ("shape", "changes", "problem"),
    [
        (RECURRENT_SHAPE, {"head": "low_rank"}, "head_rank is None; .*'low_rank' it must be less"),
        (RECURRENT_SHAPE, {"head": "low_rank", "head_rank": 8}, "is 8; .* less than exit_dim=8"),
        (RECURRENT_SHAPE, {"head_rank": 2}, "is 2, but head is 'own'; head_rank is for .* only"),
        (RECURRENT_SHAPE, {"context_layers": (3, 1)}, "holds 1 after 3; list layers in increasing"),
        (
            RECURRENT_SHAPE,
            {"head_dim": 2},
            "head_dim is 2 and attention is False; leave it out",
        ),
        (
            RECURRENT_SHAPE,
            ATTENTION | {"head_dim": None},
            "head_dim is None and attention is True; give a value",
        ),
        (
            RECURRENT_SHAPE,
            ATTENTION | {"num_attention_heads": 3},
            r"RecurrentConfig\.num_attention_heads is 3; .* multiple of num_key_value_heads=2",
        ),
        (MEDUSA_SHAPE, {"head": "target"}, "num_draft_layers is 0 and head is 'target'.*give 1"),
        (MEDUSA_SHAPE, {"head": "low_rank"}, "head is 'low_rank'; it must be one of own, target"),
        (MEDUSA_SHAPE, {"context_layers": (1,)}, r"context_layers is \(1,\); .* leave it out"),
        (EAGLE_SHAPE, {"version": "2"}, "version is '2'; it must be one of 1, 3"),
        (EAGLE_SHAPE, {"width": 6}, "width is 6 and the target's is 4; .* own_embedding"),
        (
            EAGLE_SHAPE,
            {"width": 6, "own_embedding": True, "head": "target"},
            "head is 'target', which needs width=4, but width is 6",
        ),
        (EAGLE_SHAPE, {"head_dim": 3}, "head_dim is 3; rotary embedding needs an even number"),
        (
            EAGLE_SHAPE,
            {"rope_scaling": DynamicScaling(2.0)},
            "rope_scaling is DynamicScaling; .* linear scaling and Llama 3.1's are",
        ),
        (EAGLE_SHAPE, {"fc_norm": True, "norm_before_fc": True}, "is True and fc_norm is True"),
        (FIRST_EAGLE_SHAPE, {"head": "own"}, "head is 'own', but version '1' .* give 'target'"),
        (FIRST_EAGLE_SHAPE, {"fc_norm": True}, "fc_norm is True, but version '1' has no"),
        (FIRST_EAGLE_SHAPE, {"context_layers": (1,)}, "version '1' reads only the last layer"),
        (HYDRA_SHAPE, {"num_draft_layers": 0}, "num_draft_layers is 0; it must be greater than 0"),
        (HYDRA_SHAPE, {"context_layers": (1,)}, "set hidden_state_offset instead"),
        (BLOCK_SHAPE, {"mask_token": 5}, "mask_token is 5; it must be below vocab_size, 5"),
        (BLOCK_SHAPE, {"block_size": 1}, "block_size is 1 and sample_from_anchor is False"),
        (BLOCK_SHAPE, {"context_layers": ()}, "context_layers is empty; name the target layers"),
        (BLOCK_SHAPE, {"head_dim": 3}, "head_dim is 3; rotary embedding needs an even number"),
        (BLOCK_SHAPE, {"rope_scaling": DynamicScaling(2.0)}, "rope_scaling is DynamicScaling; .* "),
        (BLOCK_SHAPE, {"markov_head_type": "gru"}, "is 'gru'; it must be one of vanilla, gated"),
        (BLOCK_SHAPE, {"markov_head_type": "rnn"}, "is 'rnn', which needs a markov_rank above 0"),
        (BLOCK_SHAPE, {"confidence_with_markov": True}, "is True, which needs a confidence head"),
        (
            BLOCK_SHAPE,
            {"markov_head_type": "rnn", "markov_rank": 2},
            "markov_head_type is 'rnn' and sample_from_anchor is False; programs disagree",
        ),
    ],
)
@pytest.mark.usefixtures("unchecked_shapes")
def test_fields_of_a_kind_that_contradict_each_other_are_refused(
    shape: dict[str, Any], changes: dict[str, Any], problem: str
) -> None:
    with pytest.raises(InputError, match=problem):
        CONFIGS[id(shape)](**(shape | changes))


@every_shape
@pytest.mark.parametrize("changes", [{"beam_width": 14}, {"beam_width": 1, "candidates": 14}])
def test_no_kind_drafts_more_tokens_than_it_has(
    kind: Kind, config: HeadConfig, changes: dict[str, Any]
) -> None:
    name, asked = list(changes.items())[-1]
    with pytest.raises(InputError, match=rf"TreeConfig\.{name} is {asked}, more than the \d+ tok"):
        config.check_tree(TreeConfig(draft_rounds=1, **changes))


@pytest.mark.parametrize(
    ("config", "tree", "problem"),
    [
        ("recurrent", {"static_tree": True}, "static_tree is for heads that draft by rank"),
        ("medusa", {"final_beams_only": True}, "final_beams_only is for heads that draft in beams"),
        ("medusa", {"rerank": True}, "rerank is for heads that draft in beams"),
        ("eagle3", {"static_tree": True}, "static_tree is for heads that draft by rank"),
        ("hydra", {"static_tree": True}, "static_tree is for heads that draft by rank"),
        ("hydra", {"draft_rounds": 4}, "draft_rounds is 4, but the drafter has 2 Hydra heads"),
        ("block", {"static_tree": True}, "static_tree is for heads that draft by rank"),
        ("block", {"draft_rounds": 4}, "draft_rounds is 4, but the head's block predicts 3 tokens"),
        ("medusa", {"draft_rounds": 4}, "draft_rounds is 4, but the drafter has 3 Medusa heads"),
    ],
)
def test_trees_that_a_kind_cannot_draft_are_refused(
    config: str, tree: dict[str, Any], problem: str
) -> None:
    asked: dict[str, Any] = {"beam_width": 4, "draft_rounds": 3} | tree
    with pytest.raises(InputError, match=rf"TreeConfig\.{problem}"):
        SHAPES[config][0].check_tree(TreeConfig(**asked))
