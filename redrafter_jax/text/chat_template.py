"""Conversations as text: the tokenizer's own chat template, or the built-in one of Vicuna v1.1."""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from tokenizers import Tokenizer

from redrafter_jax.checkpoints.download import is_gguf
from redrafter_jax.errors import InputError
from redrafter_jax.text.tokenizer import encode, special_tokens

TemplateName = Literal["tokenizer", "vicuna_v1.1"]

Turn = dict[str, Any]
"""`role` and `content` at least; what else a turn states is for the chat template to read."""

VICUNA_SYSTEM = (
    "A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions."
)
_VICUNA_END = "</s>"
# An answer of this text is found again where a template writes it.
_ANSWER = "WhatTheAssistantSays"


class NoTemplateError(InputError):
    """A tokenizer without a chat template: a base model's."""


class ChatTemplate(NamedTuple):
    """How conversations are written, or with `NO_TEMPLATE` that they are not.

    Attributes:
      name: for messages.
      render: from turns, and whether the opening of an answer follows them, to text; it may raise
        any error for turns that it does not take.
      adds_special_tokens: whether the tokenizer adds its own, because the text spells none.
      end: the token that ends an answer, as text; None where nothing states one.
      gap: what stands between the opening of an answer and its text: decoded with the answer, but
        written by the template when a later turn follows.
    """

    name: str
    render: Callable[[list[Turn], bool], str]
    adds_special_tokens: bool
    end: str | None = None
    gap: str = ""


# Where texts are continued as they stand: the last turn is the text.
NO_TEMPLATE = ChatTemplate("none", lambda turns, _: turns[-1]["content"], True)


def user_turn(text: str) -> Turn:
    """What the user says."""
    return {"role": "user", "content": text}


def load_template(
    name: TemplateName | Literal["none"] | None,
    target: str | Path,
    tokenizer: Tokenizer,
    setting: str,
    arguments: Mapping[str, Any] | None = None,
) -> ChatTemplate:
    """The template of that name.

    Args:
      name: the tokenizer's own, the built-in one, or "none" for texts as they stand; None is the
        tokenizer's own where it brings one, else "none".
      target: folder, GGUF file or hub id that the tokenizer comes from.
      tokenizer: the target's.
      setting: what the user writes in front of a template's name to choose it, for messages.
      arguments: handed to the tokenizer's template, such as `{"enable_thinking": False}`.

    Raises:
      NoTemplateError: the tokenizer has no template.
      InputError: it cannot be loaded, or has no token that Vicuna's template needs.
    """
    if name == "none" or (name is None and _has_no_template(Path(target))):
        return NO_TEMPLATE
    if name == "vicuna_v1.1":
        if tokenizer.token_to_id(_VICUNA_END) is None:
            raise InputError(
                f"{setting}vicuna_v1.1 ends answers with {_VICUNA_END!r}, but the tokenizer of "
                f"{target} has no such token; use a template of its own."
            )
        return ChatTemplate(name, render_vicuna, adds_special_tokens=True, end=_VICUNA_END, gap=" ")
    try:
        loaded = _load_with_transformers(Path(target), tokenizer)
    except InputError:
        raise
    except Exception as error:  # transformers raises whatever its many loaders raise
        raise InputError(
            f"transformers cannot load the tokenizer of {target} for its chat template: "
            f"{' '.join(str(error).split())}"
        ) from None
    if loaded.chat_template is None and name is None:
        return NO_TEMPLATE
    if loaded.chat_template is None:
        way_out = "`redrafter convert` it and save one" if is_gguf(Path(target)) else "save one"
        built_in = f", or use {setting}vicuna_v1.1" if tokenizer.token_to_id(_VICUNA_END) else ""
        raise NoTemplateError(
            f"The tokenizer of {target} has no chat template; {way_out} beside it as "
            f"chat_template.jinja{built_in}."
        )

    def render(turns: list[Turn], add_generation_prompt: bool) -> str:
        return loaded.apply_chat_template(
            turns, tokenize=False, add_generation_prompt=add_generation_prompt, **(arguments or {})
        )

    end = loaded.eos_token
    return ChatTemplate(f"the tokenizer of {target}", render, adds_special_tokens=False, end=end)


