"""Pieces of text that the target continues."""

from collections.abc import Iterator, Sequence
from itertools import batched
from typing import Any

import numpy as np
from jaxtyping import Int

from redrafter_jax.errors import InputError

from ..config import RegenerateSettings
from ..data.types import Windows
from .output import check_tail, cut_at, format_beginning, read_rows
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


def continue_texts(
    write: Write, requests: list[Request], stop_tokens: Sequence[int], batch_size: int
) -> Iterator[list[dict[str, Any]]]:
    """Rows of the continuations, a batch at a time."""
    for batch in batched(requests, batch_size):
        written = write(batch, stop_tokens)
        yield [
            {
                "seed": request.seed,
                "temperature": request.temperature,
                "input_ids": request.prompt + tokens,
                "loss_mask": [0] * len(request.prompt) + [1] * len(tokens),
            }
            for request, tokens in zip(batch, written, strict=True)
        ]


def count_done(requests: list[Request], settings: RegenerateSettings) -> int:
    """Rows of this run that the output holds already; a row cut short by a kill is removed.

    Raises:
      InputError: there are more than `count` rows, or something that these settings do not
        write.
    """
    path = settings.output
    rows, end = read_rows(path)
    if len(rows) > len(requests):
        raise InputError(
            f"count is {len(requests)}, but {path} holds {len(rows)} rows already; raise it or "
            "use another output."
        )
    for row, request in zip(rows, requests, strict=False):
        if not _is_row(row.value, request):
            raise InputError(
                f"{path}, line {row.number} is no continuation of this run's prompt with seed "
                f"{request.seed} at temperature {request.temperature}; use another output or "
                "remove that one."
            )
    following = {"seed": len(rows), "temperature": settings.temperature_of(len(rows))}
    check_tail(path, end, [format_beginning(following)])
    cut_at(path, end)
    return len(rows)


def _is_row(row: dict[str, Any] | None, request: Request) -> bool:
    if row is None:
        return False
    try:
        ids, mask = row["input_ids"], row["loss_mask"]
        prompt = request.prompt
        return (
            (row["seed"], row["temperature"]) == (request.seed, request.temperature)
            and ids[: len(prompt)] == prompt
            and mask == [0] * len(prompt) + [1] * (len(ids) - len(prompt))
        )
    except (KeyError, TypeError):
        return False
