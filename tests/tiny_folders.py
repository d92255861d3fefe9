"""Tokenizers, and model folders for command lines: the tiny pair with its own 24 characters."""

from pathlib import Path
from typing import NamedTuple

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from redrafter_jax.drafter import Drafter
from redrafter_jax.hub import save_drafter, save_target
from redrafter_jax.target import Target

# Token i is character i; as many as `PARITY_CONFIG` has tokens.
CHARACTERS = "abcdefghijklmnopqrstuvw\n"


class PairFolders(NamedTuple):
    """Where a target (with its tokenizer) and its drafter lie, as a command line takes them."""

    target: str
    drafter: str


def character_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(
        models.BPE({character: i for i, character in enumerate(CHARACTERS)}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


def byte_tokenizer() -> Tokenizer:
    """One token per byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def encode(text: str) -> list[int]:
    return [CHARACTERS.index(character) for character in text]


def decode(tokens: list[int]) -> str:
    return "".join(CHARACTERS[token] for token in tokens)


def write_pair(folder: Path, target: Target, drafter: Drafter) -> PairFolders:
    save_target(target, folder / "target")
    save_drafter(drafter, folder / "drafter")
    character_tokenizer().save(str(folder / "target" / "tokenizer.json"))
    return PairFolders(str(folder / "target"), str(folder / "drafter"))
