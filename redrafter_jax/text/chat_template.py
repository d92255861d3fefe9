"""Chat templates: the tokenizer's own, a Jinja file's, or a built-in format."""

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Tokenizer

from redrafter_jax.errors import InputError
from redrafter_jax.files.fields import read_text
from redrafter_jax.files.locate import is_gguf
from redrafter_jax.files.target_files import TargetFiles
from redrafter_jax.text.tokenizer import encode, special_tokens

OWN, NONE = "tokenizer", "none"
"""Names that choose the tokenizer's own template, and no template."""

Turn = dict[str, Any]
"""A mapping with `role` and `content`; the chat template may read further keys."""

THINKING = ("<think>", "</think>")
"""The marks around the reasoning of a target that reasons."""

# A made-up answer that is easy to find in the text that a template writes.
_ANSWER = "WhatTheAssistantSays"


class NoTemplateError(InputError):
    """The error for a tokenizer without a chat template, such as that of a base model."""


class ChatTemplate(NamedTuple):
    """A function that turns conversations into text, with its properties.

    `NO_TEMPLATE` stands for no template: texts are then continued as they are.

    Attributes:
      name: name of the template in errors. Clients of a server see it, so it is never a path.
      render: function that returns the text of a conversation. Its arguments are the turns, a flag
        that adds the generation prompt after them, and keyword arguments of the template. It may
        raise any error for turns that it refuses.
      adds_special_tokens: whether the tokenizer must add special tokens to the rendered text.
      end: the token that ends an answer, as text; None if it is unknown.
      gap: text between the generation prompt and the answer. The target writes it in the answer
        that it generates; the template writes it in the answers of earlier turns.
      reads: names of the arguments that the template may read.
      thinks: whether the template handles reasoning between the marks of `THINKING`.
      tools: whether the template can write tools, tool calls and the results of calls.
      call_style: the key of `tool_styles.STYLES` for the format of tool calls; None if no style
        there fits.
    """

    name: str
    render: Callable[..., str]
    adds_special_tokens: bool
    end: str | None = None
    gap: str = ""
    reads: frozenset[str] = frozenset()
    thinks: bool = False
    tools: bool = False
    call_style: str | None = None

    def check_arguments(self, arguments: Mapping[str, Any]) -> None:
        """Refuse arguments that the template does not read."""
        for name in arguments:
            if name in self.reads:
                continue
            near = difflib.get_close_matches(name, self.reads, n=1)
            hint = f"did you mean {near[0]!r}?" if near else "leave it out."
            raise InputError(
                f"The chat template of {self.name} reads no argument {name!r:.80}; {hint}"
            )


# Continues a text as it is; the text is the last turn.
NO_TEMPLATE = ChatTemplate(NONE, lambda turns, _: turns[-1]["content"], True)


def user_turn(text: str) -> Turn:
    """Return a user turn with this text."""
    return {"role": "user", "content": text}


def find_template(
    name: str | None,
    files: TargetFiles,
    setting: str,
    arguments: Mapping[str, Any] | None = None,
) -> ChatTemplate:
    """Find the chat template that a name selects.

    Args:
      name: "tokenizer" for the tokenizer's own template, the name of a built-in format (see
        `chat_formats`), the path of a Jinja file, or "none" for no template. None stands for
        "tokenizer" if the tokenizer has a template, and otherwise for "none".
      files: the target's files, with the tokenizer that the template is for.
      setting: the option or setting that selects the template, such as "--chat-template ". Errors
        write it before the name.
      arguments: arguments of the template, such as `{"enable_thinking": False}`.

    Raises:
      NoTemplateError: `name` is "tokenizer", but the tokenizer has no template.
      InputError: the template cannot be loaded, needs tokens that the tokenizer lacks, or does not
        read an argument.
    """
    template = _named_template(name, files, setting)
    given = dict(arguments or {})
    if not given:
        return template
    if template is NO_TEMPLATE:
        raise InputError(
            f"{next(iter(given))!r:.80} is an argument of a chat template, but no chat template is "
            "used; leave the argument out."
        )
    template.check_arguments(given)

    def render(turns: list[Turn], opens: bool, **others: Any) -> str:
        return template.render(turns, opens, **given | others)

    return template._replace(render=render)


