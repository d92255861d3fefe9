"""Conversations to tokens through a chat template, and which of the tokens the assistant writes.

What the assistant writes is found by rendering: the text up to a turn of its own, as decoding
would be asked for it, and the text with the turn. Both must be the beginning of the whole as texts;
a turn is learnt if they are as tokens too, so that training sees the very tokens that decoding
will.
"""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from jaxtyping import Bool
from tokenizers import Tokenizer

from redrafter_jax.errors import InputError
from train.data.packages import require
from train.data.settings import DataSettings
from train.data.types import Chat, Skip, Turn

VICUNA_SYSTEM = (
    "A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions."
)
_VICUNA_END = "</s>"


class ChatTemplate(NamedTuple):
    """How conversations are written.

    Attributes:
      name: for messages.
      render: turns, and whether the opening of an answer follows them, to text; it may raise
        anything where the turns are not to its liking.
      adds_special_tokens: whether the tokenizer adds its own, because the text spells none.
    """

    name: str
    render: Callable[[list[Turn], bool], str]
    adds_special_tokens: bool


class Rendered(NamedTuple):
    """A conversation as text.

    Attributes:
      place: of the record.
      whole: all of it.
      turns: for each turn that is learnt, the beginnings of `whole` without it and with it.
    """

    place: str
    whole: str
    turns: list[tuple[str, str]]


def load_template(settings: DataSettings, target: Path, tokenizer: Tokenizer) -> ChatTemplate:
    """The template that `data.chat_template` names.

    Raises:
      InputError: the tokenizer has no template, or no token that Vicuna's needs.
    """
    if settings.chat_template == "vicuna_v1.1":
        if tokenizer.token_to_id(_VICUNA_END) is None:
            raise InputError(
                f"data.chat_template is vicuna_v1.1, which ends answers with {_VICUNA_END!r}, but "
                f"the tokenizer of {target} has no such token; use a template of its own."
            )
        return ChatTemplate("vicuna_v1.1", render_vicuna, adds_special_tokens=True)
    require("jinja2", "a chat template", "jinja2")
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # that PyTorch is not there
    from transformers import AutoTokenizer  # slow, and only conversations need it

    try:
        loaded: Any = AutoTokenizer.from_pretrained(str(target))
    except Exception as error:  # transformers raises whatever its many loaders raise
        raise InputError(
            f"transformers cannot load the tokenizer of {target} for its chat template: "
            f"{' '.join(str(error).split())}"
        ) from None
    if loaded.chat_template is None:
        raise InputError(
            f"The tokenizer of {target} has no chat template; save one beside it as "
            "chat_template.jinja, or set data.chat_template=vicuna_v1.1."
        )

    def render(turns: list[Turn], asks: bool) -> str:
        return loaded.apply_chat_template(
            turns, tokenize=False, add_generation_prompt=asks, **settings.template_arguments
        )

    return ChatTemplate(f"the tokenizer of {target}", render, adds_special_tokens=False)


def render_vicuna(turns: list[Turn], asks: bool) -> str:
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
    return text + "ASSISTANT:" if asks else text


def render_chat(
    template: ChatTemplate, chat: Chat, which: Literal["all", "last"]
) -> Rendered | Skip:
    """The conversation as text, or why the template refuses it.

    Args:
      template: of the target.
      chat: has at least one turn of the assistant.
      which: of the assistant's turns are learnt; `last` drops the turns after it.

    Raises:
      InputError: the template writes the beginning of a conversation otherwise when more follows.
    """
    answers = [index for index, turn in enumerate(chat.turns) if turn["role"] == "assistant"]
    turns = chat.turns
    if which == "last":
        answers, turns = answers[-1:], turns[: answers[-1] + 1]
    try:
        whole = template.render(turns, False)
        pairs = [
            (template.render(turns[:index], True), template.render(turns[: index + 1], False))
            for index in answers
        ]
        whole.encode()
    except Exception as error:  # a template is a program of its own
        return Skip(chat.place, "the chat template refuses the turns", str(error))
    for index, (before, after) in zip(answers, pairs, strict=True):
        if after.startswith(before) and whole.startswith(after):
            continue
        when = "its answer is added" if not after.startswith(before) else "later turns are added"
        remedy = (
            "set data.train_turns=last to learn the last answer of each conversation alone"
            if which == "all"
            else "use another template"
        )
        raise InputError(
            f"The chat template of {template.name} is not prefix-stable: at {chat.place}, turn "
            f"{index + 1} of {len(turns)}, what stands before changes when {when}, so what the "
            f"assistant writes cannot be told; {remedy}."
        )
    return Rendered(chat.place, whole, pairs)


def mask_answers(
    whole: Sequence[int], turns: Sequence[tuple[Sequence[int], Sequence[int]]]
) -> tuple[Bool[np.ndarray, " t"], int]:
    """True where a token is of a turn that is learnt; and how many of the turns are not after all.

    A turn is not where a token runs across its edge: decoding, which starts there, would have
    others. The turns after it are learnt: for them it is text like any other.

    Args:
      whole: tokens of the conversation.
      turns: for each turn to learn, the tokens of its beginning without it and with it.
    """
    mask, left_out = np.zeros(len(whole), bool), 0
    for before, after in turns:
        if all(list(whole[: len(tokens)]) == list(tokens) for tokens in (before, after)):
            mask[len(before) : len(after)] = True
        else:
            left_out += 1
    return mask, left_out
