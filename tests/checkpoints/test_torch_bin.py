"""PyTorch's files: what lies where, and that nothing in them is run."""

import io
import pickle
import sys
import zipfile
from collections import OrderedDict
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest
import torch_archives as archives
from hypothesis import given
from hypothesis import strategies as st
from torch_archives import named, number, several, tensor, text

from redrafter_jax import InputError
from redrafter_jax.checkpoints.stored import Stored, read_weight
from redrafter_jax.checkpoints.torch_bin import read_torch_file

DICTIONARY = named("collections", "OrderedDict")
PAIRS = b"]q\0(" + b"".join(b"](" + text(str(key)) + b"Ne" for key in range(9)) + b"e"
MATRIX = np.arange(6, dtype=np.float32).reshape(2, 3) / 3


def read_described(folder: Path, value: bytes, **records: bytes) -> dict[str, Stored]:
    """Of an archive with this pickle; `data` is the record of storage 0."""
    path = folder / "pytorch_model.bin"
    named_records = {"data/0": records.pop("data", MATRIX.tobytes()), **records}
    archives.write_records(path, {"data.pkl": archives.pickled(value), **named_records})
    return read_torch_file(path)


def a_matrix(**changes: Any) -> bytes:
    described: dict[str, Any] = {"storage": "FloatStorage", "key": "0", "numbers": 6}
    described |= {"shape": (2, 3), **changes}
    return tensor(**described)


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_weights_of_every_width_are_what_was_saved(tmp_path: Path, dtype: str) -> None:
    path = tmp_path / "pytorch_model.bin"
    first, second = np.ones(3, np.int64), MATRIX.astype(jnp.dtype(dtype))
    archives.write_archive(path, {"steps": first, "weight": second})
    stored = read_torch_file(path)["weight"]
    assert path.read_bytes()[stored.offset :][: stored.bytes] == second.tobytes()
    assert stored.offset % 64 == 0
    out = read_weight(stored, jnp.float32, transpose=True)
    np.testing.assert_array_equal(out, second.astype(np.float32).T)


def test_plain_dictionaries_are_read_too(tmp_path: Path) -> None:
    # An empty axis and one of a single step have whatever strides.
    empty = a_matrix(shape=(0, 4), strides=(9, 9))
    single = a_matrix(shape=(1, 6), strides=(1, 1))
    items = text("a") + a_matrix() + text("e") + empty + text("s") + single
    stored = read_described(tmp_path, b"}(" + items + b"u")
    assert [weight.shape for weight in stored.values()] == [(2, 3), (0, 4), (1, 6)]


