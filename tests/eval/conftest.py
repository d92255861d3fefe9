"""A pair in folders and its prompts, for every command that decodes."""

import json
from pathlib import Path
from typing import Any

import pytest
from pair_prompts import PROMPTS
from tiny_folders import PairFolders, write_yaml


@pytest.fixture(scope="session")
def pair_settings(folders: PairFolders, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the settings of a command say of a good pair and five prompts of two categories."""
    rows = [
        {"question_id": f"q{i}", "category": "odd" if i % 2 else "even", "prompt": text}
        for i, text in enumerate(PROMPTS)
    ]
    prompts = tmp_path_factory.mktemp("pair") / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"target": folders.target, "drafter": folders.drafter, "prompts": str(prompts)}


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory, pair_settings: dict[str, Any]) -> Path:
    """Settings of `eval compare`: lookup and a head, greedy and sampled."""
    folder = tmp_path_factory.mktemp("compare")
    values = {
        "target": pair_settings["target"],
        "prompts": pair_settings["prompts"],
        "drafters": {
            "lookup": {"tree": {"lookup_tokens": 3}},
            "head": {
                "drafter": pair_settings["drafter"],
                "tree": {"beam_width": 2, "draft_rounds": 2},
            },
        },
        "samplings": [{"temperature": 0.0}, {"temperature": 0.8}],
        "dtype": "float32",
        "max_new_tokens": 16,
        "report_dir": str(folder),
    }
    return write_yaml(folder / "compare.yaml", values)
