"""`python -m tools.hold_out --config configs/demo_prompts.yaml`: prompts from held-out documents.

Prompts are pieces of the documents that a small target never saw in training, so that decoding
can be measured on real text of its own kind.
"""

import json
from collections import defaultdict
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Int
from pydantic import PositiveInt
from tokenizers import Tokenizer

from redrafter_jax.command_line import run
from redrafter_jax.errors import InputError
from redrafter_jax.settings.arguments import parse_settings
from redrafter_jax.settings.files import Settings, load_settings
from redrafter_jax.text.tokenizer import load_tokenizer
from tools.pretrain_settings import PretrainSettings
from train.data.folders import TextFile, read_folders


class HoldOutSettings(Settings):
    """`python -m tools.hold_out`: how many prompts of what length, from where to where.

    Attributes:
      pretrain_config: settings of `tools.pretrain`; its `data.held_out` says which documents.
      tokenizer: folder of the target, by whose tokenizer the length counts.
      count: prompts, spread evenly over the packages (top-level folders) of the documents.
      prompt_tokens: length of each; less where the last token would not stand alone as well.
      seed: of the choice of documents.
      output: the JSONL file to write.
    """

    pretrain_config: Path
    tokenizer: Path
    count: PositiveInt = 24
    prompt_tokens: PositiveInt = 64
    seed: int = 0
    output: Path


class Source(NamedTuple):
    """A document with its tokens' places.

    Attributes:
      document: name and text.
      line_starts: character index of every line that holds text and is followed by enough of it.
    """

    document: TextFile
    line_starts: Int[np.ndarray, " lines"]


class HeldOutPrompt(NamedTuple):
    """One row of the prompt file."""

    question_id: int
    category: str
    prompt: str
    source: str


def choose_prompts(
    documents: Sequence[TextFile],
    tokenizer: Tokenizer,
    count: int,
    prompt_tokens: int,
    seed: int,
) -> list[HeldOutPrompt]:
    """Prompts from all packages, each from the start of a line, at depths spread over the files.

    Args:
      documents: named `package/...`.
      tokenizer: counts the length.
      count: how many prompts.
      prompt_tokens: tokens per prompt; the prompt's tokens are the document's own, uncut.
      seed: the same seed gives the same prompts.

    Raises:
      InputError: there are fewer prompts than packages, or a package lacks the text for its share.
    """
    packages: dict[str, list[Source]] = defaultdict(list)
    for document in documents:
        source = Source(document, _line_starts(document.text, tokenizer, prompt_tokens))
        packages[document.name.partition("/")[0]].append(source)
    if count < len(packages):
        raise InputError(
            f"count is {count}, but there are {len(packages)} packages; ask for one prompt each."
        )
    random = np.random.default_rng(seed)
    chosen = []
    for index, (package, sources) in enumerate(packages.items()):
        share = count // len(packages) + (index < count % len(packages))
        chosen.append(
            [
                HeldOutPrompt(
                    question_id=1 + index + turn * len(packages),
                    category=package,
                    prompt=_cut(document.text[start:], tokenizer, prompt_tokens),
                    source=f"{document.name}:{document.text.count('\n', 0, start) + 1}",
                )
                for turn, (document, start) in enumerate(
                    _choose_places(package, sources, share, random)
                )
            ]
        )
    # Package by package in turns, so that the first few prompts are of all kinds too.
    return sorted(chain.from_iterable(chosen), key=lambda prompt: prompt.question_id)


def _choose_places(
    package: str, sources: Sequence[Source], share: int, random: np.random.Generator
) -> list[tuple[TextFile, int]]:
    """Different documents first, then again; place i lies at depth (i + 1/2) / share."""
    usable = [source for source in sources if len(source.line_starts)]
    order = random.permutation(len(usable))
    places = []
    for turn in range(share if usable else 0):
        document, line_starts = usable[order[turn % len(usable)]]
        start = int(line_starts[int((turn + 0.5) / share * len(line_starts))])
        if (document, start) not in places:
            places.append((document, start))
    if len(places) < share:
        raise InputError(
            f"Package {package!r} has text for {len(places)} of its share of {share} prompts; "
            "lower count or prompt_tokens."
        )
    return places


def _line_starts(text: str, tokenizer: Tokenizer, prompt_tokens: int) -> Int[np.ndarray, " lines"]:
    """Where lines that are not blank start, with at least `prompt_tokens` tokens behind them."""
    offsets = [start for start, _ in tokenizer.encode(text).offsets]
    if len(offsets) < prompt_tokens:
        return np.zeros(0, int)
    last = offsets[-prompt_tokens]
    starts, position = [], 0
    for line in text.split("\n"):
        if line.strip() and position <= last:
            starts.append(position)
        position += len(line) + 1
    return np.asarray(starts, int)


def _cut(text: str, tokenizer: Tokenizer, prompt_tokens: int) -> str:
    """The first `prompt_tokens` tokens, or some fewer so that the piece has the same tokens."""
    encoding = tokenizer.encode(text)
    for length in range(min(prompt_tokens, len(encoding.ids)), 0, -1):
        piece = text[: encoding.offsets[length - 1][1]]
        if tokenizer.encode(piece).ids == encoding.ids[:length]:
            return piece
    raise InputError(f"No beginning of {text[:40]!r} has the tokens of the whole.")


def main() -> None:
    """Choose the prompts and write them."""
    settings = parse_settings(HoldOutSettings, "Write prompts from held-out documents.")
    data = load_settings(PretrainSettings, settings.pretrain_config).data
    prompts = choose_prompts(
        read_folders(data, held_out=True),
        load_tokenizer(settings.tokenizer),
        settings.count,
        settings.prompt_tokens,
        settings.seed,
    )
    rows = "".join(json.dumps(prompt._asdict(), ensure_ascii=False) + "\n" for prompt in prompts)
    try:
        settings.output.write_text(rows, encoding="utf-8")
    except OSError as error:
        raise InputError(f"Cannot write {settings.output}: {error.strerror}.") from None
    print(f"{len(prompts)} prompts written to {settings.output}")


if __name__ == "__main__":
    run(main)
