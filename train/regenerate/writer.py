"""The target writes: batches of one size, in few shapes, speculatively where there is a drafter."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, TypeAlias

from redrafter_jax.config import DraftConfig, SamplingConfig
from redrafter_jax.decode import collect, decode
from redrafter_jax.drafter import Drafter, context_layers_of
from redrafter_jax.hub import load_drafter, load_target
from redrafter_jax.prefill import prefill
from redrafter_jax.requests import check_pair, prepare
from redrafter_jax.target import Target
from train.config import RegenerateSettings


class Request(NamedTuple):
    """What one row is asked for.

    Attributes:
      prompt: token ids.
      max_new_tokens: limit on what is written.
      seed: of its noise.
      temperature: 0 is greedy.
    """

    prompt: list[int]
    max_new_tokens: int
    seed: int
    temperature: float


# What is written for each of a batch of requests, up to and including one of the stop tokens.
Write: TypeAlias = Callable[[Sequence[Request], Sequence[int]], list[list[int]]]


def load_writer(settings: RegenerateSettings) -> Write:
    """The models that the settings name, as a function.

    Raises:
      InputError: one cannot be loaded, or they do not belong together.
    """
    target = load_target(settings.target, settings.target_dtype)
    if settings.drafter is None:
        return partial(write, target, None, None, settings.batch_size)
    drafter, draft = load_drafter(settings.drafter, settings.target_dtype), settings.draft.build()
    check_pair(target.config, drafter.config, draft)
    return partial(write, target, drafter, draft, settings.batch_size)


def write(
    target: Target,
    drafter: Drafter | None,
    draft: DraftConfig | None,
    batch_size: int,
    requests: Sequence[Request],
    stop_tokens: Sequence[int],
) -> list[list[int]]:
    """What the target writes for each request.

    Args:
      target: whose words are wanted.
      drafter: makes it faster and changes nothing; None decodes plainly.
      draft: the drafter's trees; None without one.
      batch_size: rows that are decoded together.
      requests: so many at most; fewer are filled up, so that they need no program of their own.
      stop_tokens: what ends a row.
    """
    # Idle rows end with the prompt's own pass.
    rows = [*requests, *[Request([0], 1, 0, 0.0)] * (batch_size - len(requests))]
    prompts = [row.prompt for row in rows]
    max_path = draft.max_path if draft else 1
    arrays, slots = prepare(
        target.config,
        prompts,
        [row.max_new_tokens for row in rows],
        [SamplingConfig(row.temperature) for row in rows],
        [row.seed for row in rows],
        stop_tokens,
        max_path,
    )
    layers = context_layers_of(drafter)
    state = prefill(target, arrays, max_path=max_path, context_layers=layers)
    state = decode(target, drafter, state, slots, draft=draft)
    return collect(state, prompts).tokens[: len(requests)]
