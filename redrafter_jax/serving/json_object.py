"""An incremental reader of a JSON object."""

import json
import re
from io import StringIO
from typing import Any

# Matches characters outside of strings that are not part of numbers, true, false, null or spaces.
_MARK = re.compile(r"[^ \t\r\n\-+.0123456789eEtrufalsn]")
_NO_SPACE = re.compile(r"[^ \t\r\n]")
_IN_STRING = re.compile(r'["\\]')


class JsonObject:
    """Reads a JSON object piece by piece, and finds the values of its top-level keys.

    Attributes:
      length: number of characters read so far.
      ended: whether the object is complete.
      broken: whether reading has stopped before a character that JSON does not allow.
    """

    def __init__(self) -> None:
        self.length = 0
        self.ended = self.broken = False
        # A StringIO appends and returns parts in time proportional to the part.
        self._text = StringIO()
        self._depth = 0
        self._in_string = self._escaped = False
        self._key: str | None = None  # the key of the current value
        self._key_begin = 0
        self._awaits = False  # whether the current value has not begun yet
        self._spans: dict[str, tuple[int, int | None]] = {}
        self._values: dict[str, Any] = {}

    def push(self, text: str, begin: int) -> int:
        """Read `text` from index `begin` on; return the index after the last character read.

        Reading stops at the end of the text, at the end of the object, or if the object is broken.
        """
        shift, at = self.length - begin, begin
        while at < len(text) and not self.ended:
            if self._in_string:
                at = self._take_string(text, at)
                continue
            if self._awaits and (found := _NO_SPACE.search(text, at)):
                self._spans.setdefault(self._key or "", (found.start() + shift, None))
                self._awaits = False
            found = _MARK.search(text, at)
            at = found.start() if found else len(text)
            if not found:
                break
            if found[0] == ":":  # the text before it is a key
                self._write(text, at, shift)
            if not self._take_mark(found[0], at + shift):
                self.broken = True
                break
            at += 1
        self._write(text, at, shift)
        return at

    def _write(self, text: str, end: int, shift: int) -> None:
        """Append the new text up to index `end`, which is index `end + shift` of the object."""
        self._text.seek(self.length)
        self._text.write(text[self.length - shift : end])
        self.length = end + shift

    def part(self, begin: int, end: int) -> str:
        """Return the text of the object from index `begin` up to index `end`, which is excluded."""
        self._text.seek(begin)
        return self._text.read(max(0, end - begin))

    def span(self, key: str) -> tuple[int, int] | None:
        """Return the start and the end of a key's value; None if the value has not begun.

        The end is exclusive. An unfinished value ends where the text read so far ends.
        """
        begin, end = self._spans.get(key, (None, None))
        return None if begin is None else (begin, self.length if end is None else end)

    def value(self, key: str) -> Any:
        """Return the parsed value of a key; None if the value is incomplete or not JSON."""
        begin, end = self._spans.get(key, (0, None))
        if end is None:
            return None
        if key not in self._values:
            try:
                self._values[key] = json.loads(self.part(begin, end))
            except (ValueError, RecursionError):
                self._values[key] = None
        return self._values[key]

    def _take_string(self, text: str, at: int) -> int:
        """Read on within a string; return the index after the part that was read."""
        if self._escaped:
            self._escaped = False
            return at + 1
        found = _IN_STRING.search(text, at)
        if not found:
            return len(text)
        self._escaped = found[0] == "\\"
        self._in_string = self._escaped
        return found.end()

    def _take_mark(self, mark: str, at: int) -> bool:
        """Read a character outside of strings; return whether JSON allows such a character."""
        match mark:
            case '"':
                self._in_string = True
                if self._key is None:
                    self._key_begin = at
            case ":":
                if self._depth == 1 and self._key is None:
                    self._key = self.part(self._key_begin, at).strip().strip('"')
                    self._awaits = True
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
                return False
        return True

    def _end_value(self, at: int) -> None:
        """End the value of the current key at index `at`, unless the value has already ended."""
        self._awaits = False
        if self._key in self._spans:
            begin, end = self._spans[self._key]
            self._spans[self._key] = begin, at if end is None else end
