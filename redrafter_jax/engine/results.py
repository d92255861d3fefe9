"""The results of a program, as events of the requests that it ran for."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from redrafter_jax.engine.gains import Gains
from redrafter_jax.engine.messages import Counters, Event, new_drafts, new_tokens
from redrafter_jax.engine.runner import Run
from redrafter_jax.engine.scheduler import Row
from redrafter_jax.types import NO_CHOICE


class Taken(NamedTuple):
    """Summary of the results of a program.

    Attributes:
      ended: slots of the requests that have ended.
      calls: number of target calls of decode steps, over the rows that speculate.
      gained: number of tokens that these calls gained.
    """

    ended: list[int]
    calls: int
    gained: int


def take_results(
    run: Run,
    gains: Gains,
    done: Any,
    slots: Sequence[Row | None],
    sources: tuple[str, str],
    events: dict[int, Event],
    counters: Counters,
) -> Taken:
    """Add the results of one program to its rows, to the events and to the counters.

    Args:
      run: the program.
      gains: the tokens that it gained, as NumPy arrays.
      done: whether the row at each place has ended.
      slots: all slots; rows in them are updated.
      sources: names of the sources of drafted tokens.
      events: events of the present call of `Engine.advance` by number of the request; updated.
      counters: totals over all requests; updated.
    """
    ended: list[int] = []
    calls = gained = 0
    for at, index in run.slots.items():
        row = slots[index]
        if gains.prompt is not None and row is not None:
            row.add_scores(gains.prompt, at, run.begins[at])
        own_calls = int(np.count_nonzero(gains.counts[at]))
        # A row that was preempted after dispatch reads its last token again; ignore its result.
        if row is None or not own_calls:
            continue
        number, request, prompt = row.number, row.request, () if row.calls else row.prompt
        new = new_tokens(gains, at, sources, row.calls)
        drafts = new_drafts(gains, at, sources, row.calls)
        row.add(new)
        before, why = events.get(number, Event(number, [])), None
        if done[at]:
            why = "stop" if row.text[-1] in row.arrays.stop_tokens else "length"
            if row.text[-1] == NO_CHOICE:
                why = "not numbers"
                new.pop()
        elif row.matcher is not None and row.matcher.failed:
            why = "grammar"
        if why is not None:
            ended.append(index)
        drafts = [*before.drafted, *drafts]
        prompt = before.prompt or prompt
        events[number] = Event(number, before.decided + new, why, drafts, prompt)
        if run.program:
            counters.add(new, own_calls, drafts)
            calls += request.speculate * own_calls
            gained += request.speculate * len(new)
    return Taken(ended, calls, gained)
