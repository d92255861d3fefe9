"""Conversations in which the target writes user and assistant turns, and texts without a prompt.

If the prompt of a chat model ends where the user's words begin, the model writes a user's question
(Magpie, arXiv 2406.08464). The answer and further turns follow as in any conversation. Malformed
and repeated questions are left out.

A base model, which has no chat template, continues one ordinary token of its vocabulary, a
different one for every text (as in LLM-QAT, arXiv 2305.17888). If its tokenizer adds a token at the
beginning of texts, the prompt begins with that token.
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
    Asked,
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

# Minimum number of tokens of a question.
_FEWEST_TOKENS = 4
# The run stops after this many consecutive dropped conversations.
MOST_DROPPED = 256

_REPEATED = "a question that was asked before"
# Two different texts in place of the user's words, to find where the template writes them.
_WORDS = ("WhatTheUserSays", "SomethingElse")


class UserTurn(NamedTuple):
    """The text that a template writes around the user's words.

    Attributes:
      opening: text before the user's words, without trailing spaces, because most tokens that begin
        a word include the space.
      closing: text after the user's words: a special token, or the first word of the template.
      token: id of the special token in `closing`; None if `closing` is a word.
      markers: texts that the user's words must not contain, because the model would read them as
        part of the template: the special tokens and, if `closing` is a word, the last word of
        `opening`.
      gap: trailing spaces before the user's words; written only before words that are given.
    """

    opening: str
    closing: str
    token: int | None
    markers: tuple[str, ...]
    gap: str = ""


def find_user_turn(
    template: ChatTemplate, tokenizer: Tokenizer, turns: Sequence[Turn] = ()
) -> UserTurn | None:
    """Find the text that the template writes around the user's words after these turns.

    Returns:
      The text; None if the template refuses the turns, or if the text depends on the user's words
      or is empty.
    """
    cuts = set()
    for words in _WORDS:
        try:
            text = template.render([*turns, user_turn(words)], True)
        except Exception:  # templates may raise any exception
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
    """A writer of texts or conversations, one per seed.

    Attributes:
      write: function from a seed to the session that writes its text or conversation.
      stop_tokens: tokens that end a turn or a text.
      opening: the fixed text of the prompts. With the weights it determines the digest `target` in
        each row.
      identity: settings on which the texts depend, as fields of a row.
      is_chat: whether the target has a chat template.
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
    """Make a writer of conversations for a chat model.

    If the target writes a question that is already in `asked`, the conversation ends before it.

    Raises:
      InputError: the template does not show where the user's words begin and end.
    """
    first = find_user_turn(template, tokenizer)
    if first is None:
        raise InputError(
            f"The chat template of {template.name} does not show where a user's words begin and "
            "end, so the target cannot write questions; set another data.chat_template, or set "
            "prompts=data and list recorded conversations in data.sources."
        )
    hi = [{"role": "user", "content": "Hi"}]
    stops = end_tokens(template, tokenizer, target.eos_token_ids, [hi])
    if first.token is not None and first.token not in stops:
        stops = (*stops, first.token)
    length = settings.data.sequence_length
    encoder = TurnEncoder(tokenizer, template, stops, length, target.vocab_size)

    def ask(seed: int, turns: list[Turn]) -> Session[Asked | str | None]:
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
        extended = [*turns, {"role": "user", "content": question}]
        return fault or Asked(extended, prompt, written if settings.user_loss else ())

    def write(seed: int) -> Session[Conversation]:
        return run_conversation(
            encoder, partial(ask, seed), seed, settings, find_fault=answer_fault
        )

    identity = {
        "user_sampling": asdict(settings.user_sampling),
        "turns": settings.turns,
        "max_user_tokens": settings.max_user_tokens,
        "user_loss": settings.user_loss,
    }
    return Writer(write, stops, first.opening + first.closing, identity | limits(settings), True)


def text_writer(tokenizer: Tokenizer, target: TargetConfig, settings: RegenerateSettings) -> Writer:
    """Make a writer of texts for a base model: text i continues the i-th ordinary token.

    The ordinary tokens are all tokens of the target except special and end tokens, in an order
    drawn by `data.shuffle_seed`.
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
    """Drop malformed and repeated conversations, and yield the rows of the others.

    Each row counts the conversations that were dropped before it, by reason. The questions of kept
    conversations are added to `asked`.

    Raises:
      InputError: `MOST_DROPPED` consecutive conversations or texts are dropped.
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
                    f"{MOST_DROPPED} {what} in succession are left out "
                    f"({describe_counts(dropped)}); check the target's output with `redrafter "
                    f"generate`, and raise {raised}."
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
    """Return the questions of a conversation in the output; for a text, its token ids as text."""
    return rows[0].get("questions", [_join_ids(rows[0]["input_ids"])])


def drop_repeated(conversation: Conversation, asked: set[str]) -> Conversation:
    """Cut a conversation at the first question that is in `asked`.

    The questions before the cut are added to `asked`.
    """
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
    """Return the question that the target wrote, and its fault; None if it has no fault.

    Args:
      written: tokens that the target wrote.
      encoder: encoder of turns into prompts.
      turn: the template's text around the user's words.
      begun: words that the target was given to continue; the question begins with them.
    """
    tokenizer = encoder.tokenizer
    ended = written[-1] in encoder.stop_tokens
    given = tokenizer.encode(begun, add_special_tokens=False).ids
    # Decode all tokens together: some tokenizers decode the first token of a text differently.
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
    """Return the fault for which an answer is left out; None if it has no fault."""
    return "an answer that repeats itself" if repeats_itself(answer) else None


def _join_ids(tokens: Sequence[int]) -> str:
    return " ".join(map(str, tokens))
