"""Repeat both decodings of a batch up to where they differ: a numerical tie, or a bug?"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from redrafter_jax.decoding.prefill import read_requests
from redrafter_jax.decoding.step import decode
from redrafter_jax.drafters.base import Drafter
from redrafter_jax.drafters.tree import root_tree
from redrafter_jax.generation import start
from redrafter_jax.models.target import Target
from redrafter_jax.parallel.collectives import all_gather
from redrafter_jax.parallel.mesh import per_shard, to_host
from redrafter_jax.sampling import draw_noise, filter_logits
from redrafter_jax.types import DecodeState, Requests, Sampling, TokenTree

from .benchmark import Batch, Method, prepare_batch
from .step_parts import begin_step


class TokenIndex(NamedTuple):
    """A row of the batch and one of its new tokens, both counted from 0."""

    row: int
    position: int


class TokenScores(NamedTuple):
    """What one method chose a token from.

    Attributes:
      logits: the target's scores of the token.
      noise: the noise of its position.
      scores: logits over the temperature, filtered, plus noise; the largest is chosen.
      sampling: of this row, B = 1.
    """

    logits: Float[np.ndarray, " V"]
    noise: Float[np.ndarray, " V"]
    scores: Float[np.ndarray, " V"]
    sampling: Sampling

    def gap(self, token: int, other: int) -> float:
        """The score of one token less that of another."""
        return float(self.scores[token]) - float(self.scores[other])

    @property
    def temperature(self) -> float:
        """What the logits were divided by."""
        return float(self.sampling.temperature[0]) or 1.0


class Explanation(NamedTuple):
    """Why two texts differ at a token; see `EXPLANATION`. None is unknown or infinite."""

    gap: float | None = None
    speculative_gap: float | None = None
    difference: float | None = None
    filtered: bool = False
    reproduced: bool = False
    tie: bool = False


EXPLANATION = {
    "score": "what a token is chosen by: logits over the temperature, filtered, plus the noise of "
    "the absolute position",
    "gap": "at the first divergence in the baseline: the score of its own token less that of the "
    "speculative text's; null where a filter dropped either token",
    "speculative_gap": "the same the other way round, in the speculative pass",
    "difference": "at the first divergence, the largest difference between the two passes' scores "
    "over tokens that both keep",
    "filtered": "a filter (top-k, top-p, min-p) dropped one of the two tokens in one pass",
    "reproduced": "decoding the batch again, the scores choose the tokens that the texts hold",
    "tie": "reproduced, and both gaps times the temperature are within the tolerance of the dtype; "
    "of filtered tokens: the filter would have kept the dropped one, and it would have won, had "
    "all logits moved by the tolerance in its favour",
}


def replay(
    method: Method, batch: Batch, texts: Sequence[Sequence[int]], indices: Sequence[TokenIndex]
) -> list[TokenScores | None]:
    """What the method chose from at each token, by the same programs on the same shapes.

    None where the text has ended, or where it is no path of the drafted tree. `texts` are the new
    tokens of every row, `indices` are of these tokens or of the one after the last.
    """
    if not indices:
        return []
    prompts = np.asarray([len(prompt) for prompt in batch.prompts])
    state, steps = start(*method, batch)
    sampling = to_host(state.sampling)
    scored = _score_first(method.target, prepare_batch(method, batch))
    before = np.zeros_like(prompts)
    seen: dict[TokenIndex, TokenScores | None] = {}
    for _ in range(steps + 1):
        # New tokens decided so far; the first one by prefill.
        decided = to_host(state.cache.lengths) + 1 - prompts
        reached = [one for one in indices if before[one.row] <= one.position < decided[one.row]]
        on_host = to_host(scored) if reached else None
        for row, position in reached:
            drafted = texts[row][before[row] : position]
            seen[TokenIndex(row, position)] = _pick(on_host, sampling, row, drafted)
        if len(seen) == len(indices):
            break
        before = decided
        scored = _score_step(method.target, method.drafter, state)
        state = decode(method.target, method.drafter, state, 1)
    return [seen.get(index) for index in indices]


def explain(
    baseline: TokenScores | None,
    speculative: TokenScores | None,
    token: int | None,
    speculative_token: int | None,
    tolerance: float,
) -> Explanation:
    """Judge a first divergence.

    Scores are None where `replay` found none, a token is None where the text has ended. The
    tolerance is in logits, that is in scores times the temperature.
    """
    if baseline is None or token is None or speculative_token is None:
        return Explanation()
    gap = baseline.gap(token, speculative_token)
    if speculative is None:
        return Explanation(gap=_finite(gap))
    speculative_gap = speculative.gap(speculative_token, token)
    both = np.isfinite(baseline.scores) & np.isfinite(speculative.scores)
    differences = np.abs(baseline.scores[both] - speculative.scores[both])
    filtered = not (both[token] and both[speculative_token])
    if filtered:
        tie = _nearly_kept(baseline, token, speculative_token, tolerance) or _nearly_kept(
            speculative, speculative_token, token, tolerance
        )
    else:
        tie = max(abs(gap), abs(speculative_gap)) <= tolerance / baseline.temperature
    chosen = (int(baseline.scores.argmax()), int(speculative.scores.argmax()))
    reproduced = chosen == (token, speculative_token)
    return Explanation(
        gap=_finite(gap),
        speculative_gap=_finite(speculative_gap),
        difference=_finite(float(differences.max(initial=0.0))),
        filtered=filtered,
        reproduced=reproduced,
        tie=reproduced and tie,
    )


class _NodeScores(NamedTuple):
    """What a step chooses from at every node of every row, on the device."""

    tree: TokenTree
    logits: Float[Array, "B N V"]
    noise: Float[Array, "B N V"]
    scores: Float[Array, "B N V"]


@jax.jit
@per_shard
def _score_step(target: Target, drafter: Drafter, state: DecodeState) -> _NodeScores:
    """A decode step up to its choice."""
    noise, tree, verified = begin_step(target, drafter, state)
    return _score_nodes(tree, verified.logits, noise, state.sampling)


@jax.jit
@per_shard
def _score_first(target: Target, requests: Requests) -> _NodeScores:
    """`prefill` up to its choice."""
    last, _ = read_requests(target, requests)
    logits = target.merge().logits(last[:, None])
    noise = draw_noise(requests.sampling, requests.lengths, 1, target.config.vocab_size)
    return _score_nodes(root_tree(requests.lengths), logits, noise, requests.sampling)


def _score_nodes(
    tree: TokenTree,
    logits: Float[Array, "B N part"],
    noise: Float[Array, "B P V"],
    sampling: Sampling,
) -> _NodeScores:
    V = noise.shape[-1]
    at_nodes = jnp.take_along_axis(noise, tree.depth[..., None], axis=1)
    scores = all_gather(filter_logits(logits, sampling, V), V) + at_nodes
    return _NodeScores(tree, all_gather(logits, V), at_nodes, scores)


def _pick(scored: Any, sampling: Sampling, row: int, drafted: Sequence[int]) -> TokenScores | None:
    """The scores at the node that the drafted tokens lead to."""
    node = find_node(scored.tree.tokens[row], scored.tree.parents[row], drafted)
    if node is None:
        return None
    logits, noise, scores = (array[row, node] for array in scored[1:])
    return TokenScores(
        logits, noise, scores, jax.tree.map(lambda leaf: leaf[row : row + 1], sampling)
    )


def find_node(
    tokens: Int[np.ndarray, " N"], parents: Int[np.ndarray, " N"], text: Sequence[int]
) -> int | None:
    """The node whose path below the root spells the text; None if the tree has no such path."""
    node = 0
    for token in text:
        # The root is its own parent.
        children = 1 + np.flatnonzero((parents[1:] == node) & (tokens[1:] == token))
        if len(children) == 0:
            return None
        node = int(children[0])
    return node


def _nearly_kept(seen: TokenScores, chosen: int, other: int, tolerance: float) -> bool:
    """Whether a filter dropped `other`, which would have won, perhaps by rounding alone."""
    if np.isfinite(seen.scores[other]):
        return False
    favour = np.where(seen.logits <= seen.logits[other], tolerance, -tolerance)
    favoured = jnp.asarray(seen.logits + favour, jnp.float32)[None, None]
    # Without `jit` the filter would compile its branches anew every time.
    kept = bool(jnp.isfinite(jax.jit(filter_logits)(favoured, seen.sampling)[0, 0, other]))
    unfiltered = seen.logits / seen.temperature + seen.noise
    return kept and bool(unfiltered[other] >= unfiltered[chosen] - tolerance / seen.temperature)


def _finite(value: float) -> float | None:
    return value if np.isfinite(value) else None
