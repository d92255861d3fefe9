"""Settings of training data: the sources, and how their records are processed."""

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
    """A source of training data: a `folder`, `files` or a `hub` dataset.

    `folder` is a folder of text files, one document per file: a path, or `python:stdlib` for the
    standard library of the running Python. Globs are relative to the folder. A file is training
    data if it matches `include` and neither `exclude` nor `held_out`. In `include`, `*` matches
    within one folder; in `exclude` and `held_out` it crosses folders, so `json/*` matches
    everything below `json`. `**/` matches any number of folders, including none.

    `files` are paths or globs of files with records: `.jsonl`, `.json` (a list) or `.parquet`, the
    first two also as `.gz`. `hub` is the id of a dataset, whose `split` is read. `format` sets the
    format of records whose keys fit several formats. `full_masks: allow` accepts a source in which
    every mask counts every token.

    `weight` is the source's share of the rows, relative to the weights of the other sources.
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
        """Display name: the folder, the first of the files, or the dataset."""
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
                    f"{glob!r} is not relative to the folder; use a glob such as 'package/*.py'"
                )
            if any("**" in part and part != "**" for part in path.parts):
                raise ValueError(f"{glob!r} has '**' within a name; use '**/' or '*'")
        # Normalize, so that ./json/* and json//* mean json/* in every matcher.
        return [str(PurePosixPath(glob)) for glob in globs]

    @model_validator(mode="after")
    def _one_kind(self) -> "SourceSettings":
        given = [kind for kind in _KINDS if getattr(self, kind) is not None]
        if len(given) != 1:
            raise ValueError(
                f"a source takes one of folder, files and hub, not {' and '.join(given)}"
                if given
                else "a source needs one of folder, files and hub"
            )
        for name in sorted(self.model_fields_set & _OF_KIND.keys()):
            # A default, as --print-config writes it, does not count as set.
            stated = getattr(self, name) != type(self).model_fields[name].default
            if stated and given[0] not in _OF_KIND[name]:
                raise ValueError(
                    f"{name} belongs to {' or '.join(_OF_KIND[name])}, not to {given[0]}; leave it "
                    "out"
                )
        return self


class DataSettings(Settings):
    """Sources of training data, and how their records become rows of `sequence_length` tokens.

    `chat_template` renders conversations: "tokenizer" for the tokenizer's template, the path of a
    Jinja file, or a built-in: chatml, gemma, llama2, llama3, mistral, mistral_v0.1, vicuna_v1.1,
    zephyr. `template_arguments` are passed to the template, such as `enable_thinking: false`.
    `train_turns` selects the assistant turns that carry loss; `last` also ends the conversation at
    that turn.

    `long_records` are cut into pieces of `sequence_length`, or refused. `pack` puts several
    documents into one row if they fit; documents do not attend to each other. A record that cannot
    be used is skipped, counted and listed, and the run stops if more than half of a source is
    skipped. With `skips: allow` it continues, with `skips: refuse` it stops at any skip.
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
                f"template_arguments are for Jinja templates, not {self.chat_template}; "
                "leave them out"
            )
        return self

    def name(self, index: int) -> str:
        """The name of the source at this index of `sources`, for messages."""
        return f"data.sources.{index} ({self.sources[index].title})"
