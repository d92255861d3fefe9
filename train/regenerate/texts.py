"""Pieces of text that the target continues."""

import numpy as np
from jaxtyping import Int

from redrafter_jax.config import SamplingConfig
from redrafter_jax.errors import InputError
from redrafter_jax.serving.messages import Request

from ..config import RegenerateSettings
from ..data.types import Windows
from .output import Item
from .session import Rows, Session


def choose_prompts(
    windows: Windows, prompt_tokens: int, count: int, seed: int
) -> Int[np.ndarray, "count prompt"]:
    """The beginnings of `count` windows that are full of text, none of them twice.

    Raises:
      InputError: there are fewer full windows.
    """
    full = np.flatnonzero(windows.loss_mask[:, 1:].all(axis=1))
    if len(full) < count:
        raise InputError(
            f"count is {count}, but the data has {len(full)} pieces of text of "
            f"{windows.tokens.shape[1]} tokens, as data.sequence_length says; lower one of them, "
            "or give prompt_tokens=null count=null to rewrite conversations."
        )
    chosen = np.random.default_rng(seed).permutation(full)[:count]
    return windows.tokens[chosen, :prompt_tokens]


def text_item(prompt: list[int], seed: int, settings: RegenerateSettings) -> Item:
    """The continuation of a prompt as the output knows it."""
    identity = {
        "seed": seed,
        "temperature": settings.temperature_of(seed),
        "sequence_length": settings.data.sequence_length,
    }
    return Item(seed, identity, prompt)


def continue_text(item: Item, length: int) -> Session[Rows]:
    """A row of `length` tokens, unless the target ends it before."""
    prompt = item.opening
    sampling = SamplingConfig(item.identity["temperature"])
    written = yield Request(prompt, length - len(prompt), item.seed, sampling)
    mask = [0] * len(prompt) + [1] * len(written)
    return [item.identity | {"input_ids": prompt + written, "loss_mask": mask}]
