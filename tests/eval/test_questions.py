"""What a target is asked: in its chat template, with the ends of its answers."""

import json
from pathlib import Path
from typing import Any

import pytest
from pair_prompts import PROMPTS
from tiny_folders import add_template, decode, encode

from eval.abstract import abstract_target
from eval.benchmark import make_batches
from eval.config import RowSettings, TuneSettings
from eval.questions import find_target, read_questions
from redrafter_jax import SamplingConfig, generate_autoregressive
from redrafter_jax.models.target import Target
from redrafter_jax.text.prompts import EncodedPrompts


@pytest.fixture
def settings(tmp_path: Path, pair_settings: dict[str, Any]) -> dict[str, Any]:
    target = add_template(Path(pair_settings["target"]), tmp_path)
    return pair_settings | {"target": target, "max_new_tokens": 9, "report_dir": str(tmp_path)}


def asked_by(settings: dict[str, Any], **changes: Any) -> EncodedPrompts:
    lengths = changes.pop("lengths", None)
    parsed = TuneSettings.model_validate(settings | changes)
    found = find_target(parsed)
    target = abstract_target(found.files.config, "float32")  # there is nothing to answer
    return read_questions(found, parsed, None, lengths).encode_turns(target, SamplingConfig())


def test_prompts_are_asked_in_the_template_that_the_tokenizer_brings_unless_told_otherwise(
    settings: dict[str, Any], pair_settings: dict[str, Any]
) -> None:
    cases: list[tuple[dict[str, Any], str, list[str]]] = [
        ({}, "the target's tokenizer", [f"{text}\n" for text in PROMPTS]),
        ({"chat_template": "none"}, "none", PROMPTS),
        # A target without a template.
        ({"target": pair_settings["target"]}, "none", PROMPTS),
        # Prompts of a given length are plain text.
        ({"lengths": [5, 2], "prompt_count": 3}, "none", ["abcd\n", "d\n", "wmnop"]),
    ]
    for changes, template, texts in cases:
        asked = asked_by(settings, **changes)
        assert (asked.template, asked.rows) == (template, [encode(text) for text in texts])


def test_answers_end_at_end_tokens_unless_told_never_to(settings: dict[str, Any]) -> None:
    config = find_target(TuneSettings.model_validate(settings)).files.config
    assert asked_by(settings).stop_tokens == config.eos_token_ids
    assert asked_by(settings, stop="never").stop_tokens == ()


@pytest.mark.parametrize(
    "sampling", [SamplingConfig(), pytest.param(SamplingConfig(0.9), marks=pytest.mark.long)]
)
def test_second_turns_stand_behind_the_baselines_answers_under_the_same_sampling_and_seed(
    settings: dict[str, Any], tmp_path: Path, habitual_target: Target, sampling: SamplingConfig
) -> None:
    questions = [["abc", "de"], ["w"], ["mnop", "kk"]]
    prompts = tmp_path / "question.jsonl"
    prompts.write_text("".join(json.dumps({"turns": turns}) + "\n" for turns in questions))
    parsed = TuneSettings.model_validate(settings | {"prompts": str(prompts), "first_seed": 5})
    read = read_questions(find_target(parsed), parsed, 1)
    asked = read.encode_turns(habitual_target, sampling)
    assert asked.rows[:3] == [encode(f"{turns[0]}\n") for turns in questions]
    answers = generate_autoregressive(
        habitual_target, asked.rows[:3], max_new_tokens=9, sampling=sampling, seeds=[5, 6, 7]
    ).tokens
    for row, index in ((3, 0), (4, 2)):
        before, after = questions[index]
        ends = [at for at, token in enumerate(answers[index]) if token in asked.stop_tokens]
        said = decode(answers[index][: min(ends, default=9)]).strip()
        assert asked.rows[row] == encode(f"{before}\n{said}\n{after}\n")
    assert asked.turns == [1, 1, 1, 2, 2]
    rows = RowSettings(max_new_tokens=9, first_seed=5)
    batches = make_batches(asked, 3, sampling, rows)
    assert [batch.seeds for batch in batches] == [[5, 6, 7], [5, 7]]
