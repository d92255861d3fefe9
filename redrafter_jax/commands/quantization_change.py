"""Measures how quantization changes a target's loss, its likeliest tokens and its greedy text."""

from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int
from tqdm import tqdm

from redrafter_jax.errors import InputError
from redrafter_jax.files.fields import read_text
from redrafter_jax.files.target_files import load_target, open_target
from redrafter_jax.generation import generate_autoregressive
from redrafter_jax.models.target import Target
from redrafter_jax.text.tokenizer import shared_length

# Number of tokens per window, per prompt and per compared continuation; number of continuations.
_WINDOW, _PROMPT, _CONTINUED, _TEXTS = 256, 32, 64, 8


class _Reading(NamedTuple):
    """A target's loss and most likely token at every position, and its greedy continuations."""

    losses: Float[np.ndarray, " tokens"]
    choices: Int[np.ndarray, " tokens"]
    greedy: list[list[int]]


def read_windows(path: Path, source: str | Path) -> Int[np.ndarray, "windows tokens"]:
    """Tokenize a text file with the tokenizer of `source`, and cut the tokens into windows.

    A window has 256 tokens. Tokens after the last whole window are left out.

    Raises:
      InputError: the file cannot be read, is not UTF-8 or has too few tokens, or the source is not
        a target.
    """
    text = read_text(path)
    files = open_target(source)
    _ = files.config  # refuses a drafter, which cannot be measured alone
    tokens = np.asarray(files.tokenizer.encode(text).ids, np.int32)
    count = len(tokens) // _WINDOW
    if not count:
        raise InputError(
            f"{path} has {len(tokens)} tokens, but the measurement needs {_WINDOW} or more; give "
            "more text."
        )
    return tokens[: count * _WINDOW].reshape(count, _WINDOW)


def print_change(
    source: str | Path, quantized: Path, windows: Int[np.ndarray, "windows tokens"]
) -> None:
    """Print how the quantized target differs from its source on a text.

    Both targets are computed in float32, and only one of them is in memory at a time.

    Args:
      source: folder, GGUF file or hub id of the source.
      quantized: folder of the quantized target.
      windows: token ids from `read_windows`.
    """
    before, after = (_read(load_target(path, "float32"), windows) for path in (source, quantized))
    agreement = float(np.mean(before.choices == after.choices))
    loss, new_loss = before.losses.mean(), after.losses.mean()
    same = sum(map(shared_length, before.greedy, after.greedy))
    total = sum(map(len, before.greedy))
    whole = sum(one == other for one, other in zip(before.greedy, after.greedy, strict=True))
    print(
        f"On {before.losses.size:,} tokens of held-out text the loss goes from {loss:.4f} to "
        f"{new_loss:.4f} nats per token ({new_loss - loss:+.4f}); the most likely next token is "
        f"the same at {agreement:.1%}."
    )
    print(
        f"Of {len(before.greedy)} greedy continuations of {_CONTINUED} tokens, {whole} are "
        f"identical; {same} of {total} tokens come before the first difference."
    )


def _read(target: Target, windows: Int[np.ndarray, "windows tokens"]) -> _Reading:
    scored = [
        jax.device_get(_score(target, jnp.asarray(window[None])))
        for window in tqdm(windows, desc="held-out text", leave=False, disable=None)
    ]
    losses, choices = map(np.concatenate, zip(*scored, strict=True))
    prompts = [window[:_PROMPT].tolist() for window in windows[:_TEXTS]]
    greedy = generate_autoregressive(target, prompts, max_new_tokens=_CONTINUED).tokens
    return _Reading(losses, choices, greedy)


@jax.jit
def _score(
    target: Target, window: Int[Array, "1 tokens"]
) -> tuple[Float[Array, " scored"], Int[Array, " scored"]]:
    decoder = target.merge()
    hidden, _, _ = decoder.forward(window)
    log_probs = jax.nn.log_softmax(decoder.logits(hidden[0, :-1]))
    return -jnp.take_along_axis(log_probs, window[0, 1:, None], axis=1)[:, 0], log_probs.argmax(-1)
