"""Lists of prompts in, tokens out: speculative decoding and its baseline."""

from collections.abc import Sequence
from itertools import chain, starmap
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from redrafter_jax.acceptance import acceptance_length
from redrafter_jax.config import Grammar, MirrorConfig, SamplingConfig, TreeConfig
from redrafter_jax.drafters.base import Drafter, LoadedHead
from redrafter_jax.engine.engine import Engine
from redrafter_jax.engine.messages import Event, MirrorCounts, Request, Token
from redrafter_jax.engine.requests import (
    Batch,
    PerRow,
    Prompts,
    StopTokens,
    check_batch,
    check_mirrored,
    tokenize,
)
from redrafter_jax.engine.trees import bind_models
from redrafter_jax.errors import InputError
from redrafter_jax.files.tree_table import TreeTable
from redrafter_jax.models.linear import parts_of
from redrafter_jax.models.target import Target
from redrafter_jax.parallel.mesh import check_rows, data_shards
from redrafter_jax.text.grammars import CompiledGrammar
from redrafter_jax.types import GRAMMAR, LOOKUP

# Decode steps between two choices of the tree.
_STEPS = 32


class Generation(NamedTuple):
    """What `generate` returns.

    Attributes:
      tokens: per row, the new tokens up to and including the stop token.
      steps: per row, target calls after prefill.
      acceptance_length: mean tokens gained per target call, bonus included; 1.0 without a drafter.
      accept_counts: [B, P]; entry (b, c - 1) counts the calls that gained row b c tokens.
      accepted_by: for each source of drafted tokens ("recurrent", "lookup"), per row, how many of
        its tokens were accepted. A token that two sources propose counts for the first. A call's
        last token is the target's bonus, also where the row ends before it.
      log_probs: per row, beside each new token its log-probability under the target at
        temperature 1 without filters; None unless asked for.
      texts: per row, what the new tokens spell, without what ended it; None without a tokenizer.
      prompt_log_probs: per row, likewise of the prompt's tokens from the second one on; None unless
        asked for.
      mirror: how often trees were ready; None without `mirror`.
    """

    tokens: list[list[int]]
    steps: list[int]
    acceptance_length: float
    accept_counts: np.ndarray
    accepted_by: dict[str, list[int]]
    log_probs: list[list[float]] | None = None
    texts: list[str] | None = None
    prompt_log_probs: list[list[float]] | None = None
    mirror: MirrorCounts | None = None

    @property
    def copied_tokens(self) -> list[int]:
        """Per row, the accepted tokens of prompt lookup."""
        return self.accepted_by.get(LOOKUP, [0] * len(self.tokens))


def generate(
    target: Target,
    drafter: LoadedHead | Drafter | None,
    prompts: Prompts,
    *,
    max_new_tokens: PerRow[int],
    tree: TreeConfig | TreeTable | None = None,
    adaptive: bool | None = None,
    sampling: PerRow[SamplingConfig] | None = None,
    seeds: Sequence[int] | None = None,
    eos_token_ids: StopTokens | None = None,
    log_probs: bool = False,
    prompt_log_probs: bool = False,
    grammars: PerRow[Grammar | CompiledGrammar | None] | None = None,
    tokenizer: Any = None,
    mirror: MirrorConfig | None = None,
) -> Generation:
    """Speculative decoding: the text of `generate_autoregressive`, in fewer target calls.

    Args:
      target: from `load_target`.
      drafter: from `load_drafter`: a head trained for this target, a smaller model with its
        vocabulary, or a part of the target itself; or `PromptLookup()`; or None for autoregressive
        decoding.
      prompts: token ids: a list of lists or of arrays, ragged; an array [B T]; or what a tokenizer
        of transformers returns without padding, such as `apply_chat_template(turns)`. With a
        tokenizer also a conversation, a list of turns such as `{"role": "user", "content":
        "Hi"}`, a text to continue, or a list of such.
      max_new_tokens: limit on new tokens, one for all rows or one per row.
      tree: the shape of the drafted trees, or the tuner's table of the fastest ones, from
        `load_tree_table`; None is the drafter's default: `TreeConfig()` for a head, a chain for
        a model.
      adaptive: whether plain decoding takes over while a tree gains less than it costs; None is
        True unless `tree` is one `TreeConfig`.
      sampling: how tokens are chosen, one for all rows or one per row; None is greedy.
      seeds: one per row, equal ones allowed; None counts rows from 0.
      eos_token_ids: tokens that end a row, one list for all rows or one per row; None takes the
        target's, and of a tokenizer those that end an answer; () never stops.
      log_probs: also return the log-probability of every new token.
      prompt_log_probs: also return those of the prompts' own tokens.
      grammars: what the new text is held to, one for all rows or one per row, None for anything;
        they need a tokenizer, and the package llguidance.
      tokenizer: from `load_tokenizer`: reads conversations and texts, and gives `texts`.
      mirror: draft the next trees while the target verifies (docs/mirror.md); None drafts them
        after it.

    Raises:
      InputError: a prompt, a limit or the drafter does not fit the target.
    """
    bound, _ = bind_models(target, drafter, tree)
    asked = tokenize(target.config, prompts, tokenizer, eos_token_ids)
    batch = Batch(asked.prompts, max_new_tokens, sampling, seeds, asked.eos_token_ids)
    requests = check_batch(target.config, batch)
    if grammars is not None:
        from redrafter_jax.engine.constrained import hold

        requests = hold(target.config, requests, grammars, tokenizer)
    if mirror is not None:
        check_mirrored(requests)
    told = log_probs or prompt_log_probs
    engine = engine_of(target, bound, requests, tree, adaptive, told, mirror=mirror)
    if engine.adaptive:
        engine.steps_per_call = _STEPS
    tokens: dict[int, list[Token]] = {}
    for request in requests:
        tokens[engine.submit(request._replace(scores_prompt=prompt_log_probs))] = []
    prompts_read = {number: [] for number in tokens}
    while engine.busy:
        for event in engine.advance(passes=None):
            tokens[event.number] += event.decided
            prompts_read[event.number] += [token.log_prob for token in event.prompt]
            refuse_failure(target, event)
    result = collect(engine, list(tokens.values()), log_probs)
    return result._replace(
        texts=asked.texts(target.config, result.tokens),
        prompt_log_probs=list(prompts_read.values()) if prompt_log_probs else None,
    )


