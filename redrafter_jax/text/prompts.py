"""Reads prompts from JSON lines, checks them row by row, and tokenizes them.

A row is `{"prompt": "..."}`, or a row of Spec-Bench's `question.jsonl`:
`{"question_id": 81, "category": "writing", "turns": ["...", "..."]}`, where `turns` are the
messages of the user. A row with a prompt may also have `question_id` and `category`; other keys
are ignored.

As in Spec-Bench and MT-bench, the prompt of a later turn contains the earlier turns and the answers
of the target.
"""

import json
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn

from tokenizers import Tokenizer

from redrafter_jax.errors import InputError
from redrafter_jax.files.fields import read_text
from redrafter_jax.text.chat_template import (
    NO_TEMPLATE,
    ChatTemplate,
    Turn,
    answer_text,
    encode_turns,
    end_tokens,
    user_turn,
)
from redrafter_jax.text.tokenizer import require_text

Turns = Literal[1, "all"]
"""Which turns of a prompt are asked: only the first, or all."""


class Prompt(NamedTuple):
    """One row of a prompt file.

    Attributes:
      name: the row's `question_id`; without one, its line number.
      turns: messages of the user, at least one. A row with a `prompt` has one turn.
      category: the row's category; None if it has none.
      place: file and line of the row, for errors.
      number: index of the row in the file, from 0.
    """

    name: str
    turns: tuple[str, ...]
    category: str | None
    place: str
    number: int

    @property
    def text(self) -> str:
        """The first turn."""
        return self.turns[0]


class EncodedPrompts(NamedTuple):
    """Tokenized prompts, one row per turn: first all first turns, then all second turns, and so on.

    Attributes:
      prompts: the prompt of each row; within a turn, in the order of the file.
      turns: the number of the turn of each row, from 1.
      rows: token ids of each row, up to the beginning of the answer.
      template: name of the chat template; "none" for texts that are continued as they are.
      stop_tokens: ids of the tokens that end an answer.
    """

    prompts: list[Prompt]
    turns: list[int]
    rows: list[list[int]]
    template: str
    stop_tokens: tuple[int, ...]


class PromptEncoding(NamedTuple):
    """How prompts are tokenized for a target.

    Attributes:
      template: the chat template, from `find_template`.
      tokenizer: the target's tokenizer.
      eos_token_ids: ids of the target's end tokens.
      max_new_tokens: number of new tokens that must fit after each prompt.
      positions: number of positions of the target, which limits prompt and new tokens together.
    """

    template: ChatTemplate
    tokenizer: Tokenizer
    eos_token_ids: Sequence[int]
    max_new_tokens: int
    positions: int


def read_prompts(path: Path, count: int | None = None, turns: Turns = "all") -> list[Prompt]:
    """Read the first `count` prompts of a JSONL file, or all of them.

    Args:
      path: path of the file.
      count: number of prompts; None for all.
      turns: the turns of each prompt to keep; all turns are checked.

    Raises:
      InputError: the file cannot be read, there are fewer than `count` rows, or a row is malformed;
        the error names its line.
    """
    # Not splitlines, which would split at separators that JSON strings may hold.
    lines = read_text(path).removesuffix("\n").split("\n")
    if lines == [""]:
        raise InputError(f'{path} is empty; give one row per line, such as {{"prompt": "..."}}.')
    prompts = [
        _parse_row(line, number, f"{path}, line {number + 1}") for number, line in enumerate(lines)
    ]
    if count is not None and count > len(prompts):
        raise InputError(
            f"prompt_count is {count}, but {path} holds {len(prompts)} prompts; lower prompt_count "
            "or leave it out."
        )
    kept = None if turns == "all" else turns
    return [prompt._replace(turns=prompt.turns[:kept]) for prompt in prompts[:count]]


def rows_decoded(prompts: Sequence[Prompt]) -> list[int]:
    """Return the batch sizes with which these prompts may be decoded.

    These are the number of first turns, of second turns and so on, and the number of all turns.
    """
    turns = Counter(turn for prompt in prompts for turn, _ in enumerate(prompt.turns))
    return [*turns.values(), turns.total()]


def encode_prompts(encoding: PromptEncoding, prompts: Sequence[Prompt]) -> EncodedPrompts:
    """Tokenize the first turn of every prompt with the template; nothing is truncated.

    Without a template, the tokenizer adds its own special tokens.

    Raises:
      InputError: the template refuses a prompt, a prompt leaves no room for `max_new_tokens`, a
        prompt has no tokens, or a prompt has several turns and there is no template.
    """
    for prompt in prompts:
        if encoding.template is NO_TEMPLATE and len(prompt.turns) > 1:
            raise InputError(
                f"{prompt.place}: the row has {len(prompt.turns)} turns, but without a chat "
                "template only the first can be asked; give a chat template, or turns=1 for the "
                "first turn only."
            )
    conversations = [[user_turn(prompt.text)] for prompt in prompts]
    stops = end_tokens(encoding.template, encoding.tokenizer, encoding.eos_token_ids, conversations)
    return _encode_turn(encoding, prompts, conversations, stops)


