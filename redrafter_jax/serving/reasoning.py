"""Incremental separation of the reasoning and the answer in a text."""

from collections.abc import Sequence

from tokenizers import Tokenizer

from redrafter_jax.text.chat_template import THINKING
from redrafter_jax.text.tokenizer import overlap

_OPENS, _CLOSES = THINKING
# Number of the prompt's last tokens to search for the opening mark.
_TAIL = 16


def opens_reasoning(tokenizer: Tokenizer, prompt: Sequence[int]) -> bool:
    """Return whether the prompt ends with `<think>`, after which the target begins to reason."""
    tail = tokenizer.decode(list(prompt[-_TAIL:]), skip_special_tokens=False)
    return tail.rstrip().endswith(_OPENS)


class ReasoningSplit:
    """Splits text into reasoning, between `<think>` and `</think>`, and the answer after it.

    The two marks and the white space around them are removed. Reasoning can only come first; a mark
    within an answer is ordinary text.

    Args:
      opened: whether the text begins within the reasoning, without `<think>`.

    Attributes:
      reasons: whether the current text is reasoning, as far as is known yet.
      tokens: number of tokens of the reasoning so far, including the marks.
    """

    def __init__(self, opened: bool) -> None:
        self.reasons = opened
        self.tokens = 0
        self._undecided = not opened  # whether the text may still begin with the mark
        self._trims = True  # whether to remove white space after a mark
        self._held = ""
        self._new = 0  # number of tokens that are not counted yet

    def push(self, text: str) -> tuple[str, str]:
        """Return the reasoning and the answer that the text of one token adds."""
        self._new += 1
        reasoned, pair = self.reasons, self._take(text)
        if not self._undecided:
            self.tokens += self._new if reasoned or self.reasons else 0
            self._new = 0
        return pair

    def finish(self) -> tuple[str, str]:
        """Return the reasoning and the answer that were held back, when the text has ended."""
        held, self._held = self._held, ""
        return (held, "") if self.reasons else ("", held)

    def _take(self, text: str) -> tuple[str, str]:
        text, self._held = self._held + text, ""
        if self._undecided:
            begun = text.lstrip()
            if not begun.startswith(_OPENS):
                if _OPENS.startswith(begun):
                    self._held = text
                    return "", ""
                self._undecided = self._trims = False
                return "", text
            self._undecided, self.reasons = False, True
            text = begun.removeprefix(_OPENS)
        if not self.reasons:
            return "", self._trim(text)
        before, closed, after = text.partition(_CLOSES)
        if closed:
            reasoning = self._trim(before).rstrip()
            self.reasons, self._trims = False, True
            return reasoning, self._trim(after)
        # Hold back white space, which is removed if the closing mark follows.
        shown = text[: len(text) - overlap(text, _CLOSES)].rstrip()
        self._held = text[len(shown) :]
        return self._trim(shown), ""

    def _trim(self, text: str) -> str:
        kept = text.lstrip() if self._trims else text
        self._trims = self._trims and not kept
        return kept
