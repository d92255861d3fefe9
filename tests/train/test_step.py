"""A training step: what it adds up, what it shares, what it never holds, and its schedule."""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from tiny_models import ATTENTION, random_drafter, random_target

from redrafter_jax.config import TargetConfig
from redrafter_jax.config.drafter import HeadConfig
from redrafter_jax.drafters.eagle_head import EagleConfig
from redrafter_jax.drafters.recurrent_head import RecurrentConfig
from train.config import LossSettings, OptimizerSettings
from train.loss import count_positions, round_sums, split_chunks
from train.optimizer import make_optimizer
from train.step import StepMetrics, TrainState, init_state, train_step

pytestmark = pytest.mark.usefixtures("quick_compilation")

CONFIG = TargetConfig(31, 16, 24, 2, 2, 1, 8, 1e4, 1e-5, 64, True, (0,))
SHAPE = RecurrentConfig(31, 16, 16, 1)
ATTENDING = replace(SHAPE, **ATTENTION)
EAGLE = EagleConfig(31, 16, "3", 16, 24, 4, 2, 6, context_layers=(0,))
LOSS = LossSettings(hard=0.5, soft=2.0, lk=3.0, tv=1.5, round_decay=0.8, chunk_length=8)
RATE: dict[str, Any] = {"learning_rate": 1e-2, "batch_size": 1, "warmup_fraction": 0}
ADAMW, MUON = (
    make_optimizer(OptimizerSettings(rule=rule, **RATE), 10) for rule in ("adamw", "muon")
)


def one_step(
    accumulation: int,
    tokens: np.ndarray,
    mask: np.ndarray,
    optimizer: optax.GradientTransformation = ADAMW,
) -> tuple[TrainState, StepMetrics]:
    target, drafter = random_target(CONFIG), random_drafter(RecurrentConfig(31, 16, 16, 1))
    arrays = tokens, mask, np.ones_like(tokens)
    return train_step(
        init_state(drafter, optimizer),
        target,
        drafter.graphdef,
        *(array.reshape(accumulation, -1, tokens.shape[1]) for array in arrays),
        rounds=2,
        loss_settings=LOSS,
        optimizer=optimizer,
    )


@pytest.mark.parametrize(
    "optimizer", [ADAMW, pytest.param(MUON, marks=pytest.mark.long)], ids=["adamw", "muon"]
)
def test_accumulation_changes_memory_not_the_step(optimizer: optax.GradientTransformation) -> None:
    generator = np.random.default_rng(0)
    tokens = generator.integers(0, 31, (4, 16)).astype(np.int32)
    mask = generator.random((4, 16)) < 0.5
    whole, whole_metrics = one_step(1, tokens, mask, optimizer)
    split, split_metrics = one_step(4, tokens, mask, optimizer)
    np.testing.assert_allclose(whole_metrics.loss, split_metrics.loss, rtol=1e-5)
    np.testing.assert_allclose(whole_metrics.gradient_norm, split_metrics.gradient_norm, rtol=1e-4)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), whole.params, split.params
    )


