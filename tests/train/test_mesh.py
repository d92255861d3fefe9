"""Training on meshes: the losses and the drafter of one device."""

from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import ATTENTION, random_drafter, random_target, tiny_config

from redrafter_jax.drafters.base import LoadedHead
from redrafter_jax.drafters.eagle_head import EagleConfig
from redrafter_jax.drafters.recurrent_head import RecurrentConfig
from redrafter_jax.models.target import Target
from redrafter_jax.parallel.mesh import FULLY_SHARDED, RULES, make_mesh, place
from train.checkpoint import open_checkpoints, restore_latest, save
from train.config import LossSettings, OptimizerSettings
from train.data.batches import place_batch
from train.data.types import Windows
from train.optimizer import make_optimizer
from train.step import TrainState, init_state, train_step

pytestmark = pytest.mark.usefixtures("quick_compilation")

Pair: TypeAlias = tuple[Target, LoadedHead]
Trained: TypeAlias = tuple[TrainState, list[float]]

CONFIG = tiny_config(num_attention_heads=8, num_key_value_heads=4, num_hidden_layers=1)
SHAPE = RecurrentConfig(CONFIG.vocab_size, CONFIG.hidden_size, 40, 1)
STEPS = 40
LOSS = LossSettings(hard=0.5, soft=1.0, chunk_length=8)
OPTIMIZER = make_optimizer(
    OptimizerSettings(rule="adamw", learning_rate=0.01, batch_size=8, accumulation_steps=2),
    STEPS,
)


@pytest.fixture(scope="module")
def pair() -> Pair:
    return random_target(CONFIG), random_drafter(SHAPE)


def batch(step: int) -> dict[str, np.ndarray]:
    """16 rows of 16 tokens, two documents in some of them."""
    random = np.random.default_rng(step)
    tokens = random.integers(0, CONFIG.vocab_size, (16, 16)).astype(np.int32)
    # A text to learn: every other token follows from the one before.
    tokens[:, 1::2] = (tokens[:, ::2] * 5 + 1) % CONFIG.vocab_size
    segments = (np.arange(16) >= random.integers(4, 30, (16, 1))).astype(np.int32)
    return Windows(tokens, random.random((16, 16)) < 0.9, segments)._asdict()


def train(pair: Pair, sizes: tuple[int, int] | None, *, fully_sharded: bool = False) -> Trained:
    mesh = None if sizes is None else make_mesh(*sizes)
    target, drafter = place(pair[0], mesh), pair[1]
    # The step donates its state, and the pair is used again.
    state = jax.tree.map(jnp.copy, init_state(drafter, OPTIMIZER))
    state = place(state, mesh, FULLY_SHARDED if fully_sharded else RULES)
    losses = []
    for step in range(STEPS):
        state, metrics = train_step(
            state,
            target,
            drafter.graphdef,
            **place_batch(batch(step), 2, mesh),  # pyright: ignore[reportArgumentType]
            rounds=2,
            loss_settings=LOSS,
            optimizer=OPTIMIZER,
            fully_sharded=fully_sharded,
        )
        losses.append(metrics.loss)
    return state, np.asarray(losses).tolist()


@pytest.fixture(scope="module")
def on_one_device(pair: Pair) -> Trained:
    return train(pair, None)


@pytest.mark.parametrize("sizes", [(1, 2), pytest.param((4, 2), marks=pytest.mark.long)])
def test_losses_and_parameters_are_those_of_one_device(
    pair: Pair, on_one_device: Trained, sizes: tuple[int, int]
) -> None:
    check_run(train(pair, sizes), on_one_device)


@pytest.mark.long
def test_a_head_that_the_targets_projection_scores_trains_as_on_one_device() -> None:
    some = tuple(range(0, CONFIG.vocab_size, 2))
    shape = replace(SHAPE, head="target", draft_tokens=some)
    shared = random_target(CONFIG), random_drafter(shape)
    check_run(train(shared, (1, 2)), train(shared, None))


@pytest.mark.long
@pytest.mark.parametrize("kind", ["recurrent", "eagle3"])
def test_a_head_that_attends_trains_as_on_one_device(kind: str) -> None:
    D = CONFIG.hidden_size
    shapes = {
        "recurrent": replace(SHAPE, context_layers=(0,), **ATTENTION),
        "eagle3": EagleConfig(CONFIG.vocab_size, D, "3", D, 24, 4, 2, 6, context_layers=(0,)),
    }
    target = random_target(replace(CONFIG, num_hidden_layers=2))
    attending = target, random_drafter(shapes[kind])
    check_run(train(attending, (2, 2)), train(attending, None))


@pytest.fixture(scope="module")
def fully_sharded_run(pair: Pair) -> Trained:
    return train(pair, (2, 2), fully_sharded=True)


@pytest.mark.long
def test_a_fully_sharded_run_is_that_of_one_device_and_split_over_both_axes(
    fully_sharded_run: Trained,
    on_one_device: Trained,
) -> None:
    check_run(fully_sharded_run, on_one_device)
    # Two parameters, and both moments of AdamW for each: split over data and over model.
    state, _ = fully_sharded_run
    kernels = [leaf for leaf in jax.tree.leaves(state) if leaf.shape == (32, 32)]
    assert len(kernels) == 3 * 2
    assert {leaf.addressable_shards[0].data.shape for leaf in kernels} == {(16, 16)}


@pytest.mark.parametrize("sizes", [None, (1, 2)])
@pytest.mark.long
def test_a_checkpoint_is_restored_on_another_mesh(
    fully_sharded_run: Trained,
    pair: Pair,
    sizes: tuple[int, int] | None,
    tmp_path: Path,
) -> None:
    state, _ = fully_sharded_run
    with open_checkpoints(tmp_path, 1) as checkpoints:
        save(checkpoints, STEPS, state, {})
    fresh = jax.tree.map(jnp.copy, init_state(pair[1], OPTIMIZER))
    fresh = place(fresh, None if sizes is None else make_mesh(*sizes))
    with open_checkpoints(tmp_path, 1) as checkpoints:
        restored = restore_latest(checkpoints, fresh, True)
    assert restored is not None
    leaves = map(jax.tree.leaves, (restored.arrays, state, fresh))
    for new, saved, like in zip(*leaves, strict=True):
        np.testing.assert_array_equal(new, saved)
        assert new.sharding.is_equivalent_to(like.sharding, new.ndim)


def check_run(run: Trained, on_one_device: Trained) -> None:
    state, losses = run
    expected, expected_losses = on_one_device
    assert expected_losses[-1] < 0.8 * expected_losses[0]
    np.testing.assert_allclose(losses, expected_losses, rtol=0, atol=1e-5 * losses[0])
    for ours, theirs in zip(
        jax.tree.leaves(state.params), jax.tree.leaves(expected.params), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-3)
