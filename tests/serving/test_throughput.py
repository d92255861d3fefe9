"""What continuous batching gains."""

import logging
import time
from statistics import median

import pytest
from places import CONFIGS

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
