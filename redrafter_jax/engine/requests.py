"""Checks of prompts and settings, and their conversion to requests and padded arrays."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar, cast

import jax
import numpy as np

from redrafter_jax.config import DynamicScaling, SamplingConfig, TargetConfig
from redrafter_jax.engine.messages import Request
from redrafter_jax.errors import InputError
from redrafter_jax.types import Requests, Sampling

# The number of cache slots is rounded up, so that requests of similar length share one compilation.
# Up to 4096 slots it becomes a multiple of this number, which is the block that attention reads at
# once; above that, one of eight sizes per power of 2.
_SLOT_BLOCK = 256
# Stop tokens are padded to a multiple of this.
_STOP_BLOCK = 8
# Settings that change the logits; see `SamplingConfig.adjusts`.
_ADJUSTING = (
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("logit_bias", "min_tokens"),
)

Value = TypeVar("Value")
# One value for all rows, or one per row.
PerRow: TypeAlias = Value | Sequence[Value]
StopTokens: TypeAlias = PerRow[Sequence[int]]
# Token ids: one list per prompt, an array [B T], or the result of a tokenizer of transformers. If a
# tokenizer is given, also conversations and texts.
Prompts: TypeAlias = str | Sequence[Any] | np.ndarray | jax.Array | Mapping[str, Any]


class Batch(NamedTuple):
    """Prompts to decode together, as token ids, with their settings; see `generate`'s arguments."""

    prompts: list[list[int]]
    max_new_tokens: PerRow[int]
    sampling: PerRow[SamplingConfig] | None = None
    seeds: Sequence[int] | None = None
    eos_token_ids: StopTokens | None = None


class TokenizedPrompts(NamedTuple):
    """Prompts as token ids, with stop tokens and a function that decodes new tokens.

    Attributes:
      prompts: token ids, one list per prompt.
      eos_token_ids: stop tokens, one list for all rows or one per row; None uses the target's stop
        tokens.
      decode: function from token ids to text; None without a tokenizer.
    """

    prompts: list[list[int]]
    eos_token_ids: StopTokens | None
    decode: Callable[[list[int]], str] | None

    def texts(self, config: TargetConfig, rows: Sequence[Sequence[int]]) -> list[str] | None:
        """Decode the new tokens of each row, without stop tokens; None without a tokenizer."""
        if self.decode is None:
            return None
        ends = stop_lists(config, self.eos_token_ids, len(rows))
        return [
            self.decode([token for token in row if token not in stops])
            for row, (_, stops) in zip(rows, ends, strict=True)
        ]


def tokenize(
    config: TargetConfig, prompts: Prompts, tokenizer: Any, eos_token_ids: StopTokens | None
) -> TokenizedPrompts:
    """Convert prompts of any accepted kind to token ids.

    Args:
      config: configuration of the target.
      prompts: prompts in any form that `redrafter_jax.generate` takes.
      tokenizer: tokenizer from `load_tokenizer`, or None.
      eos_token_ids: stop tokens, as in `redrafter_jax.generate`; None uses the stop tokens of the
        target and of the tokenizer.

    Raises:
      InputError: the prompts have an unknown form, or need a tokenizer that is not given.
    """
    from redrafter_jax.text.written import is_written, read_written  # not loaded by every command

    if tokenizer is None:
        if is_written(prompts):
            raise InputError(
                f"prompts is {_short(prompts)}, which only a tokenizer can read; give "
                "tokenizer=load_tokenizer(target)."
            )
        return TokenizedPrompts(token_lists(prompts), eos_token_ids, None)
    written = read_written(prompts, tokenizer, config)
    ends = written.end_tokens if eos_token_ids is None else eos_token_ids
    return TokenizedPrompts(token_lists(written.prompts), ends, written.decode)


