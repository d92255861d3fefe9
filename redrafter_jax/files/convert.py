"""Converts a model to a folder of safetensors: from `.bin` files, to another dtype, or quantized.

Apple's code and this library store drafters in the same layout, so drafters can be converted in
both directions. Weights are converted piece by piece, so a model may be larger than the memory.
"""

import json
import shutil
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from redrafter_jax.config import WeightFormat
from redrafter_jax.config.quantization import Quantization
from redrafter_jax.drafters.kinds import find_kind
from redrafter_jax.errors import InputError
from redrafter_jax.files.drafter_files import find_head, find_kind_of_files
from redrafter_jax.files.gguf import GgufFiles
from redrafter_jax.files.locate import SINGLE_FILE, TREE_TABLE
from redrafter_jax.files.parameters import MatchedModel, dotted
from redrafter_jax.files.quantized import QUANT_METHOD
from redrafter_jax.files.stored import StoredWeight
from redrafter_jax.files.target_files import TargetFiles, open_target
from redrafter_jax.files.weight_files import DTYPES, INDEX, same_weight, write_shard
from redrafter_jax.models.quantize import check_format

# Suffixes of files to copy: tokenizers, chat templates, further settings.
_COMPANIONS = {".json", ".txt", ".model", ".jinja"}
# Files not to copy: they describe the weights of the source, or are written anew (config.json).
_DESCRIPTIONS = {"config.json", "quantize_config.json", "quant_config.json"}


def convert(
    source: str | Path,
    folder: Path,
    dtype: str | None = None,
    *,
    for_apple: bool = False,
    quantization: Quantization | None = None,
    keep_quantized: bool = False,
) -> list[str]:
    """Write a drafter or a target as a folder of safetensors, and compare it with the source.

    Args:
      source: folder, GGUF file or hub id, as `load_drafter` and `load_target` take it.
      folder: folder to write, which must be empty or missing. It appears only when it is complete.
      dtype: "float32" or "bfloat16" for all unquantized weights. None keeps the dtype of each
        weight, except that dequantized blocks of a GGUF file become float32. Quantized weights of a
        folder keep their codes and scales in either case.
      for_apple: whether to refuse a drafter that Apple's code cannot load.
      quantization: formats of the matrices; None quantizes nothing.
      keep_quantized: whether to keep the quantized blocks of a GGUF file; see `load_target`.

    Returns:
      Sentences for the user about what was written.

    Raises:
      InputError: the source cannot be loaded; the folder cannot be written; `for_apple` is set for
        a target or for a drafter with features that Apple's layout lacks; `quantization` is set for
        a source that is already quantized; `keep_quantized` is set for a source that is not GGUF;
        or a drafter's `config.json` omits sizes that only weights which are not copied imply.
    """
    if dtype is not None and dtype not in DTYPES:
        raise InputError(
            f"dtype {dtype!r} is not supported; use {' or '.join(DTYPES)}, or leave dtype out."
        )
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise InputError(f"{folder} exists already; name a new folder, or empty this one.")
    files = open_target(source)
    if keep_quantized and not isinstance(files, GgufFiles):
        raise InputError(
            f"{source} is not a GGUF file, so it has no quantized blocks to keep; give a format to "
            "quantize to, or leave the option out if the source is already quantized."
        )
    stated: dict[str, object] = files.fields
    is_gguf = isinstance(files, GgufFiles)
    is_drafter = not is_gguf and find_kind_of_files(source, stated) is not None
    found = find_head(source) if is_drafter else files.match(keep_quantized=keep_quantized)
    forms = _formats(found, quantization)
    is_quantized = any(weight.scale is not None for weight in found.weights)
    beyond = _beyond_apple(found.config, quantized=is_quantized or quantization is not None)
    if for_apple and not is_drafter:
        raise InputError(
            f"{source} is a target, but Apple's code loads only drafters; give a drafter."
        )
    if for_apple and beyond:
        raise InputError(
            f"{found.folder} is a drafter with {', '.join(beyond)}, which Apple's layout does not "
            "support; train a drafter without these features."
        )

    whole = folder.resolve()
    partial = whole.with_name(f"{whole.name}.partial")
    try:
        partial.mkdir(parents=True)
    except FileExistsError:
        raise InputError(
            f"{partial} exists: another conversion is running or was killed; remove it if none is "
            "running."
        ) from None
    except OSError as error:
        raise InputError(f"Cannot make {partial}: {error.strerror}.") from None
    try:
        if quantization is not None:
            stated = {**_sizes(found), **stated, **_quantized_fields(quantization)}
        elif is_quantized:
            stated = {**stated, "quantization_config": {"quant_method": QUANT_METHOD}}
        companions = _write_companions(files, found, stated, partial, dtype)
        names = [*_write_weights(found, partial, dtype, forms), *companions]
        written = find_head(partial) if is_drafter else open_target(partial).match()
        _check_same(found, written, dtype, forms)
        partial.rename(whole)
    except OSError as error:  # a full disk, for example
        raise InputError(f"{folder} could not be written ({error.strerror or error}).") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    dtypes = " and ".join(sorted({weight.dtype for weight in written.weights}))
    size, before = (sum(weight.bytes for weight in one.weights) for one in (written, found))
    as_source = f"it loads the same as {source}{f', in {dtype}' if dtype else ''}."
    if quantization is not None:
        as_source = f"quantized from {before:,} bytes of {source}."
    sentences = [
        f"{folder}: a {'drafter' if is_drafter else 'target'} of {len(written.weights)} weights, "
        f"{size:,} bytes, {dtypes}; {as_source}",
        f"Written: {', '.join(names)}",
    ]
    if found.left_out:
        named, others = found.left_out[:2], len(found.left_out) - 2
        more = f" and {others} more" if others > 0 else ""
        sentences.append(f"Left out, because loading ignores them: {', '.join(named)}{more}")
    if beyond:
        sentences.append(
            f"Apple's code cannot load it, because that code does not support {', '.join(beyond)}."
        )
    return sentences