@pytest.mark.parametrize(
    ("module", "name"),
    [("os", "system"), ("builtins", "eval"), ("torch", "load"), ("torch", "ComplexFloatStorage")],
)
def test_what_a_pickle_may_ask_for_is_named_and_nothing_is_run(
    tmp_path: Path, module: str, name: str
) -> None:
    marker = tmp_path / "was_here"
    attack = archives.call(named(module, name), text(f"touch {marker}"))
    # And as protocol 4 names it.
    stacked = text(module) + text(name) + b"\x93" + several(text(f"touch {marker}")) + b"R"
    for value in (archives.ordered({"a": attack}), stacked):
        with pytest.raises(InputError, match=rf"asks for '{module}\.{name}', which describes no"):
            read_described(tmp_path, value)
    assert not marker.exists()


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        (b"(ios\nsystem\n", "asks for the pickle instruction INST, which"),
        (named("torch", "FloatStorage") + several(number(3)) + b"R", "a call of 'torch.FloatSt"),
        (number(3) + several() + b"R", r"data\.pkl cannot be read \('int' object is not callable"),
        (named("torch", "FloatStorage") + b"}b", r"'_Name' object has no attribute '__dict__'"),
        (b"}" + several(several()) + number(1) + b"s", "a tuple that holds more than whole n"),
        (b"}" + several() + number(1) + b"s", r"under \(\), no weight"),
        # Keys whose hash takes 2 to the 60th steps, or more stack than there is.
        (b"})q\0" + b"h\0h\0\x86q\0" * 60 + b"Ns", "a tuple that holds more than whole n"),
        (b"})" + b"\x85" * 200_000 + b"Ns", "a tuple that holds more than whole numbers"),
        # A dictionary copied many times, values by the million, a memo of gigabytes.
        (PAIRS + (DICTIONARY + b"h\0\x85R") * 9, "positional argument"),
        (b"]" * (1 << 20), "more than 1048576 instructions"),
        (b"Nr\xff\xff\xff\x7f", "puts a value aside as number 2147483647"),
        (b"h\x07", r"is damaged: its data\.pkl"),
        (b"0", "asks for the pickle instruction POP, which"),
        (several(text("storage")) + b"Q", "is damaged"),
        (number(3), "holds a int, no dictionary of weights"),
        (archives.ordered({"epoch": number(3)}), "holds a int under 'epoch', no weight; save the"),
        (a_matrix(), "holds a Tensor, no dictionary of weights"),
    ],
)
def test_other_pickles_are_refused(tmp_path: Path, value: bytes, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        read_described(tmp_path, value)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"shape": (3, 2), "strides": (1, 3)}, r"strides \(1, 3\), .* again after \.contiguous\("),
        ({"shape": (2, 2), "strides": (3, 1)}, r"strides \(3, 1\)"),
        ({"offset": 1}, "weight 'a' ends at number 7 of a storage of 6"),
        ({"offset": -1}, r"cannot be read \(a tensor with a size that no tensor has\)"),
        ({"shape": (1 << 70, 3)}, "a size that no tensor has"),
        ({"strides": (1,)}, "more sizes than strides"),
        ({"key": "7"}, "record '7' of weight 'a' is missing, not 24 bytes"),
        ({"storage": "HalfStorage"}, "has 24 bytes, not 12 bytes"),
    ],
)
def test_a_weight_must_lie_in_one_piece_of_its_storage(
    tmp_path: Path, changes: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(InputError, match=sentence):
        read_described(tmp_path, archives.ordered({"a": a_matrix(**changes)}))


def test_archives_of_something_else(tmp_path: Path) -> None:
    described = {"data.pkl": archives.pickled(archives.ordered({}))}
    for records, compression, sentence in (
        (described | {"byteorder": b"big"}, 0, "not written by a little-endian machine; save it"),
        ({"other/data.pkl": b""}, 0, r"a zip archive, but none that torch\.save writes"),
        (described, zipfile.ZIP_DEFLATED, r"holds archive/data\.pkl compressed, which torch\.save"),
    ):
        archives.write_records(tmp_path / "a.bin", records, compression)
        with pytest.raises(InputError, match=sentence):
            read_torch_file(tmp_path / "a.bin")


def test_files_that_are_no_archives_are_truncated_or_old(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    archives.write_archive(path, {"a": MATRIX})
    content = path.read_bytes()
    for kept in (len(content) - 1, len(content) // 2, 10, 0):
        path.write_bytes(content[:kept])
        with pytest.raises(InputError, match=r"is truncated or no file of torch\.save\.$"):
            read_torch_file(path)
    path.write_bytes(b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19.")
    with pytest.raises(InputError, match=r"torch before 1\.6; write it again .*\.$"):
        read_torch_file(path)
    with pytest.raises(InputError, match=r"^Cannot read .*: Is a directory\.$"):
        read_torch_file(tmp_path)


@given(st.data())
def test_a_damaged_file_is_one_sentence_or_still_within_itself(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("damaged") / "a.bin"
    archives.write_archive(path, {"a": MATRIX, "b": MATRIX.astype(np.float16)})
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(content)
    try:
        weights = read_torch_file(path)
    except InputError:
        return
    assert all(weight.offset + weight.bytes <= len(content) for weight in weights.values())


class Storage(NamedTuple):
    """Stands for one of torch, which pickles itself by a persistent id."""

    key: str
    numbers: int


class Call(NamedTuple):
    """Stands for a value that torch pickles as a call."""

    function: str
    arguments: tuple[Any, ...]


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_what_pickle_itself_writes_of_torchs_values_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, protocol: int
) -> None:
    # Pickle writes a name where a module has it.
    names = {"torch": ["FloatStorage"]}
    names["torch._utils"] = ["_rebuild_tensor_v2", "_rebuild_parameter"]
    found: dict[str, Any] = {}
    for module, contents in names.items():
        monkeypatch.setitem(sys.modules, module, ModuleType(module))
        for name in contents:
            found[name] = type(name, (), {"__module__": module})
            setattr(sys.modules[module], name, found[name])

    class Pickler(pickle.Pickler):
        def persistent_id(self, obj: Any) -> Any:
            if not isinstance(obj, Storage):
                return None
            return "storage", found["FloatStorage"], obj.key, "cpu", obj.numbers

        def reducer_override(self, obj: Any) -> Any:
            return (found[obj.function], obj.arguments) if isinstance(obj, Call) else NotImplemented

    def tensor_of(storage: Storage, *place: Any) -> Call:
        return Call("_rebuild_tensor_v2", (storage, *place, False, OrderedDict()))

    shared, scalar = Storage("0", 6), Storage("1", 1)
    whole = tensor_of(shared, 0, (2, 3), (3, 1))
    weights: Any = OrderedDict(a=whole, tied=whole, last=tensor_of(shared, 3, (1, 3), (3, 1)))
    weights["one"] = tensor_of(scalar, 0, (), ())
    weights["parameter"] = Call("_rebuild_parameter", (whole, True, OrderedDict()))
    weights._metadata = OrderedDict({"": {"version": 1}, "layer": {"version": (2, 1)}})
    # More than one frame of protocol 4, and more values than a byte counts.
    for i in range(1500):
        weights[f"model.layers.{i}.weight"] = tensor_of(shared, i % 4, (3,), (1,))
    content = io.BytesIO()
    Pickler(content, protocol).dump(weights)
    records = {"data.pkl": content.getvalue(), "data/0": MATRIX.tobytes(), "data/1": b"\0" * 4}
    archives.write_records(tmp_path / "a.bin", records)
    stored = read_torch_file(tmp_path / "a.bin")
    assert list(stored) == list(weights)
    assert stored["a"].offset == stored["tied"].offset == stored["parameter"].offset
    assert stored["last"].offset == stored["a"].offset + 12
    assert [stored[name].shape for name in ("a", "one", "parameter")] == [(2, 3), (), (2, 3)]
