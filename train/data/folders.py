"""Text files in a folder, one document per file, split into training and held-out files."""

import sysconfig
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path

from redrafter_jax.errors import InputError

from .settings import SourceSettings
from .types import Text


def read_folder(settings: SourceSettings, *, held_out: bool = False) -> list[Text]:
    """Read the training files of a folder, or with `held_out` the held-out files, sorted by path.

    Raises:
      InputError: the errors of `find_texts`, or a file cannot be read or is not UTF-8.
    """
    files = []
    for name, path in find_texts(settings, held_out=held_out):
        try:
            files.append(Text(name, path.read_bytes().decode("utf-8")))
        except UnicodeDecodeError as error:
            raise InputError(
                f"{path} is not UTF-8 at byte {error.start}; add it to the source's exclude."
            ) from None
        except OSError as error:
            raise InputError(
                f"Cannot read {path}: {error.strerror}; make the file readable, or add it to the "
                "source's exclude."
            ) from None
    return files


def find_texts(settings: SourceSettings, *, held_out: bool = False) -> list[tuple[str, Path]]:
    """Find the files that `read_folder` reads, as pairs of name and path.

    Raises:
      InputError: the folder is missing, or no file matches.
    """
    is_library = settings.folder == "python:stdlib"
    folder = Path(sysconfig.get_path("stdlib") if is_library else str(settings.folder))
    try:
        is_folder = folder.is_dir()
    except OSError:  # the name is too long for the file system
        is_folder = False
    if not is_folder:
        raise InputError(f"{settings.folder!r} is not a folder; correct the source's folder.")
    paths = sorted({path for glob in settings.include for path in folder.glob(glob)})
    named = [(path.relative_to(folder).as_posix(), path) for path in paths if path.is_file()]
    files = [
        (name, path)
        for name, path in named
        if not _matches(name, settings.exclude) and _matches(name, settings.held_out) == held_out
    ]
    if not files and named and not held_out:
        raise InputError(
            f"All {len(named)} files in {settings.folder!r} that match include are left out by "
            "exclude or held_out; change these globs."
        )
    if not files:
        kind = "held_out" if held_out else "include"
        globs = ", ".join(map(repr, getattr(settings, kind)))
        raise InputError(
            f"No file in {settings.folder!r} matches the source's {kind}, {globs}; change {kind}."
        )
    return files


def _matches(name: str, globs: Sequence[str]) -> bool:
    """Whether one of the globs matches; `*` crosses folders, and `**/` also matches no folder."""
    return any(fnmatch(name, variant) for glob in globs for variant in _without_folders(glob))


def _without_folders(glob: str) -> list[str]:
    """Variants of the glob with and without each `**/`, which `fnmatch` would require."""
    before, folders, after = glob.partition("**/")
    if not folders:
        return [glob]
    return [before + kept + rest for rest in _without_folders(after) for kept in ("", folders)]