def _named_template(name: str | None, files: TargetFiles, setting: str) -> ChatTemplate:
    if name == NONE or (name is None and files.template is None):
        return NO_TEMPLATE
    if name in (None, OWN) and files.template is not None:
        return template_of(files.transformers_tokenizer)
    from redrafter_jax.text.chat_formats import FORMATS  # only for tokenizers without a template

    if name in FORMATS:
        form = FORMATS[name]
        if missing := form.missing(files.tokenizer):
            raise InputError(
                f"{setting}{name} needs the token {missing[0]!r}, but the tokenizer of "
                f"{files.name} has no such token; give another template."
            )
        adds, end = form.begin is None, form.tokens[-1]
        return ChatTemplate(name, form.render, adds, end=end, gap=form.gap)
    if name in (None, OWN):
        # Look at special tokens alone: Gemma's tokenizers have `</s>` too, as an HTML tag.
        special = set(special_tokens(files.tokenizer).values())
        fitting = [name for name, form in FORMATS.items() if special.issuperset(form.tokens)]
        beside = "" if is_gguf(files.path) else "save one beside it as chat_template.jinja, or "
        built_in = f", or a built-in with {setting}{' or '.join(fitting)}" if fitting else ""
        raise NoTemplateError(
            f"The tokenizer of {files.name} has no chat template; {beside}give a file with "
            f"{setting}FILE{built_in}."
        )
    if not Path(name).is_file():
        raise InputError(
            f"{setting}{name} names no chat template; give a Jinja file, {OWN} for the tokenizer's "
            f"own template, or a built-in format ({', '.join(FORMATS)})."
        )
    source = read_text(Path(name))
    return template_of(files.transformers_tokenizer, source, Path(name).name)


def template_of(
    loaded: Any, source: str | None = None, name: str = "the target's tokenizer"
) -> ChatTemplate:
    """Return the chat template of a Jinja source.

    Args:
      loaded: tokenizer of transformers, which renders the template.
      source: Jinja source; None takes the tokenizer's own template.
      name: the template's name in error messages.

    Raises:
      InputError: the source is not a valid template.
    """
    # transformers, which is loaded by now, has imported it already.
    from jinja2 import Environment, TemplateSyntaxError

    try:
        jinja: str = loaded.get_chat_template() if source is None else source
    except ValueError as error:  # there are several templates and none is the default
        raise InputError(
            f"No chat template could be chosen for {name}: {' '.join(str(error).split())}"
        ) from None

    def render(turns: list[Turn], opens: bool, **arguments: Any) -> str:
        return loaded.apply_chat_template(
            turns, chat_template=jinja, tokenize=False, add_generation_prompt=opens, **arguments
        )

    words: set[str] = set()
    try:
        words = {word for _, kind, word in Environment().lex(jinja) if kind == "name"}
        render([user_turn("Hi")], True)
    except TemplateSyntaxError as error:
        raise InputError(
            f"The chat template of {name} is not valid Jinja at line {error.lineno}: "
            f"{' '.join(str(error.message).split()).rstrip('.')}."
        ) from None
    except Exception:  # a template is a program and may refuse this turn
        pass
    # Decoded answers leave special tokens out, so reasoning between special tokens could not be
    # found.
    unseen = special_tokens(loaded.backend_tokenizer).values()
    from redrafter_jax.text.tool_styles import style_of

    # Variables that transformers always gives to the template.
    own = {"messages", "raise_exception", *inspect.signature(loaded.apply_chat_template).parameters}
    return ChatTemplate(
        name,
        render,
        adds_special_tokens=False,
        end=loaded.eos_token,
        reads=frozenset(words - own),
        thinks=all(mark in jinja and mark not in unseen for mark in THINKING),
        tools="tools" in words and "tool_calls" in jinja,
        call_style=style_of(jinja),
    )