def token_lists(prompts: Prompts) -> list[list[int]]:
    """Convert prompts to lists of token ids, one list per prompt, without checking the ids.

    Args:
      prompts: one of three forms. A list with one item per prompt: a list of ids, an array [T], or
        a dictionary whose `input_ids` is one of these. An array [B T]. A dictionary from a
        tokenizer of transformers, whose `input_ids` holds one prompt or all prompts.

    Raises:
      InputError: a prompt is not a list of integers, or the prompts are padded.
    """
    given = prompts
    if isinstance(prompts, Mapping):
        given = _input_ids(prompts, "prompts")
        if _axes(given) == 1:
            given = [given]
    if not (_axes(given) == 2 or (_axes(given) and isinstance(given, Sequence))):
        raise InputError(
            f"prompts is {_short(prompts)}; give a list of token ids per prompt, or an array of "
            "token ids with the axes [prompt, token]."
        )
    return [_token_list(prompt, f"Prompt {row}") for row, prompt in enumerate(given)]


def _token_list(prompt: Any, name: str) -> list[int]:
    given = _input_ids(prompt, name) if isinstance(prompt, Mapping) else prompt
    if _axes(given) == 2 and len(given) == 1:  # a batch of one
        given = given[0]
    if _axes(given) != 1:
        raise InputError(
            f"{name} is {_short(prompt)}; prompts are lists of token ids, one list per prompt."
        )
    return np.asarray(given).tolist() if hasattr(given, "__array__") else list(given)


def _input_ids(encoding: Mapping[str, Any], name: str) -> Any:
    if "input_ids" not in encoding:
        raise InputError(
            f"{name} is a dictionary without 'input_ids'; give lists of token ids, such as "
            'tokenizer.apply_chat_template(...)["input_ids"].'
        )
    mask = encoding.get("attention_mask")
    if mask is not None and not all(np.all(np.asarray(row)) for row in mask):
        raise InputError(
            f"{name} is padded: its attention_mask holds zeros; call the tokenizer without "
            'padding and give its ["input_ids"], lists of different lengths.'
        )
    return encoding["input_ids"]


def _axes(value: Any) -> int:
    """Return the number of axes of nested lists, possibly ragged, or of an array; otherwise 0."""
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return 1 + (_axes(value[0]) if len(value) else 0)
    return np.ndim(value) if hasattr(value, "__array__") else 0


def _short(value: Any) -> str:
    return " ".join(f"{value!r:.60}".split())


def check_batch(config: TargetConfig, batch: Batch) -> list[Request]:
    """Check a batch, and return its rows as requests.

    Raises:
      InputError: there are no prompts; a prompt is empty or has tokens outside the vocabulary; a
        row needs more positions than the target has; or a list of values per row does not have one
        entry per prompt.
    """
    prompts, max_new_tokens, sampling, seeds, eos_token_ids = batch
    rows = len(prompts)
    if rows == 0:
        raise InputError("There are no prompts; give at least one list of token ids.")
    for row, prompt in enumerate(prompts):
        name = f"Prompt {row}" if rows > 1 else "The prompt"
        if len(prompt) == 0:
            raise InputError(f"{name} is empty; it needs at least one token.")
        _check_tokens(prompt, name, config.vocab_size)
    limits = per_row(max_new_tokens, rows, "max_new_tokens")
    for row, (prompt, limit) in enumerate(zip(prompts, limits, strict=True)):
        name = of_row("max_new_tokens", row, rows)
        check_size(limit, name)
        room = config.position_limit - len(prompt)
        if limit > room:
            dynamic = isinstance(config.rope_scaling, DynamicScaling)
            why = (
                " (past them, dynamic rotary scaling would change keys that are already cached)"
                if dynamic
                else ""
            )
            fewer = f"ask for {room} new ones at most, or " if room > 0 else ""
            asker = f"Row {row} asks" if rows > 1 else "The request is"
            raise InputError(
                f"{asker} for {limit} new tokens after a prompt of {len(prompt)}, but the target "
                f"has {config.position_limit} positions{why}; {fewer}shorten the prompt."
            )
    stops = stop_lists(config, eos_token_ids, rows)
    for name, tokens in stops:
        _check_tokens(tokens, name, config.vocab_size)
    chosen = per_row(SamplingConfig() if sampling is None else sampling, rows, "sampling")
    for row, one in enumerate(chosen):
        if not isinstance(one, SamplingConfig):
            name = of_row("sampling", row, rows)
            raise InputError(f"{name} is {one!r}; give a SamplingConfig.")
        _check_tokens(list(one.logit_bias or ()), "logit_bias", config.vocab_size)
        if one.min_tokens > limits[row]:
            raise InputError(
                f"{of_row('min_tokens', row, rows)} is {one.min_tokens}, but the limit on new "
                f"tokens is {limits[row]}; give a smaller min_tokens, or a higher limit."
            )
    if isinstance(seeds, int | np.integer):
        raise InputError(f"seeds is {seeds}; give a list with one whole number per prompt.")
    given = list(range(rows)) if seeds is None else seeds
    numbers: list[int] = per_row(given, rows, "seeds", "one per prompt")
    for row, seed in enumerate(numbers):
        check_size(seed, of_row("The seed", row, rows), 0, 2**31 - 1)
    columns = zip(prompts, limits, numbers, chosen, stops, strict=True)
    return [
        Request(list(prompt), limit, seed, one, tuple(tokens))
        for prompt, limit, seed, one, (_, tokens) in columns
    ]


