"""Headers of GGUF files that are damaged, cut short, hostile or of something else."""

import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tiny_gguf import tokenizer_fields, write_gguf, write_random

from redrafter_jax import InputError
from redrafter_jax.files.gguf_header import Header, read_header
from redrafter_jax.files.target_files import TargetFiles, open_target

HUGE = 2**63 + 5
TENSORS = {
    "one": (np.arange(64, dtype=np.float32).reshape(2, 32), "F32"),
    "two": (np.ones((4, 32), np.float16), "F16"),
}


def string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def header(values: int = 0, tensors: int = 0, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, values)


def value(kind: int, content: bytes, name: bytes = b"a") -> bytes:
    return string(name) + struct.pack("<I", kind) + content


def tensor(shape: tuple[int, ...], kind: int = 0, offset: int = 0, name: bytes = b"a") -> bytes:
    layout = f"<I{len(shape)}QIQ"
    return string(name) + struct.pack(layout, len(shape), *shape, kind, offset)


def read(path: Path, content: bytes) -> Header:
    path.write_bytes(content)
    return read_header(path)


def test_what_the_writer_wrote_is_read(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    fields = {"b": True, "i": 7, "f": 1e-5, "s": "ä", "list": [1, 2], "words": ["x", "y"]}
    write_gguf(path, fields, TENSORS)
    found = read_header(path)
    assert found.values == {"general.architecture": "llama", **fields}
    for name, (content, kind) in TENSORS.items():
        place = found.tensors[name]
        assert (place.path, place.kind, place.shape) == (path, kind, content.shape)
        stored = np.fromfile(path, content.dtype, content.size, offset=place.offset)
        np.testing.assert_array_equal(stored.reshape(content.shape), content)


LIES = [
    (b"", "is empty; download it again"),
    (
        b"<html>Not found</html>",
        "is not a GGUF file: it begins with b'<htm', not b'GGUF'; ",
    ),
    (b"version https://git-lfs.github.com/spec/v1", "is a Git LFS pointer, not the file itself"),
    (b"GG", "is not a GGUF file"),
    (b"GGUF", "is cut short: it should have 8 bytes or more and has 4; download it again"),
    (header(version=1), "is GGUF version 1, or big-endian; supported are little-endian"),
    (header(version=3 << 24), "or big-endian"),
    # Counts and lengths that no file could hold.
    (header(values=HUGE), "is cut short"),
    (header(tensors=HUGE), "is cut short"),
    (header(1) + struct.pack("<Q", HUGE), f"states a string of length {HUGE}, above the limit of"),
    (header(1) + struct.pack("<Q", 2**24), "is cut short: it should have 16,777,248 bytes"),
    (
        header(1) + value(9, struct.pack("<IQ", 0, HUGE)),
        f"states an array of length {HUGE}, above the",
    ),
    (header(1) + value(9, struct.pack("<IQ", 12, 2**24)), "is cut short: it should have 134,"),
    (header(1) + value(9, struct.pack("<IQ", 8, 2**24)), "is cut short"),
    (header(0, 1) + tensor((2**40, 2**40)), "is cut short"),
    (header(0, 1) + tensor((2**62, 8)), "is cut short"),
    (header(0, 1) + tensor((32,), offset=HUGE), "is cut short"),
    (
        header(0, 1) + string(b"a") + struct.pack("<I", 2**31),
        "has 2147483648 axes, above the limit of 4",
    ),
    # Contradictions.
    (header(1) + value(99, b""), "holds a value of type 99 at byte .*, which GGUF does not define"),
    (header(1) + value(9, struct.pack("<IQ", 9, 1)), "holds a value of type 9"),
    (header(1) + value(8, string(b"\xff\xfe")), "holds a string at byte .* that is not UTF-8"),
    (header(2) + value(7, b"\1") * 2, "states the field 'a' twice"),
    (
        header(1) + value(4, struct.pack("<I", 3), b"general.alignment"),
        "alignment=3; it must be",
    ),
    (
        header(1) + value(4, bytes(4), b"general.alignment"),
        "alignment=0; it must be a",
    ),
    (header(0, 2) + tensor((1,)) * 2, "holds the tensor 'a' twice"),
    (
        header(0, 1) + tensor((32,), 77),
        "'a' is stored in type 77, which this version does not know",
    ),
    (
        header(0, 1) + tensor((33,), 2),
        r"has the shape \(33,\), which cannot be stored in blocks of",
    ),
    (header(0, 1) + tensor((0, 3)), r"has the shape \(3, 0\), which cannot be stored"),
]


@pytest.mark.parametrize(("content", "sentence"), LIES, ids=range(len(LIES)))
def test_a_header_that_lies_is_one_sentence(tmp_path: Path, content: bytes, sentence: str) -> None:
    """And nothing is allocated for what it promises."""
    tracemalloc.start()
    with pytest.raises(InputError, match=sentence) as raised:
        read(tmp_path / "model.gguf", content)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 1 << 20
    assert str(raised.value).count("\n") == 0


def test_a_download_that_ended_anywhere_is_told_as_that(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, {"words": ["x", "y"], "number": 3}, TENSORS)
    content = path.read_bytes()
    for kept in range(4, len(content) - 1, 7):
        with pytest.raises(InputError, match=f"is cut short: it should .* and has {kept:,}; downl"):
            read(path, content[:kept])


def rename(parts: list[Path]) -> None:
    parts[0].rename(parts[0].with_name("a.gguf"))
    parts[1].rename(parts[0])
    parts[0].with_name("a.gguf").rename(parts[1])


def repeat(parts: list[Path]) -> None:
    """The second part is the first with another number."""
    content = parts[0].read_bytes()
    first, second = (b"split.no" + struct.pack("<IH", 2, number) for number in (0, 1))
    assert first in content
    parts[1].write_bytes(content.replace(first, second))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            lambda parts: parts[0].unlink(),
            "-00001-of-00002.gguf is missing; the model has 2 parts",
        ),
        (rename, "-00001-of-00002.gguf states that it is part 2 of 2; the file was renamed or"),
        (repeat, "-00002-of-00002.gguf holds the tensor 'one', which an earlier part holds too"),
        (
            lambda parts: parts[1].write_bytes(parts[1].read_bytes()[:-100]),
            "-00002-of-00002.gguf is cut short",
        ),
    ],
)
def test_parts_that_do_not_belong_together(
    tmp_path: Path, change: Callable[[list[Path]], object], sentence: str
) -> None:
    write_gguf(tmp_path / "model.gguf", {}, TENSORS, tensors_per_part=1)
    parts = sorted(tmp_path.iterdir())
    assert read_header(parts[1]).tensors.keys() == TENSORS.keys()
    change(parts)
    with pytest.raises(InputError, match=sentence):
        read_header(parts[1])


