"""What either side drafts in every step of decoding a prompt: beams of each round, and the tree."""

import itertools
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from redrafter_jax.config import DraftConfig
from redrafter_jax.decoding.step import decode_step, step_noise
from redrafter_jax.drafters.beam import beam_search
from redrafter_jax.drafters.recurrent import RecurrentDrafter
from redrafter_jax.drafters.recurrent_head import DraftModel
from redrafter_jax.generation import collect, start
from redrafter_jax.models.target import Target
from redrafter_jax.parallel.program import program
from redrafter_jax.types import Beams, DecodeState, TokenTree

# What Apple's `warp_logits` keeps of a beam's scores.
APPLE_CANDIDATES = 50


class Round(NamedTuple):
    """The beams after a round, best first: their tokens below the root, and their scores."""

    sequences: list[tuple[int, ...]]
    log_probs: list[float]


class Step(NamedTuple):
    """One target call.

    Attributes:
      length: of the text before it, prompt and root included.
      rounds: the beams after each.
      paths: of every node of the verified tree, the tokens from the root down to it.
    """

    length: int
    rounds: list[Round]
    paths: frozenset[tuple[int, ...]]


class Trace(NamedTuple):
    """One prompt: the new tokens, the number of target calls after prefill, and each of them."""

    tokens: list[int]
    target_calls: int
    steps: list[Step]


def apple_tree(target: Target, beam_width: int, draft_rounds: int) -> DraftConfig:
    """The settings under which our tree is the one that Apple's code makes."""
    return DraftConfig(
        beam_width=beam_width,
        draft_rounds=draft_rounds,
        num_nodes=None,
        final_beams_only=True,
        candidates=min(APPLE_CANDIDATES, target.config.vocab_size),
    )


def same_prefix(ours: list[int], theirs: list[int]) -> int:
    """How many leading tokens two texts share."""
    same = (a == b for a, b in zip(ours, theirs, strict=False))
    return sum(itertools.takewhile(bool, same))


def read_apple(reply: dict[str, Any]) -> Trace:
    """From worker.py's answer to a request for a trace."""
    steps = []
    for step in reply["steps"]:
        rounds = [
            Round([tuple(sequence) for sequence in beams["sequences"]], beams["log_probs"])
            for beams in step["rounds"]
        ]
        steps.append(Step(step["length"], rounds, frozenset(_paths(**step["tree"]))))
    return Trace(reply["tokens"], reply["target_calls"], steps)


def trace_ours(
    target: Target,
    drafter: DraftModel,
    prompt: list[int],
    *,
    beam_width: int,
    draft_rounds: int,
    max_new_tokens: int,
) -> Trace:
    """Greedy decoding with a tree of Apple's making, step by step."""
    bound = RecurrentDrafter(drafter, apple_tree(target, beam_width, draft_rounds))
    state, _ = start(target, bound, [prompt], max_new_tokens, None, None, ())
    steps = []
    while not bool(state.done[0]):
        length = int(state.cache.lengths[0]) + 1
        beams, tree, state = _traced_step(target, bound, state)
        beams, tree = jax.device_get((beams, tree))
        steps.append(Step(length, read_beams(beams), read_tree(tree)))
    result = collect(state, [prompt], bound)
    return Trace(result.tokens[0], result.steps[0], steps)


@program()
def _traced_step(
    target: Target, drafter: RecurrentDrafter, state: DecodeState
) -> tuple[Beams, TokenTree, DecodeState]:
    """A decode step, and what it drafts."""
    embedding = target.merge().embed_tokens[...]
    noise = step_noise(state, drafter.max_path, target.config.vocab_size)
    beams = beam_search(
        drafter.model.merge(),
        embedding,
        state.drafter,
        state.root,
        noise,
        state.sampling,
        drafter.draft,
    )
    after, trace = decode_step(target, drafter, state)
    return beams, trace.tree, after


def read_beams(beams: Beams) -> list[Round]:
    """Of row 0: every beam's tokens, from its parents'."""
    tokens, parents, log_probs = (np.asarray(values)[0] for values in beams)
    sequences: list[tuple[int, ...]] = [()]
    rounds = []
    for round_index in range(len(tokens)):
        # The first round's beams all descend from the root.
        before = parents[round_index] if round_index else [0] * len(parents[0])
        sequences = [
            (*sequences[parent], int(token))
            for parent, token in zip(before, tokens[round_index], strict=True)
        ]
        rounds.append(Round(sequences, log_probs[round_index].tolist()))
    return rounds


def read_tree(tree: TokenTree) -> frozenset[tuple[int, ...]]:
    """Of row 0: the paths of its live nodes."""
    paths = _paths(np.asarray(tree.tokens)[0].tolist(), np.asarray(tree.parents)[0].tolist())
    live = np.asarray(tree.log_probs)[0] > -np.inf
    return frozenset(itertools.compress(paths, live))


def choice_gap(target: Target, text: list[int], first: int, second: int) -> float:
    """By how much the target prefers one token to another after a text, in logits."""
    decoder = target.merge()
    hidden, _, _ = decoder.forward(jnp.asarray([text], jnp.int32))
    logits = decoder.logits(hidden[:, -1:])[0, 0]
    return float(logits[first] - logits[second])


def _paths(tokens: Iterable[int], parents: Iterable[int]) -> list[tuple[int, ...]]:
    """Of every node; node 0 is the root, and parents come before their children."""
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(tokens, parents, strict=True):
        paths.append((*(paths[parent] if paths else ()), token))
    return paths
