"""Parsing of raw records into texts, conversations or tokens; a faulty record is skipped."""

from collections.abc import Callable
from typing import Any

from redrafter_jax.text.chat_template import Turn

from .types import Chat, Format, Raw, Record, Skip, Text, Tokens

# The names of speakers in ShareGPT and in formats derived from it.
_SPEAKERS = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "system": "system",
    "tool": "tool",
}
# Fields by which `train regenerate` records how a row was made; training ignores them.
_STATED = frozenset([
    "record", "seed", "temperature", "max_new_tokens", "sequence_length", "row", "rows", "answers",
    "cut", "left_out", "dropped", "questions", "turns", "max_user_tokens", "user_sampling",
    "user_opening", "user_loss", "target", "shuffle_seed",
])  # fmt: skip


class _MalformedError(Exception):
    """The error for a faulty raw record; its arguments are the reason and possibly a detail."""


def parse(raw: Raw, stated: Format | None) -> Record | Skip:
    """Parse a record in the stated format, or by default in the format that its keys imply.

    A key with a null value counts as absent, because every row of a Parquet file has all columns.
    """
    try:
        if not isinstance(raw.value, dict):
            raise _MalformedError("not a JSON object", f"it is a {type(raw.value).__name__}")
        row = {key: value for key, value in raw.value.items() if value is not None}
        _, read = _FORMATS[stated or _format(row)]
        record = read(raw.place, row)
        return record._replace(unread=(*record.unread, *row))
    except _MalformedError as error:
        return Skip(raw.place, *error.args)


def _format(row: dict[str, Any]) -> Format:
    found: dict[Format, str] = {name: key for name, (key, _) in _FORMATS.items() if key in row}
    if not found:
        known = ", ".join(key for key, _ in _FORMATS.values())
        raise _MalformedError("unknown format", f"none of the keys {known}")
    if len(found) > 1:
        keys = " and ".join(found.values())
        raise _MalformedError("ambiguous format", f"it has {keys}; set the source's format")
    return next(iter(found))


def _messages(place: str, row: dict[str, Any]) -> Chat:
    return _chat(place, row, "messages")


def _conversations(place: str, row: dict[str, Any]) -> Chat:
    return _chat(place, row, "conversations")


def _alpaca(place: str, row: dict[str, Any]) -> Chat:
    task, answer = _string(row, "instruction"), _string(row, "output")
    material = row.pop("input", "")
    if not isinstance(material, str):
        raise _MalformedError("input is not a string", f"it is a {type(material).__name__}")
    if material.strip():
        task = f"{task}\n\n{material}"
    earlier = row.pop("history", [])
    if not isinstance(earlier, list) or not all(_is_pair(pair) for pair in earlier):
        raise _MalformedError("history is not a list of pairs of strings")
    turns = [
        {"role": role, "content": said}
        for pair in [*earlier, [task, answer]]
        for role, said in zip(("user", "assistant"), pair, strict=True)
    ]
    return _check_chat(Chat(place, [*_system(row, turns), *turns]))


def _text(place: str, row: dict[str, Any]) -> Text:
    return Text(place, _string(row, "text"))


def _tokens(place: str, row: dict[str, Any]) -> Tokens:
    ids, mask = row.pop("input_ids", None), row.pop("loss_mask", None)
    # `isinstance` would accept bools.
    if not isinstance(ids, list) or not ids or any(type(token) is not int for token in ids):
        raise _MalformedError("input_ids is not a list of integers")
    if not isinstance(mask, list) or not all(isinstance(x, int) and x in (0, 1) for x in mask):
        raise _MalformedError("loss_mask is not a list of 0 and 1")
    if len(ids) != len(mask):
        detail = f"{len(ids)} and {len(mask)} values"
        raise _MalformedError("input_ids and loss_mask differ in length", detail)
    rewritten = {"answers", "rows"} <= row.keys()
    if {"seed", "temperature"} <= row.keys():
        for name in _STATED & row.keys():
            del row[name]
    return Tokens(place, ids, [int(value) for value in mask], rewritten)


# The required key of each format, and the function that takes the fields of the format from a row.
_FORMATS: dict[Format, tuple[str, Callable[[str, dict[str, Any]], Record]]] = {
    "messages": ("messages", _messages),
    "conversations": ("conversations", _conversations),
    "alpaca": ("instruction", _alpaca),
    "text": ("text", _text),
    "tokens": ("input_ids", _tokens),
}


