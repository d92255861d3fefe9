"""`python -m train regenerate --config FILE`: let the target write training data.

A drafter has to predict what the target writes, not what people wrote. The target continues texts,
writes the assistant turns of recorded conversations, or writes whole conversations. The output
holds rows of tokens in the order of their seeds; a training run reads it as a source. A stopped run
resumes after the last row, if the rows have the same prompts, seeds and temperatures.
"""

import hashlib
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np
from rich.console import Console

from redrafter_jax.command_line import make_folder_of
from redrafter_jax.config import SamplingConfig
from redrafter_jax.engine.messages import Request
from redrafter_jax.errors import InputError
from redrafter_jax.files.target_files import TargetFiles, open_target
from redrafter_jax.lock import hold
from redrafter_jax.parallel.processes import is_first
from redrafter_jax.progress import progress
from redrafter_jax.settings.arguments import parse_settings
from redrafter_jax.text.chat_template import NoTemplateError, end_tokens

from ..config import USER_SETTINGS, RegenerateSettings
from ..data.chat import load_template
from ..data.documents import fitting_tokenizer, load_documents
from ..data.report import print_line
from ..data.rows import cut
from ..data.types import (
    Chat,
    Document,
    Record,
    Skip,
    Windows,
    describe_skips,
    describe_unread,
)
from ..setup import digest_weights
from ..workers import prepare
from .conversations import (
    Conversation,
    TurnEncoder,
    add_answer,
    choose_conversations,
    first_question,
    read_conversations,
    rows_of,
    run_conversation,
)
from .output import (
    Item,
    amount_of,
    append_rows,
    check_is_no_source,
    find_done,
    read_rows,
    summarize,
)
from .questions import (
    MOST_DROPPED,
    chat_writer,
    new_rows,
    questions_in,
    text_writer,
)
from .session import JsonRows, Session
from .writers import LoadedTarget, build_mesh, open_writers, write_all

_WEIGHTS = ", use the target that wrote this file"
_DATE = (
    ", state the date of the first start with data.template_arguments={date_string: ...} if the "
    "chat template writes today's date"
)


def regenerate(
    arguments: Sequence[str],
    command: str = "regenerate",
    is_late: Callable[[int], bool] = lambda _: False,
) -> None:
    """Append the target's texts or conversations to the output.

    With `workers`, this restricts JAX in this process to the CPU; see `prepare`.

    Args:
      arguments: command-line arguments.
      command: name of the command in the help; empty for `python -m train.regenerate`.
      is_late: called regularly with the number of tokens or conversations written, only with
        `prompts: self` and without workers. Once it returns True, the texts in progress are cut and
        the run ends.

    Raises:
      InputError: the settings, the data, the models or the existing output cannot be used.
    """
    settings = parse_settings(
        RegenerateSettings,
        "Let the target write training data: continued texts, rewritten answers or conversations.",
        arguments,
        command=command,
        processes=True,
    )
    prepare(settings)
    if settings.workers is None:
        build_mesh(settings)
    if is_first():
        make_folder_of(settings.output, "output")
        check_is_no_source(settings.output, settings.data)
    console = Console(stderr=True, quiet=not is_first())
    if settings.prompts == "self":
        write = partial(_write_prompts_too, is_late=is_late)
    else:
        write = _rewrite_chats if settings.prompt_tokens is None else _continue_texts
    with hold(settings.output, "output"):
        write(settings, open_target(settings.target), console)


def _continue_texts(settings: RegenerateSettings, files: TargetFiles, console: Console) -> None:
    """Continue the beginnings of texts."""
    config, sources = files.config, load_documents(settings.data, files)
    for source in sources:
        _print_skips(console, source.name, source.skips)
        _print_unread(console, source.name, source.documents)
    documents = [document for source in sources for document in source.documents]
    length = settings.data.sequence_length
    prompts = _choose_prompts(cut(documents, config.eos_token_ids[0], length), settings)

    def item(seed: int) -> Item:
        temperature = settings.temperature_of(seed)
        stated = {"seed": seed, "temperature": temperature, "sequence_length": length}
        return Item(seed, stated, prompts[seed])

    def write(item: Item) -> Session[JsonRows]:
        sampling = SamplingConfig(item.identity["temperature"])
        left = length - len(item.opening)
        written = yield Request(item.opening, left, item.seed, sampling)
        (row,) = add_answer([], item.opening, written, False)
        return [item.identity | row.stated]

    _write([*map(item, range(len(prompts)))], write, config.eos_token_ids, settings)
    print_line(console, f"{len(prompts)} rows in {settings.output}")


def _choose_prompts(windows: Windows, settings: RegenerateSettings) -> list[list[int]]:
    """The beginnings of `count` different windows that carry loss throughout.

    Raises:
      InputError: there are fewer full windows.
    """
    full = np.flatnonzero(windows.loss_mask[:, 1:].all(axis=1))
    count = settings.count or 0
    if len(full) < count:
        raise InputError(
            f"count is {count}, but the data has {len(full)} pieces of text of "
            f"data.sequence_length={windows.tokens.shape[1]} tokens; lower one of the two, "
            "or set prompt_tokens=null count=null to rewrite conversations."
        )
    chosen = np.random.default_rng(settings.data.shuffle_seed).permutation(full)[:count]
    return windows.tokens[chosen, : settings.prompt_tokens].tolist()


