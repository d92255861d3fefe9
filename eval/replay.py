"""Both decodings of a batch once more, up to where they part: a numerical tie, or a bug?"""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int
from redrafter_jax.decoding.tree_pass import tree_pass

from redrafter_jax.config import DraftConfig
from redrafter_jax.decoding.accept import accept
from redrafter_jax.decoding.prefill import read_prompts
from redrafter_jax.decoding.step import decode, draft_tree
from redrafter_jax.drafters.recurrent_head import DraftModel
from redrafter_jax.drafters.tree import root_tree
from redrafter_jax.models.target import Target
from redrafter_jax.parallel.collectives import gather_parts
from redrafter_jax.parallel.mesh import per_part, to_host
from redrafter_jax.parallel.program import program
from redrafter_jax.sampling import draw_noise, filter_logits
from redrafter_jax.types import DecodeState, Requests, Sampling

from .benchmark import Batch, Method, begin, prepare_batch


class Place(NamedTuple):
    """A new token of a row of the batch, counted from 0."""

    row: int
    position: int


class Seen(NamedTuple):
    """What one method chose a token from.

    Attributes:
      logits: the target's scores of the token.
      noise: the noise of its position.
      scores: logits over the temperature, filtered, plus noise; the largest is chosen.
      sampling: of this row, B = 1.
      found: False if the text up to here is no path of the drafted tree; the rest means nothing
        then.
    """

    logits: Float[np.ndarray, " V"]
    noise: Float[np.ndarray, " V"]
    scores: Float[np.ndarray, " V"]
    sampling: Sampling
    found: bool


class Explanation(NamedTuple):
    """Why two texts part at a token; None where a number is unknown or infinite.

    Attributes:
      gap: in plain decoding, the score of its own token less that of the speculative one.
      speculative_gap: the same the other way round, in the speculative pass.
      difference: largest difference between the two passes' scores, over tokens that both keep.
      filtered: a filter dropped one of the two tokens in one of the passes.
      reproduced: the replayed scores choose the tokens that the texts hold.
      tie: rounding accounts for the divergence.
    """

    gap: float | None
    speculative_gap: float | None
    difference: float | None
    filtered: bool
    reproduced: bool
    tie: bool


# Of a text that ends where the other goes on: there are no two tokens to compare.
UNEXPLAINED = Explanation(None, None, None, filtered=False, reproduced=False, tie=False)


def replay(
    method: Method, batch: Batch, texts: Sequence[Sequence[int]], places: Sequence[Place]
) -> list[Seen]:
    """What the method saw at each place, of the same programs on arrays of the same shapes.

    Args:
      method: how the batch was decoded.
      batch: the same prompts, seeds and limits.
      texts: the new tokens of every row.
      places: tokens of these texts.
    """
    if not places:
        return []
    decided = _count_decided(method, batch, places)
    state, _ = begin(method, batch)
    written = _write(batch.prompts, texts, state.tokens)
    seen = {}
    step = 0
    # In the order of their steps, so that one decoding passes all of them.
    for crossing, place in sorted((_crossing(decided, place), place) for place in places):
        if crossing < 0:  # prefill chose it
            requests, _ = prepare_batch(method, batch)
            seen[place] = _to_host(_look_at_first(method.target, requests), state, place.row)
            continue
        state = decode(method.target, method.drafter, state, crossing - step, draft=method.draft)
        step = crossing
        depth = place.position - int(decided[crossing, place.row])
        looked = _look(method.target, method.drafter, state, written, depth, draft=method.draft)
        seen[place] = _to_host(looked, state, place.row)
    return [seen[place] for place in places]


def explain(
    plain: Seen, speculative: Seen, token: int, speculative_token: int, tolerance: float
) -> Explanation:
    """Judge a first divergence.

    It is a tie if the scores choose the tokens that the texts hold, and in both passes the two
    tokens' scores are no further apart than the tolerance; or if a filter dropped one of them in
    one pass, though it would have kept and chosen it there had rounding favoured it by the
    tolerance.

    Args:
      plain: what plain decoding saw there.
      speculative: what the speculative pass saw there.
      token: plain decoding's choice.
      speculative_token: the speculative text's.
      tolerance: in logits, that is in scores times the temperature.
    """
    gap = _gap(plain, token, speculative_token)
    if not speculative.found:
        return UNEXPLAINED._replace(gap=_finite(gap))
    speculative_gap = _gap(speculative, speculative_token, token)
    both = np.isfinite(plain.scores) & np.isfinite(speculative.scores)
    differences = np.abs(plain.scores[both] - speculative.scores[both])
    filtered = not (both[token] and both[speculative_token])
    if filtered:
        tie = _nearly_kept(plain, token, speculative_token, tolerance) or _nearly_kept(
            speculative, speculative_token, token, tolerance
        )
    else:
        tie = max(abs(gap), abs(speculative_gap)) <= tolerance / _temperature(plain)
    reproduced = (
        int(plain.scores.argmax()) == token
        and int(speculative.scores.argmax()) == speculative_token
    )
    return Explanation(
        gap=_finite(gap),
        speculative_gap=_finite(speculative_gap),
        difference=_finite(float(differences.max(initial=0.0))),
        filtered=filtered,
        reproduced=reproduced,
        tie=reproduced and bool(tie),
    )


class _Looked(NamedTuple):
    """`Seen` of all rows, on the device."""

    logits: Float[Array, "B V"]
    noise: Float[Array, "B V"]
    scores: Float[Array, "B V"]
    found: Bool[Array, " B"]


