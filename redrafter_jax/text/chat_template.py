"""Conversations as text: the tokenizer's own chat template, a file's, or a built-in format."""

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
"""The tokenizer's own template, and texts as they stand, where templates are chosen by name."""

Turn = dict[str, Any]
"""`role` and `content` at least; what else a turn states is for the chat template to read."""

THINKING = ("<think>", "</think>")
"""Between which a target that reasons writes its reasoning."""

# An answer of this text is found again where a template writes it.
_ANSWER = "WhatTheAssistantSays"


class NoTemplateError(InputError):
    """A tokenizer without a chat template: a base model's."""


class ChatTemplate(NamedTuple):
    """A way of writing conversations; `NO_TEMPLATE` continues texts as they stand.

    Attributes:
      name: its name in messages, which clients of a server read too: no path.
      render: a function of turns, whether the opening of an answer follows them, and arguments by
        name, that returns text; it may raise any error for turns that it does not take.
      adds_special_tokens: whether the tokenizer adds its own, because the text spells none.
      end: the token that ends an answer, as text; None where nothing states one.
      gap: what stands between the opening of an answer and its text: decoded with the answer, but
        written by the template when a later turn follows.
      reads: names of the arguments that it may read.
      thinks: whether it knows reasoning, between the marks of `THINKING`.
      tools: whether it writes tools, calls of them and their results.
      call_style: the name in `tool_styles.STYLES` of the way in which answers call them; None for
        another one.
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
        """Refuse arguments that it does not read."""
        for name in arguments:
            if name in self.reads:
                continue
            near = difflib.get_close_matches(name, self.reads, n=1)
            hint = f"did you mean {near[0]!r}?" if near else "leave it out."
            raise InputError(
                f"The chat template of {self.name} reads no argument {name!r:.80}; {hint}"
            )


# Where texts are continued as they stand: the last turn is the text.
NO_TEMPLATE = ChatTemplate(NONE, lambda turns, _: turns[-1]["content"], True)


def user_turn(text: str) -> Turn:
    """A turn of the user."""
    return {"role": "user", "content": text}


def find_template(
    name: str | None,
    files: TargetFiles,
    setting: str,
    arguments: Mapping[str, Any] | None = None,
) -> ChatTemplate:
    """The template of that name.

    Args:
      name: "tokenizer" for its own, the name of a built-in (see `chat_formats`), a file of Jinja,
        or "none" for texts as they stand; None is the tokenizer's own where it brings one, else
        "none".
      files: the target's files, whose tokenizer the template is for.
      setting: the words in front of a template's name where the user chooses it, for messages.
      arguments: arguments of the template, such as `{"enable_thinking": False}`.

    Raises:
      NoTemplateError: the tokenizer has no template.
      InputError: it cannot be loaded, needs tokens that the tokenizer lacks, or does not read an
        argument.
    """
    template = _named_template(name, files, setting)
    given = dict(arguments or {})
    if not given:
        return template
    if template is NO_TEMPLATE:
        raise InputError(
            f"{next(iter(given))!r:.80} is an argument of a chat template, and texts are continued "
            "as they stand here; leave it out."
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
    from redrafter_jax.text.chat_formats import FORMATS  # for a tokenizer without a template

    if name in FORMATS:
        form = FORMATS[name]
        if missing := form.missing(files.tokenizer):
            raise InputError(
                f"{setting}{name} is written with {missing[0]!r}, but the tokenizer of "
                f"{files.name} has no such token; use a template of its own."
            )
        adds, end = form.begin is None, form.tokens[-1]
        return ChatTemplate(name, form.render, adds, end=end, gap=form.gap)
    if name in (None, OWN):
        # Gemma's tokenizers have `</s>` too, as a tag of HTML.
        special = set(special_tokens(files.tokenizer).values())
        fitting = [name for name, form in FORMATS.items() if special.issuperset(form.tokens)]
        beside = "" if is_gguf(files.path) else "save one beside it as chat_template.jinja, or "
        built_in = f", or a built-in by {setting}{' or '.join(fitting)}" if fitting else ""
        raise NoTemplateError(
            f"The tokenizer of {files.name} has no chat template; {beside}give a file of one by "
            f"{setting}FILE{built_in}."
        )
    if not Path(name).is_file():
        raise InputError(
            f"{setting}{name} is neither a file nor {OWN} nor a built-in ({', '.join(FORMATS)})."
        )
    source = read_text(Path(name))
    return template_of(files.transformers_tokenizer, source, Path(name).name)


def template_of(
    loaded: Any, source: str | None = None, name: str = "the target's tokenizer"
) -> ChatTemplate:
    """A chat template in Jinja.

    Args:
      loaded: transformers' tokenizer, which renders it.
      source: the template; None takes the tokenizer's own.
      name: its name in messages.

    Raises:
      InputError: it is no template.
    """
    # With transformers, which is loaded by now.
    from jinja2 import Environment, TemplateSyntaxError

    try:
        jinja: str = loaded.get_chat_template() if source is None else source
    except ValueError as error:  # of several templates none is the default
        raise InputError(
            f"The chat template of {name} cannot be told: {' '.join(str(error).split())}"
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
            f"The chat template of {name} is no valid Jinja at line {error.lineno}: "
            f"{' '.join(str(error.message).split()).rstrip('.')}."
        ) from None
    except Exception:  # a template is a program of its own, which need not take this turn
        pass
    # Special tokens are no part of an answer's text, so that nothing is between them there.
    unseen = special_tokens(loaded.backend_tokenizer).values()
    from redrafter_jax.text.tool_styles import style_of

    # What is handed to the template anyway.
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
    """The tokens of a conversation and of the opening of the answer that is asked for.

    Args:
      template: how conversations are written.
      tokenizer: the target's.
      turns: turns of the conversation.
      arguments: arguments of the template, for these turns alone.
      tools: tools that the answer may call, in the form of OpenAI's API.

    Raises:
      InputError: the template refuses the turns, or does not read an argument.
    """
    template.check_arguments(arguments or {})
    given = {"tools": list(tools)} if tools else {}
    try:
        text = template.render(list(turns), True, **(arguments or {}), **given)
        text.encode()
    except Exception as error:  # a template is a program of its own
        raise InputError(
            f"The chat template of {template.name} refuses the turns: "
            f"{' '.join(str(error).split())}"
        ) from None
    return encode(tokenizer, text, add_special_tokens=template.adds_special_tokens)


class PromptFormat(NamedTuple):
    """The way from questions to tokens, and what ends an answer.

    Attributes:
      tokenizer: the target's.
      template: how turns become text.
      opening: the turns that come before the user's first: the system's, if there is one.
      stop_tokens: tokens that end a continuation.
      stop_strings: texts that end one too.
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
        """The tokens of a conversation; see `encode_turns`."""
        return encode_turns(self.template, self.tokenizer, turns, arguments, tools)

    def encode_text(self, text: str) -> list[int]:
        """The tokens of a conversation's first message, or of a prompt."""
        return self.encode([*self.opening, user_turn(text)])


