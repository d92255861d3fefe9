"""The formats in which targets write tool calls, as data."""

from collections.abc import Sequence
from typing import NamedTuple

from tokenizers import Tokenizer

from redrafter_jax.text.tokenizer import with_visible


class ToolStyle(NamedTuple):
    """A format of tool calls; each call holds one JSON object.

    Attributes:
      opens: the mark before a call, or before several calls.
      closes: the mark after a call.
      before: characters, besides white space, that may precede the object.
      after: characters, besides white space, that may follow the object.
      bare: whether an object at the start of an answer is a call even without the mark.
      repeats: whether an object directly after a call is a further call, without another mark.
      named: whether the name of the tool may precede the object. The object then holds only the
        arguments.
      signs: strings by which a chat template is recognised as one for this format; one is enough.
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
    # Qwen 2.5, Qwen 3 and Hermes: <tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>
    "hermes": ToolStyle("<tool_call>", "</tool_call>", signs=("<tool_call>",)),
    # Llama 3.1, 3.2 and 3.3: {"name": "f", "parameters": {}}, with or without the mark, and further
    # calls after semicolons.
    "llama3": ToolStyle(
        "<|python_tag|>",
        after=";,",
        bare=True,
        repeats=True,
        signs=("<|python_tag|>", "<|start_header_id|>"),
    ),
    # Mistral: [TOOL_CALLS][{"name": "f", "arguments": {}}], and since 2025 [TOOL_CALLS]f[ARGS]{}
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

# Marks of the style "mistral": before the arguments, and before the identifier of a call.
ARGUMENTS_MARK, IDENTIFIER_MARK = "[ARGS]", "[CALL_ID]"
# Strings in chat templates whose calls are not JSON, such as the template of Qwen 3 Coder.
_OTHER_SIGNS = ("<function=",)


def style_of(jinja: str) -> str | None:
    """The name of the style that a chat template asks for; None if it is not in `STYLES`."""
    if any(sign in jinja for sign in _OTHER_SIGNS):
        return None
    found = (name for name, style in STYLES.items() if any(sign in jinja for sign in style.signs))
    return next(found, None)


class ToolFormat(NamedTuple):
    """How a target's answers call tools.

    Attributes:
      style: the format of tool calls.
      tokenizer: the target's tokenizer, which also decodes marks that are special tokens.
    """

    style: ToolStyle
    tokenizer: Tokenizer


def tool_format(name: str, tokenizer: Tokenizer) -> ToolFormat:
    """Return the format of tool calls for a target's tokenizer; `name` is a key of `STYLES`."""
    style = STYLES[name]
    return ToolFormat(style, with_visible(tokenizer, _marks(style)))


def _marks(style: ToolStyle) -> Sequence[str]:
    more = (ARGUMENTS_MARK, IDENTIFIER_MARK) if style.named else ()
    return [mark for mark in (style.opens, style.closes, *more) if mark]