def generate_autoregressive(
    target: Target,
    prompts: Prompts,
    *,
    max_new_tokens: PerRow[int],
    sampling: PerRow[SamplingConfig] | None = None,
    seeds: Sequence[int] | None = None,
    eos_token_ids: StopTokens | None = None,
    log_probs: bool = False,
    prompt_log_probs: bool = False,
    grammars: PerRow[Grammar | CompiledGrammar | None] | None = None,
    tokenizer: Any = None,
) -> Generation:
    """The baseline, one token per target call: `generate` without a drafter."""
    return generate(
        target,
        None,
        prompts,
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        seeds=seeds,
        eos_token_ids=eos_token_ids,
        log_probs=log_probs,
        prompt_log_probs=prompt_log_probs,
        grammars=grammars,
        tokenizer=tokenizer,
    )


def engine_of(
    target: Target,
    drafter: Drafter,
    requests: Sequence[Request],
    tree: TreeConfig | TreeTable | None,
    adaptive: bool | None,
    log_probs: bool,
    context_length: int | None = None,
    mirror: MirrorConfig | None = None,
) -> Engine:
    """An engine with a slot for each of these requests, from `check_batch`, none submitted yet.

    Raises:
      InputError: as `generate`.
    """
    rows = len(requests)
    check_rows(rows, target.mesh)
    longest = max(len(request.prompt) + request.max_new_tokens for request in requests)
    return Engine(
        target,
        drafter,
        tree=tree,
        adaptive=adaptive,
        slots=rows,
        context_length=context_length or longest,
        stop_tokens=max((request.stop_tokens or () for request in requests), key=len),
        steps_per_call=None,
        prefill_rows=rows // data_shards(target.mesh),
        row_counts=(),
        top_log_probs=0 if log_probs else None,
        mirror=mirror,
    )


def collect(engine: Engine, rows: Sequence[Sequence[Token]], log_probs: bool) -> Generation:
    """What rows of tokens say together, each row from its first new token on."""
    names, longest = engine.drafted_by, engine.longest_path
    if any(token.origin == GRAMMAR for row in rows for token in row):
        names = (*names, GRAMMAR)
    counts = np.zeros((len(rows), longest), np.int64)
    for row, tokens in enumerate(rows):
        calls = np.bincount([token.call for token in tokens])[1:]  # the first reads the prompt
        counts[row] = np.bincount(calls[calls > 0] - 1, minlength=longest)
    return Generation(
        tokens=[[token.id for token in row] for row in rows],
        steps=counts.sum(axis=1).tolist(),
        acceptance_length=acceptance_length(counts),
        accept_counts=counts,
        accepted_by={
            name: [sum(token.origin == name for token in row) for row in rows] for name in names
        },
        log_probs=[[token.log_prob for token in row] for row in rows] if log_probs else None,
        mirror=engine.mirror and engine.mirror.counts,
    )


def refuse_failure(target: Target, event: Event) -> None:
    """Refuse to go on where a row cannot: for the target's scores, or for its grammar."""
    if event.ended == "not numbers":
        raise not_numbers(target)
    if event.ended == "grammar":
        raise InputError(
            "A row's grammar has become too complex for llguidance to go on with; simplify it."
        )


def not_numbers(target: Target) -> InputError:
    """For a target whose scores are NaN or infinite: where it came from, and which weight it is."""
    problem = f"{target.source or 'The model'}: the target's scores are NaN or infinite"
    for path, weight in chain.from_iterable(starmap(parts_of, nnx.to_flat_state(target.params))):
        numbers = [leaf for leaf in jax.tree.leaves(weight) if _is_floating(leaf)]
        if not all(bool(jnp.isfinite(leaf).all()) for leaf in numbers):
            return InputError(
                f"{problem}, because its weight {'.'.join(map(str, path))} holds such numbers; "
                "download or convert it again."
            )
    return InputError(
        f"{problem}, though its weights are finite: they overflow on the way; load it in float32, "
        "or download it again."
    )


def _is_floating(leaf: jax.Array) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.floating)
