"""What every command line shares: YAML plus dotted overrides, validated; errors as sentences.

Imported by `__main__` modules alone: the library itself needs neither pydantic nor YAML.
"""

import argparse
import difflib
import os
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, NoReturn, TypeVar, get_args, get_origin

import jax
import pydantic
import yaml
from huggingface_hub import hf_hub_download
from pydantic_core import PydanticCustomError
from tokenizers import Tokenizer

from redrafter_jax.downloads import from_hub, refuse_outer_folder
from redrafter_jax.errors import InputError
from redrafter_jax.processes import join


class Settings(pydantic.BaseModel):
    """Base of all configuration models: unknown keys are errors, values never change."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @pydantic.field_validator("*", mode="wrap")
    @classmethod
    def _keep_bools(cls, value: Any, validate: Callable[[Any], Any]) -> Any:
        validated = validate(value)
        # pydantic would read true as 1.
        if _holds_bool(value) and not _holds_bool(validated):
            raise PydanticCustomError(
                "bool", "Input should be a number; YAML reads yes, no, on and off as true or false"
            )
        return validated


SettingsT = TypeVar("SettingsT", bound=Settings)


def run(main: Callable[[], None]) -> None:
    """Run a command; an `InputError` becomes its sentence on stderr and exit code 2.

    Ctrl-C ends with exit code 130, as shells count it.
    """
    # With the packages of the `aot` extra and no GPU, JAX would log a traceback: no CUDA was found.
    if not Path("/dev/nvidiactl").exists():
        os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    code = _exit_code(main)
    if code and jax.distributed.is_initialized():
        _leave(code)
    if code:
        sys.exit(code)


def _exit_code(main: Callable[[], None]) -> int:
    """Of the command, whose errors are told; those of programming are raised."""
    try:
        main()
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    except Exception as error:
        if sentence := _sentence(error):
            print(f"error: {sentence}", file=sys.stderr)
            return 2
        if not jax.distributed.is_initialized():
            raise
        _tell_of_failure(error)
        return 1
    return 0


def _sentence(error: Exception) -> str | None:
    """What the user can mend, told; None for other errors."""
    if isinstance(error, InputError):
        return str(error)
    # A full disk, or a folder that was taken away meanwhile, may meet any file that is written.
    if isinstance(error, OSError) and (error.filename or error.strerror):
        place = f"{error.filename}: " if error.filename else ""
        return f"{place}{error.strerror}."
    return None


# Seconds in which processes that fail alike tell so, each by itself, before the first one leaves.
_GRACE = 3


def _leave(code: int) -> NoReturn:
    """End a process of a job at once: in the usual way it would wait for those that wait for it."""
    sys.stdout.flush()
    sys.stderr.flush()
    time.sleep(_GRACE)
    os._exit(code)


# What errors of XLA's runtime say when another process is gone.
_LOST = ("unavailable", "deadline_exceeded", "heartbeat", "gloo", "connect")


def _tell_of_failure(error: Exception) -> None:
    reason = str(error).partition("\n")[0]
    own = f"error: process {jax.process_index()}"
    runtime = isinstance(error, jax.errors.JaxRuntimeError)
    if runtime and any(word in str(error).lower() for word in _LOST):
        sentence = f"{own} lost the others ({reason}); start all of them again."
    else:
        traceback.print_exc()
        sentence = f"{own} failed ({reason}), and the others end with it."
    print(sentence, file=sys.stderr, flush=True)


def refuse_unknown_command(word: str, commands: Iterable[str]) -> None:
    """Refuse a first word that is neither a command, nor an option, nor an override.

    Raises:
      InputError: it is none of them.
    """
    known = list(commands)
    if not word or word.startswith("-") or "=" in word or word in known:
        return
    near = difflib.get_close_matches(word, known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"known commands: {', '.join(known)}."
    raise InputError(f"{word!r} is no command; {hint}")


def parse_settings(
    model: type[SettingsT],
    description: str,
    arguments: Sequence[str] | None = None,
    *,
    command: str | None = None,
    processes: bool = False,
) -> SettingsT:
    """Settings from `--config FILE key.path=value ...`.

    `--print-config` prints the resolved whole and exits. With `processes` the command may be one of
    several that are one job, and joins the others here. A `command` of a program that has several
    is called so in the help.

    Raises:
      InputError: the file cannot be read, or any value is not valid; all problems are listed.
    """
    parser = argparse.ArgumentParser(prog=_program_name(command), description=description)
    parser.add_argument("--config", required=True, type=Path, help="YAML file")
    parser.add_argument("--print-config", action="store_true", help="print the resolved settings")
    parser.add_argument("overrides", nargs="*", metavar="key.path=value", help="override a setting")
    if processes:
        _add_processes(parser)
    parsed = parser.parse_intermixed_args(arguments)
    settings = load_settings(model, parsed.config, parsed.overrides)
    if parsed.print_config:
        print(dump_settings(settings), end="")
        sys.exit(0)
    if processes:
        join(parsed.coordinator_address, parsed.num_processes, parsed.process_id)
    return settings


def _add_processes(parser: argparse.ArgumentParser) -> None:
    title = "one of several processes that are one job (SLURM and Open MPI are known without)"
    add = parser.add_argument_group(title).add_argument
    add("--coordinator-address", metavar="HOST:PORT", help="where process 0 listens")
    add("--num-processes", type=int, metavar="N", help="in all")
    add("--process-id", type=int, metavar="I", help="of this one, from 0")


def _program_name(command: str | None) -> str | None:
    """`python -m name command` where Python was started so; None leaves it to argparse."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if spec is None:
        return None
    return f"python -m {spec.name.removesuffix('.__main__')} {command or ''}".rstrip()


