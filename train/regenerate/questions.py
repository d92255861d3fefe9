"""Conversations in which the target writes both sides, and texts that it writes without a prompt.

A chat model that continues the opening of a user turn writes a user's question (Magpie, arXiv
2406.08464). The answer and further turns follow as in any conversation. Malformed and repeated
questions are left out.

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
      opening: the text before the user's words, without trailing spaces, since most tokens that
        begin a word include the space.
      gap: the trailing spaces of the opening, written before given words.
      closing: the text that ends the user's words: a special token, or the first word after them.
      token: id of the special token in `closing`; None for a word.
      markers: texts that the user's words must not contain, since the model would read them as part
        of the template: special tokens and, with a closing word, the word that opens the turn.
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

    Returns None if the template refuses the turns, or if the text depends on the words or is empty.
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
      write: the session that writes the text or conversation of a seed.
      stop_tokens: tokens that end a turn or a text.
      opening: the prompt format, which the digest in each row covers.
      identity: fields of a row for the settings that the text depends on.
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
    """Make a writer of conversations for a chat model; questions in `asked` are not answered.

    Raises:
      InputError: the template does not show where the user's words begin and end.
    """
    first = find_user_turn(template, tokenizer)
    if first is None:
        raise InputError(
            f"The chat template of {template.name} does not show where a user's words begin and "
            "end, so the target cannot write questions; set another data.chat_template, or use "
            "recorded conversations with data.sources and prompts: data."
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
        asked_now = [*turns, {"role": "user", "content": question}]
        return fault or Asked(asked_now, prompt, written if settings.user_loss else ())

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

    Ordinary tokens are all tokens of the target except special and end tokens, shuffled by
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
    """Yield the rows of each kept conversation, with counts of those dropped before it.

    The questions of kept conversations are added to `asked`.

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
                    f"{MOST_DROPPED} {what} in a row are left out ({describe_counts(dropped)}); "
                    f"check the target's output with `redrafter generate`, and raise {raised}."
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
    """The questions of a conversation in the output; for a text, its token ids."""
    return rows[0].get("questions", [_join_ids(rows[0]["input_ids"])])


def drop_repeated(conversation: Conversation, asked: set[str]) -> Conversation:
    """Cut a conversation at a question in `asked`, and add its other questions to `asked`."""
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
    """The question that the target wrote, and the fault in it, if any.

    The question begins with `begun`, the words that the target was given to continue.
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
    """The fault for which an answer is left out, if any."""
    return "an answer that repeats itself" if repeats_itself(answer) else None


def _join_ids(tokens: Sequence[int]) -> str:
    return " ".join(map(str, tokens))
