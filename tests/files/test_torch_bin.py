"""PyTorch's files: what lies where, and that nothing in them is run."""

import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch_archives as archives
from hypothesis import given
from hypothesis import strategies as st
from torch_archives import Call, Storage, dumps, tensor

from redrafter_jax import InputError
from redrafter_jax.files.stored import StoredWeight, read_weight
from redrafter_jax.files.torch_bin import read_torch_file

MATRIX = np.arange(6, dtype=np.float32).reshape(2, 3) / 3


def text(value: str) -> bytes:
    encoded = value.encode()
    return b"X" + len(encoded).to_bytes(4, "little") + encoded


def named(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


DICTIONARY = named("collections", "OrderedDict")
PAIRS = b"]q\0(" + b"".join(b"](" + text(str(key)) + b"Ne" for key in range(9)) + b"e"


def read_described(folder: Path, pickled: bytes, **records: bytes) -> dict[str, StoredWeight]:
    """Of an archive with this pickle; storage 0 is the matrix's."""
    path = folder / "pytorch_model.bin"
    records = {"data.pkl": pickled, "data/0": MATRIX.tobytes(), **records}
    archives.write_records(path, records)
    return read_torch_file(path)


def a_matrix(**changes: Any) -> Call:
    storage = Storage(
        changes.pop("key", "0"), changes.pop("numbers", 6), changes.pop("kind", "FloatStorage")
    )
    described: dict[str, Any] = {"shape": (2, 3), **changes}
    return tensor(storage, **described)


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
    stored = read_described(tmp_path, dumps({"a": a_matrix(), "e": empty, "s": single}))
    assert [weight.shape for weight in stored.values()] == [(2, 3), (0, 4), (1, 6)]


@pytest.mark.parametrize(
    ("module", "name"),
    [("os", "system"), ("builtins", "eval"), ("torch", "load"), ("torch", "ComplexFloatStorage")],
)
def test_what_a_pickle_may_ask_for_is_named_and_nothing_is_run(
    tmp_path: Path, module: str, name: str
) -> None:
    marker = tmp_path / "was_here"
    arguments = b"(" + text(f"touch {marker}") + b"tR"
    # By a line, and from the stack as protocol 4 has it.
    for function in (named(module, name), text(module) + text(name) + b"\x93"):
        attack = b"\x80\x02}" + text("a") + function + arguments + b"s."
        with pytest.raises(InputError, match=rf"refers to '{module}\.{name}', which weights do"):
            read_described(tmp_path, attack)
    assert not marker.exists()


@pytest.mark.parametrize(
    ("program", "sentence"),
    [
        (b"(ios\nsystem\n", "refers to the pickle instruction INST, which"),
        (b"0", "refers to the pickle instruction POP, which"),
        (b"\xff", r"is damaged: its data\.pkl"),
        (named("torch", "FloatStorage") + b"K\x03\x85R", "a call of 'torch.FloatSt"),
        (b"K\x03)R", r"data\.pkl cannot be read \('int' object is not callable"),
        (
            named("torch", "FloatStorage") + b"}" + text("name") + b"Nsb",
            r"'Name' object has no attribute '__dict__'",
        ),
        (b"})K\x01s", "a tuple as a key"),
        # Keys whose hash takes 2 to the 60th steps, or more stack than there is.
        (b")q\0" + b"h\0h\0\x86q\0" * 60 + b"}h\0Ns", "a tuple as a key"),
        (b"})" + b"\x85" * 200_000 + b"Ns", "a tuple as a key"),
        (DICTIONARY + b")R(" + b")" + b"\x85" * 200_000 + b"Nu", "a tuple as a key"),
        # A dictionary copied many times, values by the million.
        (PAIRS + (DICTIONARY + b"h\0\x85R") * 9, "positional argument"),
        (b"]" * (1 << 22), r"has 4194307 bytes of data\.pkl, above the limit of 4194304"),
        (b"h\x07", r"is damaged: its data\.pkl"),
        (b"J\0", r"is damaged: its data\.pkl"),
        (text("storage") + b"\x85Q", "is damaged"),
    ],
)
def test_programs_that_torch_does_not_write_are_refused(
    tmp_path: Path, program: bytes, sentence: str
) -> None:
    with pytest.raises(InputError, match=sentence):
        read_described(tmp_path, b"\x80\x02" + program + b".")


def test_a_number_in_the_memo_takes_no_memory(tmp_path: Path) -> None:
    stored = read_described(tmp_path, b"\x80\x02}r\xff\xff\xff\x7f.")
    assert stored == {}


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        (3, "holds one int, not a dictionary of weights"),
        (a_matrix(), "holds one Tensor, not a dictionary of weights"),
        ({"epoch": 3}, "holds 'epoch', of type int, which is not a weight; save only the"),
        (
            {"model": {"a": a_matrix()}, "optimizer": {"param_groups": [{"betas": (0.9, 0.999)}]}},
            "holds 'model', of type Dictionary, which is not a weight; save only the state",
        ),
    ],
)
def test_values_that_are_not_weights_by_name(tmp_path: Path, value: Any, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        read_described(tmp_path, dumps(value))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"shape": (3, 2), "strides": (1, 3)}, r"strides \(1, 3\), .* again after \.contiguous\("),
        ({"shape": (2, 2), "strides": (3, 1)}, r"strides \(3, 1\)"),
        ({"offset": 1}, "weight 'a' ends at element 7 of a storage of 6"),
        ({"offset": -1}, r"cannot be read \(a tensor with an impossible size\)"),
        ({"shape": (1 << 70, 3)}, "a tensor with an impossible size"),
        ({"strides": (1,)}, "numbers of sizes and strides differ"),
        ({"key": "7"}, "record '7' of weight 'a' is missing, not 24 bytes"),
        ({"kind": "HalfStorage"}, "has 24 bytes, not 12 bytes"),
    ],
)
def test_a_weight_must_lie_in_one_piece_of_its_storage(
    tmp_path: Path, changes: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(InputError, match=sentence):
        read_described(tmp_path, dumps({"a": a_matrix(**changes)}))


def test_archives_of_something_else(tmp_path: Path) -> None:
    described = {"data.pkl": dumps(OrderedDict())}
    for records, compression, sentence in (
        (described | {"byteorder": b"big"}, 0, "was written by a big-endian machine; save it"),
        ({"other/data.pkl": b""}, 0, r"a zip archive, but not one that torch\.save"),
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
        with pytest.raises(InputError, match=r"is truncated or not a file of torch\.save; "):
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


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_what_pickle_itself_writes_of_torchs_values_is_read(tmp_path: Path, protocol: int) -> None:
    shared, scalar = Storage("0", 6), Storage("1", 1)
    whole = tensor(shared, (2, 3))
    weights: Any = OrderedDict(a=whole, tied=whole, last=tensor(shared, (1, 3), offset=3))
    weights["one"] = tensor(scalar, ())
    weights["parameter"] = Call("_rebuild_parameter", (whole, True, OrderedDict()))
    weights._metadata = OrderedDict({"": {"version": 1}, "layer": {"version": (2, 1)}})
    # More than one frame of protocol 4, and more values than a byte counts.
    for i in range(1500):
        weights[f"model.layers.{i}.weight"] = tensor(shared, (3,), offset=i % 4)
    stored = read_described(tmp_path, dumps(weights, protocol), **{"data/1": b"\0" * 4})
    assert list(stored) == list(weights)
    assert stored["a"].offset == stored["tied"].offset == stored["parameter"].offset
    assert stored["last"].offset == stored["a"].offset + 12
    assert [stored[name].shape for name in ("a", "one", "parameter")] == [(2, 3), (), (2, 3)]
