"""`python -m train inspect --config configs/x.yaml`: what training would see, before it does.

Documents are shown as the target's tokens spell them, those that carry loss in green; in a pipe,
between ⟦ and ⟧ instead.
"""

import re
from collections.abc import Iterator, Sequence
from itertools import groupby

import numpy as np
from pydantic import PositiveInt
from rich.console import Console
from rich.text import Text
from tokenizers import Tokenizer

from redrafter_jax.errors import InputError
from redrafter_jax.files.target_files import open_target
from redrafter_jax.settings.arguments import parse_settings

from .config import TrainSettings
from .data.batches import refuse_few_rows
from .data.documents import refuse_many_skips
from .data.report import describe_passes, print_line, print_report
from .data.types import Document
from .setup import load_sources

_CARRIES_LOSS = "bold green"
# Else a record could move the terminal's cursor.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class InspectSettings(TrainSettings):
    """`python -m train inspect`: a training run's settings, and how much of its data to show.

    Attributes:
      examples: documents of each source, drawn by `data.shuffle_seed`.
      example_tokens: tokens shown of each at most, from its beginning.
    """

    examples: PositiveInt = 3
    example_tokens: PositiveInt = 512


def inspect(arguments: Sequence[str]) -> None:
    """Print the counts of every source and some of its documents.

    Raises:
      InputError: what is wrong with the data; prompts and the drafter are for the run itself to
        check.
    """
    settings = parse_settings(
        InspectSettings,
        "Show the data of a training run, tokens that carry loss in colour.",
        arguments,
        command="inspect",
    )
    console = Console()
    # What would stop a run is shown too, and told.
    shown = settings
    if settings.data.skips == "report":
        shown = settings.model_copy(
            update={"data": settings.data.model_copy(update={"skips": "allow"})}
        )
    files = open_target(settings.target)
    loaded = load_sources(shown, files)
    print_report(loaded, console)
    for source, _ in loaded:
        total = len(source.documents) + len(source.skips)
        try:
            refuse_many_skips(source.name, source.skips, total, settings.data)
        except InputError as error:
            print_line(console, f"a run would stop: {error}")
    rows = settings.optimizer.rows_per_step
    print_line(console, describe_passes(loaded, settings.steps, rows))
    try:
        refuse_few_rows([(own.windows, source.weight) for source, own in loaded], rows)
    except InputError as error:
        print_line(console, f"a run would stop: {error}")
    for source, _ in loaded:
        order = np.random.default_rng(settings.data.shuffle_seed).permutation(len(source.documents))
        for index in sorted(order[: settings.examples].tolist()):
            print_document(
                source.documents[index], files.tokenizer, settings.example_tokens, console
            )


def print_document(document: Document, tokenizer: Tokenizer, most: int, console: Console) -> None:
    """Print where it is from, its counts, and at most `most` of its tokens as text."""
    total, counted = len(document.tokens), int(document.loss_mask.sum())
    counts = f"{total} tokens, {counted} carry loss"
    console.rule(Text(f"{document.place}: {document.kind}, {counts}"), align="left")
    shown = Text()
    colours = console.is_terminal and not console.no_color
    for text, carries_loss in split_runs(document, tokenizer, most):
        if colours or not carries_loss:
            shown.append(text, style=_CARRIES_LOSS if carries_loss else "")
        else:
            shown.append(f"⟦{text}⟧")
    if total > most:
        shown.append(f"\n... and {total - most} tokens more")
    console.print(shown, soft_wrap=True)


def split_runs(document: Document, tokenizer: Tokenizer, most: int) -> Iterator[tuple[str, bool]]:
    """The text of the first `most` tokens in runs that carry loss, or do not, as a whole."""
    tokens, before, end = document.tokens[:most].tolist(), "", 0
    for carries_loss, run in groupby(document.loss_mask[:most].tolist()):
        end += len(list(run))
        # Decoded from the beginning: some tokenizers drop a leading space. Half a character at the
        # edge is left to the next run.
        text = tokenizer.decode(tokens[:end], skip_special_tokens=False)
        text = text if end == len(tokens) else text.rstrip("�")
        yield _CONTROL.sub(lambda match: repr(match[0])[1:-1], text[len(before) :]), carries_loss
        before = text
