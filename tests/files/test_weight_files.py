"""Files of weights: where they lie, and that they arrive as they are stored."""

import os
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from safetensors.flax import save_file as save_arrays
from safetensors.numpy import save_file
from tiny_folders import write_index
from torch_archives import write_archive

from redrafter_jax import InputError, make_mesh
from redrafter_jax.files.stored import (
    StoredWeight,
    check_shape,
    memory_map,
    read_weight,
    same_values,
)
from redrafter_jax.files.weight_files import find_weights

MATRIX = np.arange(6, dtype=np.float64).reshape(2, 3) / 3


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("wanted", ["float32", "bfloat16"])
@pytest.mark.parametrize("stored", [jnp.float32, jnp.float16, jnp.bfloat16])
def test_a_weight_arrives_in_the_dtype_and_layout_asked_for(
    tmp_path: Path, stored: type, wanted: str, transpose: bool
) -> None:
    # Two of them: the second lies behind the first, and wherever it ends.
    value = jnp.asarray(MATRIX, stored)
    save_arrays({"a": jnp.ones(3, stored), "b": value}, tmp_path / "model.safetensors")
    weights = find_weights(tmp_path)
    out = read_weight(weights["b"], jnp.dtype(wanted), transpose=transpose)
    expected = np.asarray(value).astype(wanted)
    assert out.dtype == wanted
    np.testing.assert_array_equal(out, expected.T if transpose else expected)


def test_what_is_unpacked_is_not_rounded_to_the_dtype_of_the_file(tmp_path: Path) -> None:
    precise = np.asarray([0.1, -0.9, 300.0], np.float32) - 1
    stored = StoredWeight(tmp_path, "norm", "BF16", (3,), 0, lambda index: precise[index])
    np.testing.assert_array_equal(read_weight(stored, jnp.float32, transpose=False), precise)


def test_a_scalar_arrives_and_a_file_that_is_cut_while_it_is_read_is_told(tmp_path: Path) -> None:
    save_file({"a": np.asarray(3.5, np.float32), "b": MATRIX}, tmp_path / "model.safetensors")
    stored = find_weights(tmp_path)
    assert read_weight(stored["a"], jnp.float32, transpose=False) == 3.5
    whole = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[:-8])
    with pytest.raises(InputError, match="was cut short while it was read; load it again"):
        read_weight(stored["b"], jnp.float32, transpose=False)


def test_two_sources_are_one_too_many(tmp_path: Path) -> None:
    save_file({"a": MATRIX}, tmp_path / "model.safetensors")
    write_index(tmp_path / "model.safetensors.index.json", {"a": "model.safetensors"})
    with pytest.raises(InputError, match=r"holds both model\.safetensors and model\.saf.*index"):
        find_weights(tmp_path)


def test_equal_weights_are_equal_to_the_last_number_in_whatever_dtype(tmp_path: Path) -> None:
    # More than is compared at a time.
    long = np.zeros(1_100_000, np.float32)
    other = long.copy()
    other[-1] = 1
    tensors: dict[str, Any] = {"a": long, "b": long.copy(), "c": other}
    tensors |= {"d": long.astype(np.float64), "e": long.astype(jnp.bfloat16)}
    tensors |= {"f": other.astype(np.float16), "g": long.astype(np.int32), "h": long[1:]}
    save_arrays(tensors, tmp_path / "model.safetensors")
    stored = find_weights(tmp_path)
    assert [name for name in "bcdefgh" if same_values(stored["a"], stored[name])] == ["b", "d", "e"]


@pytest.mark.parametrize("spec", [("data",), (None, "data")])
def test_a_file_that_is_cut_while_the_parts_of_a_mesh_are_read_is_told(
    tmp_path: Path, spec: tuple[str | None, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After one device's part; what has been read does not hang on the file."""
    path = tmp_path / "model.safetensors"
    save_file({"a": np.ones((64, 64), np.float32)}, path)
    stored, sharding = find_weights(tmp_path)["a"], NamedSharding(make_mesh(2, 1), P(*spec))
    whole = read_weight(stored, jnp.float32, transpose=False, sharding=sharding)
    parts = 0

    def cut(weight: StoredWeight, dtype: DTypeLike) -> np.ndarray:
        nonlocal parts
        parts += 1
        if parts == 2:
            os.truncate(path, 200)
        return memory_map(weight, dtype)

    monkeypatch.setattr("redrafter_jax.files.stored.memory_map", cut)
    with pytest.raises(InputError, match="was cut short while it was read; load it again"):
        read_weight(stored, jnp.float32, transpose=False, sharding=sharding)
    assert float(whole.sum()) == 64 * 64


def test_safetensors_come_before_torch_files_of_the_same_weights(tmp_path: Path) -> None:
    write_archive(tmp_path / "pytorch_model.bin", {"a": np.zeros(3, np.float32)})
    save_file({"a": MATRIX}, tmp_path / "model.safetensors")
    assert find_weights(tmp_path)["a"].shape == (2, 3)
    (tmp_path / "model.safetensors").unlink()
    assert find_weights(tmp_path)["a"].shape == (3,)


def test_torch_files_have_shards_and_an_index_too(tmp_path: Path) -> None:
    write_archive(tmp_path / "one.bin", {"a": MATRIX})
    write_archive(tmp_path / "two.bin", {"b": MATRIX + 1})
    write_index(tmp_path / "pytorch_model.bin.index.json", {"a": "one.bin", "b": "two.bin"})
    weights = find_weights(tmp_path)
    out = read_weight(weights["b"], jnp.float32, transpose=True)
    np.testing.assert_array_equal(out, (MATRIX + 1).astype(np.float32).T)
    (tmp_path / "two.bin").unlink()
    with pytest.raises(InputError, match=r"two\.bin is missing; the model folder is incomplete"):
        find_weights(tmp_path)


def test_files_that_are_no_weights(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    with pytest.raises(InputError, match=r"in another format than safetensors and pytorch_model"):
        find_weights(tmp_path)
    save_file({"a": np.ones((2, 3), np.int8)}, path)
    with pytest.raises(InputError, match=r"weight 'a' is stored as I8; .* dtypes, F64, F32"):
        check_shape(find_weights(tmp_path)["a"], (2, 3))
    path.unlink()
    path.mkdir()
    with pytest.raises(InputError, match=r"Cannot read .*model\.safetensors: .*\.$"):
        find_weights(tmp_path)
