"""Speculative decoding: draft, tree, verify, accept, commit."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from redrafter_jax.config import DraftConfig
from redrafter_jax.decoding.accept import accept, choose_tokens
from redrafter_jax.decoding.finish import advance
from redrafter_jax.decoding.tree_pass import tree_pass
from redrafter_jax.drafters.beam import beam_search
from redrafter_jax.drafters.lookup import prompt_lookup
from redrafter_jax.drafters.recurrent import Drafter, context_layers_of
from redrafter_jax.drafters.tree import build_tree, graft, root_tree
from redrafter_jax.errors import InputError
from redrafter_jax.models.target import Decoder, Target
from redrafter_jax.parallel.collectives import gather_parts
from redrafter_jax.parallel.mesh import per_part
from redrafter_jax.parallel.program import program
from redrafter_jax.sampling import draw_noise
from redrafter_jax.types import DecodeState, Sampling, Scorer, TokenTree


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
