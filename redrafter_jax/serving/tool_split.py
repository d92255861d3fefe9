"""Incremental separation of tool calls and text in an answer."""

import json
import re
import secrets
import string
from collections.abc import Collection
from functools import reduce
from itertools import groupby
from typing import Any, Literal, NamedTuple

from redrafter_jax.serving.json_object import JsonObject
from redrafter_jax.text.tokenizer import overlap
from redrafter_jax.text.tool_styles import ARGUMENTS_MARK, IDENTIFIER_MARK, ToolStyle

_ARGUMENTS = ("arguments", "parameters")
# Mistral's templates only accept identifiers of nine letters and digits.
_ID_LENGTH, _ID_LETTERS = 9, string.ascii_letters + string.digits
_NO_SPACE = re.compile(r"\S")


def _beginning(mark: str) -> str:
    """The pattern that matches every prefix of a mark, from the empty one to the whole mark."""
    return reduce(lambda rest, letter: f"(?:{re.escape(letter)}{rest})?", reversed(mark), "")


# A name before an object, with the marks after the name; this is the maximum length of a name in
# requests.
_NAME = "[a-zA-Z0-9_.-]{1,64}"
_ARGS, _ID = re.escape(ARGUMENTS_MARK), re.escape(IDENTIFIER_MARK) + _NAME
_NAMED = re.compile(rf"({_NAME})(?:(?:{_ID})?{_ARGS})?(?={{)")
_BEGINS_NAMED = re.compile(
    rf"{_NAME}(?:(?:{_ID})?{_beginning(ARGUMENTS_MARK)}|{_beginning(IDENTIFIER_MARK)})"
)


class CallPiece(NamedTuple):
    """A piece of a tool call.

    Attributes:
      number: index of the call in the answer, from 0.
      arguments: a piece of the arguments' JSON, as the target wrote it.
      id: the call's identifier, in its first piece only.
      name: the tool's name, in its first piece only.
    """

    number: int
    arguments: str
    id: str | None = None
    name: str | None = None


# A text, or a piece of a call.
Part = str | CallPiece


