"""Text files below a folder, each one document: which belong to training, which are held out."""

import sysconfig
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path

from redrafter_jax.errors import InputError

from .settings import SourceSettings
from .types import Text


def read_folder(settings: SourceSettings, *, held_out: bool = False) -> list[Text]:
    """The training files of a folder, or the held-out ones, sorted; each is named by its path.

    Raises:
      InputError: as `find_texts`, or a file cannot be read or is not UTF-8.
    """
    files = []
    for name, path in find_texts(settings, held_out=held_out):
        try:
            files.append(Text(name, path.read_bytes().decode("utf-8")))
        except UnicodeDecodeError as error:
            raise InputError(
                f"{path} is not UTF-8 text at byte {error.start}; add it to the source's exclude."
            ) from None
        except OSError as error:
            raise InputError(f"Cannot read {path}: {error.strerror}.") from None
    return files


def find_texts(settings: SourceSettings, *, held_out: bool = False) -> list[tuple[str, Path]]:
    """Name and path of the files of a folder that `read_folder` reads.

    Raises:
      InputError: the folder is missing, or no file matches.
    """
    is_library = settings.folder == "python:stdlib"
    folder = Path(sysconfig.get_path("stdlib") if is_library else str(settings.folder))
    try:
        is_folder = folder.is_dir()
    except OSError:  # a name that is too long for the file system
        is_folder = False
    if not is_folder:
        raise InputError(f"{settings.folder!r} is not a folder; give a source the path of one.")
    paths = sorted({path for glob in settings.include for path in folder.glob(glob)})
    named = [(path.relative_to(folder).as_posix(), path) for path in paths if path.is_file()]
    files = [
        (name, path)
        for name, path in named
        if not _matches(name, settings.exclude) and _matches(name, settings.held_out) == held_out
    ]
    if not files and named and not held_out:
        raise InputError(
            f"All {len(named)} files below {settings.folder!r} that match include are left out by "
            "exclude or held_out; change those."
        )
    if not files:
        kind = "held_out" if held_out else "include"
        globs = ", ".join(map(repr, getattr(settings, kind)))
        raise InputError(
            f"No file below {settings.folder!r} matches the source's {kind}, {globs}; change it."
        )
    return files


def _matches(name: str, globs: Sequence[str]) -> bool:
    """Whether a glob fits; `*` crosses folders, and `**/` also stands for none, as in `include`."""
    return any(fnmatch(name, variant) for glob in globs for variant in _without_folders(glob))


def _without_folders(glob: str) -> list[str]:
    """The glob with and without each `**/`, which `fnmatch` takes for at least one folder."""
    before, folders, after = glob.partition("**/")
    if not folders:
        return [glob]
    return [before + kept + rest for rest in _without_folders(after) for kept in ("", folders)]
