"""Requests, all that an engine tells of them, and what `generate` gives them."""

import random
from collections.abc import Sequence

from tiny_folders import encode

from redrafter_jax import SamplingConfig, TreeConfig, generate
from redrafter_jax.drafters.base import Drafter
from redrafter_jax.engine.engine import Engine
from redrafter_jax.engine.messages import Event, Request
from redrafter_jax.engine.requests import Batch, check_batch
from redrafter_jax.generation import Generation, engine_of
from redrafter_jax.models.attention import PAGE
from redrafter_jax.models.target import Target
from redrafter_jax.types import DecodeState

# Of engines.
STOPS = (3,)
# Of `generate`.
ROWS = 16
# For a prompt and its answer.
ROOM = 120
# As in OpenAI's API.
WARM = SamplingConfig(1.0)


def make_requests(seed: int, count: int) -> list[Request]:
    """Of many lengths and limits, greedy and sampled; some begin alike, with a page and more."""
    chance = random.Random(seed)
    beginnings = [[chance.randrange(24) for _ in range(length)] for length in (0, 5, PAGE + 6)]
    return [
        Request(
            chance.choice(beginnings) + [chance.randrange(24) for _ in range(chance.randint(1, 9))],
            chance.choice([1, 4, 11, 30]),
            chance.randrange(2**31),
            chance.choice([SamplingConfig(), SamplingConfig(0.8, top_p=0.9)]),
            stop_tokens=chance.choice([None, (), (5, 7)]),
            speculate=chance.random() < 0.8,
        )
        for _ in range(count)
    ]


def read_batch(
    target: Target, drafter: Drafter, batch: Batch, tree: TreeConfig | None
) -> DecodeState:
    """The state of an engine that has read the prompts, and has decoded nothing."""
    requests = check_batch(target.config, batch)
    reader = engine_of(target, drafter, requests, tree, None, False)
    for request in requests:
        reader.submit(request)
    reader.advance(passes=None, steps=0)
    return reader.state


def generated(target: Target, requests: Sequence[Request]) -> Generation:
    # As many rows and slots every time, so that all share one program.
    filled = [*requests, *[Request([0] * 30, 30, 0, stop_tokens=())] * (ROWS - len(requests))]
    return generate(
        target,
        None,
        [request.prompt for request in filled],
        max_new_tokens=[request.max_new_tokens for request in filled],
        sampling=[request.sampling for request in filled],
        seeds=[request.seed for request in filled],
        eos_token_ids=[
            STOPS if request.stop_tokens is None else request.stop_tokens for request in filled
        ],
        log_probs=True,
    )


def decoded_alone(
    target: Target,
    prompt: str,
    limit: int,
    seed: int,
    sampling: SamplingConfig = WARM,
) -> tuple[list[int], list[float]]:
    """What the baseline decides for one prompt by itself: tokens and log-probabilities."""
    result = generate(
        target,
        None,
        [encode(prompt)],
        # In one size of cache, whatever the limit.
        max_new_tokens=ROOM - len(prompt),
        sampling=sampling,
        seeds=[seed],
        log_probs=True,
    )
    assert result.log_probs is not None
    return result.tokens[0][:limit], result.log_probs[0][:limit]


def run(engine: Engine) -> dict[int, Event]:
    """All that is left, each request's events as one."""
    told: dict[int, Event] = {}
    while engine.busy:
        gather(told, engine.advance())
    return told


def gather(told: dict[int, Event], events: Sequence[Event]) -> None:
    for event in events:
        before = told.get(event.number, Event(event.number, []))
        assert before.ended is None, "nothing follows the end"
        decided, drafted = before.decided + event.decided, [*before.drafted, *event.drafted]
        told[event.number] = event._replace(decided=decided, drafted=drafted)
