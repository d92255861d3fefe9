"""Conversations whose answers the target writes, turn by turn, and those that are recorded.

The history of an answer is the conversation with the answers *written so far*: that is what the
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

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from tokenizers import Tokenizer

from redrafter_jax.config import SamplingConfig
from redrafter_jax.errors import InputError
from redrafter_jax.serving.messages import Request
from redrafter_jax.text.chat_template import ChatTemplate, Turn, answer_text

from ..config import RegenerateSettings
from ..data.documents import read_records
from ..data.settings import DataSettings
from ..data.types import Chat, Record, Skip, describe_skips
from .output import Item
from .session import Rows, Session


class TurnEncoder(NamedTuple):
    """From turns to tokens and back; a row has room for so many of them, and some end an answer."""

    tokenizer: Tokenizer
    template: ChatTemplate
    stop_tokens: tuple[int, ...]
    room: int

    def encode(self, text: str) -> list[int]:
        """As decoding would be asked."""
        special = self.template.adds_special_tokens
        return self.tokenizer.encode(text, add_special_tokens=special).ids

    def encode_turns(self, turns: list[Turn]) -> list[int] | str:
        """The prompt of the answer to these turns, or why there is none."""
        if any(turn["role"] == "tool" for turn in turns):
            return "a tool answers a call that is not made again"
        try:
            prompt = self.encode(self.template.render(turns, True))
        except Exception:  # a template is a program of its own
            return "the chat template refuses the turns"
        if len(prompt) >= self.room:
            return "no room for an answer in data.sequence_length"
        return prompt


class Row(NamedTuple):
    """Tokens that follow each other as the target read them and, where the mask is 1, wrote them.

    They hold so many answers, of which some were cut by their limit.
    """

    tokens: list[int]
    mask: list[int]
    answers: int
    cut: int

    @property
    def stated(self) -> dict[str, list[int]]:
        """As the output has them."""
        return {"input_ids": self.tokens, "loss_mask": self.mask}


class Exchange(NamedTuple):
    """A question, and the rows up to its answer; None where that is left out."""

    question: str
    rows: list[Row] | None


class Conversation(NamedTuple):
    """A conversation with its answers, and why there are no later ones; None where none is due."""

    exchanges: list[Exchange]
    left_out: str | None


# From the turns so far to those that the next answer replies to, the former included; a reason why
# there are none; or None where no answer is due.
NextQuestion: TypeAlias = Callable[[list[Turn]], Session[list[Turn] | str | None]]


def run_conversation(
    encoder: TurnEncoder,
    next_question: NextQuestion,
    seed: int,
    settings: RegenerateSettings,
    find_fault: Callable[[list[int]], str | None] = lambda _: None,
) -> Session[Conversation]:
    """Write the answers of a conversation.

    An answer in which `find_fault` finds one is left out, and with it the rest.
    """
    exchanges: list[Exchange] = []
    turns: list[Turn] = []
    rows: list[Row] = []
    sampling = SamplingConfig(settings.temperature_of(seed))
    while True:
        asked = yield from next_question(turns)
        if not isinstance(asked, list):
            return Conversation(exchanges, asked)
        question, prompt = asked[-1]["content"], encoder.encode_turns(asked)
        if isinstance(prompt, str):
            return Conversation([*exchanges, Exchange(question, None)], prompt)
        room = encoder.room - len(prompt)
        limit = min(settings.max_new_tokens or room, room)
        answer = yield Request(prompt, limit, seed, sampling)
        if fault := find_fault(answer):
            return Conversation([*exchanges, Exchange(question, None)], fault)
        rows = add_answer(rows, prompt, answer, answer[-1] not in encoder.stop_tokens)
        exchanges.append(Exchange(question, rows))
        text = answer_text(encoder.tokenizer, answer, encoder.stop_tokens)
        turns = [*asked, {"role": "assistant", "content": text}]


def limits_of(settings: RegenerateSettings) -> dict[str, Any]:
    """How long answers and rows may be, for the identity of an item."""
    return {
        "max_new_tokens": settings.max_new_tokens,
        "sequence_length": settings.data.sequence_length,
    }


def add_answer(rows: Sequence[Row], prompt: list[int], answer: list[int], cut: bool) -> list[Row]:
    """The rows with one more answer, in the last of them if the prompt goes on from it."""
    before = rows[-1] if rows else None
    if before is None or prompt[: len(before.tokens)] != before.tokens:
        return [*rows, Row(prompt + answer, [0] * len(prompt) + [1] * len(answer), 1, int(cut))]
    between = len(prompt) - len(before.tokens)
    mask = before.mask + [0] * between + [1] * len(answer)
    longer = Row(prompt + answer, mask, before.answers + 1, before.cut + cut)
    return [*rows[:-1], longer]


def rows_of(item: Item, rows: Sequence[Row], left_out: str | None, **more: object) -> Rows:
    """The rows of a conversation as the output has them; `more` stands in each of them."""
    return [
        item.identity
        | {"row": number, "rows": len(rows), "answers": row.answers, "cut": row.cut}
        | {"left_out": left_out, **more}
        | row.stated
        for number, row in enumerate(rows)
    ]


class RecordedConversation(NamedTuple):
    """A recorded conversation whose answers are written anew; the first is asked with `opening`."""

    place: str
    turns: list[Turn]
    opening: list[int]

    def item(self, seed: int, settings: RegenerateSettings) -> Item:
        """The conversation as the output knows it."""
        identity = {
            "record": self.place,
            "seed": seed,
            "temperature": settings.temperature_of(seed),
            **limits_of(settings),
        }
        return Item(seed, identity, self.opening)

    def next_question(self, turns: list[Turn]) -> Session[list[Turn] | str | None]:
        """The turns that are recorded before the next answer."""
        yield from ()
        said = len(turns)
        rest = [index for index in range(said, len(self.turns)) if _is_answer(self.turns[index])]
        if not rest:
            return None
        return [*turns, *self.turns[said : rest[0]]]


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
    records: Iterable[Record | Skip],
    encoder: TurnEncoder,
    settings: DataSettings,
    count: int | None,
) -> tuple[list[RecordedConversation], list[Skip]]:
    """The first `count` conversations in an order drawn by `shuffle_seed`, and all that are none.

    Raises:
      InputError: there are no or fewer conversations, or there are skips and they are refused.
    """
    made = [_open(encoder, record) for record in records]
    skips = [skip for skip in made if isinstance(skip, Skip)]
    opened = [recorded for recorded in made if not isinstance(recorded, Skip)]
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
    return [opened[index] for index in order.tolist()], skips


def first_question(record: Chat) -> list[Turn]:
    """The turns before the first answer."""
    answer = next(i for i, turn in enumerate(record.turns) if _is_answer(turn))
    return list(record.turns[:answer])


def _open(encoder: TurnEncoder, record: Record | Skip) -> RecordedConversation | Skip:
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