def _chat(place: str, row: dict[str, Any], key: str) -> Chat:
    """Parse the conversation under `key`; the `system` text of the record becomes the first turn.

    Turns have role and content, or from and value. Other fields of turns with a role are passed to
    the chat template, except OpenAI's weight, which marks an answer without loss if it is 0.
    """
    turns, unread = row.pop(key), dict[str, None]()
    if not isinstance(turns, list) or not turns:
        raise _MalformedError(f"{key} is not a list of turns")
    weights, read = [], list[Turn]()
    for turn in turns:
        rest = {name: value for name, value in _object(turn).items() if value is not None}
        speaker, said = ("role", "content") if "role" in rest else ("from", "value")
        role, content = rest.pop(speaker, None), rest.pop(said, None)
        if not isinstance(role, str):
            raise _MalformedError(_NO_TURN)
        if speaker == "from" and role not in _SPEAKERS:
            detail = f"{role!r} is not one of {', '.join(_SPEAKERS)}"
            raise _MalformedError("a turn has an unknown speaker", detail)
        if not isinstance(content, str):
            raise _MalformedError(f"a turn's {said} is not a string", f"the turn of {role!r}")
        weights.append(rest.pop("weight", None))
        read.append({"role": _SPEAKERS.get(role, role), "content": content})
        if speaker == "role":
            read[-1] |= rest
        else:
            unread |= dict.fromkeys(f"{name} of a turn" for name in rest)
    before = _system(row, read)
    without_loss = [
        len(before) + index
        for index, (turn, weight) in enumerate(zip(read, weights, strict=True))
        if not _carries_loss(turn, weight)
    ]
    return _check_chat(Chat(place, [*before, *read], tuple(unread), frozenset(without_loss)))


_NO_TURN = "a turn is not an object with role and content, or from and value"


def _object(turn: Any) -> dict[str, Any]:
    if not isinstance(turn, dict):
        raise _MalformedError(_NO_TURN)
    return turn


def _is_pair(value: Any) -> bool:
    return isinstance(value, list) and [type(part) for part in value] == [str, str]


def _carries_loss(turn: Turn, weight: Any) -> bool:
    """Whether the weight of a turn lets it carry loss; only assistant turns may have weight 1."""
    is_answer = turn["role"] == "assistant"
    # `isinstance` would accept bools.
    if weight is not None and (type(weight) not in (int, float) or weight not in (0, 1)):
        raise _MalformedError("a turn's weight is neither 0 nor 1", f"it is {weight!r}")
    if weight == 1 and not is_answer:
        detail = f"the turn of {turn['role']!r}; only assistant turns carry loss"
        raise _MalformedError("a turn's weight is 1", detail)
    return not (is_answer and weight == 0)


def _system(row: dict[str, Any], turns: list[Turn]) -> list[Turn]:
    """The record's `system` text as a turn, unless it is blank or already the first turn."""
    text = row.pop("system", "")
    if not isinstance(text, str):
        raise _MalformedError("system is not a string", f"it is a {type(text).__name__}")
    if not text.strip():
        return []
    if turns[0]["role"] != "system":
        return [{"role": "system", "content": text}]
    if turns[0]["content"] != text:
        raise _MalformedError("two system texts", "the record's and the first turn's differ")
    return []


def _check_chat(chat: Chat) -> Chat:
    turns = chat.turns
    answers = [index for index, turn in enumerate(turns) if turn["role"] == "assistant"]
    if not answers:
        raise _MalformedError("no assistant turn")
    if turns[0]["role"] == "assistant":
        raise _MalformedError("the assistant speaks first")
    if not all(turns[index]["content"].strip() for index in answers):
        raise _MalformedError("an assistant turn is blank")
    if chat.without_loss.issuperset(answers):
        raise _MalformedError("every answer has weight 0")
    for turn in turns:
        _require_unicode(turn["content"], f"the turn of {turn['role']!r}")
    return chat


def _string(row: dict[str, Any], key: str) -> str:
    """Remove and return a string field; it must not be blank and must be valid Unicode."""
    text = row.pop(key, None)
    if not isinstance(text, str):
        raise _MalformedError(f"{key} is not a string", f"it is a {type(text).__name__}")
    if not text.strip():
        raise _MalformedError(f"{key} is blank")
    _require_unicode(text, key)
    return text


def _require_unicode(text: str, key: str) -> None:
    # JSON can contain lone surrogates, which tokenizers refuse.
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise _MalformedError("a lone surrogate", f"in {key}, at character {error.start}") from None
