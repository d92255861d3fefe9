"""What a raw record is: a text, a conversation or tokens; or why it is none of them."""

from typing import Any, get_args

from redrafter_jax.text.chat_template import Turn

from .types import Chat, Format, Raw, Record, Skip, Text, Tokens

# The key that a record of each format must have.
_KEYS: dict[Format, str] = {
    "messages": "messages",
    "conversations": "conversations",
    "alpaca": "instruction",
    "text": "text",
    "tokens": "input_ids",
}
# As ShareGPT and its descendants call who speaks.
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
    """Why a raw record is no record: the reason, and its detail."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason)
        self.reason, self.detail = reason, detail


def parse(raw: Raw, stated: Format | None) -> Record | Skip:
    """The record, in the format that is stated or that its keys tell; keys of no format are free.

    A key whose value is null is absent, as tables have it.
    """
    try:
        return _parse(raw, stated)
    except _MalformedError as error:
        return Skip(raw.place, error.reason, error.detail)


def _parse(raw: Raw, stated: Format | None) -> Record:
    if not isinstance(raw.value, dict):
        raise _MalformedError("no JSON object", f"but a {type(raw.value).__name__}")
    row = {key: value for key, value in raw.value.items() if value is not None}
    match stated or _format(row):
        case "messages":
            return _chat(raw.place, [_message(turn) for turn in _list(row, "messages")])
        case "conversations":
            return _chat(raw.place, [_utterance(turn) for turn in _list(row, "conversations")])
        case "alpaca":
            return _chat(raw.place, _task(row))
        case "text":
            return Text(raw.place, _text(row, "text"))
        case _:
            return _tokens(raw.place, row)


def _format(row: dict[str, Any]) -> Format:
    formats = [name for name in get_args(Format) if _KEYS[name] in row]
    if not formats:
        known = ", ".join(_KEYS.values())
        raise _MalformedError("of no known format", f"none of the keys {known}")
    if len(formats) > 1:
        keys = " and ".join(_KEYS[name] for name in formats)
        raise _MalformedError("of several formats", f"it has {keys}; state the source's format")
    return formats[0]


def _list(row: dict[str, Any], key: str) -> list[Any]:
    if not isinstance(row.get(key), list) or not row[key]:
        raise _MalformedError(f"{key} is no list of turns")
    return row[key]


def _text(row: dict[str, Any], key: str) -> str:
    """A string that is not blank and is Unicode."""
    text = row.get(key)
    if not isinstance(text, str):
        raise _MalformedError(f"{key} is no string", f"but a {type(text).__name__}")
    if not text.strip():
        raise _MalformedError(f"{key} is blank")
    _require_unicode(text, key)
    return text


def _require_unicode(text: str, key: str) -> None:
    # JSON can spell half characters, which no tokenizer takes.
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise _MalformedError("a lone surrogate", f"in {key}, at character {error.start}") from None


def _message(turn: Any) -> Turn:
    if not isinstance(turn, dict) or not isinstance(turn.get("role"), str):
        raise _MalformedError("a turn is no object with role and content")
    if not isinstance(turn.get("content"), str):
        raise _MalformedError("a turn's content is no string", f"the turn of {turn['role']!r}")
    return {key: value for key, value in turn.items() if value is not None}


def _utterance(turn: Any) -> Turn:
    if not isinstance(turn, dict) or not isinstance(turn.get("from"), str):
        raise _MalformedError("a turn is no object with from and value")
    if turn["from"] not in _SPEAKERS:
        known = ", ".join(_SPEAKERS)
        raise _MalformedError("a turn is from nobody known", f"{turn['from']!r} is none of {known}")
    if not isinstance(turn.get("value"), str):
        raise _MalformedError("a turn's value is no string", f"the turn of {turn['from']!r}")
    return {"role": _SPEAKERS[turn["from"]], "content": turn["value"]}


def _task(row: dict[str, Any]) -> list[Turn]:
    task, answer = _text(row, "instruction"), _text(row, "output")
    material = row.get("input", "")
    if not isinstance(material, str):
        raise _MalformedError("input is no string", f"but a {type(material).__name__}")
    if material.strip():
        task = f"{task}\n\n{material}"
    return [{"role": "user", "content": task}, {"role": "assistant", "content": answer}]


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


def _tokens(place: str, row: dict[str, Any]) -> Tokens:
    ids, mask = row.get("input_ids"), row.get("loss_mask")
    # Not isinstance: a bool is no token.
    if not isinstance(ids, list) or not ids or any(type(token) is not int for token in ids):
        raise _MalformedError("input_ids is no list of whole numbers")
    if not isinstance(mask, list) or any(
        type(value) not in (int, bool) or value not in (0, 1) for value in mask
    ):
        raise _MalformedError("loss_mask is no list of 0 and 1")
    if len(ids) != len(mask):
        raise _MalformedError(
            "input_ids and loss_mask differ in length", f"{len(ids)} and {len(mask)} values"
        )
    rewritten = {"answers", "rows"} <= row.keys()
    return Tokens(place, ids, [int(value) for value in mask], rewritten)
