"""Answers are recorded once; then any tree's target calls are counted without a target call.

Decoding is lossless: the text is the same whatever is drafted. So with the text and the target's
hidden states at its tokens, the drafts alone tell how many tokens a step would have gained.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from redrafter_jax.config import DraftConfig, DrafterConfig, SamplingConfig
from redrafter_jax.decoding.step import step_noise
from redrafter_jax.drafters.base import Drafter, RootOnly
from redrafter_jax.drafters.bind import bind_drafter
from redrafter_jax.drafters.head_drafter import DraftModel
from redrafter_jax.drafters.lookup import PromptLookup
from redrafter_jax.drafters.tree import matching_paths
from redrafter_jax.models.projection import Lender
from redrafter_jax.models.target import Target
from redrafter_jax.progress import track
from redrafter_jax.text.prompts import EncodedPrompts
from redrafter_jax.types import DecodeState, DecodeStats, KVCache, Sampling

from .benchmark import Method, decode_batch, make_batches, prepare_batch
from .config import RowSettings

# Texts that are read together: a beam search holds W * V scores for each.
_ROWS = 32
# More nodes than any tree has: no node of the tree.
_NO_NODE = np.iinfo(np.int32).max


class RecordedBatch(NamedTuple):
    """Texts, prompts included, and the target's hidden states at their tokens.

    Attributes:
      tokens: the texts, zeros past them.
      prompts: length of each prompt; the token after it is decided by prefill.
      ends: length of each text.
      hidden: the target's hidden states at every token, as `Drafter.init` reads them.
      sampling: how each row's tokens were chosen.
    """

    tokens: Int[Array, "B S"]
    prompts: Int[Array, " B"]
    ends: Int[Array, " B"]
    hidden: Float[Array, "B S Z"]
    sampling: Sampling


class Recording(NamedTuple):
    """The answers to all prompts under one sampling, and the texts in batches of equal shapes.

    The last batch is filled up with its last prompt.
    """

    batches: list[RecordedBatch]
    answers: list[list[int]]

    @property
    def baseline_calls(self) -> Int[np.ndarray, " prompts"]:
        """Target calls of autoregressive decoding for each prompt, after prefill."""
        return np.asarray([len(answer) - 1 for answer in self.answers])


def record(
    target: Target,
    asked: EncodedPrompts,
    sampling: SamplingConfig,
    rows: RowSettings,
    context_layers: tuple[int, ...],
) -> Recording:
    """Let the target write the answers, then read each text again in one pass.

    `context_layers` are those of the drafters that will be counted.
    """
    count = len(asked.rows)
    size = min(count, _ROWS)
    filled = [min(row, count - 1) for row in range(-(-count // size) * size)]
    equal = asked._replace(
        prompts=[asked.prompts[row] for row in filled], rows=[asked.rows[row] for row in filled]
    )
    batches = make_batches(equal, size, sampling, rows)
    method = Method(target, RootOnly())
    requests = [prepare_batch(method, batch) for batch in batches]
    slots = max(one.tokens.shape[1] for one in requests)
    recorded, answers = [], []
    for batch, request in zip(batches, requests, strict=True):
        own = decode_batch(method, batch).tokens
        tokens = np.zeros((size, slots), np.int32)
        prompts = np.asarray([len(prompt) for prompt in batch.prompts], np.int32)
        ends = prompts + np.asarray([len(new) for new in own], np.int32)
        for row, end in enumerate(ends):
            tokens[row, :end] = batch.prompts[row] + own[row]
        texts = jnp.asarray(tokens)
        hidden = _hidden_states(target, texts, context_layers=context_layers)
        recorded.append(
            RecordedBatch(texts, jnp.asarray(prompts), jnp.asarray(ends), hidden, request.sampling)
        )
        answers += own
    return Recording(recorded, answers[:count])


@partial(jax.jit, static_argnames="context_layers")
def _hidden_states(
    target: Target, tokens: Int[Array, "B S"], *, context_layers: tuple[int, ...]
) -> Float[Array, "B S Z"]:
    # Row by row: attention over whole texts takes S * S scores for each head of a row.
    def read(row: Int[Array, " S"]) -> Float[Array, "S Z"]:
        hidden, _, _ = target.merge().forward(row[None], context_layers=context_layers)
        return hidden[0]

    return jax.lax.map(read, tokens)


def count_calls(
    target: Target,
    drafter: DraftModel,
    drafts: Sequence[DraftConfig],
    recordings: Sequence[Recording],
) -> dict[DraftConfig, list[Int[np.ndarray, "prompts P"]]]:
    """Count the target calls of decoding the recorded texts with each tree.

    A beam search begins like one of fewer rounds, a budget of N keeps its N best nodes, and lookup
    adds its tokens below those. So one pass over the texts serves all trees of the same beam width,
    and one more all lookups. With Medusa heads, final beams and reranked trees every number of
    rounds needs a pass of its own.

    Returns:
      For every tree the counts under each sampling; entry (i, c - 1): calls that gain c tokens.
    """
    families: dict[DraftConfig, list[DraftConfig]] = {}
    for draft in drafts:
        family = replace(draft, num_nodes=1 if draft.rerank else None, lookup_tokens=0)
        # Medusa's most probable paths and the final beams change with every round, and a reranked
        # tree keeps its best nodes of all rounds.
        nested = not (draft.final_beams_only or draft.rerank)
        if isinstance(drafter.config, DrafterConfig) and nested:
            family = replace(family, draft_rounds=1)
        families.setdefault(family, []).append(draft)
    depths = [draft.max_path - 1 for draft in drafts if draft.lookup_tokens]
    lookup = PromptLookup(max(depths, default=1))
    deepest = (lookup.max_path - 1,)
    by_lookup = [
        _nodes_needed(target, lookup, one, deepest) if depths else [] for one in recordings
    ]
    counts = {}
    for family, own in track(families.items(), len(families), "count target calls"):
        rounds = tuple(sorted({draft.draft_rounds for draft in own}))
        # The reranked tree of the largest budget contains the others.
        nodes = max(draft.beam_nodes for draft in own) if family.rerank else None
        bound = bind_drafter(drafter, replace(family, draft_rounds=rounds[-1], num_nodes=nodes))
        needed = [_nodes_needed(target, bound, one, rounds) for one in recordings]
        for draft in own:
            index = rounds.index(draft.draft_rounds)
            counts[draft] = [
                _count_steps(draft, recording, [row[:, index] for row in rows], looked_up)
                for recording, rows, looked_up in zip(recordings, needed, by_lookup, strict=True)
            ]
    return counts


def _count_steps(
    draft: DraftConfig,
    recording: Recording,
    needed: Sequence[Int[np.ndarray, "new D"]],
    looked_up: Sequence[Int[np.ndarray, "new 1 L"]],
) -> Int[np.ndarray, "prompts P"]:
    """The steps of a tree, from each text's first new token to its end, by tokens gained."""
    counts = np.zeros((len(recording.answers), draft.max_path), np.int64)
    for row, answer in enumerate(recording.answers):
        drafted = (needed[row] <= draft.beam_nodes).sum(axis=1)
        if draft.lookup_tokens:
            found = (looked_up[row][:, 0] < _NO_NODE).sum(axis=1)
            drafted = np.maximum(drafted, np.minimum(found, drafted + draft.lookup_tokens))
        root, last = 0, len(answer) - 1
        while root < last:
            gained = min(1 + drafted[root], last - root)
            counts[row, gained - 1] += 1
            root += gained
    return counts


