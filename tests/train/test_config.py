"""Settings of `python -m train` and its commands that do not go together."""

from pathlib import Path
from typing import Any

import pytest
import regenerated

from train.config import DrafterSettings, LossSettings, OptimizerSettings, RegenerateSettings
from train.openings import OPENINGS

DATA = {"sources": [{"hub": "x"}], "sequence_length": 16}
CHATS: dict[str, Any] = {"data": DATA}
SELF: dict[str, Any] = {"prompts": "self", "data": {"sequence_length": 16}, "count": 9}


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (CHATS | {"draft": {"beam_width": 2}}, "draft is how a drafter drafts; give drafter"),
        (CHATS | {"prompt_tokens": 8}, "count is missing"),
        (
            CHATS | {"prompt_tokens": 8, "count": 1, "max_new_tokens": 4},
            "max_new_tokens is for conversations",
        ),
        (CHATS | {"prompt_tokens": 16, "count": 1}, "prompt_tokens is 16, which leaves nothing"),
        ({"data": DATA | {"train_turns": "last"}}, "does not read data.train_turns"),
        ({"data": DATA | {"sources": [{"hub": "x", "weight": 2}]}}, "not read data.sources.weight"),
        (CHATS | {"turns": 2}, "turns is for prompts: self"),
        ({"data": {"sequence_length": 16}}, "data.sources is empty; name sources, or set prompts:"),
        (SELF | {"count": None}, "needs either count or tokens"),
        (SELF | {"tokens": 9}, "needs either count or tokens"),
        (SELF | {"prompt_tokens": 9}, "reads neither data.sources nor prompt_tokens"),
        (SELF | CHATS, "reads neither data.sources nor prompt_tokens"),
        (SELF | {"user_sampling": {"temperature": 0}}, "would begin with the same question"),
    ],
)
def test_regeneration_is_of_one_kind(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        RegenerateSettings.model_validate(regenerated.settings(Path("x"), Path("y"), **changes))


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"cell": "gru"}, "cell is for a recurrent head; leave it out of kind: medusa"),
        ({"exit_dim": 8}, "exit_dim is for a recurrent head; leave it out of kind: medusa"),
        ({"context_layers": [0]}, "context_layers is for a recurrent head; leave it out of kind"),
        ({"head": "target", "num_draft_layers": 0}, "is 0 and head is 'target', which leaves noth"),
        ({"kind": "eagle"}, "Input should be 'recurrent' or 'medusa'"),
        ({"kind": "recurrent", "head": "low_rank"}, "head_rank is None"),
        ({"cell": "lstm"}, r"cell\s+Input should be 'simple', 'gru' or 'sum'"),
    ],
)
def test_a_drafter_has_the_settings_of_its_kind(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        DrafterSettings.model_validate({"kind": "medusa"} | settings)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"warmup_fraction": 1}, "warmup_fraction\n.*less than 1"),
        ({"warmup_fraction": -0.1}, "warmup_fraction\n.*greater than or equal to 0"),
    ],
)
def test_a_schedule_falls_after_its_warm_up(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        OptimizerSettings.model_validate({"learning_rate": 0.1, "batch_size": 1} | settings)


def test_some_loss_has_a_weight() -> None:
    with pytest.raises(ValueError, match="hard, soft and lk are all 0"):
        LossSettings(hard=0, soft=0, lk=0)


def test_varied_openings_take_turns_with_none_at_every_temperature() -> None:
    changes = SELF | {"user_openings": "varied", "temperatures": [0.0, 1.0]}
    settings = RegenerateSettings.model_validate(
        regenerated.settings(Path("x"), Path("y"), **changes)
    )
    given = [settings.opening_of(seed) for seed in range(4 * len(OPENINGS))]
    assert given[::4] == given[1::4] == [*OPENINGS]
    assert not any(given[2::4] + given[3::4])
    assert len({*OPENINGS}) == len(OPENINGS)
