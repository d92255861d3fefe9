"""How `redrafter fit` divides its time, and keeps it where the machine gets slower."""

import json
import re
from pathlib import Path

import pytest
from fit_plans import ASKED, plan_of

from redrafter_jax.errors import InputError
from train.fit.plan import Pace, is_enough, plan_measuring, plan_training, read_plan, write_plan

STEP = 1024


def test_the_time_is_divided_among_writing_reading_training_and_an_ending() -> None:
    plan = plan_of()
    # 19 minutes, of which a quarter is for tuner and report, and 15 s to load thrice. An answer of
    # 128 tokens follows 48 of a question, and 64 are read before both; every token is read, and
    # trained on four times.
    assert plan.ending == 0.25 * 1140
    per_answer = (128 + 48) / 150 + 64 / 500 + 128 * (1 / 500 + 4 / 400)
    assert plan.tokens == int((1140 - 285 - 15) / per_answer * 128)
    assert sum(plan.expected(STEP).values()) <= 1140
    assert plan.prompts == max(8, plan.tokens // 2048)
    # Answers are no longer than a row, and few of the texts are held out.
    assert plan.answer_tokens == 128
    more = plan_of(minutes=60.0)
    assert more.answer_tokens == more.tokens // (8 * 48)
    assert plan_of(minutes=6000.0).answer_tokens == 512
    assert plan_of(minutes=6000.0).prompts == 24


def test_too_little_time_is_refused_with_the_least_that_is_enough() -> None:
    with pytest.raises(InputError, match=r"In 3 minutes .* a head needs at least 4096") as refusal:
        plan_of(minutes=3.0)
    found = re.search(r"--minutes (\d+) or more", str(refusal.value))
    assert found
    enough = float(found[1])
    assert plan_of(minutes=enough).tokens >= 4096
    with pytest.raises(InputError):
        plan_of(minutes=enough - 1)


@pytest.mark.parametrize("slower", [1.0, 1.5, 2.0, 4.0])
def test_a_fit_on_a_machine_that_gets_slower_keeps_its_time(slower: float) -> None:
    """After the probe every stage takes so many times as long as its rate says."""
    plan = plan_of(minutes=10.0)
    rates = plan.rates
    # Writing is cut where what is written takes the rest of the time.
    used, tokens = plan.spent, 0
    while tokens < plan.tokens and not is_enough(plan, used, tokens):
        used += slower * 4.0
        tokens += int(4.0 * rates.written * 128 / (128 + 48 + 64 * rates.written / rates.read))
    used += slower * tokens / rates.read
    plan = plan_training(plan.model_copy(update={"spent": used}), tokens, STEP)
    # Training begins again with fewer steps where it is late.
    step, legs = 0, 0
    steps = plan.steps
    assert steps
    while step < steps:
        pace, legs = Pace(plan, used), legs + 1
        used += rates.starting / 6
        while step < steps:
            step += 1
            used += slower * STEP / rates.trained
            if fewer := pace.steps(step, used):
                plan = plan.model_copy(update={"steps": fewer, "spent": used})
                steps = fewer
                break
    assert legs <= 2
    assert step == steps == plan.steps
    plan, tuning = plan_measuring(plan.model_copy(update={"spent": used}))
    assert plan.prompts >= 8
    ended = used + tuning + slower * plan.measuring
    assert 60 * 8 < ended <= 60 * (10.5 if slower <= 1.5 else 12 if slower <= 2 else 15)


def test_training_takes_what_writing_left_up_to_eight_passes() -> None:
    plan = plan_of()
    in_time = plan_training(plan.model_copy(update={"spent": 600.0}), plan.tokens, STEP)
    # What is left until the ending, but for the time to start.
    assert in_time.steps == int((600 - 285 - 5) * 400 / STEP)
    early = plan_training(plan.model_copy(update={"spent": 70.0}), 4096, STEP)
    assert early.steps == 8 * 4096 // STEP
    too_late = plan_training(plan.model_copy(update={"spent": 1300.0}), 4096, STEP)
    assert too_late.steps == 8


def test_a_late_ending_measures_fewer_tokens_of_no_less_than_eight_prompts() -> None:
    plan = plan_of(minutes=60.0)
    in_time, seconds = plan_measuring(plan.model_copy(update={"spent": 3600 - plan.ending}))
    assert in_time == plan.model_copy(update={"spent": 3600 - plan.ending})
    assert seconds == pytest.approx(plan.ending - plan.measuring)
    late, seconds = plan_measuring(plan.model_copy(update={"spent": 3590.0}))
    assert (late.prompts, late.new_tokens) == (8, 24)
    # Four trees: 30 / 6 seconds to compile each, and four turns of two runs.
    assert seconds == pytest.approx(5 + 4 * (5 + 2 * 4 * 24 / 50))


def test_a_plan_is_kept_for_the_same_model_alone(tmp_path: Path) -> None:
    assert read_plan(tmp_path, ASKED) is None
    plan = plan_of().model_copy(update={"steps": 71, "done": ("write", "read")})
    write_plan(plan, tmp_path)
    assert read_plan(tmp_path, ASKED) == plan
    for other in (ASKED._replace(target="other"), ASKED._replace(target_dtype="bfloat16")):
        with pytest.raises(InputError, match=r"holds a fit with target\w* \w+ \(now \w+\); use"):
            read_plan(tmp_path, other)


def test_a_plan_is_kept_for_the_same_chat_template_alone(tmp_path: Path) -> None:
    write_plan(plan_of(), tmp_path)
    mine = ASKED._replace(chat_template="mine.jinja")
    with pytest.raises(InputError, match=r"with chat_template not given \(now mine\.jinja\); use"):
        read_plan(tmp_path, mine)
    plan = plan_of().model_copy(update={"asked": mine})
    write_plan(plan, tmp_path)
    assert read_plan(tmp_path, mine) == plan
    with pytest.raises(InputError, match=r"with chat_template mine\.jinja \(now not given\); use"):
        read_plan(tmp_path, ASKED)


def test_a_plan_from_before_there_were_templates_is_read(tmp_path: Path) -> None:
    write_plan(plan_of(), tmp_path)
    path = tmp_path / "plan.json"
    stated = json.loads(path.read_text())
    assert stated["asked"].pop() is None
    path.write_text(json.dumps(stated))
    assert read_plan(tmp_path, ASKED) == plan_of()
