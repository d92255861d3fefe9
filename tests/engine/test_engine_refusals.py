"""Engines that cannot be and requests that can never run are refused in a sentence."""

from typing import Any

import pytest

from redrafter_jax import InputError
from redrafter_jax.engine.engine import Engine
from redrafter_jax.engine.messages import Request
from redrafter_jax.models.target import Target


@pytest.fixture(scope="module")
def engine(habitual_target: Target) -> Engine:
    return Engine(habitual_target, None, slots=4, context_length=64, stop_tokens=range(5))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"prompt": [24]}, "token 24, outside the vocabulary of 24"),
        ({"max_new_tokens": 62}, "62 new tokens after a prompt of 3, but context_length is 64"),
        # Four beside the engine's own, in steps of eight.
        ({"stop_tokens": tuple(range(17))}, "17 stop tokens; give 16 or fewer"),
    ],
)
def test_what_can_never_run_is_refused(
    engine: Engine, changes: dict[str, Any], problem: str
) -> None:
    with pytest.raises(InputError, match=problem):
        engine.submit(Request([1, 2, 3], 5, 0)._replace(**changes))
    assert not engine.busy


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"slots": 0}, "slots is 0; it must be 1 or more"),
        ({"context_length": 513}, "context_length is 513; it must be from 2 to 512"),
        ({"queue_limit": -1}, "queue_limit is -1"),
        ({"steps_per_call": 0}, "steps_per_call is 0"),
        ({"prefill_chunk": 0}, "prefill_chunk is 0"),
        ({"top_log_probs": 25}, "top_log_probs is 25; it must be from 0 to 24"),
    ],
)
def test_an_engine_that_cannot_be_is_refused(
    habitual_target: Target, options: dict[str, Any], problem: str
) -> None:
    sizes: dict[str, Any] = {"slots": 4, "context_length": 64}
    with pytest.raises(InputError, match=problem):
        Engine(habitual_target, None, **(sizes | options))
