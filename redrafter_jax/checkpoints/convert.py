"""A model folder written once more, as safetensors: from `.bin` files, or in another dtype.

Drafters of Apple's code and ours lie in the same layout, so this is the way from one to the other
in both directions. Weights pass in pieces: a model larger than the memory can be converted.
"""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import jax.numpy as jnp
import numpy as np

from redrafter_jax.checkpoints.config_files import read_json
from redrafter_jax.checkpoints.download import is_gguf, locate
from redrafter_jax.checkpoints.families import text_fields
from redrafter_jax.checkpoints.found import Found, drafter_kind, find_drafter, find_target
from redrafter_jax.checkpoints.stored import ITEM_BYTES, Stored, dtype_of, pieces, read_weight
from redrafter_jax.checkpoints.weights import INDEX, SINGLE_FILE
from redrafter_jax.config import DrafterConfig, MedusaConfig
from redrafter_jax.errors import InputError

# Safetensors' names of the dtypes that can be asked for.
DTYPES = {"float32": "F32", "bfloat16": "BF16"}
# What goes with a model beside its weights: tokenizers, chat templates, further settings.
_COMPANIONS = {".json", ".txt", ".model", ".jinja"}


def convert(
    source: str | Path, folder: Path, dtype: str | None = None, *, for_apple: bool = False
) -> list[str]:
    """Write a drafter or a target as a folder of safetensors, and check that it loads the same.

    Args:
      source: folder, GGUF file or hub id, as `load_drafter` and `load_target` take it.
      folder: to write; it must not exist yet, or be empty. It appears at the end, whole.
      dtype: "float32" or "bfloat16" for all weights; None leaves each as it is stored, but
        quantized ones become float32.
      for_apple: refuse a drafter that Apple's code cannot load.

    Returns:
      What was written, in sentences.

    Raises:
      InputError: the source cannot be loaded, the folder cannot be written, or `for_apple` is asked
        of a drafter with fields of our own, or of a target.
    """
    if dtype is not None and dtype not in DTYPES:
        raise InputError(f"dtype {dtype!r} is not supported; use {', '.join(DTYPES)} or none.")
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise InputError(f"{folder} exists already; name a folder that does not, or empty it.")
    stated = _stated(locate(source))
    is_drafter = drafter_kind(stated) is not None
    find = find_drafter if is_drafter else find_target
    found = find(source)
    beyond = _beyond_apple(found.config)
    if for_apple and not is_drafter:
        raise InputError(f"{source} is a target; Apple's code loads drafters, leave for_apple out.")
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
        raise InputError(f"{partial} is left of a conversion that was ended; remove it.") from None
    except OSError as error:
        raise InputError(f"Cannot make {partial}: {error.strerror}.") from None
    try:
        companions = _write_companions(found, stated, partial, dtype)
        files = [*_write_weights(found, partial, dtype), *companions]
        written = find(partial)
        _check_same(found, written, dtype)
        partial.rename(whole)
    except OSError as error:  # a full disk, for example
        raise InputError(f"{folder} could not be written ({error.strerror or error}).") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    dtypes = " and ".join(sorted({weight.dtype for weight in written.weights}))
    told = [
        f"{folder}: a {'drafter' if is_drafter else 'target'} of {len(written.weights)} weights, "
        f"{sum(weight.bytes for weight in written.weights):,} bytes, {dtypes}; it loads the same "
        f"as {source}{f', in {dtype}' if dtype else ''}.",
        f"Written: {', '.join(files)}",
    ]
    if found.left_out:
        named, others = found.left_out[:2], len(found.left_out) - 2
        more = f" and {others} more" if others > 0 else ""
        told.append(f"Left out, for loading does not read them: {', '.join(named)}{more}")
    if beyond:
        told.append(f"Apple's code cannot load it: it does not know {', '.join(beyond)}.")
    return told


def _beyond_apple(config: Any) -> list[str]:
    """What a drafter has that Apple's layout does not."""
    match config:
        case DrafterConfig():
            return sorted(config.beyond_apple)
        case MedusaConfig():
            return ["Medusa heads"]
    return []


def _write_weights(found: Found, folder: Path, dtype: str | None) -> list[str]:
    """As many files as the source has; the names of all, an index of theirs included."""
    shards: dict[Path, list[Stored]] = {}
    for weight in found.weights:
        shards.setdefault(weight.path, []).append(weight)
    if len(shards) == 1:
        _write_shard(folder / SINGLE_FILE, found.weights, dtype)
        return [SINGLE_FILE]
    placed, total = {}, 0
    for number, path in enumerate(sorted(shards), start=1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        total += _write_shard(folder / file, shards[path], dtype)
        placed |= {weight.name: file for weight in shards[path]}
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(placed.items()))}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    return [*dict.fromkeys(placed.values()), INDEX]


