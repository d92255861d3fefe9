"""Files as `torch.save` writes them: a zip archive, its pickle put together by hand."""

import zipfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np

STORAGES = {
    "float64": "DoubleStorage",
    "float32": "FloatStorage",
    "float16": "HalfStorage",
    "bfloat16": "BFloat16Storage",
    "int64": "LongStorage",
    "bool": "BoolStorage",
}
FALSE, STOP = b"\x89", b"."


def text(value: str) -> bytes:
    encoded = value.encode()
    return b"X" + len(encoded).to_bytes(4, "little") + encoded


def number(value: int) -> bytes:
    if value < 1 << 31:
        return b"J" + value.to_bytes(4, "little", signed=True)
    length = value.bit_length() // 8 + 1
    return b"\x8a" + bytes([length]) + value.to_bytes(length, "little", signed=True)


def named(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


def several(*items: bytes) -> bytes:
    return b"(" + b"".join(items) + b"t"


def call(function: bytes, *arguments: bytes) -> bytes:
    return function + several(*arguments) + b"R"


def ordered(items: Mapping[str, bytes]) -> bytes:
    """An OrderedDict, with a state as torch's dictionaries of weights have one."""
    pairs = b"".join(text(name) + value for name, value in items.items())
    state = b"}" + text("_metadata") + call(named("collections", "OrderedDict")) + b"s"
    return call(named("collections", "OrderedDict")) + b"(" + pairs + b"u" + state + b"b"


def tensor(
    storage: str,
    key: str,
    numbers: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...] | None = None,
    offset: int = 0,
) -> bytes:
    """A call of `_rebuild_tensor_v2` with a storage of so many numbers."""
    if strides is None:
        strides = tuple(int(np.prod(shape[axis + 1 :])) for axis in range(len(shape)))
    identity = several(
        text("storage"), named("torch", storage), text(key), text("cpu"), number(numbers)
    )
    return call(
        named("torch._utils", "_rebuild_tensor_v2"),
        identity + b"Q",
        number(offset),
        several(*map(number, shape)),
        several(*map(number, strides)),
        FALSE,
        call(named("collections", "OrderedDict")),
    )


def pickled(value: bytes) -> bytes:
    return b"\x80\x02" + value + STOP


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
    described, records = {}, {}
    for key, (name, value) in enumerate(weights.items()):
        storage = STORAGES[str(value.dtype)]
        described[name] = tensor(storage, str(key), value.size, value.shape)
        records[f"data/{key}"] = value.tobytes()
    content = pickled(ordered(described))
    write_records(path, {"data.pkl": content, "byteorder": b"little", **records, "version": b"3\n"})
