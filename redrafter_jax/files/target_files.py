"""A target's files: resolved and opened once, and each of them read once, when it is needed."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from flax import nnx
from jax.sharding import Mesh
from jax.typing import DTypeLike
from tokenizers import Tokenizer

from redrafter_jax.config import TargetConfig
from redrafter_jax.errors import InputError
from redrafter_jax.files.locate import is_gguf, resolve
from redrafter_jax.files.parameters import Layout, MatchedModel, match_weights, save
from redrafter_jax.files.quantized import CODES
from redrafter_jax.files.stored import StoredWeight, check_shape, same_values
from redrafter_jax.models.target import Decoder, Target
from redrafter_jax.parallel.mesh import check_mesh, check_target
from redrafter_jax.parallel.model import Model

_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
# Old files carry the rotary frequencies; activations are not quantized.
_IGNORED = (r".*\.rotary_emb\.inv_freq", r".*\.input_scale")
# Of a model that reads images too: what is no part of its text model.
_IMAGE_WEIGHTS = r"(model\.)?(vision_tower|multi_modal_projector)\..*"
# A layer's norms, by whether attention and feed-forward have one behind them.
_NORMS = {
    False: {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"},
    True: {
        "attention_norm": "input_layernorm",
        "attention_output_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "mlp_output_norm": "post_feedforward_layernorm",
    },
}


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
    def stored_weights(self, *, keep_quantized: bool) -> tuple[Path, Mapping[str, StoredWeight]]:
        """Where the weights lie, and each by its name in transformers; none is read."""

    def match(self, *, keep_quantized: bool = False) -> MatchedModel:
        """The target once its files are known to be whole and to fit each other.

        Only weights that decide what it is are read.

        Raises:
          InputError: as `load_target`, but for what concerns meshes and dtypes.
        """
        if keep_quantized not in self._matched:
            config = self.config
            folder, found = self.stored_weights(keep_quantized=keep_quantized)
            stored = {
                (text := _text_name(name)): weight._replace(name=text)
                for name, weight in found.items()
            }
            ignored = [*_IGNORED]
            if stored.keys() != found.keys():
                ignored.append(_IMAGE_WEIGHTS)
            if config.tie_word_embeddings:
                _check_tied_head(stored, config)
                ignored.append(_HEAD)
            self._matched[keep_quantized] = match_weights(
                folder, self.described_by, config, stored, LAYOUT, ignored
            )
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
        matched = self.match()
        decoder = nnx.eval_shape(lambda: Decoder(matched.config, rngs=nnx.Rngs(0)))
        decoder.layers = nnx.List([])
        ends = [at for at, one in enumerate(matched.parameters) if one.path[0] != "layers"]
        return matched._replace(
            graphdef=nnx.split(decoder)[0],
            parameters=tuple(matched.parameters[at] for at in ends),
            weights=tuple(matched.weights[at] for at in ends),
        ).load(dtype, mesh)


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


def save_target(target: Target, folder: str | Path) -> None:
    """Write `config.json` and `model.safetensors` as transformers would for the target's family.

    Raises:
      InputError: no family has all of its variations.
    """
    from redrafter_jax.files.families import target_fields  # commands that decode save nothing

    save(Path(folder), target, LAYOUT, target_fields(target.config))


def target_name(config: TargetConfig, name: str) -> str:
    """Ours: layers.0.self_attn.q_proj, ...q_bias; theirs: ...q_proj.weight, ...q_proj.bias."""
    if name.endswith("_bias"):
        return f"model.{name.removesuffix('_bias')}_proj.bias"
    *path, last = name.split(".")
    name = ".".join([*path, _NORMS[config.output_norms].get(last, last)])
    return _HEAD if name == "lm_head" else f"model.{name}.weight"


LAYOUT = Layout(Decoder, target_name, {"num_hidden_layers": "num_hidden_layers"})


def _text_name(name: str) -> str:
    """A weight's name as if the text model within a model for images too were alone."""
    # As transformers 4 and 5 name them inside, and as both name them in files.
    if name.startswith(inner := "model.language_model."):
        return f"model.{name.removeprefix(inner)}"
    return name.removeprefix("language_model.")


def _check_tied_head(stored: Mapping[str, StoredWeight], config: TargetConfig) -> None:
    """Refuse a head of its own in a tied target's files, which may carry the embedding twice."""
    if _HEAD not in stored or _EMBEDDING not in stored:
        return
    head, embedding = stored[_HEAD], stored[_EMBEDDING]
    for weight in (embedding, head):
        if weight.dtype not in (*CODES, "U8"):
            check_shape(weight, (config.vocab_size, config.hidden_size))
    if not same_values(head, embedding):
        raise InputError(
            f"{head.path}: {_HEAD!r} is not the same as {_EMBEDDING!r}, though config.json states "
            "tie_word_embeddings=True; state false if the head is meant, or take it out."
        )
