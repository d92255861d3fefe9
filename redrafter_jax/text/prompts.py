"""Prompts from JSON lines, checked row by row, and what a target is asked with them.

A row is `{"prompt": "..."}`, or a row of Spec-Bench's `question.jsonl`:
`{"question_id": 81, "category": "writing", "turns": ["...", "..."]}`, what a user says in turn.
Only the first turn is asked. `question_id` and `category` may accompany a prompt too; other
keys are ignored.
"""

import json
from collections.abc import Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from tokenizers import Tokenizer

from redrafter_jax.errors import InputError
from redrafter_jax.text.chat_template import (
    NO_TEMPLATE,
    ChatTemplate,
    encode_turns,
    end_tokens,
    user_turn,
)
from redrafter_jax.text.tokenizer import require_text


class Prompt(NamedTuple):
    """One row of a prompt file.

    Attributes:
      name: its `question_id`, or its line number where it has none.
      turns: what the user says, one or more; a `prompt` is a single turn.
      category: None where the row states none.
      place: file and line, for messages.
    """

    name: str
    turns: tuple[str, ...]
    category: str | None
    place: str

    @property
    def text(self) -> str:
        """The first turn."""
        return self.turns[0]


class Asked(NamedTuple):
    """What a target is asked with prompts.

    Attributes:
      prompts: as they were read.
      rows: the tokens of each, up to where the answer begins.
      template: the name of the chat template, "none" for texts as they stand.
      stop_tokens: that end an answer.
    """

    prompts: list[Prompt]
    rows: list[list[int]]
    template: str
    stop_tokens: tuple[int, ...]


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


def ask(
    prompts: Sequence[Prompt],
    template: ChatTemplate,
    tokenizer: Tokenizer,
    eos_token_ids: Sequence[int],
    *,
    max_new_tokens: int,
    positions: int,
) -> Asked:
    """The first turn of every prompt in the template, never cut, and what ends its answer.

    Without a template special tokens are those that the tokenizer itself adds.

    Args:
      prompts: from `read_prompts`.
      template: from `choose_template`.
      tokenizer: the target's.
      eos_token_ids: the target's.
      max_new_tokens: new tokens that must fit behind each prompt.
      positions: positions the target has.

    Raises:
      InputError: the template refuses a prompt, or a prompt leaves no room for `max_new_tokens` or
        has no tokens.
    """
    conversations = [[user_turn(prompt.text)] for prompt in prompts]
    rows = []
    for prompt, turns in zip(prompts, conversations, strict=True):
        tokens = encode_turns(template, tokenizer, turns)
        if not tokens:
            raise InputError(f"{prompt.place}: the tokenizer makes no tokens of the prompt.")
        room = positions - len(tokens)
        if max_new_tokens > room:
            lower = f"lower max_new_tokens to {room} or " if room > 0 else ""
            written = "" if template is NO_TEMPLATE else " in the chat template"
            raise InputError(
                f"{prompt.place}: the prompt has {len(tokens)} tokens{written} and max_new_tokens "
                f"is {max_new_tokens}, but the target has {positions} positions; {lower}shorten "
                "the prompt."
            )
        rows.append(tokens)
    stops = end_tokens(template, tokenizer, eos_token_ids, conversations)
    return Asked(list(prompts), rows, template.name, stops)


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
    return Prompt(name=name, turns=_turns(row, place), category=category, place=place)


def _turns(row: dict[str, Any], place: str) -> tuple[str, ...]:
    if ("prompt" in row) == ("turns" in row):
        given = "both" if "prompt" in row else "neither"
        _refuse(place, f"the row must hold either 'prompt' or 'turns' and holds {given}")
    turns = [row["prompt"]] if "prompt" in row else row["turns"]
    if not isinstance(turns, list) or not turns:
        _refuse(place, f"'turns' is {turns!r}; it must be a list of at least one string")
    for index, text in enumerate(turns):
        key = "prompt" if "prompt" in row else f"turns[{index}]"
        if not isinstance(text, str) or not text:
            _refuse(place, f"{key!r} is {text!r}; it must be a string that is not empty")
        require_text(text, f"{place}: {key!r}")
    return tuple(turns)


def _refuse(place: str, reason: str) -> NoReturn:
    raise InputError(f"{place}: {reason}.")
