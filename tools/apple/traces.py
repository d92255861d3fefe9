"""What each side drafts in every step of decoding a prompt, and where the two traces differ."""

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from eval.metrics import first_divergence
from redrafter_jax.config import TreeConfig
from redrafter_jax.decoding.step import decode_step, propose, step_noise
from redrafter_jax.drafters.head_drafter import LoadedHead
from redrafter_jax.drafters.recurrent import RecurrentDrafter
from redrafter_jax.engine.device import Chunk, empty_rows, read_rows
from redrafter_jax.engine.requests import Batch, check_batch, row_arrays, slots_for
from redrafter_jax.models.target import Target
from redrafter_jax.types import DecodeState, TokenTree

# What Apple's `warp_logits` keeps of a beam's scores.
APPLE_CANDIDATES = 50
# Nats. Sums of seven float32 log-probabilities from logits of two libraries differ by less, and two
# beams that are farther apart than this are no tie.
TOLERANCE = 1e-4

# Of every beam after a round, best first: its tokens below the root, and its log-probability.
type Round = dict[tuple[int, ...], float]


class Step(NamedTuple):
    """One target call."""

    length: int  # of the text before it, prompt and root included
    rounds: list[Round]  # the beams after each
    paths: frozenset[tuple[int, ...]]  # from the root down to every node of the verified tree


class Decoded(NamedTuple):
    """One prompt."""

    tokens: list[int]  # the new ones
    target_calls: int  # those after prefill
    seconds: float  # wall time, prefill included; 0 where it was not taken
    steps: list[Step]  # one for each target call, where they were asked for


def apple_tree(target: Target, beam_width: int, draft_rounds: int) -> TreeConfig:
    """The settings under which our tree is the one that Apple's code makes."""
    return TreeConfig(
        beam_width=beam_width,
        draft_rounds=draft_rounds,
        num_nodes=None,
        final_beams_only=True,
        candidates=min(APPLE_CANDIDATES, target.config.vocab_size),
    )


def read_apple(reply: dict[str, Any]) -> Decoded:
    """From worker.py's answer."""
    steps = []
    for step in reply["steps"]:
        rounds = [
            dict(zip(map(tuple, beams["sequences"]), beams["log_probs"], strict=True))
            for beams in step["rounds"]
        ]
        steps.append(Step(step["length"], rounds, frozenset(_paths(**step["tree"]))))
    return Decoded(reply["tokens"], reply["target_calls"], reply["seconds"], steps)


def trace_ours(
    target: Target,
    drafter: LoadedHead,
    prompt: list[int],
    *,
    beam_width: int,
    draft_rounds: int,
    max_new_tokens: int,
) -> Decoded:
    """Greedy decoding with a tree of Apple's making, step by step."""
    bound, tree = RecurrentDrafter(drafter), apple_tree(target, beam_width, draft_rounds)
    state = _read(target, bound, prompt, max_new_tokens, tree.max_path)
    steps = []
    while not bool(state.done[0]):
        length = int(state.cache.lengths[0]) + 1
        beams, verified, state = _traced_step(target, bound, state, tree=tree)
        rounds: list[Round] = [{} for _ in range(draft_rounds)]
        for path, log_prob in read_tree(beams).items():
            if len(path) > 1:  # below the root
                rounds[len(path) - 2][path[1:]] = log_prob
        steps.append(Step(length, rounds, frozenset(read_tree(verified))))
    new = state.tokens[0, len(prompt) : len(prompt) + max_new_tokens]
    return Decoded(new.tolist(), len(steps), 0.0, steps)


def _read(
    target: Target, drafter: RecurrentDrafter, prompt: list[int], limit: int, max_path: int
) -> DecodeState:
    """The state after a prompt, read in one pass, from which `limit` tokens are decoded greedily.

    Raises:
      InputError: the prompt does not fit the target.
    """
    (request,) = check_batch(target.config, Batch([prompt], limit, eos_token_ids=()))
    arrays = row_arrays(target.config, request)
    slots = slots_for(len(prompt) + limit, max_path)
    tokens = np.zeros((1, slots), np.int32)
    tokens[0, : len(prompt)] = prompt
    requests = jax.tree.map(jnp.asarray, arrays._replace(tokens=tokens))
    zero = jnp.zeros(1, jnp.int32)
    state = empty_rows(target, drafter, 1, slots, requests.stop_tokens.shape[1])
    state, _ = read_rows(target, drafter, state, Chunk(zero, zero, zero, zero == 0, requests))
    return state


