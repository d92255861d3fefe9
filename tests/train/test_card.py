"""The model card of a head: what the hub's own client reads of it."""

import json
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard
from train_runs import settings

from train.card import write_card
from train.config import TrainSettings

REPORT = {
    "device": "a processor, 2 cores",
    "batch_size": 1,
    "config": {"dtype": "float32"},
    "samplings": [
        {
            "described": "greedy",
            "prompts": [{}] * 8,
            "methods": {
                "baseline": {},
                "head": {
                    "acceptance_length": 1.754,
                    "speedup": 1.25,
                    "speedup_quartiles": [1.14, 1.34],
                },
            },
            "categories": {
                "coding": {
                    "prompts": 3,
                    "methods": {
                        "head": {
                            "acceptance_length": 2.0,
                            "speedup": None,
                            "speedup_quartiles": None,
                        }
                    },
                }
            },
        }
    ],
}


@pytest.fixture
def run(tmp_path: Path) -> TrainSettings:
    """The settings of a run that has ended, on a hub's target."""
    values: dict[str, Any] = settings(tmp_path / "target", tmp_path / "run")
    made = TrainSettings.model_validate(values | {"target": "some/Model-1B"})
    (tmp_path / "run" / "drafter").mkdir(parents=True)
    counts = {"records": 1200, "tokens": 34567, "learnt": 23456}
    data = [{"source": f"data.sources.0 ({tmp_path}/private/chats.jsonl)", **counts}]
    (tmp_path / "run" / "data.json").write_text(json.dumps(data))
    return made


def card(run: TrainSettings) -> ModelCard:
    return ModelCard.load(run.output_dir / "drafter" / "README.md")


def test_the_hub_reads_what_it_is_of_and_that_the_licence_is_open(run: TrainSettings) -> None:
    write_card(run)
    stated = card(run).data.to_dict()
    assert stated["base_model"] == "some/Model-1B"
    assert stated["library_name"] == "redrafter-jax"
    assert (stated["license"], stated["license_name"]) == ("other", "not-stated")
    assert "speculative-decoding" in stated["tags"]


def test_its_commands_name_the_template_that_the_head_was_trained_with(
    run: TrainSettings, tmp_path: Path
) -> None:
    file = tmp_path / "private" / "mine.jinja"
    data = run.data.model_copy(update={"chat_template": str(file)})
    write_card(run.model_copy(update={"data": data}))
    text = card(run).text
    assert text.count("of/this/head --chat-template mine.jinja\n") == 2
    assert "set `tokenizer.chat_template`" in text
    write_card(run)
    assert "template" not in card(run).text


def test_it_tells_data_and_steps_and_no_path_of_this_machine(
    run: TrainSettings, tmp_path: Path
) -> None:
    write_card(run)
    text = card(run).text
    assert "| chats.jsonl | 1,200 | 34,567 | 23,456 |" in text
    assert "| steps | 40 |" in text
    assert "soft 1" in text
    assert str(tmp_path) not in text


def test_a_target_of_a_folder_is_named_by_its_last_part(run: TrainSettings, tmp_path: Path) -> None:
    (tmp_path / "secret" / "model").mkdir(parents=True)
    write_card(run.model_copy(update={"target": tmp_path / "secret" / "model"}))
    assert "base_model" not in card(run).data.to_dict()
    assert "A draft head for model\n" in card(run).text
    assert "secret" not in card(run).text


@pytest.mark.parametrize("target", ["model.gguf", "models/model.gguf", "../model", "a/b/model"])
def test_a_target_without_a_name_on_the_hub_has_a_place_in_the_commands(
    run: TrainSettings, target: str
) -> None:
    write_card(run.model_copy(update={"target": Path(target)}))
    assert "base_model" not in card(run).data.to_dict()
    text = card(run).text
    assert f"The target was a folder or a file, `{Path(target).name}`: put its path" in text
    assert "redrafter serve --target path/or/hub-id/of/the/target --drafter" in text
    assert "python -m" not in text


def test_figures_come_by_kind_of_prompt_with_their_command(
    run: TrainSettings, tmp_path: Path
) -> None:
    report = tmp_path / "compare.json"
    report.write_text(json.dumps(REPORT))
    write_card(run, report)
    text = card(run).text
    assert "| greedy | all | 8 | head | 1.75 | 1.25 (1.14 to 1.34) |" in text
    assert "| greedy | coding | 3 | head | 2.00 |  |" in text
    assert "a processor, 2 cores, float32, batch size 1" in text
    assert "redrafter-eval compare --config compare.yaml" in text


def test_a_card_that_somebody_has_edited_stays(run: TrainSettings) -> None:
    path = run.output_dir / "drafter" / "README.md"
    path.write_text("My own words.")
    write_card(run)
    assert path.read_text() == "My own words."
    path.unlink()
    write_card(run)
    first = path.read_text()
    write_card(run.model_copy(update={"steps": 41}))
    assert path.read_text() != first
