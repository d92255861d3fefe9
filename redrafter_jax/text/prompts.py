"""Prompts from JSON lines, checked row by row, and their tokens.

A row is `{"prompt": "..."}`, or a row of Spec-Bench's `question.jsonl`:
`{"question_id": 81, "category": "writing", "turns": ["...", "..."]}`. Of several turns only the
FIRST is decoded for now, as it stands, without a chat template. `question_id` and `category` may
accompany a prompt too; other keys are ignored.
"""

import json
from collections.abc import Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from tokenizers import Tokenizer

from redrafter_jax.errors import InputError
from redrafter_jax.text.tokenizer import require_text


class Prompt(NamedTuple):
    """One row of a prompt file.

    Attributes:
      name: its `question_id`, or its line number where it has none.
      text: what the target continues.
      category: None where the row states none.
      place: file and line, for messages.
    """

    name: str
    text: str
    category: str | None
    place: str


def read_prompts(path: Path, count: int | None = None) -> list[Prompt]:
    """The first `count` prompts of a JSONL file, or all of them.

    Raises:
      InputError: the file cannot be read, a row is malformed (the message names its line), or
        there are fewer than `count` rows.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"Cannot read the prompts {path}: {error.strerror}.") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 text at byte {error.start}.") from None
    # Not splitlines: JSON strings may hold separators that it would split at.
    lines = text.removesuffix("\n").split("\n")
    prompts = [
        _parse_row(line, number, f"{path}, line {number}") for number, line in enumerate(lines, 1)
    ]
    if count is not None and count > len(prompts):
        raise InputError(
            f"prompt_count is {count}, but {path} holds {len(prompts)} prompts; lower it or leave "
            "it out."
        )
    return prompts[:count]


def tokenize(
    prompts: Sequence[Prompt], tokenizer: Tokenizer, max_new_tokens: int, positions: int
) -> list[list[int]]:
    """Token ids of every prompt, never cut.

    Special tokens are those that the tokenizer itself adds.

    Args:
      prompts: from `read_prompts`.
      tokenizer: the target's.
      max_new_tokens: new tokens that must fit behind each prompt.
      positions: positions the target has.

    Raises:
      InputError: a prompt leaves no room for `max_new_tokens`, or has no tokens.
    """
    rows = []
    for prompt in prompts:
        tokens = tokenizer.encode(prompt.text).ids
        if not tokens:
            raise InputError(f"{prompt.place}: the tokenizer makes no tokens of the prompt.")
        room = positions - len(tokens)
        if max_new_tokens > room:
            lower = f"lower max_new_tokens to {room} or " if room > 0 else ""
            raise InputError(
                f"{prompt.place}: the prompt has {len(tokens)} tokens and max_new_tokens is "
                f"{max_new_tokens}, but the target has {positions} positions; {lower}shorten the "
                "prompt."
            )
        rows.append(tokens)
    return rows


def tokenize_to_length(
    prompts: Sequence[Prompt], tokenizer: Tokenizer, first: int, length: int
) -> list[int]:
    """Real text of exactly `length` tokens: prompts joined in their order, then cut.

    It begins with prompt `first` of the file, and after the last one the file begins again.

    Raises:
      InputError: the tokenizer makes no tokens of the prompts.
    """
    counts = [len(tokenizer.encode(prompt.text).ids) for prompt in prompts]
    if sum(counts) == 0:
        raise InputError(f"{prompts[0].place} and on: the tokenizer makes no tokens of any prompt.")
    text, most, tokens = "", 0, []
    for index in islice(cycle(range(len(prompts))), first, None):
        text += prompts[index].text
        most += counts[index]
        # The joint text may have fewer tokens than its parts, so only now is it worth a look.
        if most >= length:
            tokens = tokenizer.encode(text).ids
        if len(tokens) >= length:
            break
    return tokens[:length]


def _parse_row(line: str, number: int, place: str) -> Prompt:
    if not line.strip():
        _refuse(place, "the row is empty; remove it")
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        _refuse(place, f"not valid JSON: {error}")
    if not isinstance(row, dict):
        _refuse(place, f"the row is a {type(row).__name__}; it must be a JSON object")
    category = row.get("category")
    if category is not None and not isinstance(category, str):
        _refuse(place, f"'category' is {category!r}; it must be a string")
    identifier = row.get("question_id")
    name = str(number if identifier is None else identifier)
    return Prompt(name=name, text=_prompt_text(row, place), category=category, place=place)


def _prompt_text(row: dict[str, Any], place: str) -> str:
    if ("prompt" in row) == ("turns" in row):
        given = "both" if "prompt" in row else "neither"
        _refuse(place, f"the row must hold either 'prompt' or 'turns' and holds {given}")
    if "prompt" in row:
        key, text = "prompt", row["prompt"]
    else:
        turns = row["turns"]
        if not isinstance(turns, list) or not turns:
            _refuse(place, f"'turns' is {turns!r}; it must be a list of at least one string")
        key, text = "turns[0]", turns[0]
    if not isinstance(text, str) or not text:
        _refuse(place, f"{key!r} is {text!r}; it must be a string that is not empty")
    require_text(text, f"{place}: {key!r}")
    return text


def _refuse(place: str, reason: str) -> NoReturn:
    raise InputError(f"{place}: {reason}.")
