"""The target writes: batches of one size, speculatively where there is a drafter."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, TypeAlias

from jax.sharding import Mesh

from redrafter_jax.checkpoints.huggingface import load_drafter, load_target
from redrafter_jax.config import DraftConfig, SamplingConfig
from redrafter_jax.drafters.recurrent import check_pair
from redrafter_jax.drafters.recurrent_head import DraftModel
from redrafter_jax.generation import generate
from redrafter_jax.models.target import Target

from ..config import RegenerateSettings


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


def load_writer(settings: RegenerateSettings, mesh: Mesh | None = None) -> Write:
    """The models that the settings name, as a function.

    Raises:
      InputError: one cannot be loaded, or they do not belong together.
    """
    target = load_target(settings.target, settings.target_dtype, mesh)
    if settings.drafter is None:
        return partial(write, target, None, None, settings.batch_size)
    drafter = load_drafter(settings.drafter, settings.target_dtype, mesh)
    check_pair(target.config, drafter.config, settings.draft)
    return partial(write, target, drafter, settings.draft, settings.batch_size)


def write(
    target: Target,
    drafter: DraftModel | None,
    draft: DraftConfig | None,
    batch_size: int,
    requests: Sequence[Request],
    stop_tokens: Sequence[int],
) -> list[list[int]]:
    """What the target writes for each request.

    Args:
      target: whose words are wanted.
      drafter: makes it faster and changes nothing; None decodes one token at a time.
      draft: the drafter's trees; None without one.
      batch_size: rows that are decoded together.
      requests: so many at most; fewer are filled up, so that they need no program of their own.
      stop_tokens: what ends a row.
    """
    # Idle rows end with the prompt's own pass.
    rows = [*requests, *[Request([0], 1, 0, 0.0)] * (batch_size - len(requests))]
    result = generate(
        target,
        drafter,
        [row.prompt for row in rows],
        max_new_tokens=[row.max_new_tokens for row in rows],
        draft=draft,
        sampling=[SamplingConfig(row.temperature) for row in rows],
        seeds=[row.seed for row in rows],
        eos_token_ids=stop_tokens,
    )
    return result.tokens[: len(requests)]
