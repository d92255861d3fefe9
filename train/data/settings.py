"""Settings of training data: the sources, and what is done with their records."""

from pathlib import PurePosixPath
from typing import Any, Literal

from pydantic import Field, NonNegativeInt, PositiveInt, field_validator, model_validator

from redrafter_jax.settings.files import Settings
from redrafter_jax.text.chat_formats import FORMATS

from .types import Format

_KINDS = ("folder", "files", "hub")
_OF_KIND = {
    "include": ("folder",),
    "exclude": ("folder",),
    "held_out": ("folder",),
    "split": ("hub",),
    "subset": ("hub",),
    "revision": ("hub",),
    "format": ("files", "hub"),
    "full_masks": ("files", "hub"),
}


class SourceSettings(Settings):
    """One place that training data comes from: a `folder`, `files` or a `hub` dataset.

    `folder` holds text files, each a document; it is a path, or `python:stdlib` for the standard
    library of the running Python. Globs are relative to it; a file is training data if it matches
    `include` and neither `exclude` nor `held_out`. In `include` `*` stays within a folder, in the
    other two it crosses folders: `json/*` is everything below `json`. `**/` is any number of
    folders, none too.

    `files` hold records: paths or globs of `.jsonl`, `.json` (a list) or `.parquet`, the first two
    also as `.gz`. `hub` is a dataset's id, of which `split` is read. `format` says what the records
    are where they have the keys of several; `full_masks: allow` takes a source whose masks leave
    nothing out.

    `weight` is the source's part of the rows, relative to the other sources' weights.
    """

    folder: str | None = None
    include: list[str] = ["**/*.py"]
    exclude: list[str] = []
    held_out: list[str] = []
    files: list[str] | None = Field(default=None, min_length=1)
    hub: str | None = None
    split: str = "train"
    subset: str | None = None
    revision: str | None = None
    format: Format | None = None
    full_masks: Literal["refuse", "allow"] = "refuse"
    weight: float = Field(default=1.0, ge=1e-4, le=1e4)

    @property
    def title(self) -> str:
        """The name that people know it by: the folder, the first of the files or the dataset."""
        if self.files is not None:
            more = len(self.files) - 1
            return self.files[0] + (f" and {more} more" if more else "")
        return self.folder or f"hub:{self.hub}"

    @field_validator("include", "exclude", "held_out")
    @classmethod
    def _relative_globs(cls, globs: list[str]) -> list[str]:
        for glob in globs:
            path = PurePosixPath(glob)
            if not path.parts or path.is_absolute() or ".." in path.parts:
                raise ValueError(
                    f"{glob!r} is no glob below the folder; write one such as 'package/*.py'"
                )
            if any("**" in part and part != "**" for part in path.parts):
                raise ValueError(f"{glob!r} has '**' beside other letters; write '**/' or '*'")
        # Plain, so that ./json/* and json//* mean json/* however they are matched.
        return [str(PurePosixPath(glob)) for glob in globs]

    @model_validator(mode="after")
    def _one_kind(self) -> "SourceSettings":
        given = [kind for kind in _KINDS if getattr(self, kind) is not None]
        if len(given) != 1:
            raise ValueError(
                f"a source has one of folder, files and hub, and this one {' and '.join(given)}"
                if given
                else "a source needs one of folder, files and hub"
            )
        for name in sorted(self.model_fields_set & _OF_KIND.keys()):
            # As --print-config writes a default it is no statement.
            stated = getattr(self, name) != type(self).model_fields[name].default
            if stated and given[0] not in _OF_KIND[name]:
                raise ValueError(f"{name} belongs to {' or '.join(_OF_KIND[name])}, not {given[0]}")
        return self


class DataSettings(Settings):
    """The sources, and how their records become rows of `sequence_length` tokens.

    `chat_template` renders conversations: the tokenizer's own, a file of Jinja, or a built-in:
    chatml, gemma, llama2, llama3, mistral, mistral_v0.1, vicuna_v1.1, zephyr.
    `template_arguments` are handed to the template, such as `enable_thinking: false`.
    `train_turns` says which of the assistant's turns carry loss; `last` also ends the conversation
    there.

    `long_records` are cut into pieces of `sequence_length`, or refused. `pack` puts several
    documents into a row where they fit; none of them sees another. A record that cannot be used is
    left out, counted and listed, and where they are more than half of a source the run stops; with
    `skips: allow` it goes on, with `skips: refuse` it stops at any.
    """

    sources: list[SourceSettings] = Field(min_length=1)
    sequence_length: PositiveInt
    shuffle_seed: NonNegativeInt = 0
    chat_template: str = "tokenizer"
    template_arguments: dict[str, Any] = {}
    train_turns: Literal["all", "last"] = "all"
    long_records: Literal["cut", "refuse"] = "cut"
    pack: bool = False
    skips: Literal["report", "refuse", "allow"] = "report"

    @model_validator(mode="after")
    def _read_arguments(self) -> "DataSettings":
        if self.template_arguments and self.chat_template in FORMATS:
            raise ValueError(
                f"template_arguments are for templates in Jinja, not {self.chat_template}; "
                "leave them out"
            )
        return self

    def name(self, index: int) -> str:
        """What messages call the source of this number, which is its place in `sources`."""
        return f"data.sources.{index} ({self.sources[index].title})"
