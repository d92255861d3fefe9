"""Files as `torch.save` writes them: a zip archive, its pickle from Python's own pickler."""

import io
import pickle
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np

STORAGES = {
    "float64": "DoubleStorage",
    "float32": "FloatStorage",
    "float16": "HalfStorage",
    "bfloat16": "BFloat16Storage",
    "int64": "LongStorage",
}
FUNCTIONS = ("_rebuild_tensor_v2", "_rebuild_parameter")


class Storage(NamedTuple):
    """Stands for one of torch's, which are pickled by a persistent id."""

    key: str
    numbers: int
    kind: str = "FloatStorage"


class Call(NamedTuple):
    """Stands for a value that torch pickles as a call."""

    function: str
    arguments: tuple[Any, ...]


def tensor(
    storage: Storage,
    shape: tuple[int, ...],
    strides: tuple[int, ...] | None = None,
    offset: int = 0,
) -> Call:
    """Stands for a tensor."""
    if strides is None:
        strides = tuple(int(np.prod(shape[axis + 1 :])) for axis in range(len(shape)))
    return Call("_rebuild_tensor_v2", (storage, offset, shape, strides, False, OrderedDict()))


def dumps(value: Any, protocol: int = 2) -> bytes:
    """The pickle of a value; names of torch stand where torch has them."""
    modules = {name: ModuleType(name) for name in ("torch", "torch._utils")}
    for module, names in (("torch", STORAGES.values()), ("torch._utils", FUNCTIONS)):
        for name in names:
            setattr(modules[module], name, type(name, (), {"__module__": module}))

    class Pickler(pickle.Pickler):
        def persistent_id(self, obj: Any) -> Any:
            if not isinstance(obj, Storage):
                return None
            return "storage", getattr(modules["torch"], obj.kind), obj.key, "cpu", obj.numbers

        def reducer_override(self, obj: Any) -> Any:
            if not isinstance(obj, Call):
                return NotImplemented
            return getattr(modules["torch._utils"], obj.function), obj.arguments

    content = io.BytesIO()
    with patch.dict(sys.modules, modules):
        Pickler(content, protocol).dump(value)
    return content.getvalue()


def write_records(path: Path, records: Mapping[str, bytes], compression: int = 0) -> None:
    """The archive of these records, each padded to 64 bytes as torch pads them."""
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, content in records.items():
            entry = zipfile.ZipInfo(f"archive/{name}")
            entry.compress_type = compression
            place = archive.start_dir + 30 + len(entry.filename) + 4
            padding = -place % 64
            entry.extra = b"FB" + padding.to_bytes(2, "little") + bytes(padding)
            archive.writestr(entry, content)


def write_archive(path: Path, weights: Mapping[str, np.ndarray]) -> None:
    """A state dictionary, every weight in a storage of its own."""
    described: Any = OrderedDict()
    described._metadata = OrderedDict({"": {"version": 1}})
    records = {}
    for key, (name, value) in enumerate(weights.items()):
        storage = Storage(str(key), value.size, STORAGES[str(value.dtype)])
        described[name] = tensor(storage, value.shape)
        records[f"data/{key}"] = value.tobytes()
    content = dumps(described)
    write_records(path, {"data.pkl": content, "byteorder": b"little", **records, "version": b"3\n"})
