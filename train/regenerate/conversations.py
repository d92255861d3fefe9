"""Conversations whose answers the target writes itself, turn by turn.

The history of an answer is the conversation with the answers *rewritten so far*: that is what the
target will have said when it is asked next. It is asked as a chat program would ask: the turns go
through the chat template, and the text through the tokenizer, anew for every answer.

What is kept are tokens, not messages. The tokenizer need not give back the tokens that the target
wrote, and a drafter has to guess those that it writes. A row holds the tokens of a prompt and its
answer, and goes on with the next answer where the next prompt begins with these very tokens; where
it does not (the tokenizer spells the answer otherwise, or the template leaves out thoughts), the
next answer starts a row of its own. So every answer stands behind the tokens that it was written
after, whatever tokenizer and template do.

An answer carries loss, the stop token that the target chose included. One that was cut by its limit
has none: the end that the template writes behind it in the next prompt carries no loss.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import batched
from typing import Any, NamedTuple

import numpy as np
from tokenizers import Tokenizer

from redrafter_jax.errors import InputError

from ..config import RegenerateSettings
from ..data.chat import ChatTemplate
from ..data.documents import read_records
from ..data.settings import DataSettings
from ..data.types import Chat, Record, Skip, Turn, describe_skips
from .output import Item
from .writer import Request, Write

# Batches that are sorted together, so that those of a batch are alike.
_BLOCK = 64


class Speaker(NamedTuple):
    """From turns to tokens and back.

    Attributes:
      tokenizer: the target's.
      template: the target's.
      stop_tokens: what ends an answer.
      room: tokens that a row may have.
    """

    tokenizer: Tokenizer
    template: ChatTemplate
    stop_tokens: tuple[int, ...]
    room: int

    def encode(self, text: str) -> list[int]:
        """As decoding would be asked."""
        special = self.template.adds_special_tokens
        return self.tokenizer.encode(text, add_special_tokens=special).ids

    def decode(self, answer: Sequence[int]) -> str:
        """What stands in the history of later answers, as chat programs keep it."""
        ended = answer[-1] in self.stop_tokens
        return self.tokenizer.decode(answer[:-1] if ended else answer).strip()


class Conversation(NamedTuple):
    """A conversation to rewrite.

    Attributes:
      seed: its number, which keys the noise too.
      place: of its record.
      turns: as recorded.
      opening: the tokens that its first answer is asked with.
    """

    seed: int
    place: str
    turns: list[Turn]
    opening: list[int]


class Row(NamedTuple):
    """Tokens that follow each other as the target read and wrote them.

    Attributes:
      tokens: prompt and answer, and perhaps the next.
      mask: 1 where the target wrote, else 0.
      answers: how many there are.
      cut: how many of them were cut by their limit.
    """

    tokens: list[int]
    mask: list[int]
    answers: int
    cut: int


class Rewritten(NamedTuple):
    """How far a conversation is.

    Attributes:
      history: the turns so far, answers rewritten.
      rows: written so far.
      left_out: why later answers are not written; None where they are.
    """

    history: list[Turn]
    rows: list[Row]
    left_out: str | None = None


def read_conversations(settings: DataSettings) -> list[Record | Skip]:
    """The records of all sources.

    Raises:
      InputError: a source cannot be read or holds no conversation.
    """
    every: list[Record | Skip] = []
    for index, source in enumerate(settings.sources):
        records = list(read_records(source))
        if not any(isinstance(record, Chat) for record in records):
            told = describe_skips([record for record in records if isinstance(record, Skip)])
            raise InputError(
                f"{settings.name(index)} holds no conversation to rewrite{told and f' ({told})'}; "
                "give it other data, leave it out, or set prompt_tokens and count to continue "
                "texts."
            )
        every += records
    return every


def open_conversations(
    records: Iterable[Record | Skip], speaker: Speaker, settings: DataSettings, count: int | None
) -> tuple[list[Conversation], list[Skip]]:
    """The first `count` conversations in an order drawn by `shuffle_seed`, and all that are none.

    Raises:
      InputError: there are no or fewer conversations, or there are skips and they are refused.
    """
    made = [_open(speaker, record) for record in records]
    skips = [skip for skip in made if isinstance(skip, Skip)]
    opened = [opening for opening in made if not isinstance(opening, Skip)]
    if skips and settings.skips == "refuse":
        raise InputError(
            f"{len(skips)} of {len(made)} records cannot be rewritten: {describe_skips(skips)}. "
            "Mend them, or set data.skips=report to go on without."
        )
    if not opened:
        raise InputError(f"No record can be rewritten: {describe_skips(skips)}. Mend them.")
    if count is not None and count > len(opened):
        raise InputError(
            f"count is {count}, but the data gives {len(opened)} conversations; lower it."
        )
    order = np.random.default_rng(settings.shuffle_seed).permutation(len(opened))[:count]
    chosen = (opened[index] for index in order.tolist())
    conversations = [
        Conversation(seed, chat.place, chat.turns, opening)
        for seed, (chat, opening) in enumerate(chosen)
    ]
    return conversations, skips


def first_question(record: Chat) -> list[Turn]:
    """The turns before the first answer."""
    answer = next(i for i, turn in enumerate(record.turns) if turn["role"] == "assistant")
    return list(record.turns[:answer])


def plan_batches(
    conversations: Sequence[Conversation], batch_size: int
) -> list[tuple[Conversation, ...]]:
    """All conversations, those of a batch as equal in answers and length as they come."""

    def size(conversation: Conversation) -> tuple[int, int]:
        answers = sum(turn["role"] == "assistant" for turn in conversation.turns)
        return answers, len(conversation.opening)

    blocks = batched(conversations, _BLOCK * batch_size)
    return [batch for block in blocks for batch in batched(sorted(block, key=size), batch_size)]


def conversation_item(conversation: Conversation, settings: RegenerateSettings) -> Item:
    """The conversation as the output knows it."""
    identity = {
        "record": conversation.place,
        "seed": conversation.seed,
        "temperature": settings.temperature_of(conversation.seed),
        "max_new_tokens": settings.max_new_tokens,
        "sequence_length": settings.data.sequence_length,
    }
    return Item(identity, conversation.opening)


def rewrite_conversations(
    write: Write,
    speaker: Speaker,
    batches: Sequence[Sequence[Conversation]],
    settings: RegenerateSettings,
) -> Iterator[list[dict[str, Any]]]:
    """Rows of the conversations, a batch at a time."""
    for batch in batches:
        rewritten = rewrite(write, speaker, batch, settings)
        yield [
            conversation_item(conversation, settings).identity
            | {
                "row": number,
                "rows": len(result.rows),
                "answers": row.answers,
                "cut": row.cut,
                "left_out": result.left_out,
                "input_ids": row.tokens,
                "loss_mask": row.mask,
            }
            for conversation, result in zip(batch, rewritten, strict=True)
            for number, row in enumerate(result.rows)
        ]


def rewrite(
    write: Write, speaker: Speaker, batch: Sequence[Conversation], settings: RegenerateSettings
) -> list[Rewritten]:
    """The conversations of a batch with answers that `write` gives, answer by answer."""
    progress = [Rewritten([], []) for _ in batch]
    while True:
        asked: list[tuple[int, list[Turn], Request]] = []
        for index, (conversation, so_far) in enumerate(zip(batch, progress, strict=True)):
            question = _ask(speaker, conversation.turns, so_far)
            if isinstance(question, str):
                progress[index] = so_far._replace(left_out=question)
            elif question is not None:
                turns, prompt = question
                room = speaker.room - len(prompt)
                limit = min(settings.max_new_tokens or room, room)
                seed = conversation.seed
                request = Request(prompt, limit, seed, settings.temperature_of(seed))
                asked.append((index, turns, request))
        if not asked:
            return progress
        answers = write([request for _, _, request in asked], speaker.stop_tokens)
        for (index, turns, request), answer in zip(asked, answers, strict=True):
            said: Turn = {"role": "assistant", "content": speaker.decode(answer)}
            cut = answer[-1] not in speaker.stop_tokens
            rows = add_answer(progress[index].rows, request.prompt, answer, cut)
            progress[index] = Rewritten([*turns, said], rows)


def add_answer(rows: Sequence[Row], prompt: list[int], answer: list[int], cut: bool) -> list[Row]:
    """The rows with one more answer, in the last of them if the prompt goes on from it."""
    before = rows[-1] if rows else None
    if before is None or prompt[: len(before.tokens)] != before.tokens:
        return [*rows, Row(prompt + answer, [0] * len(prompt) + [1] * len(answer), 1, int(cut))]
    between = len(prompt) - len(before.tokens)
    mask = before.mask + [0] * between + [1] * len(answer)
    longer = Row(prompt + answer, mask, before.answers + 1, before.cut + cut)
    return [*rows[:-1], longer]


def _open(speaker: Speaker, record: Record | Skip) -> tuple[Chat, list[int]] | Skip:
    if isinstance(record, Skip):
        return record
    if not isinstance(record, Chat):
        return Skip(record.place, "no conversation")
    asked = _ask(speaker, record.turns, Rewritten([], []))
    assert asked is not None  # a conversation has an answer
    return Skip(record.place, asked) if isinstance(asked, str) else (record, asked[1])


def _ask(
    speaker: Speaker, turns: Sequence[Turn], so_far: Rewritten
) -> tuple[list[Turn], list[int]] | str | None:
    """The turns before the next answer, and their tokens; why not; None after the last."""
    said = len(so_far.history)
    rest = [index for index in range(said, len(turns)) if turns[index]["role"] == "assistant"]
    if not rest or so_far.left_out is not None:
        return None
    asked = [*so_far.history, *turns[said : rest[0]]]
    if any(turn["role"] == "tool" for turn in asked):
        return "a tool answers a call that is not made again"
    try:
        prompt = speaker.encode(speaker.template.render(asked, True))
    except Exception:  # a template is a program of its own
        return "the chat template refuses the turns"
    if len(prompt) >= speaker.room:
        return "no room for an answer in data.sequence_length"
    return asked, prompt