def answer_text(tokenizer: Tokenizer, answer: Sequence[int], stop_tokens: Sequence[int]) -> str:
    """An answer as the history of later turns keeps it: up to its end, without outer spaces.

    Args:
      tokenizer: the target's.
      answer: new tokens.
      stop_tokens: the first of them in the answer ends it.
    """
    end = next((at for at, token in enumerate(answer) if token in stop_tokens), len(answer))
    return tokenizer.decode(list(answer[:end])).strip()


def end_tokens(
    template: ChatTemplate,
    tokenizer: Tokenizer,
    eos_token_ids: Sequence[int],
    conversations: Iterable[Sequence[Turn]],
) -> tuple[int, ...]:
    """The tokens that end an answer: the target's, the tokenizer's and the template's own.

    The template's is the added token that it closes an answer with, special or not: a target whose
    config.json does not count it among its end tokens would go on with a turn of the user.

    Args:
      template: how conversations are written.
      tokenizer: the target's.
      eos_token_ids: tokens that end the target's texts.
      conversations: conversations in which an answer is due; the first that the template writes
        shows how it closes one.
    """
    own = None if template.end is None else tokenizer.token_to_id(template.end)
    found = (_closing_token(template, tokenizer, turns) for turns in conversations)
    closing = next((tokens for tokens in found if tokens is not None), [])
    return tuple(dict.fromkeys([*eos_token_ids, *([] if own is None else [own]), *closing]))


def _closing_token(
    template: ChatTemplate, tokenizer: Tokenizer, turns: Sequence[Turn]
) -> list[int] | None:
    """The first added token after the answer, if there is one; None where no answer is seen."""
    try:
        text = template.render([*turns, {"role": "assistant", "content": _ANSWER}], False)
    except Exception:  # a template is a program of its own
        return None
    _, found, closing = text.rpartition(_ANSWER)
    if not found:
        return None
    added = tokenizer.get_added_tokens_decoder()
    ids = tokenizer.encode(closing, add_special_tokens=False).ids
    # Runs of newlines are added tokens too, of Gemma's tokenizers.
    return [token for token in ids if token in added and added[token].content.strip()][:1]
