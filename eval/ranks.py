"""`python -m eval ranks`: where the target's own choices stand among the drafter's guesses.

The target's greedy texts are walked through once, the drafter unrolled at every position over the
tokens that follow. The fewest calls that a beam of width W could do with, were its beams ranked by
one who knows the text, are then counted without decoding.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int
from rich.console import Console

from redrafter_jax.config import DraftConfig
from redrafter_jax.decoding.step import draft_scorer
from redrafter_jax.drafters.recurrent import check_pair
from redrafter_jax.drafters.recurrent_head import DraftModel
from redrafter_jax.generation import generate_autoregressive
from redrafter_jax.models.target import Target
from redrafter_jax.settings.arguments import parse_settings

from .config import RanksSettings
from .loading import load
from .report import describe_run, write_report
from .table import render_ranks

DEFINITIONS = {
    "within": "share of places where the target's choice is among the k best guesses, by round; "
    "round i (from 0) guesses the token i + 2 places after its context, fed with the i + 1 between",
    "acceptance_length": "tokens per target call of the fewest calls that take the texts, where a "
    "call takes one token and after it as many of the target's choices as it likes, R at most, "
    "while each is among the k best guesses after its parent; a beam of width k holds no others",
}


def measure_ranks(arguments: Sequence[str] | None = None) -> None:
    """Rank the target's choices; a table and a JSON file.

    Args:
      arguments: of the command line; None takes the process's own.

    Raises:
      InputError: a setting, a file or a prompt cannot be used.
    """
    settings = parse_settings(
        RanksSettings,
        "Where the target's choices stand among the drafter's guesses.",
        arguments,
        command="ranks",
    )
    target, drafter, _, prompts = load(settings, [])
    for width in settings.widths:
        check_pair(target.config, drafter.config, DraftConfig(width, settings.draft_rounds))
    texts = generate_autoregressive(
        target, prompts, max_new_tokens=settings.max_new_tokens, eos_token_ids=()
    ).tokens
    ranks = rank_texts(target, drafter, prompts, texts, settings.draft_rounds)
    rows = [summarise(ranks, width) for width in settings.widths]
    report = {
        "rows": rows,
        "texts": len(texts),
        **describe_run(),
        "config": settings.model_dump(mode="json"),
        "definitions": DEFINITIONS,
    }
    path = settings.report_dir / "ranks.json"
    write_report(report, path)
    Console().print(render_ranks(rows))
    print(f"The report: {path}")


def rank_texts(
    target: Target,
    drafter: DraftModel,
    prompts: Sequence[Sequence[int]],
    texts: Sequence[Sequence[int]],
    rounds: int,
) -> list[Int[np.ndarray, "R M"]]:
    """For every text the rank of its token that round i guesses below its root m; 0 is the best.

    Roots are the new tokens that have others after them. Past the text's end, and for tokens that
    cannot be drafted, the rank is that of no token: V.

    Args:
      target: whose texts they are.
      drafter: whose guesses are ranked.
      prompts: token ids.
      texts: what followed each prompt.
      rounds: R.
    """
    V = target.config.vocab_size
    ranks = []
    for prompt, text in zip(prompts, texts, strict=True):
        whole = [*prompt, *text]
        # Few shapes compile once each; causal attention sees nothing of the padding.
        padded = np.zeros((1, -(-(len(whole) + rounds) // 64) * 64), np.int32)
        padded[0, : len(whole)] = whole
        every = np.asarray(_ranks(target, drafter, padded, rounds=rounds))
        roots = np.arange(len(prompt), len(whole) - 1)
        guessed = roots + 1 + np.arange(rounds)[:, None]
        # A context is the position before its root.
        ranks.append(np.where(guessed < len(whole), every[:, roots - 1], V))
    return ranks


def summarise(ranks: Sequence[Int[np.ndarray, "R M"]], width: int) -> dict[str, Any]:
    """One row of the report: guesses within the `width` best."""
    together = np.concatenate(ranks, axis=1)
    rounds = len(together)
    # A place past the end of its text asks nothing of a round.
    counts = [sum(max(one.shape[1] - i, 0) for one in ranks) for i in range(rounds)]
    hits = (together < width).sum(axis=1)
    calls = sum(fewest_calls(np.cumprod(one < width, axis=0).sum(axis=0)) for one in ranks)
    return {
        "width": width,
        "within": [int(hit) / count for hit, count in zip(hits, counts, strict=True)],
        "acceptance_length": together.shape[1] / calls,
    }


def fewest_calls(runs: Int[np.ndarray, " M"]) -> int:
    """Calls that M tokens take where one at token m takes any 1 to 1 + runs[m] of them.

    The longest gain is not always the best: a shorter one may lead to a longer run.
    """
    calls = [0]  # that the last 0, 1, 2 ... tokens take
    for run in reversed(runs.tolist()):
        calls.append(1 + min(calls[max(len(calls) - 1 - run, 0) :]))
    return calls[-1]


@partial(jax.jit, static_argnames="rounds")
def _ranks(
    target: Target, drafter: DraftModel, tokens: Int[Array, "B T"], *, rounds: int
) -> Int[Array, "R T"]:
    """Of the token that each round guesses from each position, of one row."""
    decoder, head = target.merge(), drafter.merge()
    V = target.config.vocab_size
    hidden, _, _ = decoder.forward(tokens, context_layers=drafter.config.context_layers)
    context = head.read_context(hidden[0])
    scorer, known = draft_scorer(decoder, drafter), head.draft_token_ids
    places = (
        jnp.arange(V) if known is None else jnp.full(V, -1).at[known].set(jnp.arange(len(known)))
    )
    row = jnp.pad(tokens[0], (0, rounds + 1))
    T = tokens.shape[1]

    def rank(state: Float[Array, "T D"], i: int) -> Int[Array, " T"]:
        scores = head.logits(context, state, scorer)
        place = places[row[i + 2 :][:T]]
        own = jnp.take_along_axis(scores, jnp.maximum(place, 0)[:, None], axis=1)
        # Not `scores > own`: what is no number is no good guess.
        return jnp.where(place < 0, V, (~(scores <= own)).sum(axis=1))

    state = jnp.zeros_like(context)
    found = []
    for i in range(rounds):
        state = head.step(state, decoder.embed_tokens[...][row[i + 1 :][:T]])
        found.append(rank(state, i))
    return jnp.stack(found)
