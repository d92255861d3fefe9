"""The calls of tools in an answer, told from its text while both are decided."""

import json
import secrets
import string
from collections.abc import Collection
from typing import Any, Literal, NamedTuple

from redrafter_jax.text.tokenizer import overlap
from redrafter_jax.text.tool_styles import ARGUMENTS_MARK, ToolStyle

_ARGUMENTS = ("arguments", "parameters")
# What JSON has outside of strings, besides marks: numbers, true, false, null and spaces.
_OUTSIDE = frozenset(" \t\r\n-+.0123456789eEtrufalsn")
# Mistral's templates take identifiers of nine letters and digits alone.
_ID_LENGTH, _ID_LETTERS = 9, string.ascii_letters + string.digits


class CallPiece(NamedTuple):
    """What is added to one call.

    Attributes:
      number: which call of the answer it is, from 0 on.
      arguments: a piece of the arguments' JSON, as the target wrote it.
      id: the call's identifier, with its first piece.
      name: the tool's name, with its first piece.
    """

    number: int
    arguments: str
    id: str | None = None
    name: str | None = None


class Parts(NamedTuple):
    """What a piece of an answer adds: text, and pieces of calls."""

    text: str
    calls: list[CallPiece]


class ToolSplit:
    """Text in, text and calls out, without the marks around calls and the spaces there.

    What begins like a call and is none, or calls no tool that was offered, is text as it stands.
    A stream tells a call as soon as its name is known; where its JSON turns out to be broken, the
    call stays as far as it was told, and the rest is text.

    Args:
      style: the way in which the target writes calls.
      names: names of the tools that were offered.
      streams: whether calls are told while they are written, or else when they are complete.
      single: whether calls after the first are left out.

    Attributes:
      calls: number of calls so far.
    """

    def __init__(
        self, style: ToolStyle, names: Collection[str], *, streams: bool, single: bool = False
    ) -> None:
        self.calls = 0
        self._style, self._names = style, names
        self._streams, self._single = streams, single
        self._state: Literal["text", "before", "call", "after"] = "text"
        self._starts = style.bare  # whether a call without the mark may begin here
        self._held = ""  # as it stands, what may turn out to be no text
        self._name = ""  # before the object, where the style has it there
        self._object = JsonObject()
        self._told = 0  # characters of the call's arguments
        self._begun = False  # whether the call is told in part
        self._text: list[str] = []
        self._pieces: list[CallPiece] = []

    def push(self, text: str) -> Parts:
        """What the next characters add."""
        for character in text:
            self._take(character)
        return self._release()

    def finish(self) -> Parts:
        """What was held back."""
        if self._state in ("before", "call"):
            self._give_up()
        elif self._state == "text":
            self._text.append(self._held)
        self._held = ""
        return self._release()

    def _release(self) -> Parts:
        parts = Parts("".join(self._text), self._merged())
        self._text, self._pieces = [], []
        return parts

    def _merged(self) -> list[CallPiece]:
        """The pieces, one for each call."""
        merged: list[CallPiece] = []
        for piece in self._pieces:
            if merged and merged[-1].number == piece.number:
                joined = merged[-1].arguments + piece.arguments
                merged[-1] = merged[-1]._replace(arguments=joined)
            else:
                merged.append(piece)
        return [piece for piece in merged if piece.number == 0 or not self._single]

    def _take(self, character: str) -> None:
        self._held += character
        match self._state:
            case "text":
                self._take_text(character)
            case "before":
                self._take_before(character)
            case "call":
                self._take_call(character)
            case "after":
                self._take_after(character)

    def _take_text(self, character: str) -> None:
        opens = self._style.opens
        if self._held.endswith(opens):
            self._text.append(self._held[: -len(opens)].rstrip())
            self._held = opens
            self._expect()
        elif self._starts and character == "{":
            self._begin(character)
        else:
            self._starts = self._starts and character.isspace()
            # Spaces may stand before a mark.
            kept = self._held[: len(self._held) - overlap(self._held, opens)]
            shown = "" if self._starts else kept.rstrip()
            self._text.append(shown)
            self._held = self._held[len(shown) :]

    def _expect(self) -> None:
        """A mark has been read: an object is to come."""
        self._state, self._name = "before", ""

    def _take_before(self, character: str) -> None:
        if character == "{":
            self._name = self._name.removesuffix(ARGUMENTS_MARK).strip()
            self._begin(character)
        elif self._name or not (character.isspace() or character in self._style.before):
            self._name += character
            if not self._style.named or not _begins_name(self._name):
                self._give_up()

    def _begin(self, character: str) -> None:
        self._state, self._object = "call", JsonObject()
        self._told, self._begun = 0, False
        self._take_call(character)

    def _take_call(self, character: str) -> None:
        self._object.push(character)
        if self._object.broken or (self._object.ended and not self._is_call()):
            self._give_up()
            return
        if self._streams or self._object.ended:
            self._tell()
        if self._object.ended:
            self._state, self._held, self._starts = "after", "", False

    def _tell(self) -> None:
        """Tell what is new of the call's name and arguments, once both have begun."""
        name, arguments = self._name, self._object.text
        if not self._name:
            name = self._object.value("name")
            found = (self._object.written(key) for key in _ARGUMENTS)
            arguments = next((text for text in found if text), "")
        if not (isinstance(name, str) and name in self._names and arguments.startswith("{")):
            return
        first: dict[str, Any] = {}
        if not self._begun:
            letters = (secrets.choice(_ID_LETTERS) for _ in range(_ID_LENGTH))
            first = {"id": "".join(letters), "name": name}
            self._begun = True
            self.calls += 1
        if piece := arguments[self._told :]:
            self._pieces.append(CallPiece(self.calls - 1, piece, **first))
            self._told = len(arguments)

    def _is_call(self) -> bool:
        """Whether the object, which is complete, is a call of a tool that was offered."""
        try:
            whole = json.loads(self._object.text)
        except (ValueError, RecursionError):
            return False
        if self._name:
            return self._name in self._names
        given = [whole[key] for key in _ARGUMENTS if key in whole]
        name = whole.get("name")
        one = len(given) == 1 and isinstance(given[0], dict)
        return one and isinstance(name, str) and name in self._names

    def _take_after(self, character: str) -> None:
        style, said = self._style, self._held.lstrip()
        if not said:
            return
        if style.closes and style.closes.startswith(said):
            self._held = "" if said == style.closes else self._held
        elif style.after and character in style.after and said == character:
            self._held = ""
        elif character == "{" and said == character and style.repeats:
            self._name = ""
            self._begin(character)
        else:
            self._state = "text"
            if self._held.endswith(style.opens):
                self._held = style.opens
                self._expect()

    def _give_up(self) -> None:
        """What is held is no call: as far as it is not told as one, it is text."""
        if self._state == "call" and self._begun:
            self._text.append(self._object.text[self._told_end() :])
        else:
            self._text.append(self._held)
        self._state, self._held, self._starts = "text", "", False

    def _told_end(self) -> int:
        """Where in the object the told part of its arguments ends."""
        if self._name:
            return self._told
        return self._told + next(
            at for key in _ARGUMENTS if (at := self._object.begin(key)) is not None
        )


