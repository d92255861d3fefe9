"""Lists of prompts in, tokens out."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from redrafter_jax.acceptance import acceptance_length
from redrafter_jax.config import DraftConfig, SamplingConfig
from redrafter_jax.decoding.prefill import Memory, prefill
from redrafter_jax.decoding.step import decode
from redrafter_jax.drafters.recurrent import Drafter
from redrafter_jax.errors import InputError
from redrafter_jax.models.target import Target
from redrafter_jax.parallel.mesh import check_rows, common_mesh, place, to_host
from redrafter_jax.parallel.model import Model
from redrafter_jax.requests import PerRow, StopTokens, check_pair, prepare
from redrafter_jax.types import DecodeState


class Generation(NamedTuple):
    """What `generate` returns.

    Attributes:
      tokens: per row, the new tokens up to and including the stop token.
      steps: per row, target calls after prefill.
      acceptance_length: mean tokens gained per target call, bonus included; 1.0 in plain decoding.
      accept_counts: [B, P]; entry (b, c - 1) counts the calls that gained row b c tokens.
      copied_tokens: per row, accepted tokens that were copied (`DraftConfig.lookup_tokens`); those
        that the beams had as well count as the drafter's, and a call's last token is its bonus,
        also where the row ends before it.
      log_probs: per row, beside each new token its log-probability under the target at
        temperature 1 without filters; None unless asked for.
    """

    tokens: list[list[int]]
    steps: list[int]
    acceptance_length: float
    accept_counts: np.ndarray
    copied_tokens: list[int]
    log_probs: list[list[float]] | None = None


def collect(state: DecodeState, prompts: Sequence[Sequence[int]]) -> Generation:
    """What is decided so far, on the host; `prompts` are those the state was made from."""
    tokens, log_probs, lengths, stats = to_host(
        (state.tokens, state.log_probs, state.cache.lengths, state.stats)
    )

    def new(rows: np.ndarray) -> list[list[Any]]:
        ends = lengths + 1
        return [
            row[len(prompt) : end].tolist()
            for row, prompt, end in zip(rows, prompts, ends, strict=True)
        ]

    return Generation(
        tokens=new(tokens),
        steps=stats.steps.tolist(),
        acceptance_length=acceptance_length(stats.accept_counts),
        accept_counts=stats.accept_counts,
        copied_tokens=stats.copied_tokens.tolist(),
        log_probs=None if log_probs is None else new(log_probs),
    )


def generate(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: PerRow[int],
    draft: DraftConfig | None = None,
    sampling: PerRow[SamplingConfig] | None = None,
    seeds: Sequence[int] | None = None,
    eos_token_ids: StopTokens | None = None,
    log_probs: bool = False,
) -> Generation:
    """Speculative decoding: the text of `generate_autoregressive`, in fewer target calls.

    Args:
      target: from `load_target`.
      drafter: from `load_drafter`, trained for this target.
      prompts: token ids, ragged.
      max_new_tokens: limit on new tokens, one for all rows or one per row.
      draft: how trees are drafted; None for `DraftConfig()`.
      sampling: how tokens are chosen, one for all rows or one per row; None is greedy.
      seeds: one per row, equal ones allowed; None counts rows from 0.
      eos_token_ids: tokens that end a row, one list for all rows or one per row; None takes the
        target's, () never stops.
      log_probs: also return the log-probability of every new token.

    Raises:
      InputError: a prompt, a limit or the drafter does not fit the target.
    """
    if not isinstance(drafter, Model):
        raise InputError(
            f"drafter is {drafter!r:.40}; give one of load_drafter, or call "
            "generate_autoregressive, which decodes without."
        )
    draft = draft or DraftConfig()
    check_pair(target.config, drafter.config, draft)
    common_mesh(target, drafter)
    state, max_steps = start(
        target,
        prompts,
        max_new_tokens,
        sampling,
        seeds,
        eos_token_ids,
        max_path=draft.max_path,
        log_probs=log_probs,
        context_layers=drafter.config.context_layers,
    )
    return collect(decode(target, drafter, state, max_steps, draft=draft), prompts)


def generate_autoregressive(
    target: Target,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: PerRow[int],
    sampling: PerRow[SamplingConfig] | None = None,
    seeds: Sequence[int] | None = None,
    eos_token_ids: StopTokens | None = None,
    log_probs: bool = False,
) -> Generation:
    """Plain decoding, one token per target call; arguments as in `generate`."""
    state, max_steps = start(
        target,
        prompts,
        max_new_tokens,
        sampling,
        seeds,
        eos_token_ids,
        max_path=1,
        log_probs=log_probs,
    )
    return collect(decode(target, None, state, max_steps, draft=None), prompts)


def start(
    target: Target,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: PerRow[int],
    sampling: PerRow[SamplingConfig] | None,
    seeds: Sequence[int] | None,
    eos_token_ids: StopTokens | None,
    *,
    max_path: int,
    log_probs: bool = False,
    memory: Memory | None = None,
    context_layers: tuple[int, ...] = (),
) -> tuple[DecodeState, int]:
    """Check and prefill the prompts; arguments as in `generate` and `prefill`.

    A `memory` of texts that the prompts may begin with, row by row, spares what is in it already:
    only the rest is read. It is donated, and its slots become the state's.

    Returns:
      The state, and a number of decode steps that suffices for every row.

    Raises:
      InputError: as `generate`, or the memory has too few slots or other rows.
    """
    requests, slots = prepare(
        target.config,
        prompts,
        max_new_tokens,
        sampling,
        seeds,
        eos_token_ids,
        max_path,
        None if memory is None else memory.tokens.shape,
    )
    check_rows(len(prompts), target.mesh)
    state = prefill(
        target,
        place(requests, target.mesh),
        memory,
        max_path=max_path,
        log_probs=log_probs,
        context_layers=context_layers,
    )
    return state, slots
