"""The ways in which targets write calls of tools, as data."""

from collections.abc import Sequence
from typing import NamedTuple

from tokenizers import Tokenizer

from redrafter_jax.text.tokenizer import with_visible


class ToolStyle(NamedTuple):
    """A way of writing calls; each call holds one JSON object.

    Attributes:
      opens: the mark before a call, or before several.
      closes: the mark after a call.
      before: what may stand before the object, besides spaces.
      after: what may stand after the object, besides spaces.
      bare: whether an object at the start of an answer is a call without the mark.
      repeats: whether further objects are calls without a mark of their own.
      named: whether the name may stand before the object, which then holds the arguments alone.
      signs: parts of a chat template, any of which tells that its target writes this style.
    """

    opens: str
    closes: str = ""
    before: str = ""
    after: str = ""
    bare: bool = False
    repeats: bool = False
    named: bool = False
    signs: tuple[str, ...] = ()


STYLES = {
    # <tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>, of Qwen 2.5, Qwen 3 and Hermes.
    "hermes": ToolStyle("<tool_call>", "</tool_call>", signs=("<tool_call>",)),
    # {"name": "f", "parameters": {}}, maybe after the mark and with more of them after semicolons,
    # of Llama 3.1, 3.2 and 3.3.
    "llama3": ToolStyle(
        "<|python_tag|>",
        after=";,",
        bare=True,
        repeats=True,
        signs=("<|python_tag|>", "<|start_header_id|>"),
    ),
    # [TOOL_CALLS][{"name": "f", "arguments": {}}], and since 2025 [TOOL_CALLS]f[ARGS]{}
    # or [TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{}.
    "mistral": ToolStyle(
        "[TOOL_CALLS]",
        before="[",
        after=",]",
        repeats=True,
        named=True,
        signs=("[TOOL_CALLS]", "[AVAILABLE_TOOLS]"),
    ),
}

# What the style "mistral" may write between a name and the arguments, and before that an
# identifier.
ARGUMENTS_MARK, IDENTIFIER_MARK = "[ARGS]", "[CALL_ID]"
# Of templates whose calls are no JSON: Qwen 3 Coder's, for one.
_OTHER_SIGNS = ("<function=",)


def style_of(jinja: str) -> str | None:
    """The name of the style that a chat template asks for; None where it is none of them."""
    if any(sign in jinja for sign in _OTHER_SIGNS):
        return None
    found = (name for name, style in STYLES.items() if any(sign in jinja for sign in style.signs))
    return next(found, None)


class ToolFormat(NamedTuple):
    """How a target's answers call tools.

    Attributes:
      style: the way in which calls are written.
      tokenizer: the target's, which spells the marks too where they are special tokens.
    """

    style: ToolStyle
    tokenizer: Tokenizer


def tool_format(name: str, tokenizer: Tokenizer) -> ToolFormat:
    """The format of the style of that name, of `STYLES`, with a target's tokenizer."""
    style = STYLES[name]
    return ToolFormat(style, with_visible(tokenizer, _marks(style)))


def _marks(style: ToolStyle) -> Sequence[str]:
    more = (ARGUMENTS_MARK, IDENTIFIER_MARK) if style.named else ()
    return [mark for mark in (style.opens, style.closes, *more) if mark]
