"""Timed decoding: the same texts as ever, nothing compiled inside the timers, methods in turns."""

import logging

import jax
import pytest
from pair_prompts import asked_with
from tiny_folders import encode

from eval import benchmark
from eval.benchmark import Batch, Method, Run, decode_batch, make_batches, measure, warm_up
from eval.config import RowSettings
from redrafter_jax import PromptLookup, SamplingConfig
from redrafter_jax.drafters.base import RootOnly
from redrafter_jax.models.target import Target

pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.fixture(scope="module")
def methods(habitual_target: Target) -> dict[str, Method]:
    return {
        "speculative": Method(habitual_target, PromptLookup(3)),
        "baseline": Method(habitual_target, RootOnly()),
    }


@pytest.mark.long
def test_nothing_compiles_inside_the_timers(
    methods: dict[str, Method],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Prompts of two sizes of cache; no other test has the longer one.
    rows = RowSettings(max_new_tokens=11)
    batches = make_batches(asked_with([encode("a" * 280), encode("b")]), 1, SamplingConfig(), rows)
    decoded = []

    def spy(method: Method, batch: Batch) -> Run:
        decoded.append(batch)
        return decode_batch(method, batch)

    monkeypatch.setattr(benchmark, "decode_batch", spy)
    with caplog.at_level(logging.WARNING), jax.log_compiles():
        warm_up(methods, [*batches, *batches], 1, "test")
        assert len(decoded) == 2 * 2, "of each shape one, by each method"
        assert sum("Compiling jit(prefill)" in message for message in caplog.messages) >= 2
        caplog.clear()
        list(measure(methods, batches, 2))
    assert [message for message in caplog.messages if "ompil" in message] == []


def test_methods_take_turns_and_change_who_goes_first(
    monkeypatch: pytest.MonkeyPatch, methods: dict[str, Method]
) -> None:
    batches = make_batches(
        asked_with([[0], [1]]), 1, SamplingConfig(), RowSettings(max_new_tokens=4)
    )
    order = []

    def record(method: Method, batch: benchmark.Batch) -> Run:
        name = next(name for name, one in methods.items() if one is method)
        order.append((name, batch.prompts[0][0]))
        return decode_batch(method, batch)

    monkeypatch.setattr(benchmark, "decode_batch", record)
    turns = list(measure(methods, batches, 2))
    assert [(turn.repeat, turn.batch) for turn in turns] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert all(list(turn.runs) == ["speculative", "baseline"] for turn in turns)
    s, b = "speculative", "baseline"
    assert order == [(s, 0), (b, 0), (b, 1), (s, 1), (b, 0), (s, 0), (s, 1), (b, 1)]
