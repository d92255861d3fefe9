"""What the closing line says of the speed, and how it is measured."""

from itertools import accumulate, chain, repeat
from types import SimpleNamespace

import pytest
from tiny_folders import byte_tokenizer

from redrafter_jax import PromptLookup, SamplingConfig
from redrafter_jax.commands.options import PromptFormat, TextDecoder
from redrafter_jax.commands.speed import baseline_seconds, describe_cost, update_seconds
from redrafter_jax.drafters.base import RootOnly
from redrafter_jax.drafters.head_drafter import LoadedHead
from redrafter_jax.models.target import Target
from redrafter_jax.text.chat_template import NO_TEMPLATE


def test_an_update_takes_the_median_of_at_least_three() -> None:
    assert update_seconds([0.0, 1.0, 3.0]) is None
    assert update_seconds([0.0, 1.0, 3.0, 13.0]) == 2.0


def test_the_speed_is_the_acceptance_length_over_the_cost_of_a_call(
    good_drafter: LoadedHead,
) -> None:
    assert describe_cost(3.0, 2.0, good_drafter) == (
        "a call takes 2.00 times as long as the baseline's; speed-up 1.50"
    )
    # Within what two measurements of a text differ by there is no advice.
    assert describe_cost(2.0, 2.1, good_drafter).endswith("speed-up 0.95")
    slow = "a call takes 4.00 times as long as the baseline's; speed-up 0.75; "
    assert describe_cost(3.0, 4.0, good_drafter) == slow + "try --no-drafter, or another tree"
    assert describe_cost(3.0, 4.0, PromptLookup()).endswith(
        "lower --lookup-tokens, or leave it out"
    )


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
        None,
        SamplingConfig(),
        PromptFormat(byte_tokenizer(), NO_TEMPLATE, [], (), []),
    )
    assert baseline_seconds(decoder, [3, 1], 40, 4) == 2.0
    # Of few tokens, and of the baseline itself, there is nothing to measure.
    assert baseline_seconds(decoder, [3, 1], 26, 4) is None
    assert baseline_seconds(decoder._replace(drafter=RootOnly()), [3, 1], 40, 4) is None
