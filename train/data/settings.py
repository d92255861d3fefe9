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
    """A source of training data: exactly one of `folder`, `files` and `hub`.

    In a folder, a file is training data if it matches `include` and neither `exclude` nor
    `held_out`. These globs are relative to the folder, and `**/` matches any number of folders,
    including none.

    Attributes:
      folder: folder of text files, one document per file: a path, or `python:stdlib` for the
        standard library of the running Python.
      include: globs of files; `*` matches within one folder.
      exclude: globs of files that are left out; `*` crosses folders, so `json/*` matches everything
        below `json`.
      held_out: globs of files that are kept for evaluation; `*` crosses folders.
      files: paths or globs of files with records: `.jsonl`, `.json` (a list) or `.parquet`; the
        first two also as `.gz`.
      hub: id of a dataset on the Hugging Face hub.
      split: split of the dataset.
      subset: subset (configuration) of the dataset; null: its default.
      revision: branch, tag or commit of the dataset; null: its default branch.
      format: format of the records; needed only if their keys fit several formats.
      full_masks: "allow" accepts a source in which all masks count every token, prompts included;
        by default such a source is taken for a mistake and refused.
      weight: the source's share of the rows, relative to the weights of the other sources.
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
                f"a source takes one of folder, files and hub, not {' and '.join(given)}; leave "
                "out all but one"
                if given
                else "a source needs one of folder, files and hub; set one of them"
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
    """Sources of training data, and how their records become rows of tokens.

    Attributes:
      sources: the sources, at least one.
      sequence_length: number of tokens in each row.
      shuffle_seed: seed of the order of the rows.
      chat_template: template that renders conversations: "tokenizer" for the tokenizer's template,
        the path of a Jinja file, or a built-in: chatml, gemma, llama2, llama3, mistral,
        mistral_v0.1, vicuna_v1.1, zephyr.
      template_arguments: arguments of a Jinja template, such as `enable_thinking: false`.
      train_turns: assistant turns that carry loss; "last" also ends each conversation there.
      long_records: "cut" cuts a record that is longer than a row into pieces; "refuse" stops.
      pack: whether several documents share a row if they fit; no document attends to another.
      skips: "report" lists the records that cannot be used and continues without them, but stops if
        they are more than half of a source; "allow" always continues; "refuse" stops at such a
        record, and at an answer that carries no loss because a token spans its boundary.
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
        """The name in messages of the source at this index of `sources`."""
        return f"data.sources.{index} ({self.sources[index].title})"
