"""A target in a folder or a hub repository: `config.json`, weights and tokenizer."""

import os
from functools import cached_property
from pathlib import Path
from typing import Any, override

from tokenizers import Tokenizer

from redrafter_jax.config import TargetConfig
from redrafter_jax.errors import InputError
from redrafter_jax.files.families import target_config, text_fields
from redrafter_jax.files.fields import read_json, refuse_pointer
from redrafter_jax.files.locate import check_model_folder, locate_weights, refuse_outer_folder
from redrafter_jax.files.quantized import read_method
from redrafter_jax.files.stored import StoredWeight
from redrafter_jax.files.target_files import TargetFiles
from redrafter_jax.files.weight_files import find_weights

_TOKENIZER = "tokenizer.json"
# Files from which transformers can build a tokenizer, and files that may change the tokenizer in
# `_TOKENIZER`.
_VOCABULARIES = (_TOKENIZER, "tokenizer.model", "vocab.json")
_BESIDE = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
# Files in which transformers looks for a chat template.
_TEMPLATES = ("chat_template.jinja", "tokenizer_config.json")


class FolderFiles(TargetFiles):
    """The files of a target in a folder; weights on the hub are downloaded when they are needed."""

    @cached_property
    def fields(self) -> dict[str, Any]:
        check_model_folder(self.path)
        return text_fields(read_json(self.described_by), self.described_by)

    @cached_property
    def config(self) -> TargetConfig:
        fields, path = self.fields, self.path / "generation_config.json"
        generation = (path, read_json(path)) if path.is_file() else None
        return target_config(fields, self.described_by, generation)

    @cached_property
    def described_by(self) -> Path:
        return self.path / "config.json"

    @override
    def stored_weights(self, *, keep_quantized: bool) -> tuple[Path, dict[str, StoredWeight]]:
        """Return the folder, and its weights by name; quantized weights are never dequantized."""
        folder = locate_weights(self.name, self.path)
        find_quantized = read_method(self.fields, self.described_by)
        return folder, find_quantized(find_weights(folder))

    @override
    def token_strings(self) -> dict[int, str] | None:
        path = self.path / _TOKENIZER
        if not path.is_file():
            return None
        refuse_pointer(path)
        return {number: token for token, number in _parse(path).get_vocab().items()}

    @cached_property
    def tokenizer(self) -> Tokenizer:
        self._check_tokenizer()
        if self._stands_alone:
            tokenizer = _parse(self.path / _TOKENIZER)
        else:
            tokenizer = self.transformers_tokenizer.backend_tokenizer
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return tokenizer

    @cached_property
    def template(self) -> Any:
        if not any((self.path / file).exists() for file in _TEMPLATES):
            return None
        return self.transformers_tokenizer.chat_template

    @cached_property
    def transformers_tokenizer(self) -> Any:
        self._check_tokenizer()
        os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # PyTorch is not installed
        from transformers import AutoTokenizer

        path = self.path / _TOKENIZER
        try:
            # Never run a folder's own code; by default transformers would ask.
            loaded = AutoTokenizer.from_pretrained(str(self.path), trust_remote_code=False)
        except Exception as error:  # transformers' loaders may raise anything
            if path.exists():
                _parse(path)  # raises a more specific error
            raise InputError(
                f"transformers cannot load the tokenizer of {self.name}: "
                f"{' '.join(str(error).split())}"
            ) from None
        if not isinstance(getattr(loaded, "backend_tokenizer", None), Tokenizer):
            raise InputError(
                f"The tokenizer of {self.name} is a slow tokenizer ({type(loaded).__name__}), "
                f"which is not supported; save it as {_TOKENIZER}."
            )
        try:
            loaded.backend_tokenizer.encode("Hi \N{SNOWMAN}\n")
        except Exception as error:  # the wrong class for the vocabulary may raise anything
            raise InputError(
                f"transformers loads the tokenizer of {self.name} as a {type(loaded).__name__}, "
                f"which cannot tokenize a text ({' '.join(str(error).split())}); correct "
                "tokenizer_class in its tokenizer_config.json."
            ) from None
        return loaded

    @property
    def _stands_alone(self) -> bool:
        """Whether `tokenizer.json` suffices, so that transformers, a slow import, is not needed."""
        beside = any((self.path / file).exists() for file in _BESIDE)
        return (self.path / _TOKENIZER).exists() and not beside

    def _check_tokenizer(self) -> None:
        """Refuse a folder whose tokenizer is missing or was not downloaded."""
        found = [path for file in _VOCABULARIES if (path := self.path / file).exists()]
        if not found:
            refuse_outer_folder(self.path, _TOKENIZER)
            raise InputError(
                f"{self.path / _TOKENIZER} is missing; save the target's tokenizer there."
            )
        for path in found:
            refuse_pointer(path)


def _parse(path: Path) -> Tokenizer:
    try:
        return Tokenizer.from_file(str(path))
    except (KeyboardInterrupt, SystemExit):
        raise
    # tokenizers raises plain Exception, and panics of its Rust code are only BaseExceptions.
    except BaseException as error:
        raise InputError(f"{path} is not a tokenizer: {error}.") from None