def encode_later_turns(
    encoding: PromptEncoding,
    asked: EncodedPrompts,
    answer: Callable[[EncodedPrompts], Sequence[Sequence[int]]],
) -> EncodedPrompts:
    """Return the tokenized first and later turns; a later turn follows the earlier answers.

    Args:
      encoding: the encoding of the first turns.
      asked: the first turns, from `encode_prompts`.
      answer: function from tokenized prompts to the new tokens of each row, with or without a stop
        token at the end. It is called for every turn except the last turn of each prompt.

    Raises:
      InputError: the errors of `encode_prompts`.
    """
    conversations = {prompt.number: [user_turn(prompt.text)] for prompt in asked.prompts}
    latest = whole = asked
    for turn in range(1, max((len(prompt.turns) for prompt in asked.prompts), default=1)):
        rest = [row for row, prompt in enumerate(latest.prompts) if len(prompt.turns) > turn]
        before = latest._replace(
            prompts=[latest.prompts[row] for row in rest],
            turns=[turn] * len(rest),
            rows=[latest.rows[row] for row in rest],
        )
        for prompt, answered in zip(before.prompts, answer(before), strict=True):
            text = answer_text(encoding.tokenizer, answered, asked.stop_tokens)
            answer_turn = {"role": "assistant", "content": text}
            conversations[prompt.number] += [answer_turn, user_turn(prompt.turns[turn])]
        histories = [conversations[prompt.number] for prompt in before.prompts]
        latest = _encode_turn(encoding, before.prompts, histories, asked.stop_tokens)
        whole = whole._replace(
            prompts=whole.prompts + latest.prompts,
            turns=whole.turns + latest.turns,
            rows=whole.rows + latest.rows,
        )
    return whole


def tokenize_to_length(
    prompts: Sequence[Prompt], tokenizer: Tokenizer, first: int, length: int
) -> list[int]:
    """Return exactly `length` tokens of real text: the joined prompts, truncated.

    The text begins with prompt number `first`, counted from 0. After the last prompt, it goes on
    with prompt 0.

    Raises:
      InputError: the prompts have no tokens.
    """
    counts = [len(tokenizer.encode(prompt.text).ids) for prompt in prompts]
    if sum(counts) == 0:
        raise InputError(
            f"{prompts[0].place} and later: the tokenizer finds no tokens in any prompt; give "
            "prompts with text."
        )
    text, most, tokens = "", 0, []
    for index in islice(cycle(range(len(prompts))), first, None):
        text += prompts[index].text
        most += counts[index]
        # The joined text may have fewer tokens than its parts, so its tokens are counted only now.
        if most >= length:
            tokens = tokenizer.encode(text).ids
        if len(tokens) >= length:
            break
    return tokens[:length]


def _encode_turn(
    encoding: PromptEncoding,
    prompts: Sequence[Prompt],
    conversations: Sequence[Sequence[Turn]],
    stop_tokens: tuple[int, ...],
) -> EncodedPrompts:
    """Tokenize conversations, each of which ends with the turn to answer.

    Raises:
      InputError: the errors of `encode_prompts`.
    """
    rows, asked_turns = [], [(len(turns) + 1) // 2 for turns in conversations]
    for prompt, turns, number in zip(prompts, conversations, asked_turns, strict=True):
        place = prompt.place if number == 1 else f"{prompt.place}, turn {number}"
        tokens = encode_turns(encoding.template, encoding.tokenizer, turns)
        if not tokens:
            raise InputError(
                f"{place}: the tokenizer finds no tokens in the prompt; change the prompt."
            )
        room = encoding.positions - len(tokens)
        if encoding.max_new_tokens > room:
            lower = f"lower max_new_tokens to {room} or " if room > 0 else ""
            written = "" if encoding.template is NO_TEMPLATE else " in the chat template"
            raise InputError(
                f"{place}: the prompt has {len(tokens)} tokens{written} and max_new_tokens is "
                f"{encoding.max_new_tokens}, but the target has {encoding.positions} positions; "
                f"{lower}shorten the prompt."
            )
        rows.append(tokens)
    return EncodedPrompts(list(prompts), asked_turns, rows, encoding.template.name, stop_tokens)


def _parse_row(line: str, number: int, place: str) -> Prompt:
    if not line.strip():
        _refuse(place, "the row is empty; remove it")
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        _refuse(place, f"not valid JSON: {error}")
    if not isinstance(row, dict):
        _refuse(place, f"the row is a {type(row).__name__}; it must be a JSON object")
    category = row.get("category")
    if category is not None and not isinstance(category, str):
        _refuse(place, f"'category' is {category!r}; it must be a string")
    identifier = row.get("question_id")
    name = str(number + 1 if identifier is None else identifier)
    return Prompt(name, _turns(row, place), category, place, number)


def _turns(row: dict[str, Any], place: str) -> tuple[str, ...]:
    if ("prompt" in row) == ("turns" in row):
        given = "both" if "prompt" in row else "neither"
        _refuse(place, f"the row holds {given} of 'prompt' and 'turns'; it must hold exactly one")
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