@pytest.mark.parametrize(
    "shape",
    [SHAPE, ATTENDING, pytest.param(EAGLE, marks=pytest.mark.long)],
    ids=["recurrent", "attending", "eagle3"],
)
def test_gradients_are_those_of_the_loss_of_whole_rows(shape: HeadConfig) -> None:
    """Whatever the chunks: the derivative of one sum over all positions, by JAX itself."""
    target, drafter = random_target(CONFIG), random_drafter(shape)
    random = np.random.default_rng(0)
    tokens = random.integers(0, 31, (3, 16)).astype(np.int32)
    mask = random.random((3, 16)) < 0.7
    segments = np.repeat([[1, 2, 3]], [5, 8, 3], axis=1).repeat(3, axis=0).astype(np.int32)
    decoder, rows = target.merge(), [jnp.asarray(one) for one in (tokens, mask, segments)]
    hidden, _, _ = decoder.forward(rows[0], rows[2], shape.context_layers)
    counts = count_positions(rows[1], rows[2], 2)

    def loss(params: nnx.State) -> jax.Array:
        head = nnx.merge(drafter.graphdef, params)
        embedded = decoder.stored_embeddings(jnp.roll(rows[0], -1, axis=1))
        contexts = head.contexts(hidden, embedded, rows[2], 2)
        chunk = split_chunks(contexts, hidden[..., -16:], *rows, rounds=2, chunk_length=16)
        whole = jax.tree.map(lambda leaf: leaf[0], chunk)
        sums = round_sums(head, decoder, whole, rounds=2, settings=LOSS)
        means = (0.5 * sums.hard + 2.0 * sums.soft + 3.0 * sums.lk + 1.5 * sums.tv) / counts
        return means[0] + 0.8 * means[1]

    expected = jax.jit(jax.grad(loss))(drafter.params)
    descent = optax.sgd(1.0)
    state, _ = train_step(
        jax.tree.map(jnp.copy, init_state(drafter, descent)),
        target,
        drafter.graphdef,
        *(one[None] for one in rows),
        rounds=2,
        loss_settings=LOSS.model_copy(update={"chunk_length": 5}),
        optimizer=descent,
    )
    taken = jax.tree.map(jnp.subtract, drafter.params, state.params)
    assert min(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(expected)) > 1e-4
    jax.tree.map(
        lambda ours, theirs: np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=2e-5),
        taken,
        expected,
    )


def test_the_loss_is_the_weighted_sum_of_its_parts() -> None:
    tokens = np.random.default_rng(0).integers(0, 31, (4, 16)).astype(np.int32)
    _, (loss, rounds, _) = one_step(1, tokens, np.ones((4, 16), bool))
    parts = 0.5 * rounds.hard + 2.0 * rounds.soft + 3.0 * rounds.lk + 1.5 * rounds.tv
    np.testing.assert_allclose(loss, parts[0] + 0.8 * parts[1], rtol=1e-5)


def test_no_value_grows_with_rounds_times_positions_times_vocabulary() -> None:
    config = TargetConfig(512, 8, 8, 1, 1, 1, 8, 1e4, 1e-5, 512, True, (0,))
    target, drafter = random_target(config), random_drafter(RecurrentConfig(512, 8, 8, 1))
    optimizer = make_optimizer(OptimizerSettings(learning_rate=1e-2, batch_size=1), 10)
    rounds, positions, window = 3, 256, 16

    def sizes(jaxpr: jax.extend.core.Jaxpr) -> Iterator[int]:
        for equation in jaxpr.eqns:
            yield from (math.prod(getattr(value.aval, "shape", ())) for value in equation.outvars)
            for parameter in jax.tree.leaves(equation.params):
                inner = getattr(parameter, "jaxpr", parameter)
                if isinstance(inner, jax.extend.core.Jaxpr):
                    yield from sizes(inner)

    traced = train_step.trace(
        init_state(drafter, optimizer),
        target,
        drafter.graphdef,
        np.zeros((1, 1, positions), np.int32),
        np.ones((1, 1, positions), bool),
        np.ones((1, 1, positions), np.int32),
        rounds=rounds,
        loss_settings=LossSettings(hard=1.0, chunk_length=window),
        optimizer=optimizer,
    )
    largest = max(sizes(traced.jaxpr.jaxpr))
    assert window * 512 <= largest < positions * 512


def test_the_schedule_warms_up_then_falls_to_zero_and_gradients_are_clipped() -> None:
    optimizer = make_optimizer(
        OptimizerSettings(learning_rate=0.1, batch_size=1, warmup_fraction=0.5), 10
    )
    weight = jnp.ones(1)
    state = optimizer.init(weight)
    take = jax.jit(optimizer.update)
    sizes = []
    for _ in range(10):
        update, state = take(jnp.full(1, 1e6), state, weight)
        sizes.append(abs(float(jnp.asarray(update)[0])))
    # A constant gradient makes Adam's step the learning rate itself.
    np.testing.assert_allclose(sizes[:6], [0, 0.02, 0.04, 0.06, 0.08, 0.1], atol=1e-5)
    assert sizes[5] > sizes[7] > sizes[9] > 0
    moments = [leaf for leaf in jax.tree.leaves(state) if leaf.ndim]
    assert max(abs(float(leaf[0])) for leaf in moments) < 1.0 + 1e-5
