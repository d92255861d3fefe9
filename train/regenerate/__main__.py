"""`python -m train.regenerate --config configs/x.yaml`: training data in the target's own words.

A drafter guesses what the target writes, not what people wrote. This lets the target continue
pieces of text, or write the assistant's turns of conversations, with our own decoder, and keeps
what it writes as token rows that a source of a training config reads. A run that was stopped goes
on after its last row, if the rows are of the same prompts, seeds and temperatures; the weights that
wrote them are not known.
"""

from collections.abc import Iterable, Sequence
from itertools import chain
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
from ..data.rows import cut
from ..data.skips import describe_skips
from ..data.types import Chat, Skip
from .conversation_rows import (
    find_done,
    remaining_batches,
    rewrite_conversations,
    summarize,
)
from .conversations import (
    Speaker,
    first_question,
    open_conversations,
    read_sources,
)
from .output import check_is_no_source, format_rows
from .texts import choose_prompts, continue_texts, count_done, make_requests
from .writer import load_writer


def main() -> None:
    """Append what the target writes to the output, whole batches only."""
    settings = parse_settings(
        RegenerateSettings, "Write training data in the target's own words.", processes=True
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
    # The first process alone knows the output, which the others may see late or not at all.
    held = np.asarray(count_done(requests, settings) if is_first() else 0)
    done = int(as_first_has_it(held))
    if left := requests[done:]:
        size = settings.batch_size
        rows = continue_texts(load_writer(settings, mesh), left, config.eos_token_ids, size)
        _append(rows, -(-len(left) // size), settings, console)
    _say(console, f"{len(requests)} rows in {settings.output}")


def _rewrite(settings: RegenerateSettings, mesh: Mesh | None, console: Console) -> None:
    """Rewrite conversations."""
    config = load_target_config(settings.target)
    tokenizer = load_own_tokenizer(settings.data, settings.target, config)
    records = list(chain.from_iterable(read_sources(settings.data)))
    template = load_template(settings.data, settings.target, tokenizer)
    asked = (first_question(record) for record in records if isinstance(record, Chat))
    stop_tokens = end_tokens(template, tokenizer, config.eos_token_ids, asked)
    speaker = Speaker(tokenizer, template, stop_tokens, settings.data.sequence_length)
    conversations, skips = open_conversations(records, speaker, settings.data, settings.count)
    _tell_skips(console, "conversations", skips)
    done = np.zeros(len(conversations), bool)
    if is_first():
        done = find_done(conversations, settings)
    done = as_first_has_it(done)
    if batches := remaining_batches(conversations, done, settings.batch_size):
        rows = rewrite_conversations(load_writer(settings, mesh), speaker, batches, settings)
        _append(rows, len(batches), settings, console)
    if is_first():
        _say(console, summarize(settings))


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
        _say(console, f"{name}: skipped {describe_skips(skips)}")


def _say(console: Console, line: str) -> None:
    # Names of files are no markup, and no line of theirs is broken.
    console.print(line, markup=False, highlight=False, soft_wrap=True)


if __name__ == "__main__":
    run(main)
