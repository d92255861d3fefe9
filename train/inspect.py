"""`python -m train inspect --config FILE`: show the data that a training run would read.

Documents are decoded from their tokens. Tokens that carry loss are green on a terminal, and
enclosed in ⟦ and ⟧ elsewhere.
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
# Control characters in a record could move the terminal's cursor.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class InspectSettings(TrainSettings):
    """The settings of `python -m train inspect`: those of a training run, and the amount to show.

    Attributes:
      examples: number of documents shown per source, chosen by `data.shuffle_seed`.
      example_tokens: maximum number of tokens shown per document, from its beginning.
    """

    examples: PositiveInt = 3
    example_tokens: PositiveInt = 512


def inspect(arguments: Sequence[str]) -> None:
    """Print the counts of every source and some of its documents.

    Raises:
      InputError: the data cannot be used. The evaluation prompts and the drafter are not checked.
    """
    settings = parse_settings(
        InspectSettings,
        "Show the data of a training run, with tokens that carry loss in colour.",
        arguments,
        command="inspect",
    )
    console = Console()
    # Faults that would stop a training run are reported, and the data is still shown.
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
    """Print a document's file and line, its token counts, and the text of its first tokens.

    `most` is the maximum number of tokens whose text is printed.
    """
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
    """Yield the text of the first `most` tokens in runs of tokens with and without loss.

    Each run is its text, and whether its tokens carry loss.
    """
    tokens, before, end = document.tokens[:most].tolist(), "", 0
    for carries_loss, run in groupby(document.loss_mask[:most].tolist()):
        end += len(list(run))
        # Decode from the beginning, because some tokenizers drop a leading space. An incomplete
        # character at the end belongs to the next run.
        text = tokenizer.decode(tokens[:end], skip_special_tokens=False)
        text = text if end == len(tokens) else text.rstrip("�")
        yield _CONTROL.sub(lambda match: repr(match[0])[1:-1], text[len(before) :]), carries_loss
        before = text
