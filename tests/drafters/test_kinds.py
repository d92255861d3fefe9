"""What the record of every kind of drafter promises to files, training and evaluation."""

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_folders import change_json
from tiny_models import ATTENTION, assert_same, cast, random_drafter, tiny_config

from eval.abstract import abstract_drafter, bytes_of
from redrafter_jax import (
    InputError,
    MedusaConfig,
    RecurrentConfig,
    TreeConfig,
    load_drafter,
    save_drafter,
)
from redrafter_jax.config import DynamicScaling, LinearScaling, Llama3Scaling
from redrafter_jax.config.drafter import HeadConfig
from redrafter_jax.drafters.block_head import BlockConfig
from redrafter_jax.drafters.eagle_head import EagleConfig
from redrafter_jax.drafters.hydra_head import HydraConfig, PrefixLayer
from redrafter_jax.drafters.kinds import KINDS, TRAINING, Kind, init_drafter, kind_of, recognise
from redrafter_jax.files.drafter_files import find_drafter
from redrafter_jax.settings.sections import DrafterShape

V, D = 13, 8
# Of every kind a plain shape first, then its variants.
SHAPES: dict[str, list[HeadConfig]] = {
    "recurrent": [
        RecurrentConfig(V, D, D, 1),
        RecurrentConfig(V, D, 2 * D, 0, cell="sum"),
        RecurrentConfig(V, D, 5, 0, cell="gru", head="low_rank", head_rank=3),
        RecurrentConfig(V, D, 5, 0, head="target", draft_tokens=(1, 2)),
        RecurrentConfig(V, D, 5, 2, context_layers=(0, 2), draft_tokens=(0, 3, 4)),
        RecurrentConfig(V, D, 5, 1, cell="gru", context_layers=(1,), **ATTENTION),
    ],
    "medusa": [
        MedusaConfig(V, D, 3, 1),
        MedusaConfig(V, D, 3, 0, draft_tokens=(0, 5, 12)),
        MedusaConfig(V, D, 1, 2, head="target", draft_tokens=(1, 2)),
    ],
    "eagle3": [
        EagleConfig(V, D, "3", D, 12, 2, 1, 4),
        EagleConfig(V, D, "1", D, 12, 2, 2, 4, head="target", fc_bias=True, attention_bias=True),
        EagleConfig(
            *(V, D, "3", 6, 12, 3, 1, 2),
            draft_tokens=(0, 3, 4),
            context_layers=(0, 2, 3, 5),
            own_embedding=True,
            attention_bias=True,
            attention_output_bias=True,
            qk_norm=True,
            norm_before_residual=True,
            norm_before_fc=True,
        ),
        EagleConfig(
            *(V, D, "3", D, 12, 2, 1, 4),
            head="target",
            draft_tokens=(1, 2),
            rms_norm_eps=1e-5,
            rope_theta=5e5,
            rope_scaling=Llama3Scaling(8.0, 1.0, 4.0, 64),
            fc_norm=True,
            norm_output=True,
        ),
    ],
    "hydra": [
        HydraConfig(V, D, 2, 1),
        HydraConfig(V, D, 3, 3, draft_tokens=(0, 5, 12), hidden_state_offset=1),
        HydraConfig(V, D, 2, 2, grounded=False, head="target", draft_tokens=(1, 2)),
        HydraConfig(
            *(V, D, 2, 4),
            prefix=PrefixLayer(12, 4, 2, 2, rms_norm_eps=1e-5, rope_scaling=LinearScaling(2.0)),
        ),
    ],
    "block": [
        BlockConfig(V, D, 1, 12, 2, 1, 4, 4, 5, context_layers=(0,)),
        BlockConfig(
            *(V, D, 2, 12, 2, 2, 2, 4, 12),
            context_layers=(0, 2),
            sample_from_anchor=True,
            draft_tokens=(0, 3, 4),
            markov_rank=3,
            markov_head_type="gated",
            confidence=True,
            confidence_with_markov=True,
            attention_bias=True,
            rms_norm_eps=1e-5,
            rope_theta=5e5,
            rope_scaling=Llama3Scaling(8.0, 1.0, 4.0, 64),
        ),
        BlockConfig(
            *(V, D, 1, 12, 2, 1, 4, 5, 0),
            context_layers=(1,),
            markov_rank=2,
            markov_head_type="rnn",
            confidence=True,
            sample_from_anchor=True,
            head="own",
            draft_tokens=(1, 2),
        ),
    ],
}
every_kind = pytest.mark.parametrize("kind", KINDS, ids=[kind.name for kind in KINDS])
every_shape = pytest.mark.parametrize(
    ("kind", "config"),
    [(kind, one) for kind in KINDS for one in SHAPES[kind.name]],
    ids=lambda value: getattr(value, "name", str(value)),
)


