"""How the demo's prompts are made from held-out documents."""

import json
from collections import Counter
from fnmatch import fnmatch

import pytest
from places import CONFIGS

from redrafter_jax.errors import InputError
from redrafter_jax.settings.files import load_settings
from redrafter_jax.text.prompts import read_prompts
from tools.hold_out import choose_prompts
from tools.pretrain import PretrainSettings
from tools.tokenizer import train_tokenizer
from train.data.types import Text


def test_prompts_are_line_starts_of_all_packages_with_the_documents_own_tokens() -> None:
    text = "    café = [naïve, 'über']  # ∑ of ﬁne things\n\n" * 20
    documents = [Text(f"{package}/a.py", text) for package in "ab"]
    tokenizer = train_tokenizer(["things of the naive café  # []\n" * 20], 300)
    for length in range(5, 40):
        rows = choose_prompts(documents, tokenizer, 4, length, 0)
        assert [row["category"] for row in rows] == ["a", "b"] * 2
        for row in rows:
            line = int(row["source"].rpartition(":")[2])
            rest = "\n".join(text.split("\n")[line - 1 :])
            assert rest.startswith(row["prompt"])
            ids = tokenizer.encode(row["prompt"]).ids
            assert tokenizer.encode(rest).ids[: len(ids)] == ids
            assert length - 6 <= len(ids) <= length
    with pytest.raises(InputError, match="do not have 6 different prompts of 9500 tokens"):
        choose_prompts(documents, tokenizer, 6, 9500, 0)


def test_the_demos_prompts_were_held_out_of_its_target_and_drafter() -> None:
    rows = list(map(json.loads, (CONFIGS / "demo_prompts.jsonl").read_text().splitlines()))
    (source,) = load_settings(PretrainSettings, CONFIGS / "demo_target.yaml").data.sources
    for row in rows:
        assert any(fnmatch(row["source"], f"{glob}:*") for glob in source.held_out)
    assert len(read_prompts(CONFIGS / "demo_prompts.jsonl")) == len(rows) == 24
    assert max(Counter(row["category"] for row in rows).values()) == 5