def _formats(found: MatchedModel, quantization: Quantization | None) -> dict[str, WeightFormat]:
    """The format of each weight to quantize, by the name of the weight."""
    if quantization is None:
        return {}
    forms: dict[str, WeightFormat] = {}
    for parameter, weight in zip(found.parameters, found.weights, strict=True):
        if weight.scale is not None:
            raise InputError(
                f"{found.folder} is quantized already; convert the model that it was made from."
            )
        form = quantization.format_of(dotted(parameter.path))
        if form is not None and len(parameter.shape) == 2:
            check_format(parameter.name, form, parameter.shape[1])
            forms[parameter.name] = form
    return forms


def _sizes(found: MatchedModel) -> Mapping[str, Any]:
    """Fields of a drafter that `config.json` may leave out, because the weights imply them."""
    kind = find_kind(found.config)
    return {} if kind is None else kind.files.fields(found.config)


def _quantized_fields(quantization: Quantization) -> dict[str, Any]:
    return {"quantization_config": {"quant_method": QUANT_METHOD, **asdict(quantization)}}


def _beyond_apple(config: Any, quantized: bool) -> list[str]:
    """Features of a drafter that Apple's layout does not support; empty for a target."""
    kind = find_kind(config)
    if kind is None:
        return []
    if kind.files.beyond_apple is None:
        return [kind.title]
    return sorted([*kind.files.beyond_apple(config), *["quantized weights"] * quantized])


def _write_weights(
    found: MatchedModel, folder: Path, dtype: str | None, forms: Mapping[str, WeightFormat]
) -> list[str]:
    """Write the same number of files as the source has; return their names and the index's."""
    shards: dict[Path, list[StoredWeight]] = {}
    every = (*found.weights, *found.tables)
    for weight in every:
        shards.setdefault(weight.path, []).append(weight)
    if len(shards) == 1:
        write_shard(folder / SINGLE_FILE, every, dtype, forms)
        return [SINGLE_FILE]
    placed: dict[str, str] = {}
    total = 0
    for number, path in enumerate(sorted(shards), start=1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        names, size = write_shard(folder / file, shards[path], dtype, forms)
        total += size
        placed |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(placed.items()))}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    return [*dict.fromkeys(placed.values()), INDEX]


def _write_companions(
    files: TargetFiles,
    found: MatchedModel,
    stated: dict[str, object],
    folder: Path,
    dtype: str | None,
) -> list[str]:
    """Write `config.json` with the new dtype, and the model's other files; return all names."""
    if isinstance(files, GgufFiles):
        dtype = dtype or _main_dtype(found)
    if dtype:
        # transformers 5 calls the field `dtype`.
        stated = {**stated, ("dtype" if "dtype" in stated else "torch_dtype"): dtype}
    (folder / "config.json").write_text(json.dumps(stated, indent=2) + "\n")
    if isinstance(files, GgufFiles):
        return ["config.json", *_write_tokenizer(files, folder)]
    written = ["config.json"]
    for path in sorted(found.folder.iterdir()):
        known = path.name in _DESCRIPTIONS or path.name.endswith(".index.json")
        goes_along = path.suffix in _COMPANIONS or path.name == TREE_TABLE
        if goes_along and path.is_file() and not known:
            shutil.copyfile(path, folder / path.name)
            written.append(path.name)
    return written


def _main_dtype(found: MatchedModel) -> str:
    """The dtype that most bytes of the unquantized weights have."""
    sizes = Counter[str]()
    for weight in found.weights:
        if weight.scale is None:
            sizes[weight.dtype] += weight.bytes
    ((dtype, _),) = sizes.most_common(1)
    return {"F16": "float16", "BF16": "bfloat16"}.get(dtype, "float32")


def _write_tokenizer(files: GgufFiles, folder: Path) -> list[str]:
    """Write the tokenizer of a GGUF file, if it has one; return the names of the files."""
    if "tokenizer.ggml.model" not in files.header.values:
        return []
    names = ["tokenizer.json", "tokenizer_config.json"]
    files.tokenizer.save(str(folder / names[0]))
    fields = json.dumps(files.tokenizer_fields, indent=2, ensure_ascii=False)
    (folder / names[1]).write_text(f"{fields}\n", encoding="utf-8")
    return names


def _check_same(
    found: MatchedModel, written: MatchedModel, dtype: str | None, forms: Mapping[str, WeightFormat]
) -> None:
    """Compare a drafter's configuration with the source, and all weights bit for bit."""
    if find_kind(found.config) is not None and written.config != found.config:
        ours, theirs = asdict(written.config), asdict(found.config)
        lost = [f"{name}={theirs[name]!r:.300}" for name in theirs if ours[name] != theirs[name]]
        raise InputError(
            f"{found.folder}: the conversion leaves out weights that imply {', '.join(lost)}; "
            "state these sizes in config.json."
        )
    pairs = zip((*written.weights, *written.tables), (*found.weights, *found.tables), strict=True)
    for ours, theirs in pairs:
        if ours.name != theirs.name or not same_weight(ours, theirs, dtype, forms.get(theirs.name)):
            raise InputError(
                f"{theirs.path}: weight {theirs.name!r} differs after it was written; the disk or "
                "the memory may be faulty, so the copy was deleted."
            )
