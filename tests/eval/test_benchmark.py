"""Timed decoding: the same texts as ever, nothing compiled inside the timers, methods in turns."""

import logging

import jax
import pytest
from pair_prompts import asked_with
from tiny_folders import encode

from eval import benchmark
from eval.benchmark import (
    Batch,
    Method,
    Run,
    baseline,
    decode_batch,
    drafting,
    make_batches,
    measure,
    warm_up,
)
from eval.config import RowSettings
from redrafter_jax import SamplingConfig, TreeConfig
from redrafter_jax.models.target import Target

pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.fixture(scope="module")
def methods(habitual_target: Target) -> dict[str, Method]:
    return {
        "speculative": drafting(habitual_target, None, TreeConfig(lookup_tokens=3)),
        "baseline": baseline(habitual_target),
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
        work = [(name, one, batch) for name, one in methods.items() for batch in 2 * batches]
        warm_up(work, 1)
        assert len(decoded) == 2 * 2, "of each shape one, by each method"
        assert any("Compiling jit(prefill)" in message for message in caplog.messages)
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
