"""Malformed data files: each ends in a sentence or in counted skips, and no record goes missing."""

import gzip
import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from chat_folders import CONFIG, END, RECORDS, data_settings, write_tokenizer

from redrafter_jax.errors import InputError
from train.data.documents import SourceDocuments, load_documents
from train.data.rows import make_rows

HEALTHY = [json.dumps(row).encode() for row in RECORDS.values()]
STRANGE = [
    None, True, 0, -1, 1.5, 10**30, float("nan"), "", " ", "x", "\ud800", "\x00", [], {}, [[]],
    [None], [1, "x"], {"role": "assistant"}, [{"role": "assistant", "content": None}], ["user"],
    [{"from": "gpt", "value": "x"}], [0.0, 1.0], [True], "<|im_start|>", "a" * 5000,
]  # fmt: skip


def replace_anywhere(value: Any, chance: random.Random) -> Any:
    """The value with one of its parts, however deep, replaced, dropped, doubled or renamed."""
    if not isinstance(value, dict | list) or not value or chance.random() < 0.2:
        return chance.choice(STRANGE)
    if isinstance(value, list):
        place = chance.randrange(len(value))
        part = chance.choice([[], [value[place]] * 2, [replace_anywhere(value[place], chance)]])
        return value[:place] + part + value[place + 1 :]
    key = chance.choice(list(value))
    changed = {name: part for name, part in value.items() if name != key}
    match chance.randrange(4):
        case 0:
            changed[key.upper()] = value[key]
        case 1:
            changed |= {key: value[key]} | chance.choice(list(RECORDS.values()))
        case 2:
            changed[key] = replace_anywhere(value[key], chance)
    return changed


def spoil_record(line: bytes, chance: random.Random) -> bytes:
    return json.dumps(replace_anywhere(json.loads(line), chance)).encode()


def spoil_bytes(line: bytes, chance: random.Random) -> bytes:
    place = chance.randrange(len(line))
    junk = chance.choice(
        [b"", b"\x00", b"\xff\xfe", b"\xed\xa0\x80", b"{", b'"', b"\\u", b"1" * 5000]
    )
    match chance.randrange(3):
        case 0:
            return line[:place]
        case 1:
            return line[:place] + junk + line[place + 1 :]
        case _:
            return chance.choice(
                [b"", b"   ", b"[" * 50_000, b"null", junk, line.decode().encode("utf-16-le")]
            )


def write_lines(folder: Path, spoiled: list[bytes], chance: random.Random) -> tuple[Path, int]:
    """A file of healthy and spoiled lines, perhaps packed; returns how many lines it has."""
    lines = HEALTHY + [line.replace(b"\n", b" ") for line in spoiled]
    chance.shuffle(lines)
    content = b"\n".join(lines) + b"\n" * chance.randrange(2)
    packed = chance.random() < 0.3
    path = folder / ("rows.jsonl.gz" if packed else "rows.jsonl")
    path.write_bytes(gzip.compress(content) if packed else content)
    # As a text file's lines are counted: what follows the last line's end is none.
    return path, content.count(b"\n") + (not content.endswith(b"\n"))


def load(path: Path, target: Path, **changes: object) -> SourceDocuments:
    settings = data_settings({"files": [str(path)]}, chat_template="vicuna_v1.1", **changes)
    (source,) = load_documents(settings, target, CONFIG)
    rows = make_rows(source, settings, END)
    learnt = sum(int(document.loss_mask.sum()) for document in source.documents)
    assert rows.windows.loss_mask.sum() == learnt
    return source


def load_or_refuse(path: Path, target: Path) -> SourceDocuments | str:
    """What is loaded, or the sentence that says why not; any other exception is a failure."""
    try:
        return load(path, target)
    except InputError as error:
        return str(error)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("target"))


@pytest.mark.parametrize("spoil", [spoil_record, spoil_bytes])
@pytest.mark.parametrize("case", range(30))
def test_spoiled_lines_are_counted_and_the_healthy_ones_kept(
    target: Path, tmp_path: Path, case: int, spoil: Callable[[bytes, random.Random], bytes]
) -> None:
    chance = random.Random(case)
    spoiled = [spoil(chance.choice(HEALTHY), chance) for _ in range(chance.randint(1, 4))]
    path, lines = write_lines(tmp_path, spoiled, chance)
    source = load_or_refuse(path, target)
    if isinstance(source, str):
        # The one fault of a line that stops a run.
        assert re.search(rf"{path}, line \d+ holds token .* outside the vocabulary", source)
        return
    assert len(source.documents) + len(source.skips) == lines
    assert len(source.documents) >= len(HEALTHY)
    assert len({skip.place for skip in source.skips}) == len(source.skips)
    assert all(skip.reason for skip in source.skips)
    if source.skips:
        with pytest.raises(InputError, match=f"{len(source.skips)} of {lines} records cannot be"):
            load(path, target, skips="refuse")


def whole_files() -> dict[str, bytes]:
    lines, listed = b"\n".join(HEALTHY), b"[" + b",".join(HEALTHY) + b"]"
    packed = gzip.compress(lines * 50)
    files = {
        "empty.jsonl": b"", "blank.jsonl": b"\n\n\n", "zeros.jsonl": b"\x00" * 100,
        "utf16.jsonl": lines.decode().encode("utf-16"), "list.jsonl": listed.replace(b"\n", b""),
        "empty.json": b"", "none.json": b"[]", "object.json": HEALTHY[0], "lines.json": lines,
        "number.json": b"1", "nan.json": b"[NaN]", "deep.json": b"[" * 90_000, "list.csv": lines,
        "plain.json.gz": listed,
        "utf16.json": listed.decode().encode("utf-16"), "no.parquet": lines, "empty.parquet": b"",
        "magic.parquet": b"PAR1" + lines + b"PAR1", "plain.jsonl.gz": lines,
        "flipped.jsonl.gz": packed[:40] + b"\xff\x00\xff" + packed[43:],
    }  # fmt: skip
    files |= {f"cut{n}.jsonl.gz": packed[:n] for n in (0, 1, 9, 10, 11, 50, len(packed) - 1)}
    files |= {f"cut{n}.json": listed[:n] for n in range(1, len(listed), 90)}
    return files


@pytest.mark.parametrize("name", whole_files())
def test_files_that_are_spoiled_as_a_whole_stop_the_run(
    target: Path, tmp_path: Path, name: str
) -> None:
    if name.endswith(".parquet"):
        pytest.importorskip("pyarrow")
    (tmp_path / name).write_bytes(whole_files()[name])
    with pytest.raises(InputError) as refused:
        load(tmp_path / name, target)
    assert name in str(refused.value)


@pytest.mark.parametrize("case", range(12))
def test_damaged_parquet_files_stop_the_run_or_lose_nothing(
    target: Path, tmp_path: Path, case: int
) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    chance = random.Random(case)
    path = tmp_path / "rows.parquet"
    parquet.write_table(arrow.table({"text": [f"text {n}" for n in range(50)]}), path)
    content = bytearray(path.read_bytes())
    for _ in range(1 + case):
        content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    path.write_bytes(content)
    source = load_or_refuse(path, target)
    if isinstance(source, str):
        assert "rows.parquet" in source
    else:
        assert len(source.documents) + len(source.skips) == 50