@every_shape
def test_a_saved_folder_is_recognised_and_loads_bit_for_bit(
    tmp_path: Path, kind: Kind, config: HeadConfig
) -> None:
    for dtype in ("float32", "bfloat16"):
        drafter = cast(random_drafter(config), dtype)
        save_drafter(drafter, tmp_path)
        assert recognise(json.loads((tmp_path / "config.json").read_text())) is kind
        assert find_drafter(tmp_path).config == config
        assert_same(load_drafter(tmp_path, dtype), drafter)


@every_kind
def test_what_config_json_does_not_state_is_not_guessed(tmp_path: Path, kind: Kind) -> None:
    config = SHAPES[kind.name][0]
    for name in ("vocab_size", "hidden_size", *kind.files.own_fields):
        save_drafter(random_drafter(config), tmp_path)
        change_json(tmp_path / "config.json", **{name: ...})
        with pytest.raises(InputError, match=f"does not state '{name}'"):
            load_drafter(tmp_path)


@every_kind
def test_more_layers_than_weights_are_refused_before_they_are_made(
    tmp_path: Path, kind: Kind
) -> None:
    config = SHAPES[kind.name][0]
    stated = {**kind.files.fields(config)}
    for name, stated_as in kind.files.layers.items():
        many = kind.files.fields(replace(config, **{name: 10**9}))
        save_drafter(random_drafter(config), tmp_path)
        change_json(
            tmp_path / "config.json", **{key: many[key] for key in many if many[key] != stated[key]}
        )
        with pytest.raises(InputError, match=rf"{stated_as}=1000000000\b.* files hold \d+ weights"):
            load_drafter(tmp_path)


def test_a_folder_of_another_model_is_told_what_drafters_state(tmp_path: Path) -> None:
    save_drafter(random_drafter(SHAPES["recurrent"][0]), tmp_path)
    change_json(tmp_path / "config.json", model_type="bert")
    with pytest.raises(
        InputError, match=r"'bert'; a trained head states .*, and a model .* 'llama'"
    ) as error:
        load_drafter(tmp_path)
    for kind in KINDS:
        assert repr(kind.files.model_type) in str(error.value)


@every_shape
@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"draft_tokens": ()}, "draft_tokens is empty; name tokens, or None"),
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
        (RECURRENT_SHAPE, {"head_rank": 2}, "is 2, but head is 'own'; it is for .* only"),
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
            r"RecurrentConfig\.num_attention_heads is 3, which num_key_value_heads=2 does not",
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
        (FIRST_EAGLE_SHAPE, {"head": "own"}, "head is 'own', but version '1' needs 'target'"),
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
        (BLOCK_SHAPE, {"markov_head_type": "rnn"}, "is 'rnn' and markov_rank is 0; leave one of"),
        (BLOCK_SHAPE, {"confidence_with_markov": True}, "is True, which needs a confidence head"),
        (
            BLOCK_SHAPE,
            {"markov_head_type": "rnn", "markov_rank": 2},
            "markov_head_type is 'rnn' and sample_from_anchor is False; programs differ",
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
        ("hydra", {"draft_rounds": 4}, "draft_rounds is 4, more than the 2 Hydra heads"),
        ("block", {"static_tree": True}, "static_tree is for heads that draft by rank"),
        ("block", {"draft_rounds": 4}, "draft_rounds is 4, more than the 3 places that predict"),
        ("medusa", {"draft_rounds": 4}, "draft_rounds is 4, more than the 3 Medusa heads"),
    ],
)
def test_trees_that_a_kind_cannot_draft_are_refused(
    config: str, tree: dict[str, Any], problem: str
) -> None:
    asked: dict[str, Any] = {"beam_width": 4, "draft_rounds": 3} | tree
    with pytest.raises(InputError, match=rf"TreeConfig\.{problem}"):
        SHAPES[config][0].check_tree(TreeConfig(**asked))


