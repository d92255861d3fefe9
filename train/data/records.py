"""What a raw record is: a text, a conversation or tokens; or why it is none of them."""

from collections.abc import Callable
from typing import Any

from redrafter_jax.text.chat_template import Turn

from .types import Chat, Format, Raw, Record, Skip, Text, Tokens

# The speakers' names in ShareGPT and its descendants.
_SPEAKERS = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "system": "system",
    "tool": "tool",
}


class _MalformedError(Exception):
    """Why a raw record is no record: the reason, and perhaps its detail."""


def parse(raw: Raw, stated: Format | None) -> Record | Skip:
    """The record, in the stated format or the one that its keys tell; other keys are ignored.

    A key whose value is null counts as absent: rows of a table have all columns.
    """
    try:
        if not isinstance(raw.value, dict):
            raise _MalformedError("no JSON object", f"but a {type(raw.value).__name__}")
        row = {key: value for key, value in raw.value.items() if value is not None}
        _, read = _FORMATS[stated or _format(row)]
        return read(raw.place, row)
    except _MalformedError as error:
        return Skip(raw.place, *error.args)


def _format(row: dict[str, Any]) -> Format:
    found: dict[Format, str] = {name: key for name, (key, _) in _FORMATS.items() if key in row}
    if not found:
        known = ", ".join(key for key, _ in _FORMATS.values())
        raise _MalformedError("of no known format", f"none of the keys {known}")
    if len(found) > 1:
        keys = " and ".join(found.values())
        raise _MalformedError("of several formats", f"it has {keys}; state the source's format")
    return next(iter(found))


def _messages(place: str, row: dict[str, Any]) -> Chat:
    turns = _turns(row, "messages", "role", "content")
    stated = [{key: value for key, value in turn.items() if value is not None} for turn in turns]
    return _chat(place, stated)


def _conversations(place: str, row: dict[str, Any]) -> Chat:
    turns = _turns(row, "conversations", "from", "value")
    for turn in turns:
        if turn["from"] not in _SPEAKERS:
            detail = f"{turn['from']!r} is none of {', '.join(_SPEAKERS)}"
            raise _MalformedError("a turn is from nobody known", detail)
    return _chat(
        place, [{"role": _SPEAKERS[turn["from"]], "content": turn["value"]} for turn in turns]
    )


def _alpaca(place: str, row: dict[str, Any]) -> Chat:
    task, answer = _string(row, "instruction"), _string(row, "output")
    material = row.get("input", "")
    if not isinstance(material, str):
        raise _MalformedError("input is no string", f"but a {type(material).__name__}")
    if material.strip():
        task = f"{task}\n\n{material}"
    return _chat(
        place, [{"role": "user", "content": task}, {"role": "assistant", "content": answer}]
    )


def _text(place: str, row: dict[str, Any]) -> Text:
    return Text(place, _string(row, "text"))


def _tokens(place: str, row: dict[str, Any]) -> Tokens:
    ids, mask = row.get("input_ids"), row.get("loss_mask")
    # Not isinstance: a bool is no token.
    if not isinstance(ids, list) or not ids or any(type(token) is not int for token in ids):
        raise _MalformedError("input_ids is no list of whole numbers")
    if not isinstance(mask, list) or not all(isinstance(x, int) and x in (0, 1) for x in mask):
        raise _MalformedError("loss_mask is no list of 0 and 1")
    if len(ids) != len(mask):
        detail = f"{len(ids)} and {len(mask)} values"
        raise _MalformedError("input_ids and loss_mask differ in length", detail)
    rewritten = {"answers", "rows"} <= row.keys()
    return Tokens(place, ids, [int(value) for value in mask], rewritten)


# The key that a record of each format must have, and what reads it.
_FORMATS: dict[Format, tuple[str, Callable[[str, dict[str, Any]], Record]]] = {
    "messages": ("messages", _messages),
    "conversations": ("conversations", _conversations),
    "alpaca": ("instruction", _alpaca),
    "text": ("text", _text),
    "tokens": ("input_ids", _tokens),
}


def _turns(row: dict[str, Any], key: str, speaker: str, said: str) -> list[dict[str, Any]]:
    turns = row.get(key)
    if not isinstance(turns, list) or not turns:
        raise _MalformedError(f"{key} is no list of turns")
    for turn in turns:
        if not isinstance(turn, dict) or not isinstance(turn.get(speaker), str):
            raise _MalformedError(f"a turn is no object with {speaker} and {said}")
        if not isinstance(turn.get(said), str):
            raise _MalformedError(f"a turn's {said} is no string", f"the turn of {turn[speaker]!r}")
    return turns


def _chat(place: str, turns: list[Turn]) -> Chat:
    answers = [turn["content"] for turn in turns if turn["role"] == "assistant"]
    if not answers:
        raise _MalformedError("no assistant turn")
    if turns[0]["role"] == "assistant":
        raise _MalformedError("the assistant speaks first")
    if not all(answer.strip() for answer in answers):
        raise _MalformedError("an assistant turn is blank")
    for turn in turns:
        _require_unicode(turn["content"], f"the turn of {turn['role']!r}")
    return Chat(place, turns)


def _string(row: dict[str, Any], key: str) -> str:
    """A string that is not blank and is Unicode."""
    text = row.get(key)
    if not isinstance(text, str):
        raise _MalformedError(f"{key} is no string", f"but a {type(text).__name__}")
    if not text.strip():
        raise _MalformedError(f"{key} is blank")
    _require_unicode(text, key)
    return text


def _require_unicode(text: str, key: str) -> None:
    # JSON can hold half of a surrogate pair, which no tokenizer takes.
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise _MalformedError("a lone surrogate", f"in {key}, at character {error.start}") from None
