"""Settings of `python -m train` and its commands that do not go together."""

from pathlib import Path
from typing import Any

import pytest
import regenerated
from pydantic import BaseModel

from train.config import DrafterSettings, LossSettings, OptimizerSettings, RegenerateSettings
from train.data.settings import DataSettings
from train.openings import OPENINGS

DATA = {"sources": [{"hub": "x"}], "sequence_length": 16}
CHATS: dict[str, Any] = {"data": DATA}
SELF: dict[str, Any] = {"prompts": "self", "data": {"sequence_length": 16}, "count": 9}
REGENERATION = regenerated.settings(Path("x"), Path("y"))


def source(**values: object) -> dict[str, Any]:
    return {"sources": [values]}


# Of each kind of settings what is valid, or nearly, and what makes it invalid.
CASES: dict[type[BaseModel], tuple[dict[str, Any], list[tuple[dict[str, Any], str]]]] = {
    DataSettings: (
        DATA,
        [
            (source(), "a source needs one of folder, files and hub"),
            (
                source(folder=".", hub="a/b"),
                "takes one of folder, files and hub, not folder and hub",
            ),
            (source(files=["a"], held_out=["b"]), "held_out belongs to folder, not to files"),
            (source(folder=".", format="text"), "format belongs to files or hub, not to folder"),
            (source(folder=".", include=["."]), r"'\.' is not relative to the folder"),
            (source(folder=".", held_out=["/etc/*.py"]), r"'/etc/\*\.py' is not relative"),
            (source(folder=".", exclude=["a**/b.py"]), r"has '\*\*' within a name"),
            (
                {"chat_template": "vicuna_v1.1", "template_arguments": {"enable_thinking": False}},
                "template_arguments are for Jinja templates",
            ),
        ],
    ),
    RegenerateSettings: (
        REGENERATION,
        [
            (CHATS | {"tree": {"beam_width": 2}}, "tree needs a drafter; set drafter"),
            (CHATS | {"prompt_tokens": 8}, "prompt_tokens needs count"),
            (
                CHATS | {"prompt_tokens": 8, "count": 1, "max_new_tokens": 4},
                "max_new_tokens is only for conversations",
            ),
            (CHATS | {"prompt_tokens": 16, "count": 1}, "prompt_tokens is 16, but must be less"),
            ({"data": DATA | {"train_turns": "last"}}, "does not use data.train_turns"),
            ({"data": DATA | source(hub="x", weight=2)}, "not use data.sources.weight"),
            (CHATS | {"turns": 2}, "turns is for prompts: self"),
            ({"data": {"sequence_length": 16}}, "data.sources is empty; name sources, or set prom"),
            (SELF | {"count": None}, "needs either count or tokens"),
            (SELF | {"tokens": 9}, "needs either count or tokens"),
            (SELF | {"prompt_tokens": 9}, "uses neither data.sources nor prompt_tokens"),
            (SELF | CHATS, "uses neither data.sources nor prompt_tokens"),
            (SELF | {"user_sampling": {"temperature": 0}}, "would begin with the same question"),
        ],
    ),
    DrafterSettings: (
        {"kind": "medusa"},
        [
            ({"exit_dim": 8}, "exit_dim is for a recurrent head; leave it out of kind: medusa"),
            ({"kind": "lstm"}, "Input should be 'recurrent', 'medusa' or 'eagle3'"),
            ({"kind": "eagle3", "cell": "gru"}, "cell is for a recurrent head; leave it out of"),
            ({"kind": "recurrent", "head": "low_rank"}, "head_rank is None"),
            ({"cell": "lstm"}, r"cell\s+Input should be 'simple', 'gru' or 'sum'"),
            ({"initial_drafter": "a", "initial_head": "target"}, "initial_drafter already init"),
        ],
    ),
    OptimizerSettings: (
        {"learning_rate": 0.1, "batch_size": 1},
        [
            ({"warmup_fraction": 1}, "warmup_fraction\n.*less than 1"),
            ({"warmup_fraction": -0.1}, "warmup_fraction\n.*greater than or equal to 0"),
        ],
    ),
    LossSettings: ({}, [({"soft": 0}, "hard, soft, lk and tv are all 0")]),
}


@pytest.mark.parametrize(
    ("model", "values", "sentence"),
    [
        (model, valid | changes, sentence)
        for model, (valid, cases) in CASES.items()
        for changes, sentence in cases
    ],
)
def test_settings_that_do_not_go_together_are_refused(
    model: type[BaseModel], values: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence):
        model.model_validate(values)


def test_data_settings_can_be_read_back_as_they_are_printed() -> None:
    for given in (source(folder="a"), source(files=["a"]), source(hub="a/b", split="test")):
        data = DataSettings.model_validate(DATA | given)
        assert DataSettings.model_validate(data.model_dump(mode="json")) == data


def test_varied_openings_take_turns_with_none_at_every_temperature() -> None:
    changes = SELF | {"user_openings": "varied", "temperatures": [0.0, 1.0]}
    settings = RegenerateSettings.model_validate(REGENERATION | changes)
    given = [settings.opening_of(seed) for seed in range(4 * len(OPENINGS))]
    assert given[::4] == given[1::4] == [*OPENINGS]
    assert not any(given[2::4] + given[3::4])
    assert len({*OPENINGS}) == len(OPENINGS)