def test_a_kind_that_is_not_trained_says_so() -> None:
    assert {kind.name for kind in KINDS} - TRAINING.keys() == {"block", "hydra"}
    with pytest.raises(
        ValueError, match=r"Hydra heads can be loaded .* not trained here; train one"
    ):
        DrafterShape.model_validate({"kind": "hydra"})


@pytest.mark.parametrize("name", TRAINING)
def test_training_sets_fields_of_the_kind_and_no_others(name: str) -> None:
    settings, shape = TRAINING[name].settings, DrafterShape(kind=name)
    target = tiny_config(vocab_size=V, hidden_size=D)
    built: Any = shape.build(target, rounds=3)
    assert kind_of(built) is next(kind for kind in KINDS if kind.name == name)
    assert (built.vocab_size, built.hidden_size, built.draft_tokens) == (V, D, None)
    assert set(settings) <= {one.name for one in fields(type(built))}
    assert shape.build(target, rounds=3, draft_tokens=(1, 4)).draft_tokens == (1, 4)
    of_others = {"exit_dim": 8, "cell": "gru", "head_rank": 2, "context_layers": [0]}
    for field in of_others.keys() - set(settings):
        with pytest.raises(ValueError, match=f"{field} is for .*; leave it out of kind: {name}"):
            DrafterShape.model_validate({"kind": name, field: of_others[field]})
    with pytest.raises(ValueError, match=r"exit_dmi\s+Extra inputs are not permitted"):
        DrafterShape.model_validate({"kind": name, "exit_dmi": 8})


def test_a_layer_that_attends_is_like_the_targets_where_it_is_not_told() -> None:
    target = tiny_config(vocab_size=V, hidden_size=D)
    built: Any = DrafterShape.model_validate({"attention": True, "head_dim": 4}).build(target)
    assert built.layer.head_dim == 4
    assert replace(built.layer, head_dim=target.head_dim) == replace(
        target,
        num_hidden_layers=1,
        max_position_embeddings=1,
        tie_word_embeddings=True,
    )
    shape = DrafterShape.model_validate({"attention": True, "num_attention_heads": 3})
    with pytest.raises(InputError, match=r"drafter\.num_attention_heads is 3, which num_key_val"):
        shape.build_for(target, 1)


@pytest.mark.parametrize("name", TRAINING)
def test_a_head_as_wide_as_the_target_can_start_as_the_targets(name: str) -> None:
    config = replace(SHAPES[name][0], draft_tokens=(1, 4, 9))
    module = init_drafter(config, 0).merge()
    before = jax.tree.leaves(jax.tree.map(jnp.shape, module))
    projection = jnp.asarray(np.random.default_rng(0).normal(size=(D, 3)), jnp.float32)
    TRAINING[name].start_from_target(module, projection)
    assert jax.tree.leaves(jax.tree.map(jnp.shape, module)) == before
    ends = [module] if hasattr(module, "lm_head") else list(module.heads)
    for head in ends:
        np.testing.assert_array_equal(head.lm_head.kernel[...], projection)
    # Training donates its state: no two parameters may share a buffer.
    places = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(module)]
    assert len(set(places)) == len(places)