class ToolSplit:
    """Splits an answer into text and tool calls.

    The marks of calls, such as `<tool_call>`, and the white space around them are removed. Text
    that begins like a call, but does not call an offered tool, remains text. In a stream, a call is
    returned as soon as its name is known. If its JSON turns out to be broken, the pieces already
    returned stay, and the rest becomes text. The work is linear in the length of an answer, however
    the answer is split into pieces.

    Args:
      style: the format of tool calls.
      names: names of the offered tools.
      streams: True returns a call piece by piece while it is written, False only when it is
        complete.
      single: whether calls after the first are left out.

    Attributes:
      complete: indices, from 0, of the calls whose JSON is complete.
    """

    def __init__(
        self, style: ToolStyle, names: Collection[str], *, streams: bool, single: bool = False
    ) -> None:
        self.complete: set[int] = set()
        self._style, self._names = style, names
        self._streams, self._single = streams, single
        self._state: Literal["text", "before", "call", "after"] = "text"
        self._starts = style.bare  # whether a call without the mark may begin here
        self._held: list[str] = []  # text before the object that may belong to a call
        self._rest = ""  # undecided text, at most as long as the marks
        self._name = ""  # the tool's name, if the style writes it before the object
        self._object = JsonObject()
        self._told = 0  # index in the object up to which arguments were returned
        self._begun = False  # whether a piece of the call was returned
        self._calls = 0  # number of calls so far
        self._parts: list[Part] = []

    @property
    def called(self) -> bool:
        """Whether a complete call has been returned."""
        return 0 in self.complete if self._single else bool(self.complete)

    def push(self, text: str) -> list[Part]:
        """Return the texts and the pieces of calls that new text adds, in order."""
        text, self._rest = self._rest + text, ""
        take = {
            "text": self._take_text,
            "before": self._take_before,
            "call": self._take_call,
            "after": self._take_after,
        }
        at = 0
        while at < len(text):
            at = take[self._state](text, at)
        if self._streams and self._state == "call":
            self._tell()
        return self._release()

    def finish(self) -> list[Part]:
        """Return the text that was held back; call this method when the answer has ended."""
        if self._state == "call":
            self._give_up()
        elif self._state != "after":
            self._parts += [*self._held, self._rest]
        self._held, self._rest = [], ""
        return self._release()

    def _release(self) -> list[Part]:
        """Return everything that is known by now; consecutive texts are joined."""
        known = [part for part in self._parts if part and not self._is_left_out(part)]
        self._parts = []
        parts: list[Part] = []
        for kind, run in groupby(known, type):
            together = list(run)
            parts += ["".join(map(str, together))] if kind is str else together
        return parts

    def _is_left_out(self, part: Part) -> bool:
        return self._single and isinstance(part, CallPiece) and part.number > 0

    # Each of these methods reads `text` from index `at` on and returns the index after it.

    def _take_text(self, text: str, at: int) -> int:
        opens = self._style.opens
        if self._starts:
            begin = self._hold_spaces(text, at)
            if begin == len(text):
                return begin
            self._starts = False
            if text[begin] == "{":
                return self._begin(begin)
            at = begin
        mark = text.find(opens, at)
        end = mark
        if mark < 0:
            end = len(text) - overlap(text[max(at, len(text) - len(opens)) :], opens)
        # Hold back white space, which may precede a mark.
        shown = text[at:end].rstrip()
        if shown:
            self._parts += [*self._held, shown]
            self._held = []
        self._held.append(text[at + len(shown) : end])
        if mark < 0:
            return self._wait(text, end)
        self._held.append(opens)
        self._state = "before"
        return mark + len(opens)

    def _take_before(self, text: str, at: int) -> int:
        style = self._style
        at = self._hold_spaces(text, at)
        if at == len(text):
            return at
        coming = text[at : at + len(style.opens)]
        if style.opens.startswith(coming):  # another mark
            return self._wait(text, at) if coming != style.opens else self._give_up(at)
        if text[at] in style.before:
            self._held.append(text[at])
            return at + 1
        if text[at] == "{":
            return self._begin(at)
        if style.named and (named := _NAMED.match(text, at)):
            self._held.append(named[0])
            return self._begin(named.end(), named[1])
        if style.named and _BEGINS_NAMED.fullmatch(text, at):
            return self._wait(text, at)
        return self._give_up(at)

    def _take_call(self, text: str, at: int) -> int:
        end = self._object.push(text, at)
        if self._object.broken:
            # The object may be broken by the next mark, whose beginning may be valid JSON.
            back = overlap(text[max(at, end - len(self._style.opens)) : end], self._style.opens)
            return self._give_up(end - back, back)
        if not self._object.ended:
            return end
        if self._is_call():
            self._tell()
            if self._begun:
                self.complete.add(self._calls - 1)
                self._state, self._held = "after", []
                return end
        return self._give_up(end)

    def _take_after(self, text: str, at: int) -> int:
        style = self._style
        at = self._hold_spaces(text, at)
        if at == len(text):
            return at
        coming = text[at : at + len(style.closes)]
        if coming and style.closes.startswith(coming):
            if coming != style.closes:
                return self._wait(text, at)
            self._held = []
            return at + len(coming)
        if text[at] in style.after:
            self._held = []
            return at + 1
        if text[at] == "{" and style.repeats:
            return self._begin(at)
        self._state = "text"
        return at

    def _hold_spaces(self, text: str, at: int) -> int:
        """Hold back white space; return the index after it."""
        found = _NO_SPACE.search(text, at)
        end = found.start() if found else len(text)
        self._held.append(text[at:end])
        return end

    def _wait(self, text: str, at: int) -> int:
        """Leave the text from this index on until more text has arrived."""
        self._rest = text[at:]
        return len(text)

    def _begin(self, at: int, name: str = "") -> int:
        """Begin to read an object at this index."""
        self._state, self._name = "call", name
        self._object, self._told, self._begun = JsonObject(), 0, False
        return at

    def _give_up(self, at: int = 0, back: int = 0) -> int:
        """Release the text that was held for a call, except for pieces that were already returned.

        The last `back` characters of the object are read again.
        """
        if self._state == "call":
            end = self._object.length - back
            self._parts += [] if self._begun else self._held
            self._parts.append(self._object.part(self._told, end))
        else:
            self._parts += self._held
        self._state, self._held = "text", []
        return at

    def _tell(self) -> None:
        """Return the new part of a call's name and arguments, once both have begun."""
        begin, end = 0, self._object.length
        if not self._name:
            spans = (self._object.span(key) for key in _ARGUMENTS)
            begin, end = next((span for span in spans if span), (end, end))
        first: dict[str, Any] = {}
        if not self._begun:
            name = self._name or self._object.value("name")
            known = isinstance(name, str) and name in self._names
            if not known or self._object.part(begin, begin + 1) != "{":
                return
            letters = (secrets.choice(_ID_LETTERS) for _ in range(_ID_LENGTH))
            first = {"id": "".join(letters), "name": name}
            self._begun, self._told = True, begin
            self._calls += 1
        if piece := self._object.part(self._told, end):
            self._parts.append(CallPiece(self._calls - 1, piece, **first))
            self._told = end

    def _is_call(self) -> bool:
        """Return whether the complete object is a call of an offered tool."""
        try:
            whole = json.loads(self._object.part(0, self._object.length))
        except (ValueError, RecursionError):
            return False
        if self._name:
            return self._name in self._names
        given = [whole[key] for key in _ARGUMENTS if key in whole]
        name = whole.get("name")
        one = len(given) == 1 and isinstance(given[0], dict)
        return one and isinstance(name, str) and name in self._names
