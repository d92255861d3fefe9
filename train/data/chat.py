"""Rendering of conversations through a chat template, and masks of the assistant's tokens.

To locate an assistant turn, the conversation is rendered twice: before the turn, as the prompt in
decoding, and including the turn. Both texts must be prefixes of the whole text. The turn carries
loss only if the tokens of both texts are also prefixes of the whole text's tokens. Then training
sees the same tokens as decoding.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Bool

from redrafter_jax.errors import InputError
from redrafter_jax.files.target_files import TargetFiles
from redrafter_jax.text.chat_template import ChatTemplate, Turn, find_template

from .settings import DataSettings
from .types import Chat, Skip

# The fields of a turn that every template reads.
_READ = ("role", "content")


class Rendered(NamedTuple):
    """A rendered conversation.

    Attributes:
      place: file and line of the record.
      whole: the whole text.
      turns: for each assistant turn that may carry loss, the prefix of `whole` before the turn and
        the prefix that includes the turn.
      unread: fields of the record that neither this code nor the template reads.
    """

    place: str
    whole: str
    turns: list[tuple[str, str]]
    unread: tuple[str, ...] = ()


def load_template(settings: DataSettings, files: TargetFiles) -> ChatTemplate:
    """Load the chat template that `data.chat_template` names.

    Raises:
      InputError: the tokenizer has no template, or lacks tokens that a built-in template needs.
    """
    return find_template(
        settings.chat_template,
        files,
        setting="data.chat_template=",
        arguments=settings.template_arguments,
    )


def render_chat(
    template: ChatTemplate, chat: Chat, which: Literal["all", "last"]
) -> Rendered | Skip:
    """Render a conversation, or return a `Skip` if the template refuses the turns.

    `which` selects the answers that may carry loss. With "last", the conversation ends at the last
    answer whose weight is not 0.

    Raises:
      InputError: the template is not prefix-stable, which means that later turns change the text of
        earlier ones.
    """
    answers = [
        index
        for index, turn in enumerate(chat.turns)
        if turn["role"] == "assistant" and index not in chat.without_loss
    ]
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
    except Exception as error:  # templates may raise any exception
        return Skip(chat.place, "the chat template refuses the turns", str(error))
    for index, (before, after) in zip(answers, pairs, strict=True):
        if after.startswith(before) and whole.startswith(after):
            continue
        when = "the answer is added" if not after.startswith(before) else "later turns are added"
        remedy = (
            "set data.train_turns=last to train on the last answer of each conversation alone"
            if which == "all"
            else "use another template"
        )
        raise InputError(
            f"The chat template of {template.name} is not prefix-stable: at {chat.place}, turn "
            f"{index + 1} of {len(turns)}, earlier text changes when {when}, so the "
            f"assistant's tokens cannot be located; {remedy}."
        )
    unread = (*chat.unread, *_unread_by_template(template, turns, whole))
    return Rendered(chat.place, whole, pairs, unread)


def _unread_by_template(template: ChatTemplate, turns: Sequence[Turn], whole: str) -> list[str]:
    """Fields of turns, besides role and content, that the template does not write."""
    names = dict.fromkeys(name for turn in turns for name in turn if name not in _READ)
    unread = []
    for name in names:
        without = [{key: turn[key] for key in turn if key != name} for turn in turns]
        try:
            written = template.render(without, False)
        except Exception:  # the template needs the field
            continue
        if written == whole:
            unread.append(f"{name} of a turn")
    return unread


def mask_answers(
    whole: Sequence[int], turns: Sequence[tuple[Sequence[int], Sequence[int]]]
) -> tuple[Bool[np.ndarray, " t"], int]:
    """Return the mask of the tokens that carry loss, and the number of turns that carry none.

    A turn carries no loss if a token spans its boundary: decoding starts at the boundary, so it
    would see other tokens. Later turns are not affected.

    Args:
      whole: tokens of the whole conversation.
      turns: for each turn, the tokens of the two prefixes in `Rendered.turns`.
    """
    mask, left_out = np.zeros(len(whole), bool), 0
    for before, after in turns:
        if all(list(whole[: len(tokens)]) == list(tokens) for tokens in (before, after)):
            mask[len(before) : len(after)] = True
        else:
            left_out += 1
    return mask, left_out
