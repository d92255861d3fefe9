"""A pair in folders and its prompts, for every command that decodes."""

import json
from typing import Any

import pytest
from pair_prompts import PROMPTS
from tiny_folders import PairFolders


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
