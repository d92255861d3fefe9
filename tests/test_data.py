"""Documents become windows that never cross a document; batches are deterministic and resumable."""

from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from redrafter_jax.command_line import load_tokenizer
from redrafter_jax.errors import InputError
from train.config import DataSettings
from train.data import (
    Document,
    Windows,
    make_batches,
    make_windows,
    read_documents,
    read_token_files,
)
from train.tokenizer import save_tokenizer, train_tokenizer

END = 0


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(["def f(x):\n    return x + 1\n" * 20], 300)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("a.py", "pkg/b.py", "held/c.py", "pkg/skip.py", "note.txt"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"# {name}\n")
    return tmp_path


def settings(folder: Path, **changes: object) -> DataSettings:
    values = {
        "folder": str(folder),
        "exclude": ["pkg/skip*"],
        "held_out": ["held/*"],
        "sequence_length": 8,
    }
    return DataSettings.model_validate(values | changes)


def test_include_exclude_and_held_out_divide_the_files(folder: Path) -> None:
    training = read_documents(settings(folder))
    assert [document.name for document in training] == ["a.py", "pkg/b.py"]
    assert training[0].text == "# a.py\n"
    held_out = read_documents(settings(folder), held_out=True)
    assert [document.name for document in held_out] == ["held/c.py"]


@pytest.mark.parametrize(
    ("glob", "names"),
    [
        ("**/secret.py", ["a/b/secret.py", "a/secret.py", "secret.py"]),
        ("a/**/secret.py", ["a/b/secret.py", "a/secret.py"]),
        ("**/b/**/*.py", ["a/b/secret.py"]),
        ("a/*", ["a/b/secret.py", "a/secret.py"]),
        ("./secret.py", ["secret.py"]),
    ],
)
def test_a_held_out_file_is_never_trained_on_at_whatever_depth(
    tmp_path: Path, glob: str, names: list[str]
) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    every = ["a/b/secret.py", "a/secret.py", "open.py", "secret.py"]
    for name in every:
        (tmp_path / name).write_text("x")
    chosen = settings(tmp_path, held_out=[glob])
    held_out = [document.name for document in read_documents(chosen, held_out=True)]
    training = [document.name for document in read_documents(chosen)]
    assert held_out == names
    assert training == [name for name in every if name not in names]
    excluded = read_documents(settings(tmp_path, exclude=[glob], held_out=[]))
    assert [document.name for document in excluded] == training


def test_folders_that_match_are_no_documents(folder: Path) -> None:
    (folder / "module.py").mkdir()
    names = [document.name for document in read_documents(settings(folder, include=["**/*"]))]
    assert names == ["a.py", "note.txt", "pkg/b.py"]


@pytest.mark.parametrize("field", ["include", "exclude", "held_out"])
@pytest.mark.parametrize(
    ("glob", "sentence"),
    [
        ("", "'' is no glob below data.folder"),
        (".", "'.' is no glob below data.folder"),
        ("/etc/*.py", "'/etc/\\*.py' is no glob below data.folder"),
        ("a**/b.py", "has '\\*\\*' beside other letters"),
    ],
)
def test_globs_that_can_match_nothing_are_refused(
    folder: Path, field: str, glob: str, sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence):
        settings(folder, **{field: [glob]})


def test_token_files_that_are_no_text_are_named(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_bytes(b"{\xe9}\n")
    with pytest.raises(InputError, match=r"rows\.jsonl is not UTF-8 text at byte 1"):
        read_token_files([tmp_path / "rows.jsonl"], 9, END, 3)


def test_the_standard_library_is_a_folder_with_a_name() -> None:
    stdlib = DataSettings(folder="python:stdlib", include=["json/*.py"], sequence_length=8)
    assert "json/decoder.py" in {document.name for document in read_documents(stdlib)}


def test_unusable_folders_and_files_are_named(folder: Path) -> None:
    with pytest.raises(InputError, match="'nowhere' is not a folder"):
        read_documents(settings(Path("nowhere")))
    with pytest.raises(InputError, match=r"No file below .* matches data.include"):
        read_documents(settings(folder, include=["*.rs"]))
    with pytest.raises(
        InputError, match=r"^All \d+ files below .* are left out by data.exclude or"
    ):
        read_documents(settings(folder, exclude=["*"]))
    (folder / "latin.py").write_bytes(b"# caf\xe9\n")
    with pytest.raises(InputError, match=r"latin\.py is not UTF-8 text at byte 5"):
        read_documents(settings(folder))


def test_windows_hold_every_token_once_and_mask_what_is_not_text(tokenizer: Tokenizer) -> None:
    documents = [Document("a", "def f(x):\n    return x + 1\n"), Document("b", "x")]
    windows = make_windows(documents, tokenizer, END, 8)
    rebuilt = [[END, *tokenizer.encode(document.text).ids, END] for document in documents]
    first, last = windows.tokens[:-1].reshape(-1), windows.tokens[-1]
    np.testing.assert_array_equal(first[: len(rebuilt[0])], rebuilt[0])
    np.testing.assert_array_equal(last[: len(rebuilt[1])], rebuilt[1])
    # All real tokens but the first of each document count; padding does not.
    assert windows.loss_mask.sum() == len(rebuilt[0]) - 1 + len(rebuilt[1]) - 1
    assert not windows.loss_mask[0, 0]
    assert not windows.loss_mask[-1, len(rebuilt[1]) :].any()


def examples(count: int) -> Windows:
    return Windows(
        np.repeat(np.arange(count, dtype=np.int32)[:, None], 4, axis=1), np.ones((count, 4), bool)
    )


def test_an_epoch_sees_every_window_once_in_a_shuffled_order() -> None:
    batches = make_batches([(examples(12), 1.0)], 4, seed=1)
    epoch = np.concatenate([next(batches)["tokens"][:, 0] for _ in range(3)])
    assert sorted(epoch) == list(range(12))
    assert list(epoch) != list(range(12))
    again = make_batches([(examples(12), 1.0)], 4, seed=1)
    np.testing.assert_array_equal(next(again)["tokens"][:, 0], epoch[:4])


def test_a_saved_position_goes_on_with_the_next_batch() -> None:
    batches = make_batches([(examples(10), 1.0)], 4, seed=0)
    next(batches)
    state = batches.get_state()
    expected = [next(batches)["tokens"] for _ in range(4)]
    resumed = make_batches([(examples(10), 1.0)], 4, seed=0)
    resumed.set_state(state)
    for tokens in expected:
        np.testing.assert_array_equal(next(resumed)["tokens"], tokens)


def test_too_few_windows_are_refused() -> None:
    with pytest.raises(InputError, match="gives 3 windows, fewer than a batch of 4"):
        make_batches([(examples(3), 1.0)], 4, seed=0)


def test_the_tokenizer_gives_every_text_back(tokenizer: Tokenizer, tmp_path: Path) -> None:
    save_tokenizer(tokenizer, tmp_path, 64)
    loaded = load_tokenizer(tmp_path)
    for text in ("def f(x):\n\n\treturn  {'é': 12345}\n", "日本 \r\n  ", ""):
        assert loaded.decode(loaded.encode(text).ids) == text


def test_transformers_reads_the_same_tokenizer(tokenizer: Tokenizer, tmp_path: Path) -> None:
    save_tokenizer(tokenizer, tmp_path, 64)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    text = "def g(y):\n    return y - 12\n"
    assert theirs(text).input_ids == tokenizer.encode(text).ids
    assert theirs.eos_token_id == END
