"""Tokenizers, and model folders for command lines: the tiny pair with its own 24 characters."""

import json
import os
import shutil
import string
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from places import ROOT
from safetensors.flax import load_file, save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from redrafter_jax.config import TargetConfig
from redrafter_jax.drafters.base import LoadedHead
from redrafter_jax.files.drafter_files import save_drafter
from redrafter_jax.files.target_weights import save_target
from redrafter_jax.models.target import Target, init_target
from tools.tokenizer import save_tokenizer, train_tokenizer

# Token i is character i; as many as `PARITY_CONFIG` has tokens.
CHARACTERS = "abcdefghijklmnopqrstuvw\n"


class PairFolders(NamedTuple):
    """Where a target (with its tokenizer) and its drafter lie, as a command line takes them."""

    target: str
    drafter: str


def character_tokenizer(characters: str = CHARACTERS) -> Tokenizer:
    tokenizer = Tokenizer(
        models.BPE({character: i for i, character in enumerate(characters)}, merges=[])
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


def write_pair(folder: Path, target: Target, drafter: LoadedHead) -> PairFolders:
    save_target(target, folder / "target")
    save_drafter(drafter, folder / "drafter")
    character_tokenizer().save(str(folder / "target" / "tokenizer.json"))
    return PairFolders(str(folder / "target"), str(folder / "drafter"))


def add_template(target: Path, folder: Path) -> str:
    """A copy of the target's folder with a chat template: every turn is a line."""
    copy = folder / "with_template"
    shutil.copytree(target, copy)
    (copy / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    template = "{% for turn in messages %}{{ turn.content }}\n{% endfor %}"
    (copy / "chat_template.jinja").write_text(template)
    return str(copy)


def copy_with_tokenizer(target: Path, copy: Path) -> Path:
    """A copy of a target's folder, with a tokenizer of as many characters as it has tokens."""
    shutil.copytree(target, copy)
    count = json.loads((copy / "config.json").read_text())["vocab_size"]
    characters = (string.ascii_letters + string.digits)[: count - 1] + "\n"
    character_tokenizer(characters).save(str(copy / "tokenizer.json"))
    return copy


def write_untrained_target(folder: Path, functions: int) -> None:
    """A target with random weights, its tokenizer, and a text file of that many functions."""
    text = "".join(f"def f{n}(x):\n    return x + {n}\n" for n in range(functions))
    config = TargetConfig(300, 16, 24, 1, 2, 1, 8, 1e4, 1e-5, 64, True, (0,))
    save_target(init_target(config, 0), folder)
    save_tokenizer(train_tokenizer([text], 300), folder, 64)
    (folder / "text.py").write_text(text)


def write_yaml(path: Path, values: dict[str, Any]) -> Path:
    """A file of settings."""
    path.write_text(yaml.safe_dump(values))
    return path


def change_json(path: Path, **changes: Any) -> None:
    """Set fields; those set to `...` are removed."""
    values = json.loads(path.read_text()) | changes
    values = {name: value for name, value in values.items() if value is not ...}
    path.write_text(json.dumps(values))


def write_index(path: Path, placed: Any) -> None:
    """The file that tells which shard holds each weight."""
    path.write_text(json.dumps({"weight_map": placed}))


def damaged(folder: Path, source: Path, changes: Mapping[str, Any]) -> Path:
    """The folder with the source's configuration and weights, these changed; None is taken out."""
    folder.mkdir(exist_ok=True)
    weights = {**load_file(source / "model.safetensors"), **changes}
    kept = {name: weight for name, weight in weights.items() if weight is not None}
    save_file(kept, folder / "model.safetensors")
    (folder / "config.json").write_text((source / "config.json").read_text())
    return folder


def run_module(*arguments: str, optimized: bool = False) -> subprocess.CompletedProcess[str]:
    """`python -m ...` as users start it, its output a pipe; `optimized` compiles as theirs does."""
    compilation = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    if optimized:
        compilation = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "0", "XLA_FLAGS": ""}
    return subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=ROOT,
        env=os.environ | compilation,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def stored_tensors(path: Path) -> dict[str, tuple[str, list[int]]]:
    """Dtype and shape by name, from the file's header: its length in 8 bytes, then JSON."""
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    header.pop("__metadata__", None)
    return {name: (entry["dtype"], entry["shape"]) for name, entry in header.items()}