def check_mirrored(requests: Iterable[Request]) -> None:
    """Raise `InputError` for a request that mirror decoding does not support.

    Such a request has a grammar, penalties, biases or `min_tokens`.
    """
    for one in requests:
        settings = {name: getattr(one.sampling, name) for name in _ADJUSTING}
        given = [
            f"{name} {value!r:.40}"
            for name, value in settings.items()
            if value and value != getattr(SamplingConfig, name)
        ]
        if one.sampling.adjusts and not given:
            given.append("settings that depend on the text")
        if one.grammar is not None:
            given.append("a grammar")
        if given:
            raise InputError(
                f"The request has {' and '.join(given)}, which mirror decoding does not support; "
                "leave that out, or decode without mirror."
            )


def row_arrays(config: TargetConfig, request: Request, stop_width: int | None = None) -> Requests:
    """Convert a checked request to NumPy arrays of one row; the tokens are left out.

    Args:
      config: configuration of the target.
      request: the request; its stop tokens must not be None.
      stop_width: E, maximum number of stop tokens of a row; None takes the number of this request's
        stop tokens, rounded up to a multiple of 8.

    Raises:
      InputError: the request has more than E stop tokens.
    """
    stops, one, V = request.stop_tokens or (), request.sampling, config.vocab_size
    width = stop_width or -(-max(len(stops), 1) // _STOP_BLOCK) * _STOP_BLOCK
    if len(stops) > width:
        raise InputError(f"The request has {len(stops)} stop tokens; give {width} or fewer.")

    length = len(request.prompt)
    return Requests(
        tokens=_one_row([]),
        lengths=_one_row(length),
        limits=_one_row(length + request.max_new_tokens),
        stop_tokens=_one_row([*stops, *[-1] * (width - len(stops))]),
        sampling=Sampling(
            temperature=_one_row(one.temperature, np.float32),
            top_k=_one_row(min(one.top_k or V, V)),
            top_p=_one_row(1.0 if one.top_p is None else one.top_p, np.float32),
            min_p=_one_row(0.0 if one.min_p is None else one.min_p, np.float32),
            seeds=_one_row(request.seed),
        ),
    )


def _one_row(value: Any, dtype: Any = np.int32) -> Any:
    return np.asarray([value], dtype)


def slots_for(tokens: int, max_path: int) -> int:
    """Return the number of cache slots of a row with `tokens` tokens, prompt included.

    `max_path` is P, the maximum number of tokens that a row gains in a step. The result is rounded
    up, so rows of similar length share one compilation.
    """
    # A finished row still writes P tokens past its last one, which must not overwrite its tokens.
    needed = tokens + max_path
    block = max(_SLOT_BLOCK, 1 << max((needed - 1).bit_length() - 4, 0))
    return -(-needed // block) * block


def check_size(value: int, name: str, least: int = 1, most: int | None = None) -> None:
    """Raise `InputError` unless a value is an integer from `least` to `most`.

    `most` may be None for no upper limit. `name` is the name of the value in the error.
    """
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise InputError(f"{name} is {value!r}; it must be a whole number.")
    if value < least or (most is not None and value > most):
        limit = f"{least} or more" if most is None else f"from {least} to {most}"
        raise InputError(f"{name} is {value}; it must be {limit}.")


def lists_of_rows(value: Any, rows: int, name: str, entries: str) -> list[tuple[str, list[Any]]]:
    """Return a (label, list) pair per row, where the label is the name of the list in errors.

    Args:
      value: one list for all rows, or one list per row.
      rows: number of rows.
      name: name of the value in errors.
      entries: plural of what a list holds, such as "token ids", for errors.

    Raises:
      InputError: the value is not a list, or only some of its entries are lists.
    """
    if not _axes(value):
        raise InputError(f"{name} is {value!r}; give a list of {entries}, or such a list per row.")
    if not any(map(_axes, value)):
        return [(name, _as_list(value))] * rows
    own = []
    for row, one in enumerate(per_row(value, rows, name)):
        label = of_row(name, row, rows)
        if not _axes(one):
            raise InputError(
                f"{label} is {one!r}, but another row has a list; give a list of {entries} for "
                "every row."
            )
        own.append((label, _as_list(one)))
    return own


def _as_list(value: Any) -> list[Any]:
    return list(np.asarray(value) if hasattr(value, "__array__") else value)


def stop_lists(
    config: TargetConfig, eos_token_ids: StopTokens | None, rows: int
) -> list[tuple[str, list[Any]]]:
    """Return a (label, stop tokens) pair per row, where the label is the list's name in errors.

    If `eos_token_ids` is None, every row has the target's stop tokens.
    """
    stops = config.eos_token_ids if eos_token_ids is None else eos_token_ids
    return lists_of_rows(stops, rows, "eos_token_ids", "token ids")


def per_row(
    value: PerRow[Value], rows: int, name: str, way_out: str = "one value or one per prompt"
) -> list[Value]:
    """Return a list with one value per row.

    Args:
      value: one value for all rows, or a list with one value per row.
      rows: number of rows.
      name: name of the value in errors.
      way_out: what the error tells the caller to give instead.

    Raises:
      InputError: the list has another number of values than there are rows.
    """
    if not _axes(value):
        return [cast(Value, value)] * rows
    value = _as_list(value)
    if len(value) != rows:
        raise InputError(f"{name} has {len(value)} entries for {rows} prompts; give {way_out}.")
    return value


def of_row(name: str, row: int, rows: int) -> str:
    """Return the name of one row's value for errors, such as "seeds of row 2".

    If there is only one row, this is `name` alone.
    """
    return name if rows == 1 else f"{name} of row {row}"


def _check_tokens(tokens: Sequence[int] | np.ndarray, name: str, vocab_size: int) -> None:
    for token in tokens:
        if isinstance(token, bool) or not isinstance(token, int | np.integer):
            raise InputError(
                f"{name} holds {token!r}, which is not a token id; give lists or arrays of whole "
                "numbers."
            )
        if not 0 <= token < vocab_size:
            raise InputError(
                f"{name} holds token {token}, outside the vocabulary of {vocab_size} tokens; give "
                f"ids from 0 to {vocab_size - 1}."
            )
