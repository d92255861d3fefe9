"""`python -m tools.hold_out --config configs/demo_prompts.yaml`: write held-out prompts.

Prompts are pieces of documents that a small target has not seen in training, so that decoding can
be measured on real text of the same kind.
"""

import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import NonNegativeInt, PositiveInt
from tokenizers import Tokenizer

from redrafter_jax.command_line import make_folder_of, run
from redrafter_jax.errors import InputError
from redrafter_jax.files.target_files import open_target
from redrafter_jax.settings.arguments import parse_settings
from redrafter_jax.settings.files import Settings, load_settings
from tools.pretrain import PretrainSettings
from train.data.types import Text


class HoldOutSettings(Settings):
    """The settings of `python -m tools.hold_out`: sources, number and length of prompts, output.

    Attributes:
      pretrain_config: config of `tools.pretrain`, whose held-out documents are used.
      tokenizer: folder of the target, whose tokenizer counts the tokens.
      count: number of prompts, divided evenly among packages (top-level folders).
      prompt_tokens: number of tokens of a prompt. A prompt has fewer if its text would encode
        differently.
      seed: seed for choosing documents.
      output: JSONL file to write.
    """

    pretrain_config: Path
    tokenizer: Path
    count: PositiveInt = 24
    prompt_tokens: PositiveInt = 64
    seed: NonNegativeInt = 0
    output: Path


def choose_prompts(
    documents: Sequence[Text], tokenizer: Tokenizer, count: int, prompt_tokens: int, seed: int
) -> list[dict[str, Any]]:
    """Choose prompts from all packages; prompts begin at lines spread evenly over the documents.

    Documents are named `package/...`. A prompt encodes to the same tokens alone as in its document.

    Raises:
      InputError: the documents do not have enough different prompts.
    """
    # For each document, the character indices of the lines where a prompt may start.
    packages: dict[str, list[tuple[Text, list[int]]]] = defaultdict(list)
    for document in documents:
        if line_starts := _line_starts(document.text, tokenizer, prompt_tokens):
            packages[document.place.partition("/")[0]].append((document, line_starts))
    random = np.random.default_rng(seed)
    chosen = []
    for index, (package, usable) in enumerate(packages.items()):
        share = count // len(packages) + (index < count % len(packages))
        order = random.permutation(len(usable))
        for turn in range(share):
            # Take each document once before taking it again, and then at another position.
            document, line_starts = usable[order[turn % len(usable)]]
            start = line_starts[int((turn + 0.5) / share * len(line_starts))]
            row = {
                "question_id": 1 + index + turn * len(packages),
                "category": package,
                "prompt": _cut(document.text[start:], tokenizer, prompt_tokens),
                "source": f"{document.place}:{document.text.count('\n', 0, start) + 1}",
            }
            chosen.append(row)
    if len({row["source"] for row in chosen}) < count:
        raise InputError(
            f"The documents do not have {count} different prompts of {prompt_tokens} tokens; "
            "lower count or prompt_tokens."
        )
    # Alternate the packages, so that the first few prompts are of all kinds.
    return sorted(chosen, key=lambda row: row["question_id"])


def _line_starts(text: str, tokenizer: Tokenizer, prompt_tokens: int) -> list[int]:
    """Return the start indices of non-blank lines that `prompt_tokens` tokens or more follow."""
    offsets = [start for start, _ in tokenizer.encode(text).offsets]
    if len(offsets) < prompt_tokens:
        return []
    starts, position = [], 0
    for line in text.split("\n"):
        if line.strip() and position <= offsets[-prompt_tokens]:
            starts.append(position)
        position += len(line) + 1
    return starts


def _cut(text: str, tokenizer: Tokenizer, prompt_tokens: int) -> str:
    """Return the text of the first `prompt_tokens` tokens; fewer if it would encode differently."""
    encoding = tokenizer.encode(text)
    for length in range(min(prompt_tokens, len(encoding.ids)), 0, -1):
        piece = text[: encoding.offsets[length - 1][1]]
        if tokenizer.encode(piece).ids == encoding.ids[:length]:
            return piece
    raise InputError(f"No prefix of {text[:40]!r} encodes to its own tokens; change the seed.")


def main() -> None:
    """Choose the prompts and write the file."""
    settings = parse_settings(HoldOutSettings, "Write prompts from held-out documents.")
    make_folder_of(settings.output, "output")
    prompts = choose_prompts(
        load_settings(PretrainSettings, settings.pretrain_config).read(held_out=True),
        open_target(settings.tokenizer).tokenizer,
        settings.count,
        settings.prompt_tokens,
        settings.seed,
    )
    rows = "".join(json.dumps(prompt, ensure_ascii=False) + "\n" for prompt in prompts)
    settings.output.write_text(rows, encoding="utf-8")
    print(f"{len(prompts)} prompts written to {settings.output}")


if __name__ == "__main__":
    run(main)