@pytest.mark.parametrize(
    ("config", "weights", "projections", "embeddings"),
    [
        # Two matrices 8 x 8 and a bias, the projection of 16, one block, 13 tokens; three rounds.
        # The root alone is fed in the first, W = 2 tokens in each later one.
        (
            RecurrentConfig(V, D, 5, 1),
            3 * (2 * 64 + 8 + 16 * 5 + 5 + 25 + 5 + 5 * 13),
            0,
            5,
        ),
        # Three layers of the target are read once; the target's projection scores in every round.
        (
            RecurrentConfig(V, D, 5, 0, context_layers=(0, 2), head="target"),
            3 * 8 * 8 + 3 * (2 * 64 + 8 + 16 * 5 + 5 + 5 * 8),
            3,
            5,
        ),
        # The layer that attends once: three norms, queries, keys and values of twice the width, the
        # output, the feed-forward block; a path of four tokens is embedded for it.
        (
            RecurrentConfig(V, D, 5, 0, **ATTENTION),
            3 * 8
            + 16 * (24 + 12 + 12)
            + 24 * 8
            + 3 * 8 * 24
            + 3 * (2 * 64 + 8 + 16 * 5 + 5 + 5 * 13),
            0,
            5 + 4,
        ),
        # Three of the four heads, each of one block.
        (MedusaConfig(V, D, 4, 1), 3 * (64 + 8 + 8 * 13), 0, 0),
        (MedusaConfig(V, D, 4, 1, head="target"), 3 * (64 + 8), 1, 0),
        # The projection of three fused states once; three times four norms, queries, keys and
        # values of twice the width, the output, the feed-forward block, 13 tokens. Embedded are
        # the four tokens of a path that is read, and two in each of two rounds.
        (
            EagleConfig(V, D, "3", D, 12, 2, 1, 4),
            24 * 8 + 3 * (4 * 8 + 16 * (8 + 4 + 4) + 64 + 3 * 8 * 12 + 8 * 13),
            0,
            4 + 2 * 2,
        ),
        # The first version projects its pair in every pass, and has one norm.
        (
            EagleConfig(V, D, "1", D, 12, 2, 2, 4, head="target", fc_bias=True),
            3 * (16 * 8 + 8 + 8 + 4 * 64 + 3 * 8 * 12),
            3,
            4 + 2 * 2,
        ),
        # The first three of four heads: two matrices from as many widths as there are tokens before
        # and one for the hidden state, a block that is run twice, 13 tokens with a bias.
        (
            HydraConfig(V, D, 4, 3, prefix=PrefixLayer(12, 4, 2, 2)),
            2 * 64 * (2 + 3 + 4) + 3 * (2 * 8 + 2 * 72 + 8 * 13 + 13),
            0,
            5,
        ),
        # One block, run twice; the target's projection scores.
        (HydraConfig(V, D, 4, 2, grounded=False, head="target"), 3 * 2 * 72, 3, 0),
        # The last norm, and a layer: its norms, those of queries and keys, queries and output,
        # keys and values, the feed-forward block. The gate and the 13 tokens of the sequential head
        # and the confidence head three times, of the block of four the embeddings.
        (
            BlockConfig(
                *(V, D, 1, 12, 2, 1, 4, 4, 5),
                context_layers=(0, 1),
                markov_rank=3,
                markov_head_type="gated",
                confidence=True,
            ),
            8 + 2 * 8 + 2 * 4 + 2 * 64 + 2 * 32 + 3 * 8 * 12 + 3 * (3 * 11 + 3 + 3 * 13 + 8 + 1),
            1,
            4,
        ),
    ],
)
def test_a_tree_reads_what_its_kind_says(
    config: HeadConfig, weights: int, projections: int, embeddings: int
) -> None:
    kind = kind_of(config)
    assert kind is not None
    drafter = abstract_drafter(config, jnp.bfloat16)
    reads = kind.count_reads(config, drafter.params, TreeConfig(beam_width=2, draft_rounds=3))
    assert sum(times * bytes_of(part) for part, times in reads.weights) == 2 * weights
    assert (reads.projections, reads.embeddings) == (projections, embeddings)