def _rewrite_chats(settings: RegenerateSettings, files: TargetFiles, console: Console) -> None:
    """Rewrite the answers of recorded conversations."""
    config, tokenizer = files.config, fitting_tokenizer(settings.data, files)
    records = read_conversations(settings.data)
    template = load_template(settings.data, files)
    asked = (first_question(record) for record in records if isinstance(record, Chat))
    stop_tokens = end_tokens(template, tokenizer, config.eos_token_ids, asked)
    length = settings.data.sequence_length
    encoder = TurnEncoder(tokenizer, template, stop_tokens, length, config.vocab_size)
    recorded, skips = choose_conversations(records, encoder, settings.data, settings.count)
    _print_skips(console, "conversations", skips)
    _print_unread(console, "conversations", records)
    _print_weights(console, records)
    items = [each.item(seed, settings) for seed, each in enumerate(recorded)]

    def write(item: Item) -> Session[JsonRows]:
        conversation = yield from run_conversation(
            encoder, recorded[item.seed].next_question, item.seed, settings
        )
        written = [each.rows for each in conversation.exchanges if each.rows is not None]
        return rows_of(item, written[-1], conversation.left_out)

    _write(items, write, stop_tokens, settings, _DATE)
    print_line(console, summarize(settings))


def _write(
    items: Sequence[Item],
    write: Callable[[Item], Session[JsonRows]],
    stop_tokens: Sequence[int],
    settings: RegenerateSettings,
    way_out: str = "",
) -> None:
    """Write the items that the output does not hold yet."""
    done = find_done(settings.output, items, way_out)
    if left := [item for item in items if item.seed not in done]:
        unit = "conversations" if settings.prompt_tokens is None else "texts"
        with (
            open_writers(settings, stop_tokens) as writers,
            progress(len(items), f"{unit} written", len(done)) as advance,
        ):
            rows = writers.share(partial(write_all, write), left)
            append_rows(rows, len(done), len(items), settings, advance)


def _write_prompts_too(
    settings: RegenerateSettings,
    files: TargetFiles,
    console: Console,
    is_late: Callable[[int], bool],
) -> None:
    """Let the target write prompts and answers, until the goal is reached or time is up."""
    config, tokenizer = files.config, fitting_tokenizer(settings.data, files)
    asked: set[str] = set()
    try:
        template = load_template(settings.data, files)
    except NoTemplateError:
        for name in USER_SETTINGS:
            if getattr(settings, name) not in (type(settings).model_fields[name].default, "varied"):
                raise InputError(
                    f"{name} is for chat models, but {settings.target} has no chat template; leave "
                    f"{name} out, or set data.chat_template."
                ) from None
        writer = text_writer(tokenizer, config, settings)
    else:
        writer = chat_writer(tokenizer, template, config, asked, settings)
    with open_writers(settings, writer.stop_tokens) as writers:
        weights = writers.ask(_digest_target)
        digest = hashlib.sha256(f"{weights} {writer.opening}".encode()).hexdigest()

        def item(seed: int) -> Item:
            stated: dict[str, Any] = {"seed": seed, "temperature": settings.temperature_of(seed)}
            if settings.user_openings and writer.is_chat:
                stated["user_opening"] = settings.opening_of(seed)
            return Item(seed, stated | writer.identity | {"target": digest[:16]}, [])

        rows = read_rows(settings.output)
        seeds = [row["seed"] for row in rows if type(row.get("seed")) is int]
        first = settings.first_seed
        # Between two rows, fewer than `MOST_DROPPED` seeds are dropped.
        most = min(max(seeds, default=first), first + MOST_DROPPED * len(rows)) + MOST_DROPPED
        items = [item(seed) for seed in range(first, most + 1)]
        done = find_done(settings.output, items, _WEIGHTS + _DATE)
        asked.update(question for rows in done.values() for question in questions_in(rows))
        goal = settings.tokens or settings.count or 0
        have = sum(amount_of(held, settings) for held in done.values())
        if have < goal:
            following = range(max(done, default=first - 1) + 1, sys.maxsize)
            unit = "conversations" if settings.tokens is None else "tokens"
            with progress(goal, f"{unit} written", have) as advance:
                total = have

                def told(conversation: Conversation) -> None:
                    nonlocal total
                    # Called before the conversation's turn, and before its question is checked for
                    # repetition.
                    rows = conversation.exchanges[-1].rows if conversation.exchanges else None
                    tokens = sum(sum(row.mask) for row in rows or ())
                    amount = int(rows is not None) if settings.tokens is None else tokens
                    total += amount
                    advance(amount)

                work, tell_kept = partial(write_all, writer.write), advance
                if settings.workers is None:
                    late = Conversation([], "no time was left")
                    ends = {"unfinished": late, "is_late": lambda: is_late(total)}
                    work, tell_kept = partial(work, on_end=told, **ends), lambda _: None
                conversations = writers.share(work, following)
                texts = new_rows(writer, map(item, following), conversations, asked)
                append_rows(texts, have, goal, settings, tell_kept)
    print_line(console, summarize(settings))


def _digest_target(loaded: LoadedTarget) -> str:
    return digest_weights(loaded.target)


def _print_skips(console: Console, name: str, skips: Sequence[Skip]) -> None:
    if skips:
        print_line(console, f"{name}: skipped {describe_skips(skips)}")


def _print_unread(console: Console, name: str, records: Iterable[Document | Record | Skip]) -> None:
    if unread := describe_unread(records):
        print_line(console, f"{name}: unused fields, with the number of records: {unread}")


def _print_weights(console: Console, records: Iterable[Record | Skip]) -> None:
    weighted = sum(isinstance(one, Chat) and bool(one.without_loss) for one in records)
    if weighted:
        print_line(
            console,
            f"conversations: {weighted} have answers of weight 0; the target rewrites these "
            "answers too, and the new answers carry loss",
        )