def test_a_part_under_another_name_asks_for_its_own(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", {}, TENSORS, tensors_per_part=1)
    path = sorted(tmp_path.iterdir())[0].rename(tmp_path / "other.gguf")
    with pytest.raises(InputError, match=r"is one of 2 parts; put all parts .* end in -00001"):
        read_header(path)


@pytest.mark.parametrize("flips", [40, pytest.param(100, marks=pytest.mark.long)])
def test_bits_that_flip_are_told_in_a_sentence_or_change_nothing_that_is_read(
    tmp_path: Path, flips: int
) -> None:
    path = tmp_path / "model.gguf"
    write_random(path, "Q8_0", **tokenizer_fields("smollm"))
    content = path.read_bytes()
    first = min(one.offset for one in read_header(path).tensors.values())
    random = np.random.default_rng(0)
    refused = 0
    for _ in range(flips):
        damaged = bytearray(content)
        # The fields in front of the vocabulary, and the tensors' descriptions behind it.
        place = random.choice([random.integers(0, 1200), random.integers(first - 700, first)])
        damaged[place] ^= 1 << random.integers(8)
        path.write_bytes(damaged)
        for use in (TargetFiles.match, lambda files: files.tokenizer):
            try:
                use(open_target(path))
            except InputError:
                refused += 1
    assert refused > flips / 2