@program(static_argnames="draft")
def _look(
    target: Target,
    drafter: DraftModel | None,
    state: DecodeState,
    written: Int[Array, "B S"],
    depth: Int[Array, ""] | int,
    *,
    draft: DraftConfig | None,
) -> _Looked:
    """`decode_step` up to its choice, at the nodes of one depth that spell the written text."""
    look = partial(_look_in_part, draft=draft)
    return per_part(look, target.mesh, target, drafter, state, written, depth)


def _look_in_part(
    target: Target,
    drafter: DraftModel | None,
    state: DecodeState,
    written: Int[Array, "B S"],
    depth: Int[Array, ""] | int,
    *,
    draft: DraftConfig | None,
) -> _Looked:
    decoder, V = target.merge(), target.config.vocab_size
    max_path = draft.max_path if draft else 1
    first_position = state.cache.lengths + 1
    noise = draw_noise(state.sampling, first_position, max_path, V)
    if drafter is None or draft is None:
        tree = root_tree(state.root)
    else:
        tree = draft_tree(decoder, drafter, state, noise, state.sampling, draft)
    verified = tree_pass(decoder, tree, state.cache, state.done, draft)
    node_noise = jnp.take_along_axis(noise, tree.depth[..., None], axis=1)
    scores = gather_parts(filter_logits(verified.logits, state.sampling, V), V) + node_noise

    # Follow the text, not the choices: these may come out otherwise than they did in the run.
    following = jnp.take_along_axis(written, first_position[:, None] + tree.depth, axis=1)
    spelled = accept(tree, following, max_path)
    node = spelled.path[:, depth]

    def at_node(values: Float[Array, "B N V"]) -> Float[Array, "B V"]:
        return jnp.take_along_axis(values, node[:, None, None], axis=1)[:, 0]

    return _Looked(
        at_node(gather_parts(verified.logits, V)),
        at_node(node_noise),
        at_node(scores),
        depth < spelled.count,
    )


@program()
def _look_at_first(target: Target, requests: Requests) -> _Looked:
    """`prefill` up to its choice."""
    return per_part(_look_at_first_in_part, target.mesh, target, requests)


def _look_at_first_in_part(target: Target, requests: Requests) -> _Looked:
    V = target.config.vocab_size
    last, _ = read_prompts(target, requests)
    logits = target.merge().logits(last[:, None])
    noise = draw_noise(requests.sampling, requests.lengths, 1, V)
    scores = gather_parts(filter_logits(logits, requests.sampling, V), V) + noise
    whole = gather_parts(logits, V)
    return _Looked(whole[:, 0], noise[:, 0], scores[:, 0], jnp.ones(len(logits), bool))


def _to_host(looked: _Looked, state: DecodeState, row: int) -> Seen:
    logits, noise, scores, found = (leaf[row] for leaf in to_host(looked))
    # On the host: the state is donated to the next step.
    sampling = jax.tree.map(lambda leaf: leaf[row : row + 1], to_host(state.sampling))
    return Seen(logits, noise, scores, sampling, bool(found))


def _count_decided(
    method: Method, batch: Batch, places: Sequence[Place]
) -> Int[np.ndarray, "steps B"]:
    """New tokens decided after 0, 1, 2 ... decode steps, until all places are."""
    prompts = np.asarray([len(prompt) for prompt in batch.prompts])
    state, slots = begin(method, batch)
    decided = [to_host(state.cache.lengths) + 1 - prompts]
    for _ in range(slots):
        if all(decided[-1][place.row] > place.position for place in places):
            break
        state = decode(method.target, method.drafter, state, 1, draft=method.draft)
        decided.append(to_host(state.cache.lengths) + 1 - prompts)
    return np.stack(decided)


def _crossing(decided: Int[np.ndarray, "steps B"], place: Place) -> int:
    """The number of steps after which the place is decided next; -1 if prefill decides it."""
    return int((decided[:, place.row] <= place.position).sum()) - 1


def _write(
    prompts: Sequence[Sequence[int]], texts: Sequence[Sequence[int]], tokens: Int[Array, "B S"]
) -> Int[Array, "B S"]:
    """Prompts and texts where `DecodeState.tokens` has them, on the same devices."""
    written = np.zeros(tokens.shape, np.int32)
    for row, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
        written[row, : len(prompt) + len(text)] = [*prompt, *text]
    return jax.device_put(written, tokens.sharding)


def _gap(seen: Seen, chosen: int, other: int) -> float:
    return float(seen.scores[chosen]) - float(seen.scores[other])


def _nearly_kept(seen: Seen, chosen: int, other: int, tolerance: float) -> bool:
    """Whether rounding alone may have made a filter drop `other`, which would have won else."""
    if np.isfinite(seen.scores[other]):
        return False
    favour = np.where(seen.logits <= seen.logits[other], tolerance, -tolerance)
    favoured = jnp.asarray(seen.logits + favour, jnp.float32)[None, None]
    # Called by itself the filter would compile its branches anew every time.
    kept = bool(jnp.isfinite(jax.jit(filter_logits)(favoured, seen.sampling)[0, 0, other]))
    unfiltered = seen.logits / _temperature(seen) + seen.noise
    return kept and bool(unfiltered[other] >= unfiltered[chosen] - tolerance / _temperature(seen))


def _temperature(seen: Seen) -> float:
    return float(seen.sampling.temperature[0]) or 1.0


def _finite(value: float) -> float | None:
    return value if np.isfinite(value) else None
