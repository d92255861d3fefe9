"""Generation for batches of prompts: speculative decoding and its autoregressive baseline."""

from collections.abc import Sequence
from itertools import chain, starmap
from typing import TYPE_CHECKING, Any, NamedTuple

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
from redrafter_jax.types import GRAMMAR, LOOKUP

if TYPE_CHECKING:
    from redrafter_jax.text.grammars import CompiledGrammar

# Decode steps between two choices of the tree by the adaptive chooser.
_STEPS = 32


class Generation(NamedTuple):
    """The result of `generate`.

    Attributes:
      tokens: per row, the new tokens, up to and including the stop token.
      steps: per row, the number of target calls after prefill.
      acceptance_length: mean number of tokens gained per target call, bonus token included; 1.0
        without a drafter.
      accept_counts: [B, P], where P is the most tokens that a call can gain; entry (b, c - 1) is
        the number of target calls that gained c tokens for row b.
      accepted_by: for each source of drafted tokens ("recurrent", "lookup"), the number of accepted
        tokens per row. A token that two sources propose counts for the first of them in this
        mapping. The last token of a call counts as the target's bonus token, even if the end of the
        row cuts the call short.
      log_probs: per row, the log-probability of each new token under the target at temperature 1,
        without filters; None unless `log_probs` is set.
      texts: per row, the decoded text of the new tokens, without the stop token; None without a
        tokenizer.
      prompt_log_probs: per row, the log-probabilities of the prompt's tokens from the second token
        on, computed like `log_probs`; None unless `prompt_log_probs` is set.
      mirror: counts of how often the next tree was ready in time; None unless `mirror` is given.
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
        """Number of accepted tokens that prompt lookup proposed, per row."""
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
    grammars: "PerRow[Grammar | CompiledGrammar | None] | None" = None,
    tokenizer: Any = None,
    mirror: MirrorConfig | None = None,
) -> Generation:
    """Generate the same text as `generate_autoregressive`, in fewer target calls.

    Args:
      target: the target model, from `load_target`.
      drafter: the drafter, from `load_drafter` (a head trained for this target, a smaller model
        with the target's vocabulary, or a part of the target itself), or `PromptLookup()`; None for
        autoregressive decoding.
      prompts: token ids: a ragged list of lists or of arrays, an array [B T], or the unpadded
        result of a tokenizer of transformers, for example of `apply_chat_template(turns)`. With
        `tokenizer` also a conversation (a list of turns such as
        `{"role": "user", "content": "Hi"}`), a text to continue, or a list of conversations or
        texts.
      max_new_tokens: maximum number of new tokens: one number for all rows, or one per row.
      tree: the shape of the drafted trees, or a table of measured shapes, from `load_tree_table`.
        None uses the drafter's default: `TreeConfig()` for a head, a chain for a model.
      adaptive: whether to decode without drafting while drafting makes decoding slower; None means
        True unless `tree` is a `TreeConfig`.
      sampling: sampling settings: one for all rows, or one per row; None is greedy decoding.
      seeds: one random seed per row; seeds may be equal. None uses 0, 1, 2, ...
      eos_token_ids: stop tokens: one list for all rows, or one per row. None uses the target's stop
        tokens and the tokenizer's end-of-turn tokens; () never stops.
      log_probs: whether to return the log-probability of every new token.
      prompt_log_probs: whether to return the log-probabilities of the prompts' tokens.
      grammars: constraint on the new text: one for all rows, or one per row; None for no
        constraint. A `Grammar` needs `tokenizer` and the package llguidance.
      tokenizer: tokenizer from `load_tokenizer`, which encodes conversations and texts, and decodes
        `texts`.
      mirror: settings for drafting the next trees while the target verifies (docs/mirror.md); None
        drafts them after verification.

    Raises:
      InputError: an argument is invalid; or a prompt, a limit or the drafter does not fit the
        target.
    """
    bound, _ = bind_models(target, drafter, tree)
    asked = tokenize(target.config, prompts, tokenizer, eos_token_ids)
    batch = Batch(asked.prompts, max_new_tokens, sampling, seeds, asked.eos_token_ids)
    requests = check_batch(target.config, batch)
    if grammars is not None:
        from redrafter_jax.engine.constrained import hold

        requests = hold(target.config, requests, grammars, tokenizer)
    told = log_probs or prompt_log_probs
    engine = engine_of(target, bound, requests, tree, adaptive, told, mirror)
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
    grammars: "PerRow[Grammar | CompiledGrammar | None] | None" = None,
    tokenizer: Any = None,
) -> Generation:
    """Generate one token per target call: the baseline, which is `generate` without a drafter."""
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
    mirror: MirrorConfig | None = None,
    context_length: int | None = None,
) -> Engine:
    """Create an engine with one slot for each request of a batch, without submitting the requests.

    Args:
      target: the target model.
      drafter: the drafter, from `bind_models`.
      requests: requests from `check_batch`.
      tree: as in `generate`.
      adaptive: as in `generate`.
      log_probs: whether the engine reports log-probabilities.
      mirror: as in `generate`.
      context_length: maximum number of tokens of a text, prompt included; None takes the maximum
        over the requests.

    Raises:
      InputError: the errors of `generate`.
    """
    rows = len(requests)
    check_rows(rows, target.mesh)
    if mirror is not None:
        check_mirrored(requests)
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
    """Return the new tokens of each row as a `Generation`, with their counts; `texts` is None."""
    names, longest = engine.drafted_by, engine.longest_path
    if any(token.origin == GRAMMAR for row in rows for token in row):
        names = (*names, GRAMMAR)
    counts = np.zeros((len(rows), longest), np.int64)
    for row, tokens in enumerate(rows):
        calls = np.bincount([token.call for token in tokens])[1:]  # call 0 reads the prompt
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
    """Raise `InputError` if an event has ended a row because of NaN scores or of its grammar."""
    if event.ended == "not numbers":
        raise not_numbers(target)
    if event.ended == "grammar":
        raise InputError(
            "The grammar of a row has become too complex for llguidance; give a simpler grammar."
        )


def not_numbers(target: Target) -> InputError:
    """Return the error for NaN or infinite scores; it names the model and the faulty weight."""
    problem = f"{target.source or 'The model'}: the target's scores are NaN or infinite"
    for path, weight in chain.from_iterable(starmap(parts_of, nnx.to_flat_state(target.params))):
        numbers = [leaf for leaf in jax.tree.leaves(weight) if _is_floating(leaf)]
        if not all(bool(jnp.isfinite(leaf).all()) for leaf in numbers):
            return InputError(
                f"{problem}, because its weight {'.'.join(map(str, path))} holds such numbers; "
                "download or convert the model again."
            )
    return InputError(
        f"{problem}, but its weights are finite, so its activations overflow; load the model in "
        "float32, or download it again."
    )


def _is_floating(leaf: jax.Array) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.floating)
