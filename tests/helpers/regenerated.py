"""Small runs of `python -m train regenerate`: their settings, and what they write."""

import json
from pathlib import Path
from typing import Any

import yaml

from train.regenerate.__main__ import regenerate


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


def run(values: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of the output."""
    output = Path(values["output"])
    path = output.with_suffix(".yaml")
    path.write_text(yaml.safe_dump(values))
    regenerate(["--config", str(path)])
    return read(output)
