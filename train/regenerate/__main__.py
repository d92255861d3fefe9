"""`python -m train regenerate --config configs/x.yaml`: training data in the target's own words.

A drafter guesses what the target writes, not what people wrote. This lets the target continue
pieces of text, or write the assistant's turns of conversations, with our own decoder, and keeps
what it writes as token rows that a source of a training config reads. A run that was stopped goes
on after its last row, if the rows are of the same prompts, seeds and temperatures; the weights that
wrote them are not known.
"""

import sys
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from jax.sharding import Mesh
from rich.console import Console
from rich.progress import track

from redrafter_jax.checkpoints.huggingface import load_target_config
from redrafter_jax.command_line import make_folder, run
from redrafter_jax.parallel.processes import as_first_has_it, is_first
from redrafter_jax.settings.arguments import parse_settings
from redrafter_jax.settings.sections import check_batch
from redrafter_jax.text.chat_template import end_tokens

from ..config import RegenerateSettings
from ..data.chat import load_template
from ..data.documents import load_documents, load_own_tokenizer
from ..data.report import say
from ..data.rows import cut
from ..data.types import Chat, Skip, describe_skips
from .conversations import (
    Speaker,
    conversation_item,
    first_question,
    open_conversations,
    plan_batches,
    read_conversations,
    rewrite_conversations,
)
from .output import Item, check_is_no_source, find_done, format_rows, read_rows
from .texts import choose_prompts, continue_texts, make_requests, text_item
from .writer import load_writer

_DATE = (
    ", give a template that writes today's date that of the first start, as "
    "data.template_arguments={date_string: ...},"
)


def regenerate(arguments: Sequence[str], command: str = "regenerate") -> None:
    """Append what the target writes to the output, whole batches only.

    Raises:
      InputError: the settings, the data, the models or what the output holds cannot be used.
    """
    settings = parse_settings(
        RegenerateSettings,
        "Write training data in the target's own words.",
        arguments,
        command=command,
        processes=True,
    )
    mesh = settings.mesh.build()
    check_batch("batch_size", settings.batch_size, mesh)
    if is_first():
        make_folder(settings.output.parent, "the folder of output")
        check_is_no_source(settings.output, settings.data)
    console = Console(stderr=True, quiet=not is_first())
    work = _rewrite if settings.prompt_tokens is None else _continue
    work(settings, mesh, console)


def _continue(settings: RegenerateSettings, mesh: Mesh | None, console: Console) -> None:
    """Continue texts."""
    config = load_target_config(settings.target)
    sources = load_documents(settings.data, settings.target, config)
    for source in sources:
        _tell_skips(console, source.name, source.skips)
    documents = [document for source in sources for document in source.documents]
    windows = cut(documents, config.eos_token_ids[0], settings.data.sequence_length)
    assert settings.prompt_tokens is not None
    assert settings.count is not None
    prompts = choose_prompts(
        windows, settings.prompt_tokens, settings.count, settings.data.shuffle_seed
    )
    requests = make_requests(prompts, settings)
    done = _find_done([text_item(request) for request in requests], settings)
    left = [request for request in requests if not done[request.seed]]
    if left:
        size = settings.batch_size
        rows = continue_texts(load_writer(settings, mesh), left, config.eos_token_ids, size)
        _append(rows, -(-len(left) // size), settings, console)
    say(console, f"{len(requests)} rows in {settings.output}")


def _rewrite(settings: RegenerateSettings, mesh: Mesh | None, console: Console) -> None:
    """Rewrite conversations."""
    config = load_target_config(settings.target)
    tokenizer = load_own_tokenizer(settings.data, settings.target, config)
    records = read_conversations(settings.data)
    template = load_template(settings.data, settings.target, tokenizer)
    asked = (first_question(record) for record in records if isinstance(record, Chat))
    stop_tokens = end_tokens(template, tokenizer, config.eos_token_ids, asked)
    speaker = Speaker(tokenizer, template, stop_tokens, settings.data.sequence_length)
    conversations, skips = open_conversations(records, speaker, settings.data, settings.count)
    _tell_skips(console, "conversations", skips)
    items = [conversation_item(conversation, settings) for conversation in conversations]
    done = _find_done(items, settings, _DATE)
    # The batches of the whole run, without the conversations that are done.
    planned = plan_batches(conversations, settings.batch_size)
    left = [[each for each in batch if not done[each.seed]] for batch in planned]
    if batches := [batch for batch in left if batch]:
        rows = rewrite_conversations(load_writer(settings, mesh), speaker, batches, settings)
        _append(rows, len(batches), settings, console)
    if is_first():
        say(console, _summarize(settings))


def _find_done(items: Sequence[Item], settings: RegenerateSettings, way_out: str = "") -> Any:
    """Of each item whether the output holds it; the first process alone can tell."""
    held = find_done(settings.output, items, way_out) if is_first() else np.zeros(len(items), bool)
    return as_first_has_it(held)


def _summarize(settings: RegenerateSettings) -> str:
    """What the output holds, in a sentence, and what was left out of it."""
    values = read_rows(settings.output)
    first = [value for value in values if value["row"] == 0]
    answers, cut = (sum(value[name] for value in values) for name in ("answers", "cut"))
    limit = settings.max_new_tokens or settings.data.sequence_length
    told = (
        f"{len(values)} rows of {len(first)} conversations in {settings.output}: {answers} "
        f"answers, of which {cut} were cut at their limit of {limit} tokens or less"
    )
    ended = [Skip(value["record"], value["left_out"]) for value in first if value["left_out"]]
    return f"{told}; later answers left out: {describe_skips(ended)}" if ended else told


def _append(
    batches: Iterable[list[dict[str, Any]]],
    total: int,
    settings: RegenerateSettings,
    console: Console,
) -> None:
    shown = track(batches, "regenerate", total, console=console)
    if not is_first():
        for _ in shown:  # decoded together, written once
            pass
        return
    with settings.output.open("a", encoding="utf-8") as output:
        for rows in shown:
            output.write(format_rows(rows))
            output.flush()


def _tell_skips(console: Console, name: str, skips: Sequence[Skip]) -> None:
    if skips:
        say(console, f"{name}: skipped {describe_skips(skips)}")


def main() -> None:
    """The command by itself, `python -m train.regenerate`."""
    run(lambda: regenerate(sys.argv[1:], command=""))


if __name__ == "__main__":
    main()
