"""A target's files: resolved and opened once, and each of them read once, when it is needed."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jax.sharding import Mesh
from jax.typing import DTypeLike
from tokenizers import Tokenizer

from redrafter_jax.config import TargetConfig
from redrafter_jax.errors import InputError
from redrafter_jax.files.locate import is_gguf, resolve
from redrafter_jax.models.target import Target
from redrafter_jax.parallel.mesh import check_mesh, check_target
from redrafter_jax.parallel.model import Model

if TYPE_CHECKING:
    from redrafter_jax.files.parameters import MatchedModel
    from redrafter_jax.files.stored import StoredWeight


class TargetFiles(ABC):
    """The files of a target; each format of files is a subclass, and `open_target` chooses.

    What is read is remembered, so that a command that is handed this object parses nothing twice.
    Reading an attribute raises `InputError` where its file is missing, damaged or not supported.

    Attributes:
      name: the path or hub id, as the user wrote it.
      path: the folder, or the GGUF file.
      described_by: the file that states the configuration.
      fields: the fields of `config.json`, those of a GGUF header as transformers would spell them.
      config: the configuration; no weight is read.
      tokenizer: what makes tokens of texts and texts of tokens, by transformers' rules.
      transformers_tokenizer: the same as transformers loads it, which also renders chat templates.
      template: the chat templates that come with it: one in Jinja, several by name, or None.
    """

    described_by: cached_property[Path]
    fields: cached_property[dict[str, Any]]
    config: cached_property[TargetConfig]
    tokenizer: cached_property[Tokenizer]
    transformers_tokenizer: cached_property[Any]
    template: cached_property[Any]

    def __init__(self, name: str | Path, path: Path) -> None:
        self.name, self.path = str(name), path
        self._matched: dict[bool, MatchedModel] = {}

    @abstractmethod
    def token_strings(self) -> dict[int, str] | None:
        """The tokens as the vocabulary writes them, if a file states them plainly; else None."""

    @abstractmethod
    def stored_weights(self, *, keep_quantized: bool) -> "tuple[Path, Mapping[str, StoredWeight]]":
        """Where the weights lie, and each by its name in transformers; none is read."""

    def match(self, *, keep_quantized: bool = False) -> "MatchedModel":
        """The target once its files are known to be whole and to fit each other.

        Only weights that decide what it is are read.

        Raises:
          InputError: as `load_target`, but for what concerns meshes and dtypes.
        """
        if keep_quantized not in self._matched:
            # What reads weights is imported where they are read.
            from redrafter_jax.files.target_weights import match_target

            config = self.config  # first: it refuses what is no target
            folder, found = self.stored_weights(keep_quantized=keep_quantized)
            self._matched[keep_quantized] = match_target(folder, self.described_by, config, found)
        return self._matched[keep_quantized]

    def digest(self) -> str:
        """A digest of the contents of the files that hold and describe the weights."""
        return self.match().digest()

    def load(
        self,
        dtype: DTypeLike = "bfloat16",
        mesh: Mesh | None = None,
        *,
        keep_quantized: bool = False,
    ) -> Target:
        """The target with its weights, as `load_target` describes it; errors are the same."""
        if mesh is not None:
            check_mesh(mesh)
        matched = self.match(keep_quantized=keep_quantized)
        if mesh is not None:
            check_target(matched.config, mesh)
        return matched.load(dtype, mesh)

    def load_without_layers(
        self, dtype: DTypeLike = "bfloat16", mesh: Mesh | None = None
    ) -> Target:
        """The embeddings, the final norm and the vocabulary projection, and nothing else.

        What is trained on kept hidden states needs no more; this target cannot read tokens. Errors
        are those of `match`: all files must be there.
        """
        from redrafter_jax.files.target_weights import without_layers

        return without_layers(self.match()).load(dtype, mesh)


def open_target(name: str | Path) -> TargetFiles:
    """The files of a folder, a GGUF file or a hub id; of the hub what describes the target.

    Raises:
      InputError: it is neither a path nor a repository that the hub gives.
    """
    path = resolve(name)
    # A format is imported for files of it alone.
    if is_gguf(path):
        from redrafter_jax.files.gguf import GgufFiles as Format
    else:
        from redrafter_jax.files.folder import FolderFiles as Format
    return Format(name, path)


def load_target(
    name: str | Path,
    dtype: DTypeLike = "bfloat16",
    mesh: Mesh | None = None,
    *,
    keep_quantized: bool = False,
) -> Target:
    """Load a target from a folder or a hub id, one weight at a time.

    On a terminal a bar shows how far it is.

    Args:
      name: a folder with `config.json` and safetensors or PyTorch's `.bin` (one file, or shards
        with an index), a GGUF file or any part of one, or the id of a repository on the Hugging
        Face hub; where the hub cannot be reached, files downloaded before serve.
      dtype: dtype of the parameters and activations, "float32" or "bfloat16"; the codes and scales
        of quantized weights stay as they are stored.
      mesh: from `make_mesh`: every device reads its own part of each weight; None is one device.
      keep_quantized: keep the blocks of a GGUF file in their own bits: Q8_0, Q4_0 and Q4_1 exactly,
        Q4_K and Q6_K with the same codes and their scales rounded to float16. Without it they
        become numbers of `dtype`. A folder that holds quantized weights, ours or of GPTQ, AWQ or
        float8, is always loaded so.

    Raises:
      InputError: the folder, a weight or a file is missing, truncated or of the wrong shape,
        there are weights that the model has no place for, it is of a kind not supported, its blocks
        cannot be kept, or the mesh does not divide its heads or its groups.
    """
    return open_target(name).load(dtype, mesh, keep_quantized=keep_quantized)


def load_tokenizer(source: str | Path | Model[Any, Any]) -> Any:
    """A target's tokenizer with its chat template, as transformers loads it; of a GGUF file too.

    `generate` and `stream` take it; `apply_chat_template`, `encode` and `decode` are its own.

    Args:
      source: folder, GGUF file or hub id of the target, or what `load_target` returned for it.

    Raises:
      InputError: there is none, or it cannot be loaded.
    """
    if isinstance(source, Model):
        if not source.source:
            raise InputError(
                "This target was not loaded from files; give the path of its tokenizer."
            )
        source = str(source.source)
    return open_target(source).transformers_tokenizer
