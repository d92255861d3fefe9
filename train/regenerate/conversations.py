"""Conversations whose assistant turns the target writes; recorded answers are replaced.

An answer is written after the answers *written so far*, as in use. Prompts are made as in a chat
program: for every answer, all turns go through the chat template, and the resulting text through
the tokenizer.

The output stores tokens instead of messages. The tokenizer might encode the text of an answer to
other tokens than the target wrote, and the drafter has to predict the target's tokens. A row holds
the tokens of a prompt and its answer. The next answer is appended to the row if the next prompt
begins with the row's tokens. Otherwise it starts a new row: the tokenizer encodes the answer to
other tokens, or the template leaves out thoughts. So every answer follows exactly the tokens that
the target read.

An answer carries loss, including the stop token that the target chose. An answer that its limit has
cut has no stop token; the end marker that the template writes after it in the next prompt carries
no loss. Questions that the target wrote may carry loss too.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from tokenizers import Tokenizer

from redrafter_jax.config import SamplingConfig
from redrafter_jax.engine.messages import Request
from redrafter_jax.errors import InputError
from redrafter_jax.text.chat_template import ChatTemplate, Turn, answer_text

from ..config import RegenerateSettings
from ..data.documents import read_records, refuse_many_skips
from ..data.settings import DataSettings
from ..data.types import Chat, Record, Skip, describe_skips
from .output import Item
from .session import JsonRows, Session


class TurnEncoder(NamedTuple):
    """Encoder of turns for a target with V = `vocab_size` tokens.

    `room` is the length of a row, `stop_tokens` end an answer.
    """

    tokenizer: Tokenizer
    template: ChatTemplate
    stop_tokens: tuple[int, ...]
    room: int
    vocab_size: int

    def encode(self, text: str) -> list[int]:
        """The tokens of a rendered prompt, as in decoding."""
        special = self.template.adds_special_tokens
        return self.tokenizer.encode(text, add_special_tokens=special).ids

    def encode_turns(self, turns: list[Turn]) -> list[int] | str:
        """The prompt for an answer to these turns, or the reason why there is no prompt."""
        if any(turn["role"] == "tool" for turn in turns):
            return "a tool answers a call that the rewritten conversation does not hold"
        try:
            prompt = self.encode(self.template.render(turns, True))
        except Exception:  # templates may raise any exception
            return "the chat template refuses the turns"
        if max(prompt, default=0) >= self.vocab_size:
            return f"token {max(prompt)} is outside the target's {self.vocab_size} tokens"
        if len(prompt) >= self.room:
            return "no room for an answer in data.sequence_length"
        return prompt


class Row(NamedTuple):
    """Tokens that the target read or, where the mask is 1, wrote.

    `answers` is the number of answers in the row, and `cut` the number of answers that their limit
    has cut.
    """

    tokens: list[int]
    mask: list[int]
    answers: int
    cut: int

    @property
    def stated(self) -> dict[str, list[int]]:
        """The tokens and the mask as fields of the output."""
        return {"input_ids": self.tokens, "loss_mask": self.mask}


class Exchange(NamedTuple):
    """A question, and the rows up to its answer; None if the answer is left out."""

    question: str
    rows: list[Row] | None


class Conversation(NamedTuple):
    """A conversation with its answers, and why later answers are left out, if any are."""

    exchanges: list[Exchange]
    left_out: str | None


class Asked(NamedTuple):
    """The turns of a conversation up to its next question.

    Attributes:
      turns: the turns; the last is the question.
      read: the tokens after which the target wrote the question.
      written: the tokens of the question that carry loss, as the target wrote them; empty for a
        question without loss.
    """

    turns: list[Turn]
    read: Sequence[int] = ()
    written: Sequence[int] = ()

    def mask(self, prompt: Sequence[int]) -> list[int]:
        """The loss mask of the prompt for the answer: 1 for the question's tokens that carry loss.

        The prompt holds the text of the question, so its tokens may differ from those that the
        target wrote. The first different token and all after it carry no loss.
        """
        mask = [0] * len(prompt)
        whole = [*self.read, *self.written]
        for place, (token, stated) in enumerate(zip(prompt, whole, strict=False)):
            if token != stated:
                break
            mask[place] = int(place >= len(self.read))
        return mask


# Extends the turns so far to the next question, or returns the reason for leaving out the question,
# or None at the end.
NextQuestion: TypeAlias = Callable[[list[Turn]], Session[Asked | str | None]]


def run_conversation(
    encoder: TurnEncoder,
    next_question: NextQuestion,
    seed: int,
    settings: RegenerateSettings,
    find_fault: Callable[[list[int]], str | None] = lambda _: None,
) -> Session[Conversation]:
    """Write the answers of a conversation.

    An answer in which `find_fault` finds a fault is left out, and all after it.
    """
    exchanges: list[Exchange] = []
    turns: list[Turn] = []
    rows: list[Row] = []
    sampling = SamplingConfig(settings.temperature_of(seed))
    while True:
        asked = yield from next_question(turns)
        if not isinstance(asked, Asked):
            return Conversation(exchanges, asked)
        question, prompt = asked.turns[-1]["content"], encoder.encode_turns(asked.turns)
        if isinstance(prompt, str):
            return Conversation([*exchanges, Exchange(question, None)], prompt)
        room = encoder.room - len(prompt)
        limit = min(settings.max_new_tokens or room, room)
        answer = yield Request(prompt, limit, seed, sampling)
        if fault := find_fault(answer):
            return Conversation([*exchanges, Exchange(question, None)], fault)
        is_cut = answer[-1] not in encoder.stop_tokens
        rows = add_answer(rows, prompt, answer, is_cut, asked.mask(prompt))
        exchanges.append(Exchange(question, rows))
        text = answer_text(encoder.tokenizer, answer, encoder.stop_tokens)
        turns = [*asked.turns, {"role": "assistant", "content": text}]


def limits(settings: RegenerateSettings) -> dict[str, Any]:
    """The limits of answers and rows, for the identity of an item."""
    return {
        "max_new_tokens": settings.max_new_tokens,
        "sequence_length": settings.data.sequence_length,
    }


def add_answer(
    rows: Sequence[Row],
    prompt: list[int],
    answer: list[int],
    cut: bool,
    prompt_mask: Sequence[int] | None = None,
) -> list[Row]:
    """The rows with one more answer, added to the last row if the prompt begins with it.

    `prompt_mask` is the loss mask of the prompt. None means that no token of it carries loss.
    Tokens that are in the last row already keep their mask.
    """
    before = rows[-1] if rows else None
    mask = [*(prompt_mask or [0] * len(prompt)), *[1] * len(answer)]
    if before is None or prompt[: len(before.tokens)] != before.tokens:
        return [*rows, Row(prompt + answer, mask, 1, int(cut))]
    mask[: len(before.mask)] = before.mask
    longer = Row(prompt + answer, mask, before.answers + 1, before.cut + cut)
    return [*rows[:-1], longer]


def rows_of(item: Item, rows: Sequence[Row], left_out: str | None, **more: object) -> JsonRows:
    """Return the rows of a conversation in the output's format, each with the fields of `more`."""
    return [
        item.identity
        | {"row": number, "rows": len(rows), "answers": row.answers, "cut": row.cut}
        | {"left_out": left_out, **more}
        | row.stated
        for number, row in enumerate(rows)
    ]


