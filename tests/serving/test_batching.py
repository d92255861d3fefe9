"""Rows in slots share the device calls that decode them."""

import jax
import numpy as np
import pytest
from device_calls import watch_device_calls
from engine_runs import run
from tiny_models import forgetful_target, imitating_drafter, tiny_config

from redrafter_jax import DraftConfig
from redrafter_jax.serving.engine import Engine, Request

pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.mark.parametrize("speculate", [False, True])
def test_eight_requests_in_four_slots_share_calls(
    speculate: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = forgetful_target(memory=0.15, config=tiny_config(num_hidden_layers=1))
    drafter = imitating_drafter(target) if speculate else None
    draft = DraftConfig(beam_width=2, draft_rounds=2) if speculate else None
    engine = Engine(
        target, drafter, draft=draft, slots=4, context_length=64, steps_per_call=3, prefill_chunk=8
    )
    engine.warm_up()
    calls = watch_device_calls(monkeypatch)

    def decode_calls(groups: list[list[Request]]) -> int:
        calls.clear()
        for group in groups:
            for request in group:
                engine.submit(request)
            assert [len(event.tokens) for event in run(engine).values()] == [25] * len(group)
        return calls.count("decode_rows")

    requests = [Request([n], 25, n, stop_tokens=()) for n in range(8)]
    alone = decode_calls([[request] for request in requests])
    together = decode_calls([requests])
    assert 2 * together <= alone
    if not speculate:
        # The prompt gives a token, eight calls of three steps the other 24. Before a call one
        # prompt is read: the fourth starts with the fourth call, and each slot decodes two.
        assert (alone, together) == (8 * 8, 3 + 2 * 8)
    assert engine.counters.compiled == 0
    jax.jit(lambda value: value + 1)(np.arange(3))
    assert engine.counters.compiled > 0
