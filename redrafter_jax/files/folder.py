"""A target in a folder, or in a repository of the hub: `config.json`, weights and tokenizer."""

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
# What transformers makes a tokenizer of, and what may change the one of `_TOKENIZER`.
_VOCABULARIES = (_TOKENIZER, "tokenizer.model", "vocab.json")
_BESIDE = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
# Where it looks for a chat template.
_TEMPLATES = ("chat_template.jinja", "tokenizer_config.json")


class FolderFiles(TargetFiles):
    """The files of a target in a folder; the hub's weights are downloaded when they are needed."""

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
        """The weights, quantized ones always as they are stored."""
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
        os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # that PyTorch is not there
        from transformers import AutoTokenizer

        path = self.path / _TOKENIZER
        try:
            # A folder's own code is never run: by default transformers would ask whether to.
            loaded = AutoTokenizer.from_pretrained(str(self.path), trust_remote_code=False)
        except Exception as error:  # transformers raises whatever its many loaders raise
            if path.exists():
                _parse(path)  # whose error says more
            raise InputError(
                f"transformers cannot load the tokenizer of {self.name}: "
                f"{' '.join(str(error).split())}"
            ) from None
        if not isinstance(getattr(loaded, "backend_tokenizer", None), Tokenizer):
            raise InputError(
                f"The tokenizer of {self.name} is one in Python alone ({type(loaded).__name__}); "
                f"save it as {_TOKENIZER}."
            )
        try:
            loaded.backend_tokenizer.encode("Hi \N{SNOWMAN}\n")
        except Exception as error:  # a class that does not fit the vocabulary may raise anything
            raise InputError(
                f"transformers loads the tokenizer of {self.name} as a {type(loaded).__name__}, "
                f"which cannot tokenize a text ({' '.join(str(error).split())}); correct "
                "tokenizer_class in its tokenizer_config.json."
            ) from None
        return loaded

    @property
    def _stands_alone(self) -> bool:
        """Whether `tokenizer.json` says all there is to say; transformers imports slowly."""
        beside = any((self.path / file).exists() for file in _BESIDE)
        return (self.path / _TOKENIZER).exists() and not beside

    def _check_tokenizer(self) -> None:
        """Refuse a folder without a tokenizer, or with one that was not downloaded."""
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
    # tokenizers raises nothing narrower, and a panic of its Rust code is no Exception.
    except BaseException as error:
        raise InputError(f"{path} is no tokenizer: {error}.") from None