def encode_turns(
    template: ChatTemplate,
    tokenizer: Tokenizer,
    turns: Sequence[Turn],
    arguments: Mapping[str, Any] | None = None,
    tools: Sequence[Mapping[str, Any]] = (),
) -> list[int]:
    """Tokenize a conversation, followed by the generation prompt.

    Args:
      template: the chat template.
      tokenizer: the target's tokenizer.
      turns: the turns of the conversation.
      arguments: arguments of the template for this call.
      tools: tools that the answer may call, in the format of OpenAI's API.

    Raises:
      InputError: the template refuses the turns, or does not read an argument.
    """
    template.check_arguments(arguments or {})
    given = {"tools": list(tools)} if tools else {}
    try:
        text = template.render(list(turns), True, **(arguments or {}), **given)
        text.encode()
    except Exception as error:  # a template is a program and may raise anything
        raise InputError(
            f"The chat template of {template.name} refuses the turns: "
            f"{' '.join(str(error).split())}"
        ) from None
    return encode(tokenizer, text, add_special_tokens=template.adds_special_tokens)


class PromptFormat(NamedTuple):
    """How prompts become tokens, and what ends an answer.

    Attributes:
      tokenizer: the target's tokenizer.
      template: the chat template.
      opening: the turns before the first user turn: the system turn, if there is one.
      stop_tokens: ids of the tokens that end a continuation.
      stop_strings: strings that end a continuation.
    """

    tokenizer: Tokenizer
    template: ChatTemplate
    opening: list[Turn]
    stop_tokens: tuple[int, ...]
    stop_strings: list[str]

    def encode(
        self,
        turns: Sequence[Turn],
        arguments: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> list[int]:
        """Tokenize a conversation; see `encode_turns`."""
        return encode_turns(self.template, self.tokenizer, turns, arguments, tools)

    def encode_text(self, text: str) -> list[int]:
        """Tokenize a text as the first user turn; without a template, as it is."""
        return self.encode([*self.opening, user_turn(text)])


def answer_text(tokenizer: Tokenizer, answer: Sequence[int], stop_tokens: Sequence[int]) -> str:
    """The text of an answer for the history of a conversation, without white space at its ends.

    Args:
      tokenizer: the target's tokenizer.
      answer: token ids of the answer.
      stop_tokens: ids of the tokens that end an answer; the text ends before the first of them.
    """
    end = next((at for at, token in enumerate(answer) if token in stop_tokens), len(answer))
    return tokenizer.decode(list(answer[:end])).strip()


def end_tokens(
    template: ChatTemplate,
    tokenizer: Tokenizer,
    eos_token_ids: Sequence[int],
    conversations: Iterable[Sequence[Turn]],
) -> tuple[int, ...]:
    """The ids of the tokens that end an answer, from the target, the tokenizer and the template.

    The template's token is the added token, special or not, with which the template closes an
    answer. The target's config.json may not list this token. If the token did not end the answer,
    the target would go on and write a user turn.

    Args:
      template: the chat template.
      tokenizer: the target's tokenizer.
      eos_token_ids: ids of the tokens that end the target's texts.
      conversations: conversations that end with a user turn. The first conversation that the
        template can format shows how it closes an answer.
    """
    own = None if template.end is None else tokenizer.token_to_id(template.end)
    found = (_closing_token(template, tokenizer, turns) for turns in conversations)
    closing = next((tokens for tokens in found if tokens is not None), [])
    return tuple(dict.fromkeys([*eos_token_ids, *([] if own is None else [own]), *closing]))


def _closing_token(
    template: ChatTemplate, tokenizer: Tokenizer, turns: Sequence[Turn]
) -> list[int] | None:
    """The first added token after an answer, if any; None if no answer can be formatted."""
    try:
        text = template.render([*turns, {"role": "assistant", "content": _ANSWER}], False)
    except Exception:  # a template is a program and may raise anything
        return None
    _, found, closing = text.rpartition(_ANSWER)
    if not found:
        return None
    added = tokenizer.get_added_tokens_decoder()
    ids = tokenizer.encode(closing, add_special_tokens=False).ids
    # Gemma's tokenizers have runs of newlines as added tokens, which end no answer.
    return [token for token in ids if token in added and added[token].content.strip()][:1]
