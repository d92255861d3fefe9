"""A model folder written once more, as safetensors: from `.bin` files, in another dtype, quantized.

Drafters of Apple's code and ours lie in the same layout, so this is the way from one to the other
in both directions. Weights pass in pieces: a model larger than the memory can be converted.
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

# What goes with a model beside its weights: tokenizers, chat templates, further settings.
_COMPANIONS = {".json", ".txt", ".model", ".jinja"}
# What is written anew; other programs' word on how the weights are packed no longer holds.
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
    """Write a drafter or a target as a folder of safetensors, and check that it loads the same.

    Args:
      source: folder, GGUF file or hub id, as `load_drafter` and `load_target` take it.
      folder: to write; it must not exist yet, or be empty. It appears at the end, whole.
      dtype: "float32" or "bfloat16" for all plain weights; None leaves each as it is stored, but
        blocks of GGUF become float32. A folder that is quantized keeps its bits.
      for_apple: refuse a drafter that Apple's code cannot load.
      quantization: formats of the matrices; None quantizes nothing.
      keep_quantized: keep the blocks of a GGUF file in their own bits; see `load_target`.

    Returns:
      What was written, in sentences.

    Raises:
      InputError: the source cannot be loaded, the folder cannot be written, `for_apple` is asked
        of a drafter with fields of our own, or of a target, the source is to be quantized and is
        already, or blocks are to be kept of what is no GGUF file.
    """
    if dtype is not None and dtype not in DTYPES:
        raise InputError(f"dtype {dtype!r} is not supported; use {', '.join(DTYPES)} or none.")
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise InputError(f"{folder} exists already; name a folder that does not, or empty it.")
    files = open_target(source)
    if keep_quantized and not isinstance(files, GgufFiles):
        raise InputError(
            f"{source} is no GGUF file, whose blocks could be kept; name a format to quantize it "
            "to, or leave the option out if it is quantized already."
        )
    stated: dict[str, object] = files.fields
    is_gguf = isinstance(files, GgufFiles)
    is_drafter = not is_gguf and find_kind_of_files(source, stated) is not None
    found = find_head(source) if is_drafter else files.match(keep_quantized=keep_quantized)
    forms = _formats(found, quantization)
    is_quantized = any(weight.scale is not None for weight in found.weights)
    beyond = _beyond_apple(found.config, quantized=is_quantized or quantization is not None)
    if for_apple and not is_drafter:
        raise InputError(f"{source} is a target; Apple's code loads drafters alone.")
    if for_apple and beyond:
        raise InputError(
            f"{found.folder} is a drafter with {', '.join(beyond)}, which Apple's layout does not "
            "have; train one without."
        )

    whole = folder.resolve()
    partial = whole.with_name(f"{whole.name}.partial")
    try:
        partial.mkdir(parents=True)
    except FileExistsError:
        raise InputError(
            f"{partial} is there: another conversion is running, or one was killed; remove it if "
            "none is running."
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
        sentences.append(f"Left out, for loading does not read them: {', '.join(named)}{more}")
    if beyond:
        sentences.append(f"Apple's code cannot load it: it does not know {', '.join(beyond)}.")
    return sentences


def _formats(found: MatchedModel, quantization: Quantization | None) -> dict[str, WeightFormat]:
    """Of the weights that are to be quantized, by their names."""
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
    """What `config.json` may not state of a drafter, whose weights then tell."""
    kind = find_kind(found.config)
    return {} if kind is None else kind.files.fields(found.config)


def _quantized_fields(quantization: Quantization) -> dict[str, Any]:
    return {"quantization_config": {"quant_method": QUANT_METHOD, **asdict(quantization)}}


def _beyond_apple(config: Any, quantized: bool) -> list[str]:
    """What a drafter has that Apple's layout does not; nothing of a target."""
    kind = find_kind(config)
    if kind is None:
        return []
    if kind.files.beyond_apple is None:
        return [kind.title]
    return sorted([*kind.files.beyond_apple(config), *["quantized weights"] * quantized])


def _write_weights(
    found: MatchedModel, folder: Path, dtype: str | None, forms: Mapping[str, WeightFormat]
) -> list[str]:
    """As many files as the source has; the names of all, an index of theirs included."""
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
    """`config.json` with the dtype that the weights have now, and what goes with a model."""
    if isinstance(files, GgufFiles):
        dtype = dtype or _main_dtype(found)
    if dtype:
        # transformers 5 says it shorter.
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
    """The one that most bytes of the plain weights are of."""
    sizes = Counter[str]()
    for weight in found.weights:
        if weight.scale is None:
            sizes[weight.dtype] += weight.bytes
    ((dtype, _),) = sizes.most_common(1)
    return {"F16": "float16", "BF16": "bfloat16"}.get(dtype, "float32")


def _write_tokenizer(files: GgufFiles, folder: Path) -> list[str]:
    """What a GGUF file holds of its tokenizer, in files of their own."""
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
    """Read back what was written, and compare it with the source, bit for bit."""
    pairs = zip((*written.weights, *written.tables), (*found.weights, *found.tables), strict=True)
    for ours, theirs in pairs:
        if ours.name != theirs.name or not same_weight(ours, theirs, dtype, forms.get(theirs.name)):
            raise InputError(
                f"{theirs.path}: weight {theirs.name!r} does not load the same once it is written; "
                "the disk or the memory may be faulty, nothing was kept."
            )
