"""Configuration files with overrides, errors as sentences, the tokenizer beside a target."""

import importlib
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pydantic
import pytest
from tiny_folders import byte_tokenizer

from redrafter_jax import InputError
from redrafter_jax.command_line import (
    Settings,
    dump_settings,
    load_settings,
    load_tokenizer,
    parse_settings,
    run,
)


class Inner(Settings):
    rate: float = 0.5
    names: tuple[str, ...] = ()
    weights: tuple[float, ...] = ()
    fast: bool = False


class Outer(Settings):
    size: pydantic.PositiveInt
    inner: Inner = Inner()
    spare: Inner | None = None


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "outer.yaml"
    path.write_text("size: 3\ninner:\n  rate: 1e-3\n")
    return path


# Configuration files and overrides.


@pytest.mark.parametrize(
    ("module", "word", "sentence"),
    [
        ("eval", "acceptence", "error: 'acceptence' is no command; did you mean 'acceptance'?"),
        ("train", "preview", "error: 'preview' is no command; known commands: inspect."),
    ],
)
def test_a_mistyped_command_is_named(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    module: str,
    word: str,
    sentence: str,
) -> None:
    monkeypatch.setattr("sys.argv", [module, word, "--config", "x.yaml"])
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(f"{module}.__main__").main()
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith(sentence)


def test_a_file_gives_values_and_the_model_the_rest(config: Path) -> None:
    assert load_settings(Outer, config) == Outer(size=3, inner=Inner(rate=0.001, names=()))


def test_overrides_reach_into_sections_and_are_read_as_yaml(config: Path) -> None:
    overrides = ["size=4", "inner.rate=3e-4", "inner.names=[a, b]"]
    settings = load_settings(Outer, config, overrides)
    assert settings == Outer(size=4, inner=Inner(rate=0.0003, names=("a", "b")))


def test_an_override_may_open_a_section_that_the_file_lacks(tmp_path: Path) -> None:
    path = tmp_path / "short.yaml"
    path.write_text("size: 1\n")
    assert load_settings(Outer, path, ["inner.rate=2"]).inner.rate == 2.0


def test_a_date_is_a_string_and_yes_is_true_where_that_is_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "dates.yaml"
    path.write_text("size: 1\ninner:\n  names: [2024-01-31, 2024-13-01]\n", encoding="utf-8")
    settings = load_settings(Outer, path, ["inner.fast=yes"])
    assert settings.inner == Inner(names=("2024-01-31", "2024-13-01"), fast=True)
    overridden = load_settings(Outer, path, ["inner.names=[2025-02-30]"])
    assert overridden.inner.names == ("2025-02-30",)


def test_the_dump_reads_back_as_the_same_settings(config: Path, tmp_path: Path) -> None:
    settings = load_settings(Outer, config, ["inner.names=[x]"])
    (tmp_path / "dump.yaml").write_text(dump_settings(settings))
    assert load_settings(Outer, tmp_path / "dump.yaml") == settings


def test_overrides_may_stand_before_and_after_options(config: Path) -> None:
    arguments = ["size=4", "--config", str(config), "inner.rate=0"]
    assert parse_settings(Outer, "A test.", arguments) == Outer(size=4, inner=Inner(rate=0.0))


