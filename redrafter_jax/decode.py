"""Speculative decoding: draft, tree, verify, accept, commit.

The functions of arrays come first, the ones that take lists of token ids last.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from redrafter_jax.acceptance import acceptance_length
from redrafter_jax.advance import advance
from redrafter_jax.beam import beam_search
from redrafter_jax.config import DraftConfig, SamplingConfig
from redrafter_jax.drafter import Drafter, context_layers_of
from redrafter_jax.errors import InputError
from redrafter_jax.lookup import prompt_lookup
from redrafter_jax.model import Model
from redrafter_jax.parts import gather_parts
from redrafter_jax.prefill import Memory, prefill
from redrafter_jax.program import program
from redrafter_jax.requests import PerRow, StopTokens, check_pair, prepare
from redrafter_jax.sampling import draw_noise
from redrafter_jax.sharding import check_rows, common_mesh, per_part, place, to_host
from redrafter_jax.target import Decoder, Target
from redrafter_jax.tree import build_tree, graft, root_tree
from redrafter_jax.tree_pass import tree_pass
from redrafter_jax.types import DecodeState, Sampling, Scorer, TokenTree
from redrafter_jax.verify import accept, choose_tokens


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


def decode_step(
    target: Target,
    drafter: Drafter | None,
    state: DecodeState,
    draft: DraftConfig | None,
    scorer: Scorer | None = None,
) -> DecodeState:
    """Draft a tree, verify it in one target call, keep what the target chose itself.

    Without a drafter the tree is its root alone: plain decoding, on the same path.

    Args:
      target: the target model.
      drafter: the drafter, or None.
      state: from `prefill` or the step before.
      draft: how trees are drafted, or None.
      scorer: from `draft_scorer`, made outside of a loop over steps; None makes it here.
    """
    step = partial(_decode_step, draft=draft, scorer=scorer)
    return per_part(step, target.mesh, target, drafter, state)


def _decode_step(
    target: Target,
    drafter: Drafter | None,
    state: DecodeState,
    draft: DraftConfig | None,
    scorer: Scorer | None,
) -> DecodeState:
    decoder = target.merge()
    max_path = draft.max_path if draft else 1
    first_position = state.cache.lengths + 1
    noise = draw_noise(state.sampling, first_position, max_path, target.config.vocab_size)

    if drafter is None or draft is None:
        tree = root_tree(state.root)
    else:
        tree = draft_tree(decoder, drafter, state, noise, state.sampling, draft, scorer)
    layers = context_layers_of(drafter)
    verified = tree_pass(decoder, tree, state.cache, state.done, draft, layers)
    chosen = choose_tokens(verified.logits, tree.depth, noise, state.sampling)
    accepted = accept(tree, chosen, max_path)
    if state.log_probs is not None:
        whole = gather_parts(verified.logits, target.config.vocab_size)
        verified = verified._replace(logits=whole)
    return advance(state, verified, chosen, accepted, draft.lookup_tokens if draft else 0)


def draft_scorer(decoder: Decoder, drafter: Drafter | None) -> Scorer | None:
    """The target's vocabulary projection for a drafter that has none; None for all others.

    The weights of a smaller vocabulary are gathered here, so that no step does it again.
    """
    if drafter is None or drafter.config.head != "target":
        return None
    return decoder.scorer(drafter.merge().draft_token_ids)


def draft_tree(
    decoder: Decoder,
    drafter: Drafter,
    state: DecodeState,
    noise: Float[Array, "B P V"],
    sampling: Sampling,
    draft: DraftConfig,
    scorer: Scorer | None = None,
) -> TokenTree:
    """The tree below each row's root, as beams find it that see this noise and this sampling.

    With `lookup_tokens` also what followed when the text last read as it does now.

    Raises:
      InputError: the state was made without the drafter's context layers.
    """
    if state.context.shape[1] != drafter.config.context_size:
        raise InputError(
            f"The state's context is {state.context.shape[1]} wide and the drafter's is "
            f"{drafter.config.context_size}; prefill with context_layers="
            f"{drafter.config.context_layers}."
        )
    beams = beam_search(
        drafter.merge(),
        decoder.embed_tokens[...],
        state.context,
        state.root,
        noise,
        sampling,
        draft,
        scorer or draft_scorer(decoder, drafter),
    )
    tree = build_tree(state.root, beams, draft)
    if not draft.lookup_tokens:
        return tree
    # As many as the beams may have of them already, and those that are new.
    reach = draft.max_path - 1
    copied, found = prompt_lookup(state.tokens, state.cache.lengths, reach)
    return graft(tree, copied, found, draft.lookup_tokens)


@program(static_argnames="draft", donate_argnames="state")
def decode(
    target: Target,
    drafter: Drafter | None,
    state: DecodeState,
    max_steps: Int[Array, ""] | int,
    *,
    draft: DraftConfig | None,
) -> DecodeState:
    """Decode steps until every row is done, `max_steps` at most; the state is donated."""

    def run(
        target: Target,
        drafter: Drafter | None,
        state: DecodeState,
        max_steps: Int[Array, ""] | int,
    ) -> DecodeState:
        scorer = draft_scorer(target.merge(), drafter)
        return until_done(
            lambda state: decode_step(target, drafter, state, draft, scorer), state, max_steps
        )

    return per_part(run, target.mesh, target, drafter, state, max_steps)


def until_done(
    step: Callable[[DecodeState], DecodeState], state: DecodeState, max_steps: Int[Array, ""] | int
) -> DecodeState:
    """The state after as many steps as it takes until every row is done, `max_steps` at most."""

    def unfinished(carry: tuple[Array, DecodeState]) -> Bool[Array, ""]:
        count, state = carry
        return (count < max_steps) & ~state.done.all()

    def body(carry: tuple[Array, DecodeState]) -> tuple[Array, DecodeState]:
        count, state = carry
        return count + 1, step(state)

    _, state = jax.lax.while_loop(unfinished, body, (jnp.int32(0), state))
    return state


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