def load_settings(model: type[SettingsT], path: Path, overrides: Sequence[str] = ()) -> SettingsT:
    """Validate a YAML file with overrides such as `optimizer.learning_rate=3e-4` applied.

    Raises:
      InputError: as `parse_settings`.
    """
    values = _read_yaml(path)
    for override in overrides:
        _apply(values, override)
    try:
        return model.model_validate(values)
    except pydantic.ValidationError as error:
        listed = "\n  ".join(_describe(error.errors(), model))
        raise InputError(f"{path} is not a valid configuration:\n  {listed}") from None


def dump_settings(settings: Settings) -> str:
    """The settings as YAML, every value resolved."""
    return yaml.safe_dump(settings.model_dump(mode="json"), sort_keys=False)


def make_folder(folder: Path, name: str) -> None:
    """Make a folder that a command writes to, before anything slow is done.

    Raises:
      InputError: it cannot be made; the sentence calls it by `name`, its setting.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"Cannot make {name} {folder}: {error.strerror}.") from None


def require_text(text: str, name: str) -> None:
    """Refuse lone surrogates, which no tokenizer takes.

    JSON can spell them, and bytes of the command line that are not UTF-8 become them.

    Raises:
      InputError: there is one; the sentence calls the text by `name`.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(
            f"{name} holds {text[error.start]!r} at character {error.start}, a lone surrogate; "
            "write it in valid UTF-8."
        ) from None


def load_tokenizer(name: str | Path) -> Tokenizer:
    """The tokenizer of a target: `tokenizer.json` of its folder or hub repository.

    Raises:
      InputError: there is no such file, it cannot be downloaded, or it is no tokenizer.
    """
    path = Path(name) / "tokenizer.json"
    if not path.parent.is_dir():
        fetch = partial(hf_hub_download, filename="tokenizer.json")
        path = from_hub(fetch, str(name), "tokenizer.json")
    else:
        refuse_outer_folder(path.parent, path.name)
    if not path.is_file():
        raise InputError(f"{path} is missing; save the target's tokenizer there.")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises nothing narrower
        raise InputError(f"{path} is no tokenizer: {error}.") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        values = yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)
    except OSError as error:
        raise InputError(f"Cannot read {path}: {error.strerror}.") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 text at byte {error.start}.") from None
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a number such as 0x_
        raise InputError(f"{path} is not valid YAML: {error}") from None
    if not isinstance(values, dict):
        raise InputError(f"{path} holds no mapping of settings.")
    return values


class _Loader(yaml.SafeLoader):
    """SafeLoader that reads 3e-4 as a number and 2024-01-31 as a string, as YAML 1.2 does."""

    yaml_implicit_resolvers = {  # noqa: RUF012 - the name and the place are YAML's
        first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith(":timestamp")]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$"),
    list("-+0123456789"),
)


def _apply(values: dict[str, Any], override: str) -> None:
    path, separator, text = override.partition("=")
    if not separator or not path:
        raise InputError(f"Override {override!r} is not of the form key.path=value.")
    *parents, leaf = path.split(".")
    for parent in parents:
        values = values.setdefault(parent, {})
        if not isinstance(values, dict):
            raise InputError(f"Override {override!r}: {parent!r} is a value, not a section.")
    try:
        values[leaf] = yaml.load(text, Loader=_Loader)
    except (yaml.YAMLError, ValueError):
        raise InputError(f"Override {override!r}: {text!r} is not a YAML value.") from None


def _holds_bool(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return any(map(_holds_bool, value))
    return isinstance(value, bool)


def _describe(problems: Sequence[Any], model: type[pydantic.BaseModel]) -> list[str]:
    """A line for each; a section's keys are listed once, where the last has none like it."""
    lines, lists = [], {}
    for problem in problems:
        location = problem["loc"]
        path = ".".join(map(str, location))
        if problem["type"] != "extra_forbidden":
            # Of a missing key or an inconsistent section the input is the whole section.
            got = "" if isinstance(problem["input"], dict) else f" (got {problem['input']!r})"
            lines.append(f"{path}: {problem['msg']}{got}")
            continue
        known = _known_keys(model, location[:-1])
        near = difflib.get_close_matches(str(location[-1]), known, n=1)
        if not near:
            lists[location[:-1]] = len(lines), f"; known keys: {', '.join(known)}."
        lines.append(f"{path}: unknown key" + (f"; did you mean {near[0]!r}?" if near else ""))
    for line, known in lists.values():
        lines[line] += known
    return lines


def _known_keys(model: Any, location: tuple[int | str, ...]) -> list[str]:
    for part in location:
        # A part of a list or a mapping: its index or key leads to what it holds.
        if get_origin(model) in (list, dict):
            model = _section_of(get_args(model)[-1])
        elif field := getattr(model, "model_fields", {}).get(part):
            model = _section_of(field.annotation)
    return list(getattr(model, "model_fields", []))


def _section_of(annotation: Any) -> Any:
    """Of a section that may be left out, `Section | None`, the section."""
    if get_origin(annotation) is not UnionType:
        return annotation
    return next(one for one in get_args(annotation) if one is not NoneType)
