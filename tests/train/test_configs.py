"""The configurations for real models: they parse, and their step can be traced without weights."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from places import CONFIGS

from eval.abstract import abstract_drafter, abstract_target
from redrafter_jax.config import TargetConfig
from redrafter_jax.models.target import Target
from redrafter_jax.settings.files import load_settings
from train.config import TrainSettings
from train.optimizer import make_optimizer
from train.step import TrainState, init_state, train_step


@pytest.mark.parametrize(
    ("name", "vocab_size", "positions"),
    [
        pytest.param("vicuna_7b", 32000, 2048, marks=pytest.mark.long),
        ("llama_3_1_8b", 128256, 131072),
        pytest.param("qwen3_8b", 151936, 40960, marks=pytest.mark.long),
    ],
)
def test_a_step_can_be_traced_and_keeps_the_state(
    name: str, vocab_size: int, positions: int
) -> None:
    # Every layer is traced alike: two are enough.
    layout = (11008, 2, 32, 8, 128, 1e4, 1e-6)
    config = TargetConfig(vocab_size, 4096, *layout, positions, False, (2,))
    settings = load_settings(TrainSettings, CONFIGS / f"{name}.yaml")
    assert settings.data.sequence_length <= config.max_position_embeddings
    target = abstract_target(config, jnp.dtype(settings.target_dtype))
    drafter = abstract_drafter(
        settings.drafter.build_for(config, settings.draft_rounds), jnp.float32
    )
    optimizer = make_optimizer(settings.optimizer, settings.steps)
    state = jax.eval_shape(lambda drafter: init_state(drafter, optimizer), drafter)
    rows = settings.optimizer.accumulation_steps, settings.optimizer.batch_size
    tokens = jax.ShapeDtypeStruct((*rows, settings.data.sequence_length), jnp.int32)

    def step(state: TrainState, target: Target, tokens: jax.Array) -> Any:
        return train_step(
            state,
            target,
            drafter.graphdef,
            tokens,
            tokens > 0,
            tokens,
            rounds=settings.draft_rounds,
            loss_settings=settings.loss,
            optimizer=optimizer,
        )

    after, metrics = jax.eval_shape(step, state, target, tokens)
    for new, old in zip(jax.tree.leaves(after), jax.tree.leaves(state), strict=True):
        assert (new.shape, new.dtype) == (old.shape, old.dtype)
    assert metrics.rounds.hard.shape == (5,)
    head = drafter.params["lm_head"]["kernel"]
    assert head.shape == (8192, settings.drafter.draft_vocab_size or vocab_size)
