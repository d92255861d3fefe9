"""How the demo's prompts are made from held-out documents."""

import json
from collections import Counter
from fnmatch import fnmatch
from typing import Any

import pytest
from places import CONFIGS
from tiny_folders import CHARACTERS, character_tokenizer
from tokenizers import Tokenizer

from redrafter_jax.errors import InputError
from redrafter_jax.settings.files import load_settings
from redrafter_jax.text.prompts import read_prompts
from tools.hold_out import choose_prompts
from tools.pretrain import PretrainSettings
from tools.tokenizer import train_tokenizer
from train.data.types import Text


@pytest.fixture
def documents() -> list[Text]:
    letters = CHARACTERS[:-1]
    lines = [letters[i % 23 :] + letters[: i % 23] for i in range(40)]
    names = ["a/one.py", "a/two.py", "a/short.py", "b/one.py", "c/sub/one.py"]
    texts = ["\n".join(lines[i:]) + "\n" for i in range(5)]
    texts[2] = "abc\n"
    texts[3] = texts[3].replace("\n", "\n\n")
    return [Text(*pair) for pair in zip(names, texts, strict=True)]


def choose(documents: list[Text], **changes: Any) -> list[Any]:
    values: dict[str, Any] = {"count": 8, "prompt_tokens": 30, "seed": 0} | changes
    return choose_prompts(documents, character_tokenizer(), **values)


def test_prompts_are_spread_over_packages_in_turns_and_over_depths(
    documents: list[Text],
) -> None:
    prompts = choose(documents, count=9)
    assert [prompt["category"] for prompt in prompts] == ["a", "b", "c"] * 3
    sources = [prompt["source"] for prompt in prompts]
    assert len(set(sources)) == 9
    lines = sorted(int(source.rpartition(":")[2]) for source in sources if source[0] == "c")
    assert lines[0] < 12 < lines[1] < 25 < lines[2]
    assert choose(documents, count=9) == prompts


def test_a_prompt_is_the_text_at_its_source_from_a_line_start(documents: list[Text]) -> None:
    texts = dict(documents)
    for prompt in choose(documents):
        name, _, line = prompt["source"].rpartition(":")
        rest = "\n".join(texts[name].split("\n")[int(line) - 1 :])
        assert rest.startswith(prompt["prompt"])
        assert rest.split("\n")[0].strip(), "a prompt starts with a line that holds text"
        assert len(prompt["prompt"]) == 30


def test_too_little_text_is_refused(documents: list[Text]) -> None:
    with pytest.raises(InputError, match="do not hold 8 different prompts of 950 tokens"):
        choose(documents, prompt_tokens=950)


def test_a_prompts_tokens_are_the_documents_own(byte_level: Tokenizer) -> None:
    text = "    café = [naïve, 'über']  # ∑ of ﬁne things\n" * 20
    for length in range(5, 40):
        (prompt,) = choose_prompts([Text("p/a.py", text)], byte_level, 1, length, 0)
        ids = byte_level.encode(prompt["prompt"]).ids
        assert byte_level.encode(text).ids[: len(ids)] == ids
        assert length - 6 <= len(ids) <= length


@pytest.fixture(scope="module")
def byte_level() -> Tokenizer:
    return train_tokenizer(["things of the naive café  # []\n" * 20], 300)


def test_the_demos_prompts_were_held_out_of_its_target_and_drafter() -> None:
    rows = list(map(json.loads, (CONFIGS / "demo_prompts.jsonl").read_text().splitlines()))
    (source,) = load_settings(PretrainSettings, CONFIGS / "demo_target.yaml").data.sources
    for row in rows:
        assert any(fnmatch(row["source"], f"{glob}:*") for glob in source.held_out)
    assert len(read_prompts(CONFIGS / "demo_prompts.jsonl")) == len(rows) == 24
    assert max(Counter(row["category"] for row in rows).values()) == 5
