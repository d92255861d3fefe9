"""Conversations in which the target writes the assistant turns; recorded answers are replaced.

The prompt of an answer contains the answers that the target wrote before, not the recorded ones.
Prompts are made as in a chat program: for every answer, all turns go through the chat template, and
the resulting text goes through the tokenizer.

The output stores tokens instead of messages. The tokenizer might encode the text of an answer to
other tokens than the target wrote, and the drafter has to predict the target's tokens. A row holds
the tokens of a prompt and its answer. If the next prompt begins with the row's tokens, the next
answer is appended to the row. Otherwise the next answer starts a new row. This happens if the
tokenizer encodes the earlier answer to other tokens, or if the template leaves out its reasoning.
So every answer follows exactly the tokens that the target read.

The tokens of an answer carry loss, including the stop token that the target chose. An answer that
was cut at its token limit has no stop token. In the next prompt the template writes an end marker
after this answer; the marker carries no loss. Questions that the target wrote may carry loss too.
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
    """Encoder of turns into prompts for a target.

    Attributes:
      tokenizer: the target's tokenizer.
      template: the chat template.
      stop_tokens: tokens that end an answer.
      room: maximum number of tokens in a row.
      vocab_size: number of tokens of the target.
    """

    tokenizer: Tokenizer
    template: ChatTemplate
    stop_tokens: tuple[int, ...]
    room: int
    vocab_size: int

    def encode(self, text: str) -> list[int]:
        """Tokenize a rendered prompt exactly as for generating an answer."""
        special = self.template.adds_special_tokens
        return self.tokenizer.encode(text, add_special_tokens=special).ids

    def encode_turns(self, turns: list[Turn]) -> list[int] | str:
        """Return the prompt for an answer to these turns, or a sentence why there is none."""
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
    """A row of the output.

    Attributes:
      tokens: token ids.
      mask: loss mask, 1 for tokens that carry loss and 0 for the others. Only tokens that the
        target wrote carry loss.
      answers: number of answers in the row.
      cut: number of these answers that were cut at their token limit.
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
    """A question and its answer.

    Attributes:
      question: text of the user turn.
      rows: rows of the conversation up to the answer; None if the answer is left out.
    """

    question: str
    rows: list[Row] | None


class Conversation(NamedTuple):
    """A conversation with its answers.

    Attributes:
      exchanges: questions and answers, in order.
      left_out: why later answers are left out; None if the conversation is complete.
    """

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
        """Return the loss mask of the prompt for the answer: 1 for the question's `written` tokens.

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

    Args:
      encoder: encoder of turns into prompts.
      next_question: extends the turns so far to the next question.
      seed: seed of the answers.
      settings: temperatures and limits of the answers.
      find_fault: returns the fault of an answer, or None. An answer with a fault is left out, and
        the conversation ends before it.
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
    """Return the limits of answers and rows, which are part of `Item.identity`."""
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
    """Return the rows with one more answer.

    The answer is appended to the last row if the prompt begins with the tokens of this row.
    Otherwise the answer starts a new row.

    Args:
      rows: the rows so far.
      prompt: tokens of the prompt for the answer.
      answer: tokens of the answer.
      cut: whether the answer was cut at its limit.
      prompt_mask: loss mask of the prompt; None if no token of the prompt carries loss. Tokens that
        are already in the last row keep their mask.
    """
    before = rows[-1] if rows else None
    mask = [*(prompt_mask or [0] * len(prompt)), *[1] * len(answer)]
    if before is None or prompt[: len(before.tokens)] != before.tokens:
        return [*rows, Row(prompt + answer, mask, 1, int(cut))]
    mask[: len(before.mask)] = before.mask
    longer = Row(prompt + answer, mask, before.answers + 1, before.cut + cut)
    return [*rows[:-1], longer]


def rows_of(item: Item, rows: Sequence[Row], left_out: str | None, **more: object) -> JsonRows:
    """Return the rows of a conversation as JSON objects, each with the further fields `more`."""
    return [
        item.identity
        | {"row": number, "rows": len(rows), "answers": row.answers, "cut": row.cut}
        | {"left_out": left_out, **more}
        | row.stated
        for number, row in enumerate(rows)
    ]


class RecordedConversation(NamedTuple):
    """A recorded conversation, for the target to rewrite the answers.

    Attributes:
      place: file and line of the conversation.
      turns: recorded turns of the conversation.
      opening: tokens of the first prompt.
    """

    place: str
    turns: list[Turn]
    opening: list[int]

    def item(self, seed: int, settings: RegenerateSettings) -> Item:
        """Return the item of the output for this conversation and seed."""
        identity = {
            "record": self.place,
            "seed": seed,
            "temperature": settings.temperature_of(seed),
            **limits(settings),
        }
        return Item(seed, identity, self.opening)

    def next_question(self, turns: list[Turn]) -> Session[Asked | str | None]:
        """Return the turns so far and the recorded turns up to the next answer; None at the end."""
        yield from ()
        done = len(turns)
        rest = [index for index in range(done, len(self.turns)) if _is_answer(self.turns[index])]
        if not rest:
            return None
        return Asked([*turns, *self.turns[done : rest[0]]])


def read_conversations(settings: DataSettings) -> list[Record | Skip]:
    """Read the records of all sources.

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
                "change the data, leave this source out, or set prompt_tokens and count to "
                "continue texts."
            )
        all_records += records
    return all_records


def choose_conversations(
    records: Iterable[Record | Skip],
    encoder: TurnEncoder,
    settings: DataSettings,
    count: int | None,
) -> tuple[list[RecordedConversation], list[Skip]]:
    """Choose `count` conversations at random; return them and all skips.

    The choice and the order are drawn by `data.shuffle_seed`. If `count` is None, all conversations
    are taken.

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
            "Correct these records, or set data.skips=report to continue without them."
        )
    if not usable:
        raise InputError(
            f"No record can be rewritten: {describe_skips(skips)}. Correct the records."
        )
    if count is not None and count > len(usable):
        raise InputError(
            f"count is {count}, but the data gives {len(usable)} conversations; lower count."
        )
    order = np.random.default_rng(settings.shuffle_seed).permutation(len(usable))[:count]
    return [usable[index] for index in order.tolist()], skips


def first_question(record: Chat) -> list[Turn]:
    """Return the turns before the first answer."""
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