@pytest.mark.parametrize("command", [None, "plan"])
def test_the_help_names_the_program_and_its_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str | None
) -> None:
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", ModuleSpec("eval.__main__", None))
    with pytest.raises(SystemExit):
        parse_settings(Outer, "A test.", ["--help"], command=command)
    name = "python -m eval plan" if command else "python -m eval"
    assert capsys.readouterr().out.startswith(f"usage: {name} [-h]")


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("size", "not of the form key.path=value"),
        ("=3", "not of the form key.path=value"),
        ("size.more=3", "'size' is a value, not a section"),
        ("size=[", "not a YAML value"),
        ("size=0x_", "not a YAML value"),
        ("size=yes", "size: Input should be a number; YAML reads yes"),
        ("inner.rate=on", "inner.rate: Input should be a number; YAML reads yes"),
        ("inner.weights=[1, yes]", "inner.weights: Input should be a number; YAML reads yes"),
        ("inner.rate=.inf", "inner.rate: Input should be a finite number"),
        ("inner.rate=.nan", "inner.rate: Input should be a finite number"),
        ("size=0", "size: Input should be greater than 0"),
        ("inner.rats=1", "inner.rats: unknown key; did you mean 'rate'?"),
        ("other=1", "other: unknown key; known keys: size, inner, spare."),
        ("spare.rats=1", "spare.rats: unknown key; did you mean 'rate'?"),
        ("spare.a=1", "spare.a: unknown key; known keys: rate, names, weights, fast."),
    ],
)
def test_a_bad_override_is_refused(config: Path, override: str, reason: str) -> None:
    with pytest.raises(InputError) as error:
        load_settings(Outer, config, [override])
    assert reason in str(error.value)


def test_known_keys_are_listed_once(tmp_path: Path) -> None:
    path = tmp_path / "other.yaml"
    path.write_text("size: 1\nsteps: 3\nloss: 1\ninner:\n  a: 1\n  b: 2\n  rats: 3\n")
    with pytest.raises(InputError) as error:
        load_settings(Outer, path)
    assert str(error.value).splitlines()[1:] == [
        "  inner.a: unknown key",
        "  inner.b: unknown key; known keys: rate, names, weights, fast.",
        "  inner.rats: unknown key; did you mean 'rate'?",
        "  steps: unknown key",
        "  loss: unknown key; known keys: size, inner, spare.",
    ]


def test_a_file_that_is_no_mapping_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    with pytest.raises(InputError, match=r"Cannot read .*bad.yaml: No such file"):
        load_settings(Outer, path)
    path.write_text("- a list\n")
    with pytest.raises(InputError, match="holds no mapping"):
        load_settings(Outer, path)
    for text in ("size: [\n", "size: 0x_\n"):
        path.write_text(text)
        with pytest.raises(InputError, match="not valid YAML"):
            load_settings(Outer, path)
    path.write_bytes(b"size: \xff\n")
    with pytest.raises(InputError, match="not UTF-8 text at byte 6"):
        load_settings(Outer, path)


# How a command ends.


def ending(main: Any, capsys: pytest.CaptureFixture[str]) -> tuple[Any, str]:
    """Exit code and stderr of a command."""
    with pytest.raises(SystemExit) as exit:
        run(main)
    return exit.value.code, capsys.readouterr().err


def test_an_input_error_is_one_sentence_and_exit_code_2(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def main() -> None:
        raise InputError("The value is 3; it must be 2.")

    assert ending(main, capsys) == (2, "error: The value is 3; it must be 2.\n")


def test_ctrl_c_ends_with_exit_code_130(capsys: pytest.CaptureFixture[str]) -> None:
    def main() -> None:
        raise KeyboardInterrupt

    assert ending(main, capsys) == (130, "\ninterrupted\n")


def test_a_defect_of_ours_keeps_its_traceback() -> None:
    def main() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run(main)


# The tokenizer beside a target.


def test_a_tokenizer_never_truncates_or_pads(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=8)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert len(load_tokenizer(tmp_path).encode("abcde").ids) == 5


def test_a_folder_without_a_readable_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"tokenizer.json is missing"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(InputError, match=r"tokenizer.json is no tokenizer"):
        load_tokenizer(tmp_path)
    with pytest.raises(InputError, match="neither a folder nor an id of the Hugging Face hub"):
        load_tokenizer(tmp_path / "none")


def test_a_tokenizer_that_the_hub_does_not_give_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(repository: str, filename: str) -> str:
        raise RuntimeError(f"{filename} broke off")

    monkeypatch.setattr("redrafter_jax.command_line.hf_hub_download", fail)
    with pytest.raises(InputError, match=r"\(tokenizer.json broke off\); give .* with tokenizer"):
        load_tokenizer("some/body")
