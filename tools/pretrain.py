"""`python -m tools.pretrain --config configs/demo_target.yaml`: train a small target.

The demo needs a real language model that is small enough for the repository.
"""

import json
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Bool, Float, Int
from pydantic import PositiveInt, model_validator
from rich.progress import track

from redrafter_jax.command_line import make_folder, run
from redrafter_jax.config import TargetConfig
from redrafter_jax.files.target_files import open_target
from redrafter_jax.files.target_weights import save_target
from redrafter_jax.models.target import Target, init_target
from redrafter_jax.parallel.model import Model
from redrafter_jax.settings.arguments import parse_settings
from redrafter_jax.settings.files import Settings
from tools.tokenizer import END_TOKEN, SMALLEST_VOCABULARY, save_tokenizer, train_tokenizer
from train.config import OptimizerSettings
from train.data.batches import make_batches
from train.data.chat import load_template
from train.data.documents import encode_records
from train.data.folders import read_folder
from train.data.rows import cut
from train.data.settings import DataSettings
from train.data.types import Text, Windows
from train.metrics import check_finite
from train.optimizer import make_optimizer

_EVALUATION_BATCH = 4


class PretrainSettings(Settings):
    """The settings of `python -m tools.pretrain`: train a tokenizer and a small target.

    Attributes:
      target: configuration of the target.
      data: training data, with its held-out documents.
      optimizer: the optimizer's settings.
      steps: number of optimizer steps.
      seed: seed of the first weights.
      log_every: number of steps between two printed losses.
      output_dir: folder for the target, the tokenizer and the report.
    """

    target: TargetConfig
    data: DataSettings
    optimizer: OptimizerSettings
    steps: PositiveInt
    seed: int = 0
    log_every: PositiveInt = 20
    output_dir: Path

    @model_validator(mode="after")
    def _fitting_target(self) -> "PretrainSettings":
        vocab_size, ends = self.target.vocab_size, self.target.eos_token_ids
        if vocab_size < SMALLEST_VOCABULARY or ends != (END_TOKEN,):
            raise ValueError(
                f"target.vocab_size is {vocab_size} and must be {SMALLEST_VOCABULARY} or more; "
                f"target.eos_token_ids is {list(ends)} and must be {[END_TOKEN]}"
            )
        length, positions = self.data.sequence_length, self.target.max_position_embeddings
        if not 2 <= length <= positions:
            raise ValueError(
                f"data.sequence_length is {length}, but must be from 2 to {positions}, which is "
                "target.max_position_embeddings"
            )
        return self

    def read(self, *, held_out: bool = False) -> list[Text]:
        """Read the training texts of all sources, or the held-out texts."""
        return [
            text for source in self.data.sources for text in read_folder(source, held_out=held_out)
        ]


def next_token_loss(
    target: Target, tokens: Int[Array, "B T"], loss_mask: Bool[Array, "B T"]
) -> Float[Array, ""]:
    """Return the mean cross-entropy, in nats, of the predictions of the tokens in the mask."""
    module = target.merge()
    hidden, _, _ = module.forward(tokens)
    logits = module.logits(hidden[:, :-1])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    weights = loss_mask[:, 1:]
    return jnp.sum(losses * weights) / jnp.maximum(weights.sum(), 1)


@partial(jax.jit, static_argnames="optimizer", donate_argnames=("params", "state"))
def pretrain_step(
    params: nnx.State,
    state: optax.MultiStepsState,
    target: Target,
    tokens: Int[Array, "B T"],
    loss_mask: Bool[Array, "B T"],
    *,
    optimizer: optax.MultiSteps,
) -> tuple[nnx.State, optax.MultiStepsState, Float[Array, ""]]:
    """Train on one batch; return the parameters, the optimizer state and the loss of the batch."""

    def loss(params: nnx.State) -> Array:
        return next_token_loss(Model(target.config, target.graphdef, params), tokens, loss_mask)

    value, gradients = jax.value_and_grad(loss)(params)
    updates, state = optimizer.update(gradients, state, params)
    return jax.tree.map(jnp.add, params, updates), state, value


def held_out_loss(target: Target, windows: Windows) -> tuple[float, int]:
    """Return the mean loss of the tokens in the mask, and the number of these tokens.

    The first token of a window has no context and does not count.
    """
    loss = jax.jit(next_token_loss)
    total, count = 0.0, 0
    for start in range(0, len(windows.tokens), _EVALUATION_BATCH):
        part = slice(start, start + _EVALUATION_BATCH)
        weight = int(windows.loss_mask[part, 1:].sum())
        total += weight * float(loss(target, windows.tokens[part], windows.loss_mask[part]))
        count += weight
    return total / count, count


def main() -> None:
    """Train the tokenizer and the model, and save both in `output_dir`."""
    settings = parse_settings(PretrainSettings, "Train a small target from text files.")
    make_folder(settings.output_dir, "output_dir")
    texts, held_out = settings.read(), settings.read(held_out=True)
    config, length = settings.target, settings.data.sequence_length
    tokenizer = train_tokenizer([text.text for text in texts], config.vocab_size)
    save_tokenizer(tokenizer, settings.output_dir, config.max_position_embeddings)
    template = partial(load_template, settings.data, open_target(settings.output_dir))
    windows, held_out_windows = (
        cut(encode_records(part, settings.data, tokenizer, config, template), END_TOKEN, length)
        for part in (texts, held_out)
    )

    target = init_target(config, settings.seed)
    rule = settings.optimizer
    optimizer = optax.MultiSteps(make_optimizer(rule, settings.steps), rule.accumulation_steps)
    params, state = target.params, optimizer.init(target.params)
    batches = make_batches([(windows, 1.0)], rule.batch_size, settings.data.shuffle_seed)
    for step in track(range(1, settings.steps + 1), "pretrain"):
        losses = []
        for _ in range(rule.accumulation_steps):
            batch = next(batches)
            params, state, loss = pretrain_step(
                params, state, target, batch["tokens"], batch["loss_mask"], optimizer=optimizer
            )
            losses.append(loss)
        if step % settings.log_every == 0 or step == settings.steps:
            mean = float(np.mean(losses))
            check_finite(step, rule.learning_rate, loss=mean)
            print(f"step {step}: loss {mean:.3f}")

    stored = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
    save_target(Model(config, target.graphdef, stored), settings.output_dir)
    # The loss of the stored weights, computed in float32.
    read = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), stored)
    loss, tokens = held_out_loss(Model(config, target.graphdef, read), held_out_windows)
    text_bytes = sum(len(text.text.encode()) for text in held_out)
    # The bytes include the first token of each window, for which the mean loss is assumed.
    text_tokens = int(held_out_windows.loss_mask.sum())
    report = {
        "held_out_loss_nats_per_token": loss,
        "held_out_bits_per_byte": loss * text_tokens / text_bytes / np.log(2),
        "held_out_tokens": tokens,
        "training_tokens": settings.steps * rule.accumulation_steps * rule.batch_size * length,
        "settings": settings.model_dump(mode="json"),
    }
    (settings.output_dir / "pretrain_report.json").write_text(json.dumps(report, indent=2) + "\n")
    print(f"held-out loss {loss:.4f} nats/token; target written to {settings.output_dir}")


if __name__ == "__main__":
    run(main)
