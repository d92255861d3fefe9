"""Meshes: who holds what, and texts that do not know how many devices wrote them."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, PartitionSpec
from tiny_models import (
    forgetful_target,
    imitating_drafter,
    random_drafter,
    random_target,
    tiny_config,
)

from pallas_kernels.tree_attention import PAGE
from redrafter_jax import (
    Generation,
    InputError,
    KeptCache,
    PromptLookup,
    RecurrentConfig,
    SamplingConfig,
    TreeConfig,
    generate,
    generate_autoregressive,
    load_drafter,
    load_target,
    make_mesh,
    save_drafter,
    save_target,
    stream,
)
from redrafter_jax.drafters.base import LoadedHead
from redrafter_jax.drafters.ranking import _highest_of_shards, _over_shards
from redrafter_jax.engine.requests import Batch, check_batch
from redrafter_jax.generation import engine_of
from redrafter_jax.models.target import Target
from redrafter_jax.parallel.collectives import all_gather
from redrafter_jax.parallel.mesh import partition, place

pytestmark = pytest.mark.usefixtures("quick_compilation")

# Divided by every mesh below: 8 query heads, 4 key heads, 24 tokens. One layer compiles faster.
CONFIG = tiny_config(num_attention_heads=8, num_key_value_heads=4, num_hidden_layers=1)

PROMPTS = [[1, 2, 3], [4, 5], [6], [7, 8, 9, 10], [1, 1], [2] * 20, [3, 4], [9]]
ASKED: dict[str, Any] = {
    "max_new_tokens": [24, 20, 16, 24, 24, 12, 24, 1],
    "seeds": [5, 6, 7, 8, 9, 10, 11, 12],
    "log_probs": True,
    "sampling": [
        SamplingConfig(),
        SamplingConfig(1.0),
        SamplingConfig(0.8, top_k=5),
        SamplingConfig(1.2, top_p=0.9),
        SamplingConfig(0.7, min_p=0.05),
        SamplingConfig(),
        SamplingConfig(1.0),
        SamplingConfig(),
    ],
}
DRAFT = TreeConfig(beam_width=3, draft_rounds=3, num_nodes=10, sharpness=1.3, lookup_tokens=2)


@pytest.fixture(scope="module")
def pair() -> tuple[Target, LoadedHead]:
    target = forgetful_target(memory=0.15, config=CONFIG)
    return target, imitating_drafter(target)


@pytest.fixture(scope="module")
def on_one_device(pair: tuple[Target, LoadedHead]) -> Generation:
    return generate_autoregressive(pair[0], PROMPTS, **ASKED)


@pytest.mark.parametrize(
    ("sizes", "draft"),
    [
        ((1, 2), DRAFT),
        # More extensions of a beam than a device has tokens.
        pytest.param((2, 4), replace(DRAFT, num_nodes=12, rerank=True), marks=pytest.mark.long),
    ],
    ids=["two devices", "eight devices, reranked"],
)
def test_the_text_is_that_of_one_device(
    pair: tuple[Target, LoadedHead],
    on_one_device: Generation,
    sizes: tuple[int, int],
    draft: TreeConfig,
) -> None:
    mesh = make_mesh(*sizes)
    target, drafter = place(pair[0], mesh), place(pair[1], mesh)
    result = generate(target, drafter, PROMPTS, tree=draft, **ASKED)
    assert result.tokens == on_one_device.tokens
    assert result.acceptance_length > 1.5
    for ours, theirs in zip(result.log_probs or (), on_one_device.log_probs or (), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-4)


@pytest.mark.long
@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        # 22 tokens four devices cannot share: each holds them all.
        ({"tie_word_embeddings": True, "vocab_size": 22}, {"cell": "gru"}),
        (
            {"num_hidden_layers": 2, "sliding_window": 8, "windowed_layers": (1,)},
            {"head": "target", "draft_tokens": tuple(range(0, 24, 2)), "context_layers": (0,)},
        ),
    ],
    ids=["tied, gated", "the target's head for some tokens, two layers of context"],
)
def test_other_kinds_of_pair_say_the_same_on_a_mesh(
    changes: dict[str, Any], kind: dict[str, Any]
) -> None:
    target = random_target(replace(CONFIG, **changes))
    shape = RecurrentConfig(
        vocab_size=target.config.vocab_size,
        hidden_size=32,
        exit_dim=64,
        num_draft_layers=1,
        **kind,
    )
    drafter, mesh = random_drafter(shape), make_mesh(2, 4)
    asked: dict[str, Any] = {
        "max_new_tokens": 12,
        "sampling": [SamplingConfig(), SamplingConfig(1.0)],
    }
    prompts, kept = [[1, 2, 3] * 30, [4] * 90], KeptCache(200)
    expected = generate_autoregressive(target, prompts, **asked).tokens
    split = place(target, mesh), place(drafter, mesh)
    for _ in range(2):  # the second time from the cache of the first
        *_, last = stream(*split, prompts, tree=DRAFT, steps_per_yield=16, kept_cache=kept, **asked)
        assert last.generation.tokens == expected
    assert kept._engine is not None
    assert kept._engine.counters.reused_tokens == 2 * PAGE


def test_every_part_of_a_state_lies_on_its_own_device(pair: tuple[Target, LoadedHead]) -> None:
    target = place(pair[0], make_mesh(2, 4))
    batch, tree = Batch(PROMPTS, 4, eos_token_ids=()), TreeConfig(beam_width=1, draft_rounds=3)
    requests = check_batch(target.config, batch)
    engine = engine_of(target, PromptLookup(), requests, tree, None, log_probs=False)
    for request in requests:
        engine.submit(request)
    engine.advance(passes=None, steps=0)
    state = engine.state
    assert sorted(state.cache.lengths.tolist()) == sorted(map(len, PROMPTS))
    B, S = state.tokens.shape
    for layer in (*state.cache.keys, *state.cache.values):
        pages = B // 2 * S // PAGE
        assert {shard.data.shape for shard in layer.addressable_shards} == {(pages, 1, PAGE, 8)}
        assert len({shard.index for shard in layer.addressable_shards}) == 8
    assert {shard.data.shape for shard in state.tokens.addressable_shards} == {(B // 2, S)}


# What a device holds of two that share the model, by name: D 32, F 48, 8 x 8 query channels,
# 4 x 8 key channels, V 24.
HALVES = {
    "embed_tokens": (12, 32),
    "layers.0.mlp.down_proj": (24, 32),
    "layers.0.mlp.gate_up_proj": (32, 48),
    "layers.0.self_attn.o_proj": (32, 32),
    "layers.0.self_attn.q_norm": (8,),
    "layers.0.self_attn.qkv_bias": (64,),
    "layers.0.self_attn.qkv_proj": (32, 64),
    "lm_head": (32, 12),
    "norm": (32,),
}


def held(model: Target | LoadedHead) -> dict[str, tuple[int, ...]]:
    """The shape of what the first device holds of each parameter."""
    return {
        ".".join(map(str, path)): variable[...].addressable_shards[0].data.shape
        for path, variable in nnx.to_flat_state(model.params)
    }


def test_what_each_device_holds_of_a_target() -> None:
    config = replace(CONFIG, attention_bias=True, qk_norm=True)
    target = place(forgetful_target(0.1, config=config), make_mesh(2, 2))
    assert HALVES.items() <= held(target).items()


def test_every_device_reads_its_own_part_of_the_files(
    pair: tuple[Target, LoadedHead], tmp_path: Path
) -> None:
    save_target(pair[0], tmp_path / "target")
    save_drafter(pair[1], tmp_path / "drafter")
    mesh = make_mesh(2, 4)
    loads: list[tuple[Any, Callable[..., Any], str]] = [
        (pair[0], load_target, "target"),
        (pair[1], load_drafter, "drafter"),
    ]
    for model, load, name in loads:
        loaded = load(tmp_path / name, "float32", mesh=mesh)
        assert loaded.mesh == mesh
        assert held(loaded) == held(place(model, mesh))
        jax.tree.map(np.testing.assert_array_equal, loaded.params, model.params)


@pytest.mark.parametrize(("parts", "size"), [(2, 24), (4, 24), (4, 22)])
def test_the_best_of_a_split_vocabulary(parts: int, size: int) -> None:
    """Of 22 tokens four devices can have no equal parts: they hold all of them."""
    mesh = make_mesh(model=parts)
    # Small whole numbers, so that there are ties, within parts and across them.
    scores = np.random.default_rng(0).integers(0, 6, (3, 5, size)).astype(np.float32)
    spec = partition(scores.shape, (None, None, "split"), mesh)
    assert (spec[-1] is not None) == (size % parts == 0)

    def measure(scores: jax.Array) -> tuple[jax.Array, ...]:
        best, where = _highest_of_shards(scores, 7, size)
        own = jax.nn.logsumexp(scores, axis=-1, keepdims=True)
        return best, where, _over_shards(own, scores, size), all_gather(scores, size)

    split = jax.shard_map(
        measure, mesh=mesh, in_specs=spec, out_specs=PartitionSpec(), check_vma=False
    )
    best, where, total, whole = jax.jit(split)(scores)
    # Of equal scores the one with the lower index comes first.
    order = np.argsort(-scores, axis=-1, kind="stable")[..., :7]
    np.testing.assert_array_equal(where, order)
    np.testing.assert_array_equal(best, np.take_along_axis(scores, order, axis=-1))
    expected = np.log(np.exp(scores.astype(np.float64)).sum(-1, keepdims=True))
    np.testing.assert_allclose(total, expected, rtol=1e-6)
    np.testing.assert_array_equal(whole, scores)


def test_what_cannot_be_split_is_refused() -> None:
    with pytest.raises(InputError, match="data=4 and model=4 needs 16 devices, but there are 8"):
        make_mesh(4, 4)
    with pytest.raises(InputError, match=r"mesh\.model is 0"):
        make_mesh(model=0)


def test_a_mesh_of_other_axes_is_refused(tmp_path: Path) -> None:
    others = {
        "axes x, y of type Auto": Mesh(make_mesh(2, 4).devices, ("x", "y")),
        "axes data, model of type Explicit": jax.make_mesh((2, 4), ("data", "model")),
    }
    for load in (load_target, load_drafter):
        for words, mesh in others.items():
            with pytest.raises(InputError, match=rf"{words}; make it with redrafter_jax\.make"):
                load(tmp_path, mesh=mesh)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"num_attention_heads": 6, "num_key_value_heads": 6},
            "num_attention_heads of 6; give model=2",
        ),
        ({"num_key_value_heads": 2}, "num_key_value_heads of 2; give model=2"),
        ({"intermediate_size": 50}, "intermediate_size of 50; give model=2"),
    ],
)
def test_heads_that_cannot_be_divided(changes: dict[str, int], words: str, tmp_path: Path) -> None:
    save_target(forgetful_target(0.1, config=replace(CONFIG, **changes)), tmp_path)
    with pytest.raises(InputError, match=f"The mesh has model=4, which does not divide .* {words}"):
        load_target(tmp_path, mesh=make_mesh(2, 4))


def test_rows_that_cannot_be_divided(pair: tuple[Target, LoadedHead]) -> None:
    target = place(pair[0], make_mesh(4, 2))
    with pytest.raises(InputError, match="The number of prompts is 3, which the mesh's data=4"):
        generate_autoregressive(target, PROMPTS[:3], max_new_tokens=4)


def test_target_and_drafter_lie_on_one_mesh(pair: tuple[Target, LoadedHead]) -> None:
    target = place(pair[0], make_mesh(2, 4))
    with pytest.raises(InputError, match="different meshes"):
        generate(target, pair[1], PROMPTS, max_new_tokens=4)
