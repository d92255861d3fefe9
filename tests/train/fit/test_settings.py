"""The settings of a fit's stages, as their own commands read them."""

from pathlib import Path

import pytest
from chat_folders import CONFIG
from fit_plans import ASKED, plan_of

from train.config import RegenerateSettings, TrainSettings
from train.fit.settings import decode_settings, regenerate_settings, train_settings


@pytest.mark.parametrize("template", [None, "chatml", "folder/mine.jinja"])
def test_every_stage_has_the_template_that_was_asked_for(
    template: str | None, tmp_path: Path
) -> None:
    asked = ASKED._replace(chat_template=template)
    plan = plan_of().model_copy(update={"asked": asked})
    written = RegenerateSettings.model_validate(regenerate_settings(plan, tmp_path, 512))
    learned = TrainSettings.model_validate(train_settings(asked, tmp_path, CONFIG, 10))
    # Without one, training and evaluation have different names for the tokenizer's own.
    own = template or "tokenizer"
    assert (written.data.chat_template, learned.data.chat_template) == (own, own)
    for report, prompts in (("tune", "tuning_prompts"), ("report", "held_out")):
        assert decode_settings(plan, tmp_path, report, prompts).get("chat_template") == template
