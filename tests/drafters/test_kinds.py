"""What the record of every kind of drafter promises to files and training."""

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kind_shapes import SHAPES, D, V, every_kind, every_shape
from tiny_folders import change_json
from tiny_models import assert_same, cast, random_drafter, tiny_config

from redrafter_jax import InputError, load_drafter, save_drafter
from redrafter_jax.config.drafter import HeadConfig
from redrafter_jax.drafters.kinds import KINDS, TRAINING, Kind, init_drafter, kind_of, recognise
from redrafter_jax.files.drafter_files import find_drafter
from redrafter_jax.settings.sections import DrafterShape


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
        with pytest.raises(
            InputError, match=rf"{stated_as}=1000000000\b.* files hold only \d+ weights"
        ):
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
    with pytest.raises(InputError, match=r"drafter\.num_attention_heads is 3; .* num_key_value"):
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