def _begins_name(text: str) -> bool:
    """Whether this is the beginning of a name and of the mark after it."""
    name, mark, rest = text.partition("[")
    return all(letter.isalnum() or letter in "_-." for letter in name) and bool(
        name and ARGUMENTS_MARK.startswith(mark + rest)
    )


class JsonObject:
    """The text of a JSON object as it comes, and where the values of its own keys lie.

    Attributes:
      text: what has come.
      ended: whether the object is complete.
      broken: whether it holds what no JSON holds outside of strings.
    """

    def __init__(self) -> None:
        self.text = ""
        self.ended = self.broken = False
        self._depth = 0
        self._in_string = self._escaped = False
        self._key: str | None = None  # whose value comes
        self._key_begin = 0
        self._spans: dict[str, tuple[int, int | None]] = {}

    def push(self, character: str) -> None:
        """Take the next character."""
        at = len(self.text)
        self.text += character
        if self._in_string:
            self._in_string = self._escaped or character != '"'
            self._escaped = character == "\\" and not self._escaped
            return
        if self._depth == 1 and self._key is not None and not character.isspace():
            self._spans.setdefault(self._key, (at, None))
        match character:
            case '"':
                self._in_string = True
                if self._key is None:
                    self._key_begin = at
            case ":":
                if self._depth == 1 and self._key is None:
                    self._key = self.text[self._key_begin : at].strip().strip('"')
            case ",":
                if self._depth == 1:
                    self._end_value(at)
                    self._key = None
            case "{" | "[":
                self._depth += 1
            case "}" | "]":
                self._depth -= 1
                self.ended = self._depth == 0
                if self._depth < 2:
                    self._end_value(at + self._depth)
            case _:
                self.broken = character not in _OUTSIDE

    def begin(self, key: str) -> int | None:
        """Where the value of a key begins; None where nothing of it has come."""
        return self._spans[key][0] if key in self._spans else None

    def written(self, key: str) -> str:
        """What has come of the value of a key, as it stands."""
        begin, end = self._spans.get(key, (len(self.text), None))
        return self.text[begin:end]

    def value(self, key: str) -> Any:
        """The value of a key; None where it is not complete, or no JSON."""
        begin, end = self._spans.get(key, (0, None))
        if end is None:
            return None
        try:
            return json.loads(self.text[begin:end])
        except ValueError:
            return None

    def _end_value(self, at: int) -> None:
        """The value of the key ends there, unless it ended before."""
        if self._key in self._spans:
            begin, end = self._spans[self._key]
            self._spans[self._key] = begin, at if end is None else end