class RecordedConversation(NamedTuple):
    """A recorded conversation, whose answers the target replaces by its own.

    Attributes:
      place: the conversation's file and line.
      turns: turns of the conversation.
      opening: tokens of the first prompt.
    """

    place: str
    turns: list[Turn]
    opening: list[int]

    def item(self, seed: int, settings: RegenerateSettings) -> Item:
        """The item of the output for this conversation and seed."""
        identity = {
            "record": self.place,
            "seed": seed,
            "temperature": settings.temperature_of(seed),
            **limits(settings),
        }
        return Item(seed, identity, self.opening)

    def next_question(self, turns: list[Turn]) -> Session[Asked | str | None]:
        """The turns so far and the recorded turns up to the next answer."""
        yield from ()
        done = len(turns)
        rest = [index for index in range(done, len(self.turns)) if _is_answer(self.turns[index])]
        if not rest:
            return None
        return Asked([*turns, *self.turns[done : rest[0]]])


def read_conversations(settings: DataSettings) -> list[Record | Skip]:
    """The records of all sources.

    Raises:
      InputError: a source cannot be read or holds no conversation.
    """
    all_records: list[Record | Skip] = []
    for index, source in enumerate(settings.sources):
        records = list(read_records(source))
        if not any(isinstance(record, Chat) for record in records):
            why = describe_skips([record for record in records if isinstance(record, Skip)])
            raise InputError(
                f"{settings.name(index)} holds no conversation to rewrite{why and f' ({why})'}; "
                "change its data, leave it out, or set prompt_tokens and count to continue "
                "texts."
            )
        all_records += records
    return all_records


def choose_conversations(
    records: Iterable[Record | Skip],
    encoder: TurnEncoder,
    settings: DataSettings,
    count: int | None,
) -> tuple[list[RecordedConversation], list[Skip]]:
    """The first `count` conversations in an order drawn by `shuffle_seed`, and all skips.

    Raises:
      InputError: there are fewer than `count` conversations or none, or `data.skips` refuses skips.
    """
    made = [_encode(encoder, record) for record in records]
    skips = [skip for skip in made if isinstance(skip, Skip)]
    usable = [recorded for recorded in made if not isinstance(recorded, Skip)]
    refuse_many_skips("conversations", skips if usable else [], len(made), settings)
    if skips and settings.skips == "refuse":
        raise InputError(
            f"{len(skips)} of {len(made)} records cannot be rewritten: {describe_skips(skips)}. "
            "Correct them, or set data.skips=report to continue without them."
        )
    if not usable:
        raise InputError(f"No record can be rewritten: {describe_skips(skips)}. Correct them.")
    if count is not None and count > len(usable):
        raise InputError(
            f"count is {count}, but the data gives {len(usable)} conversations; lower it."
        )
    order = np.random.default_rng(settings.shuffle_seed).permutation(len(usable))[:count]
    return [usable[index] for index in order.tolist()], skips


def first_question(record: Chat) -> list[Turn]:
    """The turns before the first answer."""
    answer = next(i for i, turn in enumerate(record.turns) if _is_answer(turn))
    return list(record.turns[:answer])


def _encode(encoder: TurnEncoder, record: Record | Skip) -> RecordedConversation | Skip:
    if isinstance(record, Skip):
        return record
    if not isinstance(record, Chat):
        return Skip(record.place, "no conversation")
    prompt = encoder.encode_turns(first_question(record))
    if isinstance(prompt, str):
        return Skip(record.place, prompt)
    return RecordedConversation(record.place, record.turns, prompt)


def _is_answer(turn: Turn) -> bool:
    return turn["role"] == "assistant"
