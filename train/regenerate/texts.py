"""Pieces of text that the target continues."""

from collections.abc import Iterator, Sequence
from itertools import batched
from typing import Any

import numpy as np
from jaxtyping import Int

from redrafter_jax.errors import InputError

from ..config import RegenerateSettings
from ..data.types import Windows
from .output import Item
from .writer import Request, Write


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


def make_requests(
    prompts: Int[np.ndarray, "count prompt"], settings: RegenerateSettings
) -> list[Request]:
    """What is asked for each prompt: the rest of a row of `data.sequence_length` tokens."""
    room = settings.data.sequence_length - prompts.shape[1]
    return [
        Request(prompt, room, seed, settings.temperature_of(seed))
        for seed, prompt in enumerate(prompts.tolist())
    ]


def text_item(request: Request) -> Item:
    """The request as the output knows it."""
    identity = {"seed": request.seed, "temperature": request.temperature}
    return Item(identity, request.prompt)


def continue_texts(
    write: Write, requests: Sequence[Request], stop_tokens: Sequence[int], batch_size: int
) -> Iterator[list[dict[str, Any]]]:
    """Rows of the continuations, a batch at a time."""
    for batch in batched(requests, batch_size):
        written = write(batch, stop_tokens)
        yield [
            text_item(request).identity
            | {
                "input_ids": request.prompt + tokens,
                "loss_mask": [0] * len(request.prompt) + [1] * len(tokens),
            }
            for request, tokens in zip(batch, written, strict=True)
        ]
