"""Text as it is decided, and what that cost: tokens per second, and calls of the baseline."""

import dataclasses
import time
from collections.abc import Generator, Sequence
from itertools import islice, pairwise
from statistics import median
from threading import Event
from typing import NamedTuple

from redrafter_jax.acceptance import repeats_itself
from redrafter_jax.commands.options import TextDecoder
from redrafter_jax.commands.terminal import Screen
from redrafter_jax.drafters.base import RootOnly
from redrafter_jax.files.tree_table import TreeTable, TunedTree
from redrafter_jax.generation import Generation
from redrafter_jax.streaming import KeptCache, Update
from redrafter_jax.types import LOOKUP

# Updates that a median is taken of: at least, and of the baseline.
_UPDATES, _BASELINE_UPDATES = 3, 5
# A speed-up below it is worth advice: two measurements of one text differ by so much.
_CLEARLY_SLOWER = 0.95
# Decodes without drafts, whatever the drafter.
_ROOT_ALONE = TreeTable("", "", (TunedTree(1, 0.0, None, 1.0, 1.0),))


def describe_speed(result: Generation, tokens_per_second: float | None) -> str:
    """A line on how row 0 was decoded."""
    count, calls = len(result.tokens[0]), result.steps[0]
    speed = "" if tokens_per_second is None else f" {tokens_per_second:.1f} tokens/s,"
    return (
        f"{count} tokens,{speed} {describe_acceptance(result, 1)}, {calls} target calls after "
        "prefill"
    )


def describe_shortly(
    result: Generation, tokens_per_second: float | None, cost: float | None
) -> str:
    """The same for people: tokens, their pace, and the speed-up where a call's cost is known."""
    parts = [f"{len(result.tokens[0])} tokens"]
    if tokens_per_second is not None:
        parts.append(f"{tokens_per_second:.1f} tokens/s")
    if cost is not None:
        parts.append(f"{result.acceptance_length / cost:.2f} times the baseline's speed")
    return ", ".join(parts)


def describe_acceptance(result: Generation, rows: int) -> str:
    """The acceptance length, and what of it each of several drafters gained in the first rows."""
    calls, sources = sum(result.steps[:rows]), result.accepted_by
    of_it = ""
    if len(sources) > 1 and calls:
        gained = ((sum(counts[:rows]) / calls, name) for name, counts in sources.items())
        of_it = f" ({', '.join(f'{tokens:.2f} of {name}' for tokens, name in gained)})"
    return f"acceptance length {result.acceptance_length:.2f}{of_it}"


def describe_cost(result: Generation, cost: float) -> str:
    """A sentence on a target call's cost in calls of the baseline, and on the speed-up of row 0.

    What prompt lookup gains is not called the head's, nor what any drafter guesses.
    """
    speed_up = result.acceptance_length / cost
    sentence = f"a call takes {cost:.2f} times as long as the baseline's; speed-up {speed_up:.2f}"
    alone = result.accepted_by.keys() == {LOOKUP}
    if speed_up < _CLEARLY_SLOWER:
        advice = (
            "lower --lookup-tokens, or leave it out"
            if alone
            else "try --no-drafter, or another tree"
        )
        return f"{sentence}; {advice}"
    if speed_up <= 1:
        return sentence
    accepted = {name: counts[0] for name, counts in result.accepted_by.items()}
    if not any(accepted.values()):
        return f"{sentence}; nothing that was drafted was accepted"
    if not alone and 2 * accepted.get(LOOKUP, 0) > sum(accepted.values()):
        sentence += " by prompt lookup, for which no head is needed (--no-drafter)"
    if repeats_itself(result.tokens[0]):
        sentence += "; the text repeats itself, which any drafter guesses"
    return sentence


def update_seconds(stamps: Sequence[float]) -> float | None:
    """Median seconds of an update, from the times after each; None where they are too few."""
    updates = [after - before for before, after in pairwise(stamps)]
    return median(updates) if len(updates) >= _UPDATES else None


class ShownText(NamedTuple):
    """A text that was shown as it came.

    Attributes:
      text: the text of row 0.
      update: the last update; None where there was none.
      stamps: seconds after each update, the first of which is prefill's.
      counts: numbers of tokens decided until then.
    """

    text: str
    update: Update | None
    stamps: list[float]
    counts: list[int]


def show_stream(
    updates: Generator[Update], gap: str, screen: Screen, stop: Event | None = None
) -> ShownText:
    """Write the text of row 0 as it comes, without the gap that an answer begins with.

    Args:
      updates: the updates of a stream, which is closed in the end.
      gap: what the chat template writes before an answer, left out here.
      screen: where the text goes.
      stop: an event that ends the text after the next update; Ctrl-C sets it. Without it Ctrl-C
        raises KeyboardInterrupt.
    """
    whole, text, update, stamps, counts = "", "", None, [], []
    decided = 0
    try:
        for update in updates:
            gained = max(1, len(update.tokens[0]))
            # In pieces only where these differ in colour.
            pieces = [(token.text, token.origin) for token in update.pieces[0]]
            for piece, origin in pieces if screen.by_origin else [(update.texts[0], None)]:
                before, whole = len(text), whole + piece
                text = whole.removeprefix(gap)
                screen.write(text[before:], gained, origin)
            stamps.append(time.perf_counter())
            decided += len(update.tokens[0])
            counts.append(decided)
            if stop and stop.is_set():
                break
    except KeyboardInterrupt:
        if stop is None:
            raise
        stop.set()
    finally:
        updates.close()
        if update or stop:
            screen.write("\n")
    return ShownText(text, update, stamps, counts)


def baseline_seconds(
    decoder: TextDecoder,
    prompt: list[int],
    room: int,
    steps_per_update: int,
    kept_cache: KeptCache | None = None,
) -> float | None:
    """The median of a baseline update's seconds, compiling left out.

    None for the baseline itself, and for texts that are held to a grammar, which says where they
    end.

    Args:
      decoder: the decoder whose updates are compared with the baseline.
      prompt: prompt of the steps to compare with, for a step's time grows with the text.
      room: number of tokens in the cache, prompt included; too few give no measurement.
      steps_per_update: decode steps in each of the updates to compare with.
      kept_cache: a cache to borrow; its text is forgotten.
    """
    # Prefill is an update too.
    needed = 1 + steps_per_update * (1 + _BASELINE_UPDATES)
    if decoder.drafter is None or isinstance(decoder.drafter, RootOnly) or decoder.grammar:
        return None
    if room < len(prompt) + needed:
        return None
    # The drafter reads on, so that prefill is not compiled again.
    endless = decoder.format._replace(stop_tokens=(), stop_strings=[])
    baseline = decoder._replace(
        tree=_ROOT_ALONE,
        format=endless,
        sampling=dataclasses.replace(decoder.sampling, min_tokens=0),
    )
    most = min(room, decoder.target.config.position_limit)
    updates = baseline.stream(
        [prompt],
        most - len(prompt),
        [0],
        steps_per_yield=steps_per_update,
        kept_cache=kept_cache,
    )
    stamps = [time.perf_counter() for _ in islice(updates, 2 + _BASELINE_UPDATES)]
    updates.close()
    return update_seconds(stamps[1:])
