"""From records to documents: records are read, rendered, tokenized, and checked or skipped."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from itertools import batched, chain
from typing import NamedTuple

import numpy as np
from tokenizers import Tokenizer

from redrafter_jax.config import TargetConfig
from redrafter_jax.errors import InputError
from redrafter_jax.files.target_files import TargetFiles
from redrafter_jax.text.chat_template import ChatTemplate

from .chat import Rendered, load_template, mask_answers, render_chat
from .files import read_raw
from .folders import read_folder
from .records import parse
from .settings import DataSettings, SourceSettings
from .types import Chat, Document, Raw, Record, Skip, Text, Tokens, describe_skips

# Records per call of the tokenizer, which uses all cores.
_BATCH = 256


class SourceDocuments(NamedTuple):
    """The documents of a source of training data.

    Attributes:
      name: the source's name in messages.
      weight: the source's share of the rows, relative to other sources.
      documents: the usable records as tokens, in the order of the files.
      skips: the skipped records, in the order of the files.
    """

    name: str
    weight: float
    documents: list[Document]
    skips: list[Skip]


def load_documents(settings: DataSettings, files: TargetFiles) -> list[SourceDocuments]:
    """Load the documents of every source and tokenize them for the target.

    Raises:
      InputError: a source cannot be read, has nothing to train on, has tokens outside the target's
        vocabulary, has masks that count every token, or has skipped records that `data.skips`
        refuses; the chat template is missing or not prefix-stable; or the tokenizer does not fit
        the target.
    """
    tokenizer = fitting_tokenizer(settings, files)
    # Load the template lazily: only conversations need it.
    template = cache(lambda: load_template(settings, files))
    loaded = []
    for index, source in enumerate(settings.sources):
        made = list(
            encode_records(read_records(source), settings, tokenizer, files.config, template)
        )
        documents = [document for document in made if isinstance(document, Document)]
        skips = [skip for skip in made if isinstance(skip, Skip)]
        loaded.append(SourceDocuments(settings.name(index), source.weight, documents, skips))
        _check(loaded[-1], source, settings)
    return loaded


def fitting_tokenizer(settings: DataSettings, files: TargetFiles) -> Tokenizer:
    """Return the target's tokenizer, after checking that the target fits the data.

    The tokenizer may have more tokens than the target, such as a padding token. Data with these
    tokens is refused later.

    Raises:
      InputError: rows are longer than the target's position limit, or the target has no end token.
    """
    config, tokenizer = files.config, files.tokenizer
    length, positions = settings.sequence_length, config.position_limit
    if length > positions:
        raise InputError(
            f"data.sequence_length is {length}, but the target has {positions} positions; lower "
            "data.sequence_length."
        )
    if not config.eos_token_ids:
        raise InputError(
            f"{files.name} states no eos_token_id, the token that separates documents; add "
            "eos_token_id to the target's config.json."
        )
    return tokenizer


def encode_records(
    records: Iterable[Record | Skip],
    settings: DataSettings,
    tokenizer: Tokenizer,
    config: TargetConfig,
    template: Callable[[], ChatTemplate],
) -> Iterator[Document | Skip]:
    """Encode each record as a document, or as a skip if it cannot be used.

    Raises:
      InputError: a token is outside the target's vocabulary, or the template cannot be loaded or is
        not prefix-stable.
    """
    for batch in batched(records, _BATCH):
        rendered = [
            render_chat(template(), record, settings.train_turns)
            if isinstance(record, Chat)
            else record
            for record in batch
        ]
        texts = [record.text for record in rendered if isinstance(record, Text)]
        ids_of_text = _encode(tokenizer, texts, adds_special_tokens=True)
        chats = [record for record in rendered if isinstance(record, Rendered)]
        pieces = chain.from_iterable((chat.whole, *chain(*chat.turns)) for chat in chats)
        special = bool(chats) and template().adds_special_tokens
        ids_of_chat = _encode(tokenizer, pieces, adds_special_tokens=special)
        end_token = config.eos_token_ids[0]
        # A text begins with the end token, unless the tokenizer adds a token of its own.
        opening = [] if tokenizer.encode("").ids else [end_token]
        for record in rendered:
            match record:
                case Skip():
                    yield record
                case Text():
                    ids = ids_of_text[record.text]
                    _check_tokens(record.place, ids, tokenizer, config.vocab_size)
                    yield _from_text(record, ids, opening, end_token)
                case Rendered():
                    ids = ids_of_chat[record.whole]
                    _check_tokens(record.place, ids, tokenizer, config.vocab_size)
                    yield _from_chat(record, ids_of_chat)
                case Tokens():
                    _check_tokens(record.place, record.ids, tokenizer, config.vocab_size)
                    yield _from_tokens(record)


def read_records(source: SourceSettings) -> Iterator[Record | Skip]:
    """Read the records of a source in the order of its files; unusable records become skips.

    Raises:
      InputError: the source cannot be read.
    """
    if source.folder is not None:
        yield from read_folder(source)
        return
    for raw in read_raw(source):
        yield parse(raw, source.format) if isinstance(raw, Raw) else raw


def _encode(
    tokenizer: Tokenizer, texts: Iterable[str], *, adds_special_tokens: bool
) -> dict[str, list[int]]:
    unique = list(dict.fromkeys(texts))
    encodings = tokenizer.encode_batch_fast(unique, add_special_tokens=adds_special_tokens)
    return {text: encoding.ids for text, encoding in zip(unique, encodings, strict=True)}


def _from_text(
    record: Text, ids: Sequence[int], opening: Sequence[int], end_token: int
) -> Document:
    closing = [] if list(ids[-1:]) == [end_token] else [end_token]
    tokens = np.asarray([*opening, *ids, *closing], np.int32)
    mask = np.arange(len(tokens)) > 0
    return Document(record.place, "text", tokens, mask, unread=record.unread)


def _from_chat(chat: Rendered, ids: dict[str, list[int]]) -> Document | Skip:
    turns = [(ids[before], ids[after]) for before, after in chat.turns]
    mask, left_out = mask_answers(ids[chat.whole], turns)
    if not mask.any():
        fault = "a token spans the boundary of every answer" if left_out else ""
        return Skip(chat.place, "no token carries loss", fault)
    tokens = np.asarray(ids[chat.whole], np.int32)
    return Document(chat.place, "chat", tokens, mask, left_out, True, chat.unread)


def _from_tokens(record: Tokens) -> Document | Skip:
    if not any(record.mask):
        return Skip(record.place, "no token carries loss")
    mask = np.asarray(record.mask, bool)
    tokens = np.asarray(record.ids, np.int32)
    return Document(record.place, "tokens", tokens, mask, 0, record.is_chat, record.unread)


def _check_tokens(place: str, ids: Sequence[int], tokenizer: Tokenizer, vocab_size: int) -> None:
    """Refuse a record with a token outside the target's vocabulary."""
    for token in (min(ids, default=0), max(ids, default=0)):
        if not 0 <= token < vocab_size:
            known = 0 <= token < tokenizer.get_vocab_size()
            named = f" ({tokenizer.id_to_token(token)!r})" if known else ""
            raise InputError(
                f"{place} holds token {token}{named}, which is outside the vocabulary of "
                f"{vocab_size} tokens; remove this token from the record, or encode the record "
                "with the target's own tokenizer."
            )