def _nodes_needed(
    target: Target, drafter: Drafter, recording: Recording, rounds: tuple[int, ...]
) -> list[Int[np.ndarray, "new X D"]]:
    """One array per prompt: how many of the best nodes must be kept to spell the text.

    Entry [i, x, d - 1] is for the text down to depth d, and the first rounds[x] rounds of the tree
    drafted at new token i; `_NO_NODE` if no node spells it. The drafter's state must follow from
    the hidden states before the root, and it must read no keys or values.
    """
    longest = max(map(len, recording.answers))
    needed = [
        np.moveaxis(np.asarray(_read_drafts(target, drafter, batch, longest, rounds)), 0, 1)
        for batch in recording.batches
    ]
    return list(np.concatenate(needed)[: len(recording.answers)])


@partial(jax.jit, static_argnames=("count", "rounds"))
def _read_drafts(
    target: Target, drafter: Drafter, recorded: RecordedBatch, count: int, rounds: tuple[int, ...]
) -> Int[Array, "new B X D"]:
    decoder, P = target.merge(), drafter.max_path
    prepared = drafter.prepare(Lender(target))
    tokens, B = recorded.tokens, len(recorded.tokens)

    def take(values: Array, at: Int[Array, " B"]) -> Array:
        return values[jnp.arange(B), at]

    def read(new: Int[Array, ""]) -> Int[Array, "B X D"]:
        # Rows whose answers are shorter stay at their last token.
        root = jnp.minimum(recorded.prompts + new, recorded.ends - 1)
        counts = jnp.zeros((B, P), jnp.int32)
        state = DecodeState(
            tokens=tokens,
            cache=KVCache((), (), root),
            drafter=prepared.init(take(recorded.hidden, root - 1)),
            root=take(tokens, root),
            done=jnp.zeros(B, bool),
            limits=recorded.ends,
            stop_tokens=jnp.zeros((B, 0), jnp.int32),
            sampling=recorded.sampling,
            stats=DecodeStats(counts, None, counts.sum(axis=1)),
            log_probs=None,
        )
        tree = prepared.propose(decoder, state, step_noise(state, P, target.config.vocab_size))
        text = jnp.take_along_axis(tokens, root[:, None] + tree.depth, axis=1)
        spelled = matching_paths(tree, tree.tokens == text)
        depths, ends = jnp.arange(1, P), jnp.asarray(rounds)[:, None]
        mine, others = tree.log_probs[:, :, None], tree.log_probs[:, None]
        before = jnp.tri(others.shape[-1], dtype=bool)
        better = (others > mine) | ((others == mine) & before)
        within = tree.depth[:, None] <= ends
        # Small counts, which float32 holds exactly.
        rank = jnp.einsum("bij,bxj->bxi", better.astype(jnp.float32), within.astype(jnp.float32))
        rank = rank.astype(jnp.int32)
        reaches = spelled[:, None] & (tree.depth[:, None] == depths[:, None])
        needed = jnp.where(reaches[:, None], rank[:, :, None], _NO_NODE).min(axis=3)
        return jnp.where(depths <= ends, needed, _NO_NODE)

    return jax.lax.map(read, jnp.arange(count))
