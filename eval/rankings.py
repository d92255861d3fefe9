"""Ways for a beam search to rank drafts while the target samples, for comparison.

The library has one of them, "shared". They differ in what the drafter is shown of the choice to
come, which can change the speed alone: the target chooses with its own noise and filters.
"""

from functools import partial
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int
from redrafter_jax.decoding.finish import advance
from redrafter_jax.decoding.tree_pass import tree_pass

from redrafter_jax.config import DraftConfig
from redrafter_jax.decoding.accept import accept, choose_tokens
from redrafter_jax.decoding.step import draft_scorer, draft_tree, until_done
from redrafter_jax.drafters.recurrent_head import DraftModel
from redrafter_jax.models.target import Target
from redrafter_jax.parallel.mesh import per_part
from redrafter_jax.parallel.program import program
from redrafter_jax.sampling import draw_noise
from redrafter_jax.types import DecodeState, Sampling

Ranking = Literal["shared", "weak noise", "unfiltered", "blind"]

RANKINGS: dict[Ranking, str] = {
    "shared": "sharpness * (filtered logits + temperature * noise)",
    "weak noise": "sharpness * filtered logits + temperature * noise",
    "unfiltered": "sharpness * (logits + temperature * noise), filters left to the target",
    "blind": "sharpness * filtered logits, no noise",
}


class Shown(NamedTuple):
    """What drafts are ranked with.

    Attributes:
      sampling: temperature and filters of the drafter's scores.
      noise_weight: factor on the noise that is added to them, beside the sharpness.
    """

    sampling: Sampling
    noise_weight: Float[Array, ""]


def shown_to_drafts(ranking: Ranking, sampling: Sampling, draft: DraftConfig) -> Shown:
    """What a ranking shows of the target's choice."""
    if ranking == "unfiltered":
        sampling = sampling._replace(
            top_k=jnp.full_like(sampling.top_k, jnp.iinfo(jnp.int32).max),
            top_p=jnp.ones_like(sampling.top_p),
            min_p=jnp.zeros_like(sampling.min_p),
        )
    weights = {"weak noise": 1 / draft.sharpness, "blind": 0.0}
    # Copied: the state that holds the originals is donated.
    return Shown(jax.tree.map(jnp.copy, sampling), jnp.float32(weights.get(ranking, 1.0)))


@program(static_argnames="draft", donate_argnames="state")
def decode_ranked(
    target: Target,
    drafter: DraftModel,
    state: DecodeState,
    shown: Shown,
    max_steps: Int[Array, ""] | int,
    *,
    draft: DraftConfig,
) -> DecodeState:
    """`redrafter_jax.decoding.step.decode`, with drafts ranked by what they are shown."""
    run = partial(_decode_ranked, draft=draft)
    return per_part(run, target.mesh, target, drafter, state, shown, max_steps)


def _decode_ranked(
    target: Target,
    drafter: DraftModel,
    state: DecodeState,
    shown: Shown,
    max_steps: Int[Array, ""] | int,
    *,
    draft: DraftConfig,
) -> DecodeState:
    decoder = target.merge()
    scorer, layers = draft_scorer(decoder, drafter), context_layers_of(drafter)

    def step(state: DecodeState) -> DecodeState:
        first_position = state.cache.lengths + 1
        noise = draw_noise(state.sampling, first_position, draft.max_path, target.config.vocab_size)
        shown_noise = shown.noise_weight * noise
        tree = draft_tree(decoder, drafter, state, shown_noise, shown.sampling, draft, scorer)
        verified = tree_pass(decoder, tree, state.cache, state.done, draft, layers)
        chosen = choose_tokens(verified.logits, tree.depth, noise, state.sampling)
        accepted = accept(tree, chosen, draft.max_path)
        return advance(state, verified, chosen, accepted, draft.lookup_tokens)

    return until_done(step, state, max_steps)
