"""Lists of prompts in, tokens out: speculative decoding and its baseline."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from redrafter_jax.acceptance import acceptance_length
from redrafter_jax.config import SamplingConfig, TargetConfig, TreeConfig
from redrafter_jax.decoding.prefill import PrefixCache, begin_drafting, prefill
from redrafter_jax.decoding.step import decode
from redrafter_jax.drafters.base import Drafter
from redrafter_jax.drafters.bind import bind_drafter
from redrafter_jax.drafters.head_drafter import LoadedHead
from redrafter_jax.errors import InputError
from redrafter_jax.models.target import Target
from redrafter_jax.parallel.mesh import check_rows, check_same_mesh, place, to_host
from redrafter_jax.parallel.model import Model
from redrafter_jax.requests import Batch, PerRow, Prompts, StopTokens, pad_requests, tokenize
from redrafter_jax.types import NO_CHOICE, DecodeState


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
    """

    tokens: list[list[int]]
    steps: list[int]
    acceptance_length: float
    accept_counts: np.ndarray
    accepted_by: dict[str, list[int]]
    log_probs: list[list[float]] | None = None
    texts: list[str] | None = None

    @property
    def copied_tokens(self) -> list[int]:
        """Per row, the accepted tokens of prompt lookup."""
        return self.accepted_by.get("lookup", [0] * len(self.tokens))


def generate(
    target: Target,
    drafter: LoadedHead | Drafter | None,
    prompts: Prompts,
    *,
    max_new_tokens: PerRow[int],
    tree: TreeConfig | None = None,
    sampling: PerRow[SamplingConfig] | None = None,
    seeds: Sequence[int] | None = None,
    eos_token_ids: StopTokens | None = None,
    log_probs: bool = False,
    tokenizer: Any = None,
) -> Generation:
    """Speculative decoding: the text of `generate_autoregressive`, in fewer target calls.

    Args:
      target: from `load_target`.
      drafter: from `load_drafter`, trained for this target; or `PromptLookup()`, which needs no
        training; or None for autoregressive decoding.
      prompts: token ids: a list of lists or of arrays, ragged; an array [B T]; or what a tokenizer
        of transformers returns without padding, such as `apply_chat_template(turns)`. With a
        tokenizer also a conversation, a list of turns such as `{"role": "user", "content":
        "Hi"}`, a text to continue, or a list of such.
      max_new_tokens: limit on new tokens, one for all rows or one per row.
      tree: how a loaded drafter drafts trees; None for `TreeConfig()`.
      sampling: how tokens are chosen, one for all rows or one per row; None is greedy.
      seeds: one per row, equal ones allowed; None counts rows from 0.
      eos_token_ids: tokens that end a row, one list for all rows or one per row; None takes the
        target's, and of a tokenizer those that end an answer; () never stops.
      log_probs: also return the log-probability of every new token.
      tokenizer: from `load_tokenizer`: reads conversations and texts, and gives `texts`.

    Raises:
      InputError: a prompt, a limit or the drafter does not fit the target.
    """
    bound = bind_drafter(drafter, tree)
    check_models(target, bound)
    asked = tokenize(target.config, prompts, tokenizer, eos_token_ids)
    batch = Batch(asked.prompts, max_new_tokens, sampling, seeds, asked.eos_token_ids)
    state, max_steps = start(target, bound, batch, log_probs=log_probs)
    lengths = list(map(len, asked.prompts))
    result = collect(target, decode(target, bound, state, max_steps), lengths, bound)
    return result._replace(texts=asked.texts(target.config, result.tokens))


def generate_autoregressive(
    target: Target,
    prompts: Prompts,
    *,
    max_new_tokens: PerRow[int],
    sampling: PerRow[SamplingConfig] | None = None,
    seeds: Sequence[int] | None = None,
    eos_token_ids: StopTokens | None = None,
    log_probs: bool = False,
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
        tokenizer=tokenizer,
    )


def check_models(target: Target, drafter: Drafter) -> None:
    """Refuse what is no target, and a drafter that does not fit it or lies on another mesh."""
    if not (isinstance(target, Model) and isinstance(target.config, TargetConfig)):
        raise InputError(
            f"target is {target!r:.40}; give what load_target returns, then its drafter."
        )
    drafter.check(target.config)
    check_same_mesh(target, *drafter.models)


def start(
    target: Target,
    drafter: Drafter,
    batch: Batch,
    *,
    log_probs: bool = False,
    prefix: PrefixCache | None = None,
) -> tuple[DecodeState, int]:
    """Check and prefill the prompts; arguments as in `generate` and `prefill`.

    Where the prompts begin with the texts of a `prefix`, row by row, only the rest is read. It is
    donated, and its slots become the state's.

    Returns:
      The state, and a number of decode steps that suffices for every row.

    Raises:
      InputError: as `generate`, or the prefix has too few slots or other rows.
    """
    check_models(target, drafter)
    shape = None if prefix is None else prefix.tokens.shape
    requests, slots = pad_requests(target.config, batch, drafter.max_path, shape)
    check_rows(len(batch.prompts), target.mesh)
    state = prefill(
        target,
        place(requests, target.mesh),
        prefix,
        log_probs=log_probs,
        context_layers=drafter.context_layers,
    )
    return begin_drafting(state, drafter), slots


def collect(
    target: Target, state: DecodeState, starts: Sequence[int], drafter: Drafter
) -> Generation:
    """What row b has decided from its token `starts[b]` on, on the host; counts are the state's.

    Raises:
      InputError: the target's scores were not numbers.
    """
    tokens, log_probs, lengths, stats = to_host(
        (state.tokens, state.log_probs, state.cache.lengths, state.stats)
    )

    def new(rows: np.ndarray) -> list[list[Any]]:
        ends = zip(rows, starts, lengths, strict=True)
        return [row[start : length + 1].tolist() for row, start, length in ends]

    decided = new(tokens)
    if any(NO_CHOICE in row for row in decided):
        raise not_numbers(target)
    accepted_by = {name: [0] * len(starts) for name in drafter.names}
    for source, name in enumerate(drafter.names):
        counts = stats.accepted_by[:, source].tolist()
        accepted_by[name] = [sum(pair) for pair in zip(accepted_by[name], counts, strict=True)]
    return Generation(
        tokens=decided,
        steps=stats.steps.tolist(),
        acceptance_length=acceptance_length(stats.accept_counts),
        accept_counts=stats.accept_counts,
        accepted_by=accepted_by,
        log_probs=None if log_probs is None else new(log_probs),
    )


def not_numbers(target: Target) -> InputError:
    """For a target whose scores are NaN or infinite: where it came from, and which weight it is."""
    problem = f"{target.source or 'The model'}: the target's scores are NaN or infinite"
    for path, leaf in jax.tree_util.tree_leaves_with_path(target.params):
        if jnp.issubdtype(leaf.dtype, jnp.floating) and not bool(jnp.isfinite(leaf).all()):
            keys = (str(getattr(key, "key", getattr(key, "idx", ""))) for key in path)
            return InputError(
                f"{problem}, because its weight {'.'.join(filter(None, keys))} holds such numbers; "
                "download or convert it again."
            )
    return InputError(
        f"{problem}, though its weights are finite: they overflow on the way; load it in float32, "
        "or download it again."
    )
