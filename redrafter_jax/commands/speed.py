"""What decoding cost: tokens per second, and a target call in calls of the baseline."""

import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from statistics import median

from redrafter_jax.config import SamplingConfig
from redrafter_jax.decoding.step import decode
from redrafter_jax.drafters.base import Drafter, RootOnly
from redrafter_jax.drafters.lookup import PromptLookup
from redrafter_jax.generation import Generation, collect, start
from redrafter_jax.models.target import Target
from redrafter_jax.streaming import KeptCache

# Steps that a median is taken of: at least, and of the baseline.
_STEPS, _BASELINE_STEPS = 3, 10


def describe_speed(result: Generation, tokens_per_second: float | None) -> str:
    """How row 0 was decoded, in a line."""
    count, calls, sources = len(result.tokens[0]), result.steps[0], result.accepted_by
    speed = "" if tokens_per_second is None else f" {tokens_per_second:.1f} tokens/s,"
    of_it = ""
    if len(sources) > 1 and calls:
        shares = (f"{accepted[0] / calls:.2f} of {name}" for name, accepted in sources.items())
        of_it = f" ({', '.join(shares)})"
    return (
        f"{count} tokens,{speed} acceptance length {result.acceptance_length:.2f}{of_it}, {calls} "
        "target calls after prefill"
    )


def describe_cost(acceptance_length: float, cost: float, drafter: Drafter) -> str:
    """What a target call costs in calls of the baseline, and what that makes of the speed."""
    speed_up = acceptance_length / cost
    sentence = f"a call takes as long as {cost:.2f} of --no-drafter: {speed_up:.2f} times its speed"
    if speed_up >= 1:
        return sentence
    if isinstance(drafter, PromptLookup):
        return f"{sentence}; lower --lookup-tokens, or leave it out"
    return f"{sentence}; try --no-drafter, or another tree"


def step_seconds(stamps: Sequence[float]) -> float | None:
    """The median of a step's seconds; None of too few. Stamps are taken after every step."""
    steps = [after - before for before, after in pairwise(stamps)]
    return median(steps) if len(steps) >= _STEPS else None


def baseline_seconds(
    target: Target,
    drafter: Drafter,
    prompt: Sequence[int],
    sampling: SamplingConfig,
    tokens: int,
    *,
    kept_cache: KeptCache | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> float | None:
    """The median of a baseline step's seconds, compilation left out; None for the baseline itself.

    Args:
      target: the target model.
      drafter: of the steps to compare with; its prefill, which is compiled, serves once more.
      prompt: of the steps to compare with, for a step's time grows with the text.
      sampling: how tokens are chosen.
      tokens: that the cache has room for, prompt included; of too few there is no measurement.
      kept_cache: to borrow; its text is forgotten.
      clock: seconds.
    """
    if drafter.num_nodes == 1 or tokens < len(prompt) + 1 + _BASELINE_STEPS:
        return None
    memory = kept_cache.take(target, 1, drafter.max_path) if kept_cache else None
    limit = tokens - len(prompt)
    state, _ = start(target, drafter, [prompt], limit, sampling, None, (), memory=memory)
    counts = state.stats.accept_counts[:, :1]
    stats = state.stats._replace(accept_counts=counts, accepted_by=None)
    state = state._replace(drafter=(), stats=stats)
    baseline, stamps = RootOnly(), []
    for _ in range(_BASELINE_STEPS):
        state = decode(target, baseline, state, 1)
        collect(state, [prompt], baseline)
        stamps.append(clock())
    if kept_cache:
        kept_cache.put(state)
    return step_seconds(stamps)
