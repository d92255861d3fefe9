"""A target's files, each of which is read once, when it is first needed."""

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
    """The files of a target; `open_target` chooses the subclass for the format.

    Contents are cached, so a command parses nothing twice. Access to an attribute reads its file,
    and raises `InputError` if the file is missing, damaged or not supported.

    Attributes:
      name: the path or hub id that the user gave.
      path: path of the folder or GGUF file.
      described_by: path of the file with the configuration.
      fields: the fields of `config.json`, or the fields of a GGUF header in the format of
        transformers.
      config: the configuration, for which no weights are read.
      tokenizer: the tokenizer, with the behaviour of transformers.
      transformers_tokenizer: the tokenizer object of transformers, which also renders chat
        templates.
      template: the tokenizer's chat template in Jinja, several templates by name, or None.
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
        """The tokens of the vocabulary by id; None if no file lists them."""

    @abstractmethod
    def stored_weights(self, *, keep_quantized: bool) -> "tuple[Path, Mapping[str, StoredWeight]]":
        """Return the path of the weights, and the weights by transformers' names, not yet read."""

    def match(self, *, keep_quantized: bool = False) -> "MatchedModel":
        """Check the target's files, and match its parameters with stored weights.

        Only the weights that the checks need are read.

        Raises:
          InputError: the errors of `load_target`, except those about meshes and dtypes.
        """
        if keep_quantized not in self._matched:
            # Imported here, because not every command reads weights.
            from redrafter_jax.files.target_weights import match_target

            config = self.config  # first, because it refuses files that are not a target
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
        """Load the target with its weights; arguments and errors are those of `load_target`."""
        if mesh is not None:
            check_mesh(mesh)
        matched = self.match(keep_quantized=keep_quantized)
        if mesh is not None:
            check_target(matched.config, mesh)
        return matched.load(dtype, mesh)

    def load_without_layers(
        self, dtype: DTypeLike = "bfloat16", mesh: Mesh | None = None
    ) -> Target:
        """Load only the embeddings, the final norm and the vocabulary projection of the target.

        Such a target serves training on stored hidden states; it cannot read tokens. All files of
        the target must exist, and the errors are those of `match`.
        """
        from redrafter_jax.files.target_weights import without_layers

        return without_layers(self.match()).load(dtype, mesh)


def open_target(name: str | Path) -> TargetFiles:
    """The files of a folder, a GGUF file or a hub id; weights on the hub are not downloaded yet.

    Raises:
      InputError: the name is neither a path nor an accessible hub repository.
    """
    path = resolve(name)
    # Import only the format that is needed.
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
    """Load a target from a folder, a GGUF file or a hub id, one weight at a time.

    On a terminal a progress bar is shown.

    Args:
      name: a folder, a GGUF file or an id on the Hugging Face hub. A folder holds `config.json` and
        the weights as safetensors or PyTorch's `.bin` (one file, or shards with an index). Any part
        of a split GGUF model names the model. If the hub cannot be reached, files that were
        downloaded before are used.
      dtype: dtype of the parameters and activations, "float32" or "bfloat16"; codes and scales of
        quantized weights keep their dtypes.
      mesh: mesh from `make_mesh`, on which every device reads its own part of each weight; None for
        one device.
      keep_quantized: whether to keep the quantized blocks of a GGUF file: Q8_0, Q4_0 and Q4_1
        exactly, Q4_K and Q6_K with exact codes and with scales rounded to float16. By default,
        blocks are dequantized to `dtype`. In folders, quantized weights of this library, GPTQ, AWQ
        and float8 are always kept quantized.

    Raises:
      InputError: the folder, a file or a weight is missing, truncated or of the wrong shape; a
        weight does not belong to the model; the model is not supported; its blocks cannot be kept;
        or the mesh does not divide the heads or the groups of scales.
    """
    return open_target(name).load(dtype, mesh, keep_quantized=keep_quantized)


def load_tokenizer(source: str | Path | Model[Any, Any]) -> Any:
    """Load a target's tokenizer, with its chat template, as a tokenizer of transformers.

    `generate` and `stream` accept it, and it has `apply_chat_template`, `encode` and `decode`.

    Args:
      source: folder, GGUF file or hub id of the target, or the target that `load_target` returned.

    Raises:
      InputError: the tokenizer is missing or cannot be loaded.
    """
    if isinstance(source, Model):
        if not source.source:
            raise InputError(
                "This target was not loaded from files, so it has no tokenizer; give "
                "load_tokenizer the path or hub id of a tokenizer."
            )
        source = str(source.source)
    return open_target(source).transformers_tokenizer
