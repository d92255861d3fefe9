"""The configurations of training and of its data: what they name can be built without weights."""

import jax
import jax.numpy as jnp
import pytest
from places import CONFIGS
from tiny_models import tiny_config

from eval.abstract import abstract_drafter
from redrafter_jax.settings.files import load_settings
from train.config import RegenerateSettings, TrainSettings
from train.optimizer import make_optimizer
from train.step import init_state

# Some leave the target to whoever starts them.
TARGET = ["target=a/model"]


@pytest.mark.parametrize(
    ("name", "vocab_size", "layers", "positions"),
    [
        ("demo", 2048, 12, 512),
        ("distillation", 2048, 12, 512),
        ("eagle3_llama_3_1_8b", 128256, 32, 131072),
        ("llama_3_1_8b", 128256, 32, 131072),
        ("qwen3_8b", 151936, 36, 40960),
        ("vicuna_7b", 32000, 32, 2048),
        ("qwen2_5_coder_1_5b/head", 151936, 28, 32768),
        ("smollm2_135m/demo", 49152, 30, 8192),
        ("smollm2_135m/drafter", 49152, 30, 8192),
        ("smollm2_135m/attending", 49152, 30, 8192),
    ],
)
def test_a_drafter_and_its_optimizer_can_be_made(
    name: str, vocab_size: int, layers: int, positions: int
) -> None:
    settings = load_settings(TrainSettings, CONFIGS / f"{name}.yaml", TARGET)
    assert settings.data.sequence_length <= positions
    config = tiny_config(vocab_size=vocab_size, num_hidden_layers=layers)
    shape = settings.drafter.build_for(config, settings.draft_rounds)
    optimizer = make_optimizer(settings.optimizer, settings.steps)
    drafter = abstract_drafter(shape, jnp.float32)
    jax.eval_shape(lambda drafter: init_state(drafter, optimizer), drafter)


@pytest.mark.parametrize(
    "name",
    [
        "demo_regenerate",
        "llama_3_1_8b_words",
        "qwen2_5_coder_1_5b/words",
        "smollm2_135m/kinds",
        "smollm2_135m/own_words",
        "smollm2_135m/regenerate",
    ],
)
def test_the_settings_of_written_data_are_valid(name: str) -> None:
    load_settings(RegenerateSettings, CONFIGS / f"{name}.yaml", TARGET)
