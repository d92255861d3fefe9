"""Small runs of `python -m train regenerate`: their settings, and what they write."""

import json
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from train.regenerate.run import regenerate

# Prompts and limits of conversations such that every batch is of one shape: nothing is compiled
# twice.
LENGTH, LIMIT = 128, 4
LONG = "What is it that you would like to tell me about it tonight"


def chat(*contents: str, system: str | None = None) -> dict[str, Any]:
    """User and assistant in turns."""
    turns = [
        {"role": ("user", "assistant")[index % 2], "content": content}
        for index, content in enumerate(contents)
    ]
    return {"messages": [{"role": "system", "content": system}] * (system is not None) + turns}


CHATS = [
    chat(LONG, "RECORDED", "B", "RECORDED", system="Be kind"),
    chat(f"{LONG}, or right at once?", "RECORDED"),
    chat(f"{LONG}, or then at last", "RECORDED", "C", "RECORDED"),
]


def settings(target: Path, output: Path, **changes: Any) -> dict[str, Any]:
    return {
        "target": str(target),
        "target_dtype": "float32",
        "batch_size": 2,
        "temperatures": [0.0, 0.8],
        "output": str(output),
    } | changes


def read(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in output.read_text().splitlines()]


class Regeneration:
    """Runs of one kind, which write the rows of an output; `finished` holds those of a whole one.

    Of the section `data` changes may state some keys only.
    """

    def __init__(self, target: Path, folder: Path, **values: Any) -> None:
        self.target, self.values, self._folder = target, values, folder

    def __call__(self, output: Path, **changes: Any) -> list[dict[str, Any]]:
        changes["data"] = self.values["data"] | changes.get("data", {})
        path = output.with_suffix(".yaml")
        path.write_text(yaml.safe_dump(settings(self.target, output, **self.values | changes)))
        regenerate(["--config", str(path)])
        return read(output)

    @cached_property
    def finished(self) -> Path:
        # Where it is asked for, not where the fixture is made: the module says how to compile.
        self(self._folder / "rows.jsonl")
        return self._folder / "rows.jsonl"
