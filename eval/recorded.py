"""Answers recorded once, on which any tree's target calls are counted without a target call.

Decoding is lossless: the text is the same whatever is drafted. So with the text known, and what the
target saw at each of its tokens, a step needs its drafts alone to tell how far it would have got.
"""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from redrafter_jax.config import SamplingConfig
from redrafter_jax.decoding.accept import accept
from redrafter_jax.decoding.step import step_noise
from redrafter_jax.drafters.base import Drafter, RootOnly
from redrafter_jax.models.target import Target
from redrafter_jax.text.prompts import Asked
from redrafter_jax.types import DecodeState, DecodeStats, KVCache, Sampling

from .benchmark import Batch, Method, decode_batch, make_batches, prepare_batch
from .config import RowSettings

# Texts that are walked together: a beam search holds W * V scores for each.
_ROWS = 32


class Recorded(NamedTuple):
    """Texts, prompts included, and what the target saw at their tokens.

    Attributes:
      tokens: the texts, zeros past them.
      prompts: tokens of each prompt; the one behind them is decided by prefill.
      ends: tokens of each text.
      hidden: at every token the target's hidden states, as `Drafter.init` reads them.
      sampling: how each row's tokens were chosen.
    """

    tokens: Int[Array, "B S"]
    prompts: Int[Array, " B"]
    ends: Int[Array, " B"]
    hidden: Float[Array, "B S Z"]
    sampling: Sampling


class Recording(NamedTuple):
    """The answers to all prompts under one sampling.

    Attributes:
      batches: of equal shapes; the last prompt stands in for those that the last batch lacks.
      answers: new tokens of each prompt.
    """

    batches: list[Recorded]
    answers: list[list[int]]

    @property
    def baseline_calls(self) -> Int[np.ndarray, " prompts"]:
        """Target calls of autoregressive decoding for each prompt, after prefill."""
        return np.asarray([len(answer) - 1 for answer in self.answers])


def record(
    target: Target,
    asked: Asked,
    sampling: SamplingConfig,
    rows: RowSettings,
    context_layers: tuple[int, ...],
) -> Recording:
    """Let the target write the answers, then read each once more in one pass.

    Args:
      target: the target, on one device.
      asked: what it is asked.
      sampling: how tokens are chosen.
      rows: how far prompts are answered, and their seeds.
      context_layers: of the drafters to come.
    """
    count = len(asked.rows)
    size = min(count, _ROWS)
    batches = make_batches(asked, size, sampling, rows)
    prompts, missing = batches[-1].prompts, size - len(batches[-1].prompts)
    batches[-1] = batches[-1]._replace(
        prompts=prompts + prompts[-1:] * missing,
        seeds=batches[-1].seeds + batches[-1].seeds[-1:] * missing,
    )
    method = Method(target, RootOnly())
    requests = [prepare_batch(method, batch) for batch in batches]
    slots = max(one.tokens.shape[1] for one in requests)
    recorded, answers = [], []
    for batch, request in zip(batches, requests, strict=True):
        own = decode_batch(method, batch).tokens
        recorded.append(_read(target, batch, own, request.sampling, slots, context_layers))
        answers += own
    return Recording(recorded, answers[:count])


def _read(
    target: Target,
    batch: Batch,
    answers: Sequence[Sequence[int]],
    sampling: Sampling,
    slots: int,
    context_layers: tuple[int, ...],
) -> Recorded:
    texts = [[*prompt, *new] for prompt, new in zip(batch.prompts, answers, strict=True)]
    tokens = np.zeros((len(texts), slots), np.int32)
    for row, text in enumerate(texts):
        tokens[row, : len(text)] = text
    return Recorded(
        tokens=jnp.asarray(tokens),
        prompts=jnp.asarray([len(prompt) for prompt in batch.prompts], jnp.int32),
        ends=jnp.asarray([len(text) for text in texts], jnp.int32),
        hidden=_hidden_states(target, jnp.asarray(tokens), context_layers=context_layers),
        sampling=sampling,
    )


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
    target: Target, drafter: Drafter, recording: Recording
) -> Int[np.ndarray, "prompts P"]:
    """What decoding the recorded texts would count: entry (i, c - 1), calls that gain c tokens.

    Args:
      target: that wrote them.
      drafter: from `bind_drafter`; one whose state follows from the hidden states before the root,
        and that reads no keys or values.
      recording: of a sampling.
    """
    counts = [np.asarray(_walk(target, drafter, batch)) for batch in recording.batches]
    return np.concatenate(counts)[: len(recording.answers)]


@jax.jit
def _walk(target: Target, drafter: Drafter, recorded: Recorded) -> Int[Array, "B P"]:
    """Decode steps without their target calls, from each text's first new token to its end."""
    decoder, P = target.merge(), drafter.max_path
    prepared = drafter.prepare(decoder)
    tokens, B = recorded.tokens, len(recorded.tokens)

    def take(values: Array, at: Int[Array, " B"]) -> Array:
        return values[jnp.arange(B), at]

    def unfinished(carry: tuple[Int[Array, " B"], Int[Array, "B P"]]) -> Bool[Array, ""]:
        root, _ = carry
        return (root + 1 < recorded.ends).any()

    def step(
        carry: tuple[Int[Array, " B"], Int[Array, "B P"]],
    ) -> tuple[Int[Array, " B"], Int[Array, "B P"]]:
        root, counts = carry
        state = DecodeState(
            tokens=tokens,
            cache=KVCache((), (), root),
            drafter=prepared.init(take(recorded.hidden, root - 1)),
            root=take(tokens, root),
            done=root + 1 >= recorded.ends,
            limits=recorded.ends,
            stop_tokens=jnp.zeros((B, 0), jnp.int32),
            sampling=recorded.sampling,
            stats=DecodeStats(counts, None, counts.sum(axis=1)),
            log_probs=None,
        )
        noise = step_noise(state, P, target.config.vocab_size)
        tree = prepared.propose(decoder, state, noise)
        # At every depth the target chooses the text's next token, if all above it did.
        chosen = jnp.take_along_axis(tokens, root[:, None] + 1 + tree.depth, axis=1)
        gained = jnp.minimum(accept(tree, chosen, P).count, recorded.ends - 1 - root)
        return root + gained, counts + (jnp.arange(P) == gained[:, None] - 1)

    start = recorded.prompts, jnp.zeros((B, P), jnp.int32)
    _, counts = jax.lax.while_loop(unfinished, step, start)
    return counts
