"""The weights of a model folder: which files hold them, and where each one lies."""

import json
from collections.abc import Sequence
from pathlib import Path

from safetensors import SafetensorError, safe_open

from redrafter_jax.checkpoints.config_files import field, read_json, reading
from redrafter_jax.checkpoints.stored import StoredWeight
from redrafter_jax.checkpoints.torch_bin import read_torch_file
from redrafter_jax.errors import InputError

SINGLE_FILE = "model.safetensors"
INDEX = f"{SINGLE_FILE}.index.json"
TORCH_FILE = "pytorch_model.bin"
_OTHERWISE = (
    "the model folder is incomplete, or holds its weights in another format than safetensors and "
    f"{TORCH_FILE} and must be converted first"
)


def find_weights(folder: Path, others: Sequence[str] = ()) -> dict[str, StoredWeight]:
    """Every weight of a model folder: of its one file, or of the shards that its index names.

    Only headers are read. Of a folder that holds both, safetensors are taken and PyTorch's `.bin`
    files are not looked at: they are the same weights again, as transformers has it. The `others`,
    as some drafters' files are called, are read where there are neither.

    Raises:
      InputError: a file is missing or truncated, there are two sources, or index and shards
        disagree.
    """
    present = [
        name
        for name in (SINGLE_FILE, TORCH_FILE, *others)
        if (folder / name).exists() or (folder / f"{name}.index.json").exists()
    ]
    file = (present or [SINGLE_FILE])[0]
    read = _read_safetensors if file.endswith(".safetensors") else read_torch_file
    single, index = folder / file, folder / f"{file}.index.json"
    if not index.is_file():
        return read(single)
    if single.is_file():
        raise InputError(
            f"{folder} holds both {single.name} and {index.name}; remove the one that is not meant."
        )
    placed = field(read_json(index), "weight_map", index, dict)
    shards = {name: folder / field(placed, name, index, str) for name in placed}
    headers = {path: read(path) for path in sorted(set(shards.values()))}
    for name, path in shards.items():
        if name not in headers[path]:
            raise InputError(f"{path} holds no weight {name!r}, which the index places there.")
    for path, header in headers.items():
        # A weight may lie in two shards, of which the index means one.
        if others := sorted(header.keys() - shards.keys()):
            more = f" and {len(others) - 1} more" if len(others) > 1 else ""
            raise InputError(
                f"{path} holds the weight {others[0]!r}{more}, which {index.name} does not name; "
                "add it to the index, or take it out of the file."
            )
    return {name: headers[path][name] for name, path in shards.items()}


def _read_safetensors(path: Path) -> dict[str, StoredWeight]:
    """What a safetensors file says it holds; the library makes sure that the file is whole."""
    try:
        with (
            reading(path, _OTHERWISE),
            safe_open(path, framework="numpy"),
            path.open("rb") as file,
        ):
            size = int.from_bytes(file.read(8), "little")
            entries = json.loads(file.read(size))
    except SafetensorError as error:
        raise InputError(f"{path} is truncated or no safetensors file ({error}).") from None
    entries.pop("__metadata__", None)
    return {
        name: StoredWeight(
            path, name, entry["dtype"], tuple(entry["shape"]), 8 + size + entry["data_offsets"][0]
        )
        for name, entry in entries.items()
    }
