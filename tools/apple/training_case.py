"""What both sides train: a folder with the two models, the batches and the optimizer's numbers."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Int

from redrafter_jax.checkpoints.huggingface import load_target, save_drafter, save_target
from redrafter_jax.config import DrafterConfig, TargetConfig
from redrafter_jax.drafters.recurrent_head import init_drafter
from redrafter_jax.models.target import Target, init_target
from tools.apple.training_settings import AppleSettings, CurveSettings, SpeedSettings
from train.data.batches import make_batches
from train.data.documents import load_documents
from train.data.rows import make_rows
from train.optimizer import make_schedule

# Steps that each side takes before speed is measured.
WARM_UP = 2


class Batches(NamedTuple):
    """Rows of all steps."""

    tokens: Int[np.ndarray, "steps B T"]
    loss_mask: Bool[np.ndarray, "steps B T"]
    segments: Int[np.ndarray, "steps B T"]


def random_batches(speed: SpeedSettings, steps: int, seed: int) -> Batches:
    """Rows of one document each, of tokens drawn evenly."""
    shape = (steps, speed.batch_size, speed.sequence_length)
    tokens = np.random.default_rng(seed).integers(0, speed.target.vocab_size, shape, np.int32)
    return Batches(tokens, np.ones(shape, bool), np.ones(shape, np.int32))


def read_batches(curve: CurveSettings, target: Target) -> Batches:
    """The rows that `python -m train` would see, in its order.

    Raises:
      InputError: the data cannot be used.
    """
    sources = load_documents(curve.data, curve.target, target.config)
    end_token = target.config.eos_token_ids[0]
    mixture = [
        (make_rows(source, curve.data, end_token).windows, source.weight) for source in sources
    ]
    batches = make_batches(mixture, curve.batch_size, curve.data.shuffle_seed)
    taken = [next(batches) for _ in range(curve.steps)]
    return Batches(*(np.stack([batch[name] for batch in taken]) for name in Batches._fields))


def write_speed_case(folder: Path, settings: AppleSettings) -> None:
    """The case that speed and memory are measured on."""
    speed = settings.speed
    target = init_target(
        TargetConfig(**speed.target.model_dump(), eos_token_ids=(0,)), settings.seed
    )
    steps = WARM_UP + speed.turns * speed.steps_per_turn
    _write(folder, settings, target, random_batches(speed, steps, settings.seed))


def write_curve_case(folder: Path, settings: AppleSettings) -> None:
    """The case that losses are compared on.

    Raises:
      InputError: target or data cannot be used.
    """
    target = load_target(settings.curve.target, "float32")
    _write(folder, settings, target, read_batches(settings.curve, target))


def _write(folder: Path, settings: AppleSettings, target: Target, batches: Batches) -> None:
    folder.mkdir()
    save_target(target, folder / "target")
    width = target.config.hidden_size
    shape = DrafterConfig(target.config.vocab_size, width, 2 * width, settings.num_draft_layers)
    save_drafter(init_drafter(shape, settings.seed), folder / "drafter")
    np.savez(folder / "batches.npz", **batches._asdict())
    steps = len(batches.tokens)
    schedule = make_schedule(settings.optimizer, steps)
    numbers: dict[str, Any] = {
        "rounds": settings.draft_rounds,
        "chunk_length": settings.chunk_length,
        "accuracies": settings.accuracies,
        "optimizer": settings.optimizer.model_dump(mode="json"),
        "learning_rates": np.asarray([schedule(step) for step in range(steps)]).tolist(),
    }
    (folder / "case.json").write_text(json.dumps(numbers))