def _has_no_template(target: Path) -> bool:
    """Whether a folder surely has no template: transformers, which would tell, imports slowly."""
    if not target.is_dir() or (target / "chat_template.jinja").exists():
        return False
    settings = target / "tokenizer_config.json"
    return not settings.exists() or b'"chat_template"' not in settings.read_bytes()


def _load_with_transformers(target: Path, tokenizer: Tokenizer) -> Any:
    """Transformers' tokenizer, which renders chat templates."""
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # that PyTorch is not there
    # Slow, and only conversations need it.
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    if is_gguf(target):
        from redrafter_jax.checkpoints.gguf_header import read_header
        from redrafter_jax.checkpoints.gguf_tokenizer import tokenizer_fields

        fields = tokenizer_fields(read_header(target))
        return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **fields)
    # A folder's own code is never run: by default transformers would ask on stdin whether to.
    return AutoTokenizer.from_pretrained(str(target), trust_remote_code=False)


def encode_turns(template: ChatTemplate, tokenizer: Tokenizer, turns: Sequence[Turn]) -> list[int]:
    """The tokens of a conversation and of the opening of the answer that is asked for.

    Raises:
      InputError: the template refuses the turns.
    """
    try:
        text = template.render(list(turns), True)
        text.encode()
    except Exception as error:  # a template is a program of its own
        raise InputError(
            f"The chat template of {template.name} refuses the turns: "
            f"{' '.join(str(error).split())}"
        ) from None
    return encode(tokenizer, text, add_special_tokens=template.adds_special_tokens)


class PromptFormat(NamedTuple):
    """How what is asked becomes tokens, and what ends an answer.

    Attributes:
      tokenizer: the target's.
      template: how turns become text.
      opening: the turns that come before the user's first: the system's, if there is one.
      stop_tokens: that end a continuation.
      stop_strings: that end one too.
    """

    tokenizer: Tokenizer
    template: ChatTemplate
    opening: list[Turn]
    stop_tokens: tuple[int, ...]
    stop_strings: list[str]

    def encode(self, turns: Sequence[Turn]) -> list[int]:
        """The tokens of a conversation."""
        return encode_turns(self.template, self.tokenizer, turns)

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

    The template's is the special token that it closes an answer with: a target whose config.json
    does not count it among its end tokens would go on with a turn of the user.

    Args:
      template: how conversations are written.
      tokenizer: the target's.
      eos_token_ids: that end the target's texts.
      conversations: that end where an answer is due; the first that the template writes shows how
        it closes one.
    """
    own = None if template.end is None else tokenizer.token_to_id(template.end)
    found = (_closing_token(template, tokenizer, turns) for turns in conversations)
    closing = next((tokens for tokens in found if tokens is not None), [])
    return tuple(dict.fromkeys([*eos_token_ids, *([] if own is None else [own]), *closing]))


def _closing_token(
    template: ChatTemplate, tokenizer: Tokenizer, turns: Sequence[Turn]
) -> list[int] | None:
    """The first special token after the answer, if there is one; None where no answer is seen."""
    try:
        text = template.render([*turns, {"role": "assistant", "content": _ANSWER}], False)
    except Exception:  # a template is a program of its own
        return None
    _, found, closing = text.rpartition(_ANSWER)
    if not found:
        return None
    special = special_tokens(tokenizer)
    ids = tokenizer.encode(closing, add_special_tokens=False).ids
    return [token for token in ids if token in special][:1]


def render_vicuna(turns: Sequence[Turn], add_generation_prompt: bool) -> str:
    """The conversation in the format of Vicuna v1.1.

    Raises:
      ValueError: after an optional system turn, user and assistant do not take turns.
    """
    system, rest = VICUNA_SYSTEM, turns
    if turns and turns[0]["role"] == "system":
        system, rest = turns[0]["content"], turns[1:]
    text = f"{system} "
    for index, turn in enumerate(rest):
        due = ("user", "assistant")[index % 2]
        if turn["role"] != due:
            raise ValueError(f"a turn is of {turn['role']!r} where one of {due!r} is due")
        if due == "user":
            text += f"USER: {turn['content']} "
        else:
            text += f"ASSISTANT: {turn['content']}{_VICUNA_END}"
    return text + "ASSISTANT:" if add_generation_prompt else text
