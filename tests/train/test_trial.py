"""Trials: what prompts are asked as, and which drafter is kept."""

import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chat_folders import (
    CHATML,
    CONFIG,
    END,
    IM_END,
    chat_tokenizer,
    files_with,
    write_lines,
    write_tokenizer,
)
from tiny_models import random_drafter, random_target
from train_runs import settings, trial

from redrafter_jax.drafters.recurrent_head import RecurrentConfig
from redrafter_jax.files.drafter_files import load_drafter
from redrafter_jax.generation import generate_autoregressive
from train.config import AcceptanceSettings, TrainSettings
from train.trial import Best, Trial, describe_best, keep_best, plan_trial


def planned(folder: Path, chats: bool, template: str | None = CHATML, **changes: Any) -> Trial:
    target = write_tokenizer(folder / "target", template)
    values = settings(target, folder, acceptance=trial(folder, "Hi", **changes))
    files = files_with(chat_tokenizer(), target)
    prepare = plan_trial(TrainSettings.model_validate(values), files, None, chats)
    assert prepare is not None
    return prepare(random_target(CONFIG))


@pytest.mark.parametrize(
    ("chats", "template", "stated", "turn"),
    [
        (True, CHATML, None, True),
        (False, CHATML, None, True),
        (False, None, None, False),
        (False, CHATML, True, True),
        (True, CHATML, False, False),
    ],
)
def test_prompts_are_a_users_turns_for_chat_data_and_for_chat_models(
    tmp_path: Path, chats: bool, template: str | None, stated: bool | None, turn: bool
) -> None:
    tried = planned(tmp_path, chats, template, chat=stated)
    asked = chat_tokenizer().decode(tried.rows[0], skip_special_tokens=False)
    if not turn:
        assert (asked, tried.stop_tokens) == ("<s>Hi", ())
    else:
        assert asked == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
        assert set(tried.stop_tokens) == {END, IM_END}


@pytest.mark.parametrize("turns", [1, "all"])
@pytest.mark.long
def test_a_second_turn_stands_behind_the_targets_own_answer(tmp_path: Path, turns: Any) -> None:
    prompts = write_lines(tmp_path / "question.jsonl", {"turns": ["Hi", "Bye"]})
    tried = planned(tmp_path, False, prompts=prompts, turns=turns)
    first, *later = (chat_tokenizer().decode(row, skip_special_tokens=False) for row in tried.rows)
    assert first == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    second = "<|im_end|>\n<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n"
    answers = generate_autoregressive(
        random_target(CONFIG), tried.rows[:1], max_new_tokens=4, eos_token_ids=(END, IM_END)
    ).tokens
    said = chat_tokenizer().decode(answers[0]).strip()
    assert later == ([] if turns == 1 else [first + said + second])


@pytest.mark.parametrize(
    ("best", "told"),
    [
        (None, "No verdict: the head was not tried, because `acceptance` is not set; `eval comp"),
        (
            Best(9, 1.03, "a", 24),
            "Slower than no head, wherever it runs: a target call gains 1.03 tokens (1.00 without "
            "a head) with W=2 R=2 N=5 on 24 held-out texts; train on more tokens",
        ),
        (
            Best(9, 1.92, "a", 24),
            "Faster where a call over the tree costs less than 1.92 calls of the baseline: a "
            "target call gains 1.92 tokens (1.00 without a head) with W=2 R=2 N=5 on 24",
        ),
        # What any drafter guesses is no gain of the head.
        (Best(9, 3.0, "a", 24, 12), "Too little data to tell: the head was tried on 12 of 24 text"),
        (Best(9, 3.0, "a", 24, 0, 12), "Too little data to tell: the head was tried on 12 of 24 a"),
        (Best(9, 3.0, "a", 2), "Too little data to tell: the head was tried on 2 texts, but 8 are"),
        # Kept by a run that did not count texts.
        (Best(9, 3.0, "a"), "Too little data to tell: the head was tried on 0 texts"),
    ],
)
def test_a_run_ends_with_what_its_trials_tell(tmp_path: Path, best: Best | None, told: str) -> None:
    tree = {"beam_width": 2, "draft_rounds": 2}
    values = settings(tmp_path, tmp_path / "run", acceptance=trial(tmp_path, tree=tree))
    sentence = describe_best(best, TrainSettings.model_validate(values))
    assert sentence.startswith(told)


def test_the_command_of_the_next_step_can_be_pasted(tmp_path: Path) -> None:
    folder = tmp_path / "it's a run"
    values = settings(tmp_path, folder, acceptance=trial(tmp_path))
    told = describe_best(Best(9, 1.92, "a", 24), TrainSettings.model_validate(values))
    words = shlex.split(told.partition("drafting: ")[2])
    assert words[:6] == ["python", "-m", "eval", "compare", "--config", "configs/compare.yaml"]
    assert f"drafters.head.drafter={folder / 'best'}" in words
    assert words[-1] == "prompts=FILE"
    # Prompts are to be written as the conversations of training were.
    data = {"sources": [{"folder": str(tmp_path)}], "sequence_length": 16}
    values["data"] = data | {"chat_template": "gemma"}
    told = describe_best(Best(9, 1.92, "a", 24), TrainSettings.model_validate(values))
    assert "prompts=FILE chat_template=gemma" in told


def test_a_trial_with_prompt_lookup_tells_nothing_of_the_head(tmp_path: Path) -> None:
    tree = {"beam_width": 2, "draft_rounds": 2, "lookup_tokens": 4}
    values = settings(tmp_path, tmp_path / "run", acceptance=trial(tmp_path, tree=tree))
    told = describe_best(Best(9, 3.0, "a", 24), TrainSettings.model_validate(values))
    assert told.startswith("Too little data to tell: acceptance.tree has lookup_tokens=4, and")


def test_a_better_drafter_takes_the_place_of_the_best(tmp_path: Path) -> None:
    tried = Trial(AcceptanceSettings(every=1, prompts=tmp_path), [], (), tmp_path / "best", "a")
    drafters = {step: random_drafter(RecurrentConfig(31, 16, 16, 1), step) for step in (1, 2, 3)}
    best = None
    for step, measured in ((1, 2.0), (2, 2.5), (3, 2.5)):
        best = keep_best(tried, best, step, measured, drafters[step])
    assert best == Best(2, 2.5, "a")
    kept = load_drafter(tmp_path / "best", "float32").merge().lm_head.kernel[...]
    np.testing.assert_array_equal(kept, drafters[2].merge().lm_head.kernel[...])
    assert [path.name for path in tmp_path.iterdir()] == ["best"]
    # Measured on other prompts it does not compare.
    assert keep_best(tried._replace(measured_on="b"), best, 4, 1.5, drafters[3]).step == 4