@partial(jax.jit, static_argnames="tree")
def _traced_step(
    target: Target, drafter: RecurrentDrafter, state: DecodeState, *, tree: TreeConfig
) -> tuple[TokenTree, TokenTree, DecodeState]:
    """A decode step: the tree of all beams of all rounds, the tree that is verified, the state."""
    noise = step_noise(state, tree.max_path, target.config.vocab_size)
    every_beam = replace(tree, final_beams_only=False)
    beams = propose(target.merge(), drafter, state, noise, every_beam)
    after, trace = decode_step(target, drafter, state, tree=tree)
    return beams, trace.tree, after


def read_tree(tree: TokenTree) -> dict[tuple[int, ...], float]:
    """The paths of row 0's nodes in their order, without padding, with their log-probabilities."""
    tokens, parents, scores = (
        np.asarray(values)[0].tolist() for values in (tree.tokens, tree.parents, tree.log_probs)
    )
    nodes = zip(_paths(tokens, parents), scores, strict=True)
    return {path: score for path, score in nodes if score > -np.inf}


def _paths(tokens: Iterable[int], parents: Iterable[int]) -> list[tuple[int, ...]]:
    """The path of every node; node 0 is the root, and parents come before their children."""
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(tokens, parents, strict=True):
        paths.append((*(paths[parent] if paths else ()), token))
    return paths


def compare_traces(ours: Decoded, apple: Decoded, prompt_length: int) -> dict[str, Any]:
    """The texts, the calls, and every step that both sides begin from the same text.

    `unexplained` counts the differences that are no ties, a text of another wording, and calls that
    differ where nothing else does.
    """
    divergence = first_divergence(ours.tokens, apple.tokens)
    shared = len(ours.tokens) if divergence is None else divergence
    theirs = {step.length: step for step in apple.steps}
    pairs = [
        (step, theirs[step.length])
        for step in ours.steps
        if step.length in theirs and step.length - prompt_length <= shared
    ]
    differences = [
        (step.length, *found)
        for step, other in pairs
        if (found := find_difference(step, other)) is not None
    ]
    ties = sum(gap is not None and gap <= TOLERANCE for _, _, gap in differences)
    same_text = ours.tokens == apple.tokens
    same_calls = ours.target_calls == apple.target_calls
    unexplained = len(differences) - ties + (not same_text)
    unexplained += same_text and not same_calls and not differences
    return {
        "same_text": same_text,
        "shared_tokens": shared,
        "same_calls": same_calls,
        "target_calls": {"ours": ours.target_calls, "apple": apple.target_calls},
        "steps": len(pairs),
        "same_beams": len(pairs) - sum(kind != "tree" for _, kind, _ in differences),
        "same_trees": sum(one.paths == other.paths for one, other in pairs),
        "largest_error": max((largest_error(*pair) for pair in pairs), default=0.0),
        "ties": ties,
        "unexplained": unexplained,
        "differences": [
            {"length": length, "kind": kind, "gap": gap} for length, kind, gap in differences
        ],
    }


def find_difference(ours: Step, apple: Step) -> tuple[str, float | None] | None:
    """Where two steps first differ, and the nats between the two choices.

    They differ in the "order" of the same beams, in the "beams", or in the "tree" of the same
    beams, where the gap is None. Returns None for steps without a difference.
    """
    for one, other in zip(ours.rounds, apple.rounds, strict=True):
        if list(one) == list(other):
            continue
        if one.keys() == other.keys():
            # The most that separates, by our scores, two beams of one rank.
            return "order", max(abs(one[a] - one[b]) for a, b in zip(one, other, strict=True))
        # By how much a beam that one side alone keeps beats the other side's last. That side
        # scored it no higher, so the two scores of it differ by this much.
        return "beams", max(
            kept[beam] - min(others.values())
            for kept, others in ((one, other), (other, one))
            for beam in kept.keys() - others.keys()
        )
    return None if ours.paths == apple.paths else ("tree", None)


def largest_error(ours: Step, apple: Step) -> float:
    """Nats between the two scores of a beam that both sides keep in a round, at most."""
    rounds = zip(ours.rounds, apple.rounds, strict=True)
    errors = [
        abs(one[beam] - other[beam]) for one, other in rounds for beam in one.keys() & other.keys()
    ]
    return max(errors, default=0.0)
