"""The drafter that training starts from."""

from collections.abc import Sequence

import jax.numpy as jnp
from jaxtyping import Array, Float

from redrafter_jax.config import DrafterConfig
from redrafter_jax.drafter import Drafter, init_drafter
from redrafter_jax.errors import InputError
from redrafter_jax.model import Model
from redrafter_jax.target import Target
from train.config import DrafterSettings
from train.data.types import Windows
from train.vocabulary import most_frequent


def new_drafter(
    target: Target, settings: DrafterSettings, sources: Sequence[tuple[Windows, float]], seed: int
) -> Drafter:
    """A drafter to start from, of the target's width.

    Args:
      target: that it will draft for.
      settings: its shape, and where its head starts.
      sources: the training data, from which a smaller vocabulary is chosen if one is asked for.
      seed: of its random parameters.

    Raises:
      InputError: the head is to start from the target's, but is wider; or the target has fewer
        tokens than are asked for.
    """
    config = DrafterConfig(
        vocab_size=target.config.vocab_size,
        hidden_size=target.config.hidden_size,
        exit_dim=settings.exit_dim,
        num_draft_layers=settings.num_draft_layers,
        rnn=settings.rnn,
        draft_tokens=_draft_tokens(target, settings, sources),
    )
    drafter = init_drafter(config, seed)
    if settings.initial_head == "random":
        return drafter
    if config.exit_dim > config.hidden_size:
        raise InputError(
            f"drafter.initial_head=target asks for an exit_dim of {config.hidden_size}, the "
            f"target's width, or less, not {config.exit_dim}."
        )
    drafter_head = drafter.merge()
    head = target.merge().head.astype(jnp.float32)
    drafted = drafter_head.draft_token_ids
    rows = _principal_rows(head if drafted is None else head[:, drafted], config.exit_dim)
    drafter_head.lm_head.kernel[...] = rows
    return Model.split(config, drafter_head)


def _draft_tokens(
    target: Target, settings: DrafterSettings, sources: Sequence[tuple[Windows, float]]
) -> tuple[int, ...] | None:
    if settings.draft_vocab_size is None:
        return None
    config = target.config
    # Where a draft can end no text, every text ends with a call for its end alone.
    ends = set(config.eos_token_ids)
    return most_frequent(sources, settings.draft_vocab_size, config.vocab_size, ends)


def _principal_rows(head: Float[Array, "D U"], exit_dim: int) -> Float[Array, "E U"]:
    """The head itself, or its E strongest directions: the best head of that rank."""
    if exit_dim == len(head):
        return head
    _, directions = jnp.linalg.eigh(head @ head.T)
    return directions[:, : -exit_dim - 1 : -1].T @ head
