"""What a target is asked: in its chat template, with the ends of its answers."""

from pathlib import Path
from typing import Any

import pytest
from pair_prompts import PROMPTS
from tiny_folders import add_template, encode

from eval.config import EvalSettings
from eval.loading import ask_target, find
from redrafter_jax.text.prompts import Asked


@pytest.fixture
def settings(tmp_path: Path, pair_settings: dict[str, Any]) -> dict[str, Any]:
    target = add_template(Path(pair_settings["target"]), tmp_path)
    return pair_settings | {"target": target, "max_new_tokens": 9, "report_dir": str(tmp_path)}


def asked_by(settings: dict[str, Any], **changes: Any) -> Asked:
    lengths = changes.pop("lengths", None)
    parsed = EvalSettings.model_validate(settings | changes)
    return ask_target(find(parsed), parsed, None, lengths)


def test_prompts_are_asked_in_the_template_that_the_tokenizer_brings(
    settings: dict[str, Any],
) -> None:
    asked = asked_by(settings)
    assert asked.rows == [encode(f"{text}\n") for text in PROMPTS]
    assert asked.template == f"the tokenizer of {settings['target']}"
    as_they_stand = asked_by(settings, chat_template="none")
    assert as_they_stand.rows == [encode(text) for text in PROMPTS]
    assert as_they_stand.template == "none"


def test_without_a_template_prompts_are_continued_as_they_stand(
    settings: dict[str, Any], pair_settings: dict[str, Any]
) -> None:
    asked = asked_by(settings, target=pair_settings["target"])
    assert (asked.template, asked.rows) == ("none", [encode(text) for text in PROMPTS])


def test_prompts_of_a_length_are_plain_text(settings: dict[str, Any]) -> None:
    asked = asked_by(settings, lengths=[5, 2], prompt_count=3)
    assert asked.template == "none"
    assert asked.rows == [encode("abcd\n"), encode("d\n"), encode("wmnop")]


def test_answers_end_at_end_tokens_unless_told_never_to(settings: dict[str, Any]) -> None:
    config = find(EvalSettings.model_validate(settings)).target
    assert asked_by(settings).stop_tokens == config.eos_token_ids
    assert asked_by(settings, stop="never").stop_tokens == ()
