"""Conversations of which the target writes both sides, and texts that it writes without a prompt.

A chat model that continues the opening of a user's turn writes what users ask (Magpie, arXiv
2406.08464). Its answer follows as in any conversation, and then further turns, if any. What is no
question is left out, and no question is asked twice.

A base model, which has no template, continues one ordinary token of its vocabulary, another one for
every text (as LLM-QAT, arXiv 2305.17888). If its tokenizer begins texts with a token, that comes
first.
"""

from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from tokenizers import Tokenizer

from redrafter_jax.acceptance import repeats_itself
from redrafter_jax.config import SamplingConfig, TargetConfig
from redrafter_jax.engine.messages import Request
from redrafter_jax.errors import InputError
from redrafter_jax.text.chat_template import ChatTemplate, Turn, end_tokens, user_turn
from redrafter_jax.text.tokenizer import special_tokens

from ..config import RegenerateSettings
from .conversations import (
    Conversation,
    Exchange,
    TurnEncoder,
    add_answer,
    limits,
    rows_of,
    run_conversation,
)
from .output import Item, describe_counts
from .session import JsonRows, Session

# Fewest tokens of a question.
_FEWEST_TOKENS = 4
# The run stops after so many dropped conversations in a row.
MOST_DROPPED = 256

_REPEATED = "a question that was asked before"
# Two different texts in place of the user's words, to find where the template writes them.
_WORDS = ("WhatTheUserSays", "SomethingElse")


class UserTurn(NamedTuple):
    """The text that a template writes around the user's words.

    Attributes:
      opening: the text before them, without the spaces at its end: most tokens that begin a word
        include the space.
      gap: these spaces, written before given words.
      closing: the text that ends them: a special token, or the first word that follows.
      token: the special token's id; None for a word.
      markers: texts that the words must not contain, for they would be read as the template's:
        special tokens and, with a closing word, the word that opens the turn.
    """

    opening: str
    closing: str
    token: int | None
    markers: tuple[str, ...]
    gap: str = ""


def find_user_turn(
    template: ChatTemplate, tokenizer: Tokenizer, turns: Sequence[Turn] = ()
) -> UserTurn | None:
    """The text that the template writes around the user's words after these turns.

    None if the template refuses them, or if that text depends on the words or is empty.
    """
    cuts = set()
    for words in _WORDS:
        try:
            text = template.render([*turns, user_turn(words)], True)
        except Exception:  # a template is a program of its own
            return None
        before, _, after = text.rpartition(words)
        cuts.add((before, after.strip()))
    before, after = cuts.pop()
    opening = before.rstrip(" ")
    gap = before[len(opening) :]
    if cuts or not opening or not after:
        return None
    special = special_tokens(tokenizer)
    first = tokenizer.encode(after, add_special_tokens=False).ids[0]
    if first in special:
        return UserTurn(opening, special[first], first, tuple(special.values()), gap)
    plain = opening
    for marker in special.values():
        plain = plain.replace(marker, " ")
    markers = (*special.values(), *plain.split()[-1:])
    return UserTurn(opening, after.split()[0], None, markers, gap)


class Writer(NamedTuple):
    """Writes the text or the conversation of a seed.

    `opening` is what each begins with, `identity` the settings that it depends on, as a row of the
    output states them.
    """

    write: Callable[[int], Session[Conversation]]
    stop_tokens: tuple[int, ...]
    opening: str
    identity: dict[str, Any]
    is_chat: bool


def chat_writer(
    tokenizer: Tokenizer,
    template: ChatTemplate,
    target: TargetConfig,
    asked: Container[str],
    settings: RegenerateSettings,
) -> Writer:
    """A chat model that writes conversations; a question of `asked` gets no answer.

    Raises:
      InputError: the template does not show where the user's words begin and end.
    """
    first = find_user_turn(template, tokenizer)
    if first is None:
        raise InputError(
            f"The chat template of {template.name} does not show where a user's words begin and "
            "end, so that the target cannot be asked for them; give another data.chat_template, or "
            "recorded conversations in data.sources and prompts: data."
        )
    hi = [{"role": "user", "content": "Hi"}]
    stops = end_tokens(template, tokenizer, target.eos_token_ids, [hi])
    if first.token is not None and first.token not in stops:
        stops = (*stops, first.token)
    length = settings.data.sequence_length
    encoder = TurnEncoder(tokenizer, template, stops, length, target.vocab_size)

    def ask(seed: int, turns: list[Turn]) -> Session[list[Turn] | str | None]:
        if len(turns) == 2 * settings.turns:
            return None
        turn = find_user_turn(template, tokenizer, turns)
        if turn is None:
            return "the chat template refuses the turns"
        begun = "" if turns else settings.opening_of(seed)
        prompt = encoder.encode(turn.opening + (begun and turn.gap + begun))
        limit = min(settings.max_user_tokens, encoder.room - len(prompt))
        if limit < 1:
            return "no room for a question in data.sequence_length"
        written = yield Request(prompt, limit, seed, settings.user_sampling)
        question, fault = read_question(written, encoder, turn, begun)
        if fault is None and question in asked:
            fault = _REPEATED
        return fault or [*turns, {"role": "user", "content": question}]

    def write(seed: int) -> Session[Conversation]:
        return run_conversation(
            encoder, partial(ask, seed), seed, settings, find_fault=answer_fault
        )

    identity = {
        "user_sampling": asdict(settings.user_sampling),
        "turns": settings.turns,
        "max_user_tokens": settings.max_user_tokens,
    }
    return Writer(write, stops, first.opening + first.closing, identity | limits(settings), True)


