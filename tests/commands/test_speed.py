"""What the closing line says of the speed, and how it is measured."""

from itertools import accumulate, chain, repeat
from types import SimpleNamespace

import numpy as np
import pytest
from tiny_folders import byte_tokenizer

from redrafter_jax import PromptLookup, SamplingConfig
from redrafter_jax.commands.options import PromptFormat, TextDecoder
from redrafter_jax.commands.speed import (
    baseline_seconds,
    describe_acceptance,
    describe_cost,
    describe_shortly,
    update_seconds,
)
from redrafter_jax.drafters.base import RootOnly
from redrafter_jax.generation import Generation
from redrafter_jax.models.target import Target
from redrafter_jax.text.chat_template import NO_TEMPLATE


def test_an_update_takes_the_median_of_at_least_three() -> None:
    assert update_seconds([0.0, 1.0, 3.0]) is None
    assert update_seconds([0.0, 1.0, 3.0, 13.0]) == 2.0


def result_of(length: float, **accepted: int) -> Generation:
    """A text of 32 different tokens, of which so many were accepted of each source."""
    counts = {name: [count] for name, count in accepted.items()}
    return Generation([[*range(32)]], [10], length, np.asarray([[0, 10]]), counts)


def test_the_speed_is_the_acceptance_length_over_the_cost_of_a_call() -> None:
    assert describe_cost(result_of(3.0, recurrent=20), 2.0) == (
        "a call takes 2.00 times as long as the baseline's; speed-up 1.50"
    )
    # Within what two measurements of a text differ by there is no advice.
    near = describe_cost(result_of(2.0, recurrent=10), 2.1)
    assert near.endswith("speed-up 0.95, no clear difference")
    slow = "a call takes 4.00 times as long as the baseline's; speed-up 0.75; "
    result = result_of(3.0, recurrent=20, lookup=0)
    assert describe_cost(result, 4.0) == slow + "try --no-drafter, or another tree"
    assert describe_cost(result_of(3.0, lookup=20), 4.0).endswith(
        "lower --lookup-tokens, or leave it out"
    )


def test_what_lookup_or_any_drafter_gains_is_not_the_heads() -> None:
    said = "a call takes 2.00 times as long as the baseline's; speed-up 1.50"
    by_lookup = result_of(3.0, recurrent=9, lookup=11)
    words = " by prompt lookup, which needs no head (--no-drafter)"
    assert describe_cost(by_lookup, 2.0) == said + words
    assert describe_cost(result_of(3.0, lookup=20), 2.0) == said
    repeating = result_of(3.0, recurrent=20)
    repeating = repeating._replace(tokens=[[1, 2, 3, 4] * 8])
    words = "; the text repeats itself, which any drafter guesses"
    assert describe_cost(repeating, 2.0) == said + words


@pytest.mark.parametrize("length", [1.0, 1.03])
def test_a_machine_that_slowed_down_is_no_gain(length: float) -> None:
    said = describe_cost(result_of(length, recurrent=1), 0.87)
    assert said == (
        "a call takes 0.87 times as long as the baseline's; "
        f"speed-up {length:.2f}, no clear difference"
    )
    shortly = describe_shortly(result_of(length, recurrent=1), None, 0.87)
    assert shortly.endswith(f"{length:.2f} times the baseline's speed")


def test_people_are_told_tokens_pace_and_speed_up() -> None:
    result = result_of(3.0, recurrent=9)
    count = len(result.tokens[0])
    assert describe_shortly(result, 31.26, 2.0) == (
        f"{count} tokens, 31.3 tokens/s, 1.50 times the baseline's speed"
    )
    assert describe_shortly(result, None, None) == f"{count} tokens"


def test_the_acceptance_length_of_several_drafters_has_a_part_of_each() -> None:
    result = result_of(3.0, recurrent=9, lookup=11)
    assert describe_acceptance(result, 1) == (
        "acceptance length 3.00 (0.90 of recurrent, 1.10 of lookup)"
    )
    assert describe_acceptance(result_of(3.0, recurrent=20), 1) == "acceptance length 3.00"


@pytest.mark.usefixtures("quick_compilation")
def test_the_baseline_is_timed_without_the_update_that_compiles(
    habitual_target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = accumulate(chain([0.0, 1.0, 100.0], repeat(2.0)))
    clock = SimpleNamespace(perf_counter=lambda: next(times))
    monkeypatch.setattr("redrafter_jax.commands.speed.time", clock)
    decoder = TextDecoder(
        habitual_target,
        PromptLookup(),
        None,
        False,
        SamplingConfig(),
        PromptFormat(byte_tokenizer(), NO_TEMPLATE, [], (), []),
    )
    assert baseline_seconds(decoder, [3, 1], 40, 4) == 2.0
    # Of few tokens, and of the baseline itself, there is nothing to measure.
    assert baseline_seconds(decoder, [3, 1], 26, 4) is None
    assert baseline_seconds(decoder._replace(drafter=RootOnly()), [3, 1], 40, 4) is None