def refuse_many_skips(name: str, skips: Sequence[Skip], total: int, settings: DataSettings) -> None:
    """Refuse data with more than half of its records left out, unless `data.skips` allows it."""
    if settings.skips == "report" and 2 * len(skips) > total:
        raise InputError(
            f"{name}: {len(skips)} of {total} records are left out, more than half: "
            f"{describe_skips(skips)}. Correct the records, the chat template or the source's "
            "format, or set data.skips=allow to train on the other records."
        )


def _check(loaded: SourceDocuments, source: SourceSettings, settings: DataSettings) -> None:
    documents, skips = loaded.documents, loaded.skips
    total, reasons = len(documents) + len(skips), describe_skips(skips)
    if not documents:
        why = f"all {total} records are left out: {reasons}" if total else "it has no records"
        raise InputError(
            f"{loaded.name} has nothing to train on: {why}. Change the data, or leave this source "
            "out."
        )
    refuse_many_skips(loaded.name, skips, total, settings)
    if settings.skips == "refuse":
        faults = []
        if skips:
            faults.append(f"{len(skips)} of {total} records cannot be used: {reasons}")
        if cut_off := [document.place for document in documents if document.left_out]:
            faults.append(
                f"answers of {len(cut_off)} records carry no loss, because a token spans "
                f"their boundary (first at {cut_off[0]})"
            )
        if faults:
            raise InputError(
                f"{loaded.name}: {'; '.join(faults)}. Correct these records, or set "
                "data.skips=report to train without them."
            )
    masks = [document.loss_mask for document in documents if document.kind != "text"]
    if masks and source.full_masks == "refuse" and all(mask.all() for mask in masks):
        raise InputError(
            f"{loaded.name}: the masks of all {len(masks)} records count every token, so prompts "
            "would carry loss too; correct the masks, or set full_masks: allow on the source if "
            "this is intended."
        )
