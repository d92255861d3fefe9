"""`python -m tools.pretrain --config configs/demo_target.yaml`: a small target from text files.

The demo needs a real language model that is small enough to be kept beside the code; this trains
it.
"""

import json
import time
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Bool, Float, Int
from rich.progress import track

from redrafter_jax.checkpoints.huggingface import save_target
from redrafter_jax.command_line import make_folder, run
from redrafter_jax.config import TargetConfig
from redrafter_jax.models.target import Target, init_target
from redrafter_jax.parallel.model import Model
from redrafter_jax.settings.arguments import parse_settings
from tools.pretrain_settings import PretrainSettings
from tools.tokenizer import save_tokenizer, train_tokenizer
from train.data.batches import make_batches
from train.data.chat import load_template
from train.data.documents import encode_records
from train.data.folders import read_folder
from train.data.rows import cut
from train.data.types import Windows
from train.metrics import check_finite
from train.optimizer import make_optimizer

_END_TOKEN = 0
_EVALUATION_BATCH = 4


class HeldOutLoss(NamedTuple):
    """Mean cross-entropy in nats, and the number of tokens it is the mean of."""

    mean: float
    tokens: int


class PretrainState(NamedTuple):
    """What one optimizer step reads and writes."""

    params: nnx.State
    optimizer: optax.OptState


def next_token_loss(
    target: Target, tokens: Int[Array, "B T"], loss_mask: Bool[Array, "B T"]
) -> Float[Array, ""]:
    """Mean cross-entropy, in nats, of every unmasked token given those before it."""
    module = target.merge()
    hidden, _, _ = module.forward(tokens)
    logits = module.logits(hidden[:, :-1])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    weights = loss_mask[:, 1:]
    return jnp.sum(losses * weights) / jnp.maximum(weights.sum(), 1)


@partial(jax.jit, static_argnames="optimizer", donate_argnames="state")
def pretrain_step(
    state: PretrainState,
    target: Target,
    tokens: Int[Array, "A B T"],
    loss_mask: Bool[Array, "A B T"],
    *,
    optimizer: optax.GradientTransformation,
) -> tuple[PretrainState, Float[Array, ""]]:
    """One optimizer step over A accumulated batches; returns their mean loss."""

    def loss(params: nnx.State, batch: tuple[Array, Array]) -> Array:
        return next_token_loss(Model(target.config, target.graphdef, params), *batch)

    def accumulate(gradients: nnx.State, batch: tuple[Array, Array]) -> tuple[nnx.State, Array]:
        value, fresh = jax.value_and_grad(loss)(state.params, batch)
        return jax.tree.map(jnp.add, gradients, fresh), value

    zeros = jax.tree.map(jnp.zeros_like, state.params)
    gradients, losses = jax.lax.scan(accumulate, zeros, (tokens, loss_mask))
    gradients = jax.tree.map(lambda leaf: leaf / len(tokens), gradients)
    updates, optimizer_state = optimizer.update(gradients, state.optimizer, state.params)
    params = jax.tree.map(jnp.add, state.params, updates)
    return PretrainState(params, optimizer_state), losses.mean()


def held_out_loss(target: Target, windows: Windows) -> HeldOutLoss:
    """The loss of all counted tokens but the first of each window, which nothing precedes."""
    loss = jax.jit(next_token_loss)
    total, count = 0.0, 0
    for start in range(0, len(windows.tokens), _EVALUATION_BATCH):
        part = slice(start, start + _EVALUATION_BATCH)
        weight = int(windows.loss_mask[part, 1:].sum())
        total += weight * float(loss(target, windows.tokens[part], windows.loss_mask[part]))
        count += weight
    return HeldOutLoss(total / count, count)


def main() -> None:
    """Train the tokenizer, then the model; keep both in `output_dir`."""
    settings = parse_settings(PretrainSettings, "Train a small target from text files.")
    config = TargetConfig(**settings.target.model_dump(), eos_token_ids=(_END_TOKEN,))
    make_folder(settings.output_dir, "output_dir")
    texts, held_out = (
        [text for source in settings.data.sources for text in read_folder(source, held_out=part)]
        for part in (False, True)
    )
    tokenizer = train_tokenizer([text.text for text in texts], settings.target.vocab_size)
    save_tokenizer(tokenizer, settings.output_dir, settings.target.max_position_embeddings)
    length = settings.data.sequence_length
    template = partial(load_template, settings.data, settings.output_dir, tokenizer)
    windows, held_out_windows = (
        cut(encode_records(part, settings.data, tokenizer, config, template), _END_TOKEN, length)
        for part in (texts, held_out)
    )
    # The last window of a document may hold its last token alone, which is not scored.
    scored = np.flatnonzero(held_out_windows.loss_mask[:, 1:].any(axis=1))
    sample = np.random.default_rng(0).permutation(scored)
    sample = np.sort(sample[: settings.evaluation_windows])
    sampled = Windows(*(rows[sample] for rows in held_out_windows))

    target = init_target(config, settings.seed)
    optimizer = make_optimizer(
        settings.optimizer, settings.steps, lambda name: name.startswith("layers")
    )
    state = PretrainState(target.params, optimizer.init(target.params))
    group = settings.optimizer.accumulation_steps
    rows = settings.optimizer.batch_size * group
    batches = make_batches([(windows, 1.0)], rows, settings.data.shuffle_seed)

    def current() -> Target:
        return Model(config, target.graphdef, state.params)

    started = time.perf_counter()
    for step in track(range(1, settings.steps + 1), "pretrain"):
        batch = next(batches)
        shape = (group, -1, length)
        tokens, loss_mask = (batch[name].reshape(shape) for name in ("tokens", "loss_mask"))
        state, loss = pretrain_step(state, target, tokens, loss_mask, optimizer=optimizer)
        if step % settings.log_every == 0 or step == settings.steps:
            check_finite(step, settings.optimizer.learning_rate, loss=float(loss))
            speed = step * batch["tokens"].size / (time.perf_counter() - started)
            print(f"step {step}: loss {float(loss):.3f}, {speed:.0f} tokens/s")
        if step % settings.evaluate_every == 0:
            check_finite(step, settings.optimizer.learning_rate, loss=float(loss))
            _export(current(), settings)
            measured = held_out_loss(current(), sampled)
            print(f"step {step}: held-out loss {measured.mean:.4f} nats/token")

    _export(current(), settings)
    measured = held_out_loss(current(), held_out_windows)
    text_bytes = sum(len(document.text.encode()) for document in held_out)
    # The bytes are those of all tokens, so the first of a window is taken to cost the mean as well.
    text_tokens = int(held_out_windows.loss_mask.sum())
    report = {
        "held_out_loss_nats_per_token": measured.mean,
        "held_out_bits_per_byte": measured.mean * text_tokens / text_bytes / np.log(2),
        "held_out_tokens": measured.tokens,
        "training_tokens": settings.steps * group * settings.optimizer.batch_size * length,
        "settings": settings.model_dump(mode="json"),
    }
    (settings.output_dir / "pretrain_report.json").write_text(json.dumps(report, indent=2) + "\n")
    print(f"held-out loss {measured.mean:.4f} nats/token; target written to {settings.output_dir}")


def _export(target: Target, settings: PretrainSettings) -> None:
    dtype = jnp.dtype(settings.export_dtype)
    params = jax.tree.map(lambda leaf: leaf.astype(dtype), target.params)
    save_target(Model(target.config, target.graphdef, params), settings.output_dir)


if __name__ == "__main__":
    run(main)