def text_writer(tokenizer: Tokenizer, target: TargetConfig, settings: RegenerateSettings) -> Writer:
    """A base model that writes texts: text i continues the i-th ordinary token.

    Ordinary tokens are all of the target's but special and end tokens, in an order drawn by
    `data.shuffle_seed`.
    """
    excluded = {*special_tokens(tokenizer), *target.eos_token_ids}
    tokens = (token for token in tokenizer.get_vocab().values() if token < target.vocab_size)
    ordinary = sorted(token for token in tokens if token not in excluded)
    order = np.random.default_rng(settings.data.shuffle_seed).permutation(ordinary).tolist()
    prefix = tokenizer.encode("").ids

    def write(seed: int) -> Session[Conversation]:
        prompt = [*prefix, order[seed % len(order)]]
        room = settings.data.sequence_length - len(prompt)
        limit = min(settings.max_new_tokens or room, room)
        sampling = SamplingConfig(settings.temperature_of(seed))
        written = yield Request(prompt, limit, seed, sampling)
        rows = add_answer([], prompt, written, False)
        fault = "a text that repeats itself" if repeats_itself(written) else None
        return Conversation([Exchange(_join_ids(prompt + written), None if fault else rows)], fault)

    identity = limits(settings) | {"shuffle_seed": settings.data.shuffle_seed}
    return Writer(write, tuple(target.eos_token_ids), _join_ids(prefix), identity, False)


def new_rows(
    writer: Writer, items: Iterable[Item], conversations: Iterable[Conversation], asked: set[str]
) -> Iterator[JsonRows]:
    """The rows of what was written and not left out, with counts of what was left out before.

    The questions are added to those of earlier conversations, `asked`.

    Raises:
      InputError: `MOST_DROPPED` conversations or texts in a row are left out.
    """
    dropped: Counter[str] = Counter()
    for item, whole in zip(items, conversations, strict=False):
        kept = drop_repeated(whole, asked)
        rows = kept.exchanges[-1].rows if kept.exchanges else None
        if rows is None:
            dropped[kept.left_out or ""] += 1
            if dropped.total() == MOST_DROPPED:
                what, raised = "texts", "temperatures"
                if writer.is_chat:
                    what = "conversations"
                    raised = "max_user_tokens or user_sampling.temperature"
                raise InputError(
                    f"{MOST_DROPPED} {what} in a row are left out ({describe_counts(dropped)}); "
                    f"look at what the target says with `redrafter generate`, and raise {raised}."
                )
            continue
        if writer.is_chat:
            questions = [exchange.question for exchange in kept.exchanges]
            more = {"dropped": dict(dropped), "questions": questions}
            yield rows_of(item, rows, kept.left_out, **more)
        else:
            (row,) = rows
            yield [item.identity | {"dropped": dict(dropped)} | row.stated]
        dropped.clear()


def questions_in(rows: JsonRows) -> list[str]:
    """The questions of a conversation of the output; a text stands for itself."""
    return rows[0].get("questions", [_join_ids(rows[0]["input_ids"])])


def drop_repeated(conversation: Conversation, asked: set[str]) -> Conversation:
    """The conversation up to a question that was asked before; its own are added to `asked`."""
    kept = []
    for exchange in conversation.exchanges:
        if exchange.question in asked:
            return Conversation(kept, _REPEATED)
        if exchange.rows is None:
            break
        asked.add(exchange.question)
        kept.append(exchange)
    return Conversation(kept, conversation.left_out)


def read_question(
    written: Sequence[int], encoder: TurnEncoder, turn: UserTurn, begun: str = ""
) -> tuple[str, str | None]:
    """The user's words, and what is wrong with them.

    They begin with `begun`, the words that the target was given to continue.
    """
    tokenizer = encoder.tokenizer
    ended = written[-1] in encoder.stop_tokens
    given = tokenizer.encode(begun, add_special_tokens=False).ids
    # In one piece: some tokenizers decode a token otherwise at the beginning of a text.
    words = tokenizer.decode(
        [*given, *(written[:-1] if ended else written)], skip_special_tokens=False
    )
    if turn.token is None:
        words, closed, _ = words.partition(turn.closing)
        ended |= bool(closed)
    words = words.strip()
    tokens = tokenizer.encode(words, add_special_tokens=False).ids
    faults = {
        "a question without an end": not ended,
        "an empty or short question": len(tokens) < _FEWEST_TOKENS or words == begun,
        "a question with a marker of the template": any(marker in words for marker in turn.markers),
        "a question that repeats itself": repeats_itself(tokens),
    }
    return words, next((fault for fault, holds in faults.items() if holds), None)


def answer_fault(answer: Sequence[int]) -> str | None:
    """Why an answer is left out."""
    return "an answer that repeats itself" if repeats_itself(answer) else None


def _join_ids(tokens: Sequence[int]) -> str:
    return " ".join(map(str, tokens))
