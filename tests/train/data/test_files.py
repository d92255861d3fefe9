"""Records from files of every kind and from the hub; what cannot be read is named."""

import gzip
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from chat_folders import RECORDS, write_lines

from redrafter_jax.errors import InputError
from train.data.files import read_raw
from train.data.settings import SourceSettings
from train.data.types import Raw, Skip

ROWS = list(RECORDS.values())


def read(*files: object) -> list[Raw | Skip]:
    return list(read_raw(SourceSettings(files=[str(file) for file in files])))


def test_json_lines_lists_and_their_archives_hold_the_same_records(tmp_path: Path) -> None:
    lines, listed = tmp_path / "a.jsonl", tmp_path / "b.json"
    write_lines(lines, *ROWS)
    listed.write_text("\ufeff" + json.dumps(ROWS, indent=1), encoding="utf-8")
    for path in (lines, listed):
        (tmp_path / f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes()))
    assert read(lines) == [Raw(f"{lines}, line {n}", row) for n, row in enumerate(ROWS, 1)]
    assert read(listed) == [Raw(f"{listed}, record {n}", row) for n, row in enumerate(ROWS, 1)]
    for archive in ("a.jsonl.gz", "b.json.gz"):
        assert [raw.value for raw in read(tmp_path / archive) if isinstance(raw, Raw)] == ROWS


def test_parquet_holds_the_same_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    columns = list(dict.fromkeys(key for row in ROWS for key in row))
    table = {key: [row.get(key) for row in ROWS] for key in columns}
    parquet.write_table(arrow.Table.from_pydict(table), path)
    raws = read(path)
    assert [raw.place for raw in raws][-1] == f"{path}, row {len(ROWS)}"
    for raw, row in zip(raws, ROWS, strict=True):
        assert isinstance(raw, Raw)
        assert {key: value for key, value in raw.value.items() if value is not None} == row
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(InputError, match=r"Cannot read .*a\.parquet"):
        read(path)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(InputError, match=r"needs the package pyarrow, .*'\.\[hub\]'"):
        read(path)


def test_datasets_of_the_hub_are_asked_for_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def load_dataset(*arguments: object, **options: object) -> list[dict[str, object]]:
        asked.append((arguments, options))
        if "gone" in arguments:
            raise FileNotFoundError("no such\n dataset")
        return [{"text": "a"}, {"text": "b"}]

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    source = SourceSettings(hub="owner/name", split="train[:2]", revision="v1")
    assert list(read_raw(source)) == [
        Raw("hub:owner/name, row 1", {"text": "a"}),
        Raw("hub:owner/name, row 2", {"text": "b"}),
    ]
    assert asked == [(("owner/name", None), {"split": "train[:2]", "revision": "v1"})]
    with pytest.raises(InputError, match=r"Cannot load hub:gone, .* split train: no such dataset"):
        list(read_raw(SourceSettings(hub="gone")))
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(InputError, match="hub:owner/name needs the package datasets"):
        list(read_raw(source))


def test_lines_that_are_no_records_are_skips_with_their_number(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    nested = b"[" * 100_000
    path.write_bytes(b'\xef\xbb\xbf{"text": "a"}\r\n\n{"text": \n{"text": "\xff"}\n' + nested)
    first, *skips = read(path)
    assert first == Raw(f"{path}, line 1", {"text": "a"})
    assert [(skip.place[-1], skip.reason) for skip in skips if isinstance(skip, Skip)] == [
        ("2", "an empty line"),
        ("3", "not valid JSON"),
        ("4", "not UTF-8"),
        ("5", "not valid JSON"),
    ]


def test_a_glob_names_its_files_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("b.jsonl", "a.jsonl", "[c].jsonl"):
        write_lines(tmp_path / name, {"text": name})
    monkeypatch.chdir(tmp_path)
    for pattern in ("?.jsonl", f"{tmp_path}/?.jsonl"):
        values = [raw.value["text"] for raw in read(pattern) if isinstance(raw, Raw)]
        assert values == ["a.jsonl", "b.jsonl"]
    assert len(read("[c].jsonl", "*a.jsonl")) == 2
    with pytest.raises(InputError, match=r"a\.jsonl is listed twice"):
        read("a.jsonl", "*.jsonl")


GZIPPED = gzip.compress(b'{"text": "a"}\n' * 99)


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("a.csv", b"", r"a\.csv has an unsupported type"),
        ("a.parquet.gz", b"", "has an unsupported type"),
        ("a.json", b"{}", "is not a list of records"),
        (
            "a.json",
            b'{"text": "a"}\n{"text": "b"}\n',
            r"is not valid JSON: .* rename it to \.jsonl",
        ),
        ("a.json", b"\xff", r"a\.json is not UTF-8 text at byte 0"),
        ("a.json", b"[" * 100_000, "is not valid JSON: too deeply nested"),
        ("a.jsonl.gz", b"{}\n", r"Cannot read .*a\.jsonl\.gz: Not a gzipped file"),
        ("a.jsonl.gz", GZIPPED[:-9], r"Cannot read .*\.gz"),
        ("a.jsonl.gz", GZIPPED[:20] + b"\xff\x00\xff" + GZIPPED[23:], r"Cannot read .*\.gz"),
        ("a.json.gz", gzip.compress(b"[]")[:-9], r"Cannot read .*\.gz"),
        # What is not there.
        ("nowhere/*.jsonl", None, r"There is no file 'nowhere/\*\.jsonl'"),
        # Python 3.13 takes it for a glob, 3.12 for none.
        ("a**b.jsonl", None, r"(Cannot read|There is no file '?)a\*\*b|Invalid pattern"),
        ("a" * 5000, None, r"Cannot read aaa.*: File name too long"),
        (str(Path(__file__).parent), None, r"^'.*' is a folder; use files: \[.*\*\.jsonl\]"),
    ],
    ids=range(14),
)
def test_files_that_cannot_be_read_are_named(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    content: bytes | None,
    sentence: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    if content is not None:
        Path(name).write_bytes(content)
    with pytest.raises(InputError, match=sentence):
        read(name)
