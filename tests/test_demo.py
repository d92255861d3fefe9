"""`make demo`: SmolLM2, conversations that it wrote, and the ways of drafting that are compared."""

import json
from pathlib import Path

import pytest
from needs import fetched
from places import CONFIGS
from rich.console import Console
from tiny_models import tiny_config

from eval.commands import evaluate
from eval.config import CompareSettings
from redrafter_jax.files.drafter_files import load_drafter
from redrafter_jax.files.real_models import SMOLLM2
from redrafter_jax.files.target_files import open_target
from redrafter_jax.files.tree_table import load_tree
from redrafter_jax.settings.files import load_settings
from redrafter_jax.text.chat_template import encode_turns, find_template
from redrafter_jax.text.prompts import read_prompts
from train.config import RegenerateSettings, TrainSettings
from train.loop import train

FOLDER = CONFIGS / "smollm2_135m"
TOKENS = [json.loads(line) for line in (FOLDER / "tokens.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def model() -> Path:
    return fetched(SMOLLM2)


def test_the_settings_are_valid_and_name_what_is_there() -> None:
    settings = load_settings(TrainSettings, FOLDER / "demo.yaml", ["target=any"])
    assert settings.data.sources[0].files == ["configs/smollm2_135m/tokens.jsonl"]
    compared = load_settings(CompareSettings, FOLDER / "compare.yaml", ["target=any"])
    heads = {way.drafter for way in compared.drafters.values()} - {None}
    assert heads == {str(settings.output_dir / "drafter"), "configs/smollm2_135m/drafter"}
    assert settings.acceptance is not None
    paths = (compared.prompts, settings.acceptance.prompts)
    held_out, tried = ({prompt.turns for prompt in read_prompts(path)} for path in paths)
    assert len(held_out) == 24
    assert not held_out & tried
    assert not (held_out | tried) & {tuple(row["questions"]) for row in TOKENS}


def test_the_shipped_head_is_that_of_its_settings_and_small() -> None:
    settings = load_settings(TrainSettings, FOLDER / "attending.yaml", ["target=any"])
    shipped = load_drafter(FOLDER / "drafter").config
    assert len(shipped.draft_tokens) == settings.drafter.draft_vocab_size
    target = tiny_config(
        vocab_size=49152,
        hidden_size=576,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=64,
        rope_theta=1e5,
        rms_norm_eps=1e-5,
    )
    assert shipped == settings.drafter.build(target, settings.draft_rounds, shipped.draft_tokens)
    assert load_tree(FOLDER / "drafter") is not None
    assert sum(path.stat().st_size for path in (FOLDER / "drafter").iterdir()) < 16e6


def test_tokens_keep_to_the_limits_that_the_settings_of_their_writing_state() -> None:
    settings = load_settings(RegenerateSettings, FOLDER / "regenerate.yaml", ["target=any"])
    assert len(TOKENS) == settings.count
    assert len({row["questions"][0] for row in TOKENS}) == len(TOKENS)
    for row in TOKENS:
        assert row["temperature"] == settings.temperature_of(row["seed"])
        assert len(row["input_ids"]) == len(row["loss_mask"]) <= settings.data.sequence_length
        # The prompt, then the answer.
        answer = sum(row["loss_mask"])
        assert row["loss_mask"] == [0] * (len(row["loss_mask"]) - answer) + [1] * answer
        assert 0 < answer <= (settings.max_new_tokens or 0)


@pytest.mark.long
def test_tokens_are_conversations_in_the_models_template(model: Path) -> None:
    files = open_target(model)
    tokenizer = files.tokenizer
    template = find_template("tokenizer", files, "")
    for row in TOKENS:
        prompt = row["input_ids"][: row["loss_mask"].index(1)]
        asked = [{"role": "user", "content": row["questions"][0]}]
        assert encode_turns(template, tokenizer, asked) == prompt


@pytest.mark.long
def test_a_head_that_has_hardly_begun_decodes_the_targets_own_texts(
    model: Path, tmp_path: Path
) -> None:
    overrides = [f"target={model}", f"output_dir={tmp_path}", "steps=2", "acceptance=null"]
    small = ["data.sequence_length=128", "data.pack=false", "optimizer.batch_size=1"]
    settings = load_settings(TrainSettings, FOLDER / "demo.yaml", [*overrides, *small])
    head = train(settings, Console(quiet=True)).exported
    ways = ("two-minute head", "shipped head", "shipped head and lookup")
    evaluate(
        [
            "compare",
            f"--config={FOLDER / 'compare.yaml'}",
            f"target={model}",
            f"drafters.two-minute head.drafter={head}",
            "prompt_count=4",
            "max_new_tokens=24",
            f"report_dir={tmp_path}",
        ]
    )
    report = json.loads((tmp_path / "compare.json").read_text())
    assert [case["described"] for case in report["samplings"]] == ["greedy", "T 0.7"]
    for case in report["samplings"]:
        assert case["answers"]["chat_template"] == "the target's tokenizer"
        assert set(case["methods"]) == {"baseline", "lookup", *ways}
        assert all(measures["identical"] == 1.0 for measures in case["methods"].values())
        assert case["methods"]["shipped head"]["acceptance_length"] > 1.4
