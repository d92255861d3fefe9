"""What continuous batching gains, and what the admission of a long prompt costs, each in turns."""

import dataclasses
import logging
import time
from collections.abc import Sequence
from statistics import median

import pytest
from device_calls import watch_device_calls
from places import CONFIGS
from tiny_models import random_target

from redrafter_jax import load_target
from redrafter_jax.serving.engine import Engine
from redrafter_jax.serving.messages import Request
from redrafter_jax.text.prompts import read_prompts
from redrafter_jax.text.tokenizer import load_tokenizer

pytestmark = pytest.mark.long


def test_eight_slots_give_twice_the_tokens_per_second_of_one_at_a_time() -> None:
    target = load_target(CONFIGS / "demo_target", "float32")
    tokenizer = load_tokenizer(CONFIGS / "demo_target")
    texts = [prompt.turns[0] for prompt in read_prompts(CONFIGS / "demo_prompts.jsonl", 16)]
    requests = [
        Request(tokenizer.encode(text).ids, 48, seed, stop_tokens=())
        for seed, text in enumerate(texts)
    ]
    engine = Engine(target, None, slots=8, context_length=256)
    engine.warm_up()

    def seconds(groups: list[list[Request]]) -> float:
        began = time.perf_counter()
        for group in groups:
            for request in group:
                engine.submit(request)
            while engine.busy:
                engine.advance()
        return time.perf_counter() - began

    turns = [(seconds([[request] for request in requests]), seconds([requests])) for _ in range(3)]
    ratios = [alone / together for alone, together in turns]
    logging.info("tokens/s of 8 slots over one at a time, by turns: %s", ratios)
    assert median(ratios) >= 2
    assert engine.counters.compiled == 0


def test_a_prompt_of_1000_tokens_delays_running_streams_by_a_chunk_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = load_target(CONFIGS / "demo_target", "float32").config
    target = random_target(dataclasses.replace(config, max_position_embeddings=2048))
    engine = Engine(target, None, slots=8, context_length=1200, stop_tokens=())
    engine.warm_up()
    calls = watch_device_calls(monkeypatch)

    def gaps(count: int, streams: Sequence[int] = ()) -> list[float]:
        """Seconds of so many calls, each of which brings every stream its tokens."""
        taken = []
        for _ in range(count):
            began = time.perf_counter()
            events = {event.number: event.tokens for event in engine.advance()}
            taken.append(time.perf_counter() - began)
            assert [len(events[number]) for number in streams] == [4] * len(streams)
        return taken

    def submit_long(first: int) -> None:
        engine.submit(Request([first, *[7] * 999], 1, 0))

    alone, without, admitting = [], [], []
    for turn in range(3):
        submit_long(2 * turn)
        alone += gaps(16)
        assert not engine.busy, "1000 tokens are 16 chunks of 64"
        streams = [engine.submit(Request([seed], 200, seed)) for seed in range(7)]
        gaps(len(streams))
        without += gaps(8, streams)
        submit_long(2 * turn + 1)
        calls.clear()
        admitting += gaps(16, streams)
        assert calls == ["read_chunk", "decode_rows"] * 16
        while engine.busy:
            engine.advance()
    assert engine.counters.compiled == 0
    chunk, before, during = map(median, (alone, without, admitting))
    logging.info(
        "ms between the tokens of streams: %.1f, and %.1f while a prompt of 1000 tokens is "
        "admitted; a chunk takes %.1f: a delay of %.2f chunks",
        *(1000 * seconds for seconds in (before, during, chunk)),
        (during - before) / chunk,
    )