def _write_shard(path: Path, weights: Sequence[Stored], dtype: str | None) -> int:
    """One safetensors file: the length of its header in 8 bytes, the header, the weights.

    https://github.com/huggingface/safetensors#format. Returns the bytes of the weights.
    """
    names = {weight: DTYPES[dtype] if dtype else weight.dtype for weight in weights}
    # The widest numbers first: then all lie at multiples of their own size.
    order = sorted(weights, key=lambda weight: (-ITEM_BYTES[names[weight]], weight.name))
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for weight in order:
        start, end = end, end + weight._replace(dtype=names[weight]).bytes
        header[weight.name] = {
            "dtype": names[weight],
            "shape": weight.shape,
            "data_offsets": [start, end],
        }
    described = json.dumps(header, separators=(",", ":")).encode()
    described += b" " * (-len(described) % 8)
    with path.open("wb") as file:
        file.write(len(described).to_bytes(8, "little") + described)
        for weight in order:
            _copy(weight, file, dtype)
    return end


def _copy(weight: Stored, file: BinaryIO, dtype: str | None) -> None:
    wanted = jnp.dtype(dtype) if dtype else dtype_of(weight)
    for numbers in pieces(weight):
        with np.errstate(over="ignore"):
            cast = numbers.astype(wanted)
        if (np.isinf(cast) & ~np.isinf(numbers)).any():
            raise InputError(
                f"{weight.path}: weight {weight.name!r} holds numbers beyond the range of {wanted}."
            )
        file.write(cast.tobytes())


def _write_companions(
    found: Found, stated: dict[str, object], folder: Path, dtype: str | None
) -> list[str]:
    """`config.json` with the dtype that the weights have now, and what goes with a model."""
    if dtype:
        # transformers 5 says it shorter.
        stated = {**stated, ("dtype" if "dtype" in stated else "torch_dtype"): dtype}
    (folder / "config.json").write_text(json.dumps(stated, indent=2) + "\n")
    if is_gguf(found.folder):
        return ["config.json", *_write_tokenizer(found.folder, folder)]
    written = ["config.json"]
    for path in sorted(found.folder.iterdir()):
        known = path.name == "config.json" or path.name.endswith(".index.json")
        if path.suffix in _COMPANIONS and path.is_file() and not known:
            shutil.copyfile(path, folder / path.name)
            written.append(path.name)
    return written


def _stated(path: Path) -> dict[str, Any]:
    """The fields of `config.json`, those that a GGUF file implies included."""
    if not is_gguf(path):
        path /= "config.json"
        return text_fields(read_json(path), path)
    from redrafter_jax.checkpoints.gguf_fields import gguf_fields
    from redrafter_jax.checkpoints.gguf_header import read_header

    return {**gguf_fields(read_header(path)), "torch_dtype": "float32"}


def _write_tokenizer(path: Path, folder: Path) -> list[str]:
    """What a GGUF file holds of its tokenizer, in files of their own."""
    from redrafter_jax.checkpoints.gguf_header import read_header
    from redrafter_jax.checkpoints.gguf_tokenizer import gguf_tokenizer, tokenizer_fields

    header = read_header(path)
    if "tokenizer.ggml.model" not in header.values:
        return []
    names = ["tokenizer.json", "tokenizer_config.json"]
    gguf_tokenizer(header).save(str(folder / names[0]))
    fields = json.dumps(tokenizer_fields(header), indent=2, ensure_ascii=False)
    (folder / names[1]).write_text(f"{fields}\n", encoding="utf-8")
    return names


def _check_same(found: Found, written: Found, dtype: str | None) -> None:
    """That both load to the same parameters, bit for bit; two weights are in memory at a time."""
    loaded = dtype or "float32"
    for ours, theirs in zip(written.weights, found.weights, strict=True):
        new, old = (
            np.asarray(read_weight(weight, loaded, transpose=False)) for weight in (ours, theirs)
        )
        if ours.name != theirs.name or new.tobytes() != old.tobytes():
            raise InputError(
                f"{theirs.path}: weight {theirs.name!r} does not load the same once it is written; "
                "the disk or the memory may be faulty, nothing was kept."
            )
