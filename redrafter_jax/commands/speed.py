"""Shows text while it is decoded, and compares its speed with the autoregressive baseline."""

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

# Minimum number of updates for a median, and number of updates of the baseline.
_UPDATES, _BASELINE_UPDATES = 3, 5
# Below the first speed-up advice is given, and above the second a gain is claimed: measurements of
# the same text differ by about this much.
_CLEARLY_SLOWER, _CLEARLY_FASTER = 0.95, 1.05
# A table of trees with which every drafter decodes without drafting.
_ROOT_ALONE = TreeTable("", "", (TunedTree(1, 0.0, None, 1.0, 1.0),))


def describe_speed(result: Generation, tokens_per_second: float | None) -> str:
    """Describe the decoding of row 0 in one line: tokens, speed, acceptance length and calls."""
    count, calls = len(result.tokens[0]), result.steps[0]
    speed = "" if tokens_per_second is None else f" {tokens_per_second:.1f} tokens/s,"
    return (
        f"{count} tokens,{speed} {describe_acceptance(result, 1)}, {calls} target calls after "
        "prefill"
    )


def describe_shortly(
    result: Generation, tokens_per_second: float | None, cost: float | None
) -> str:
    """Describe the decoding of row 0 in a short line.

    The line has the number of tokens, tokens per second, and the speed-up if `cost` is known.
    """
    parts = [f"{len(result.tokens[0])} tokens"]
    if tokens_per_second is not None:
        parts.append(f"{tokens_per_second:.1f} tokens/s")
    if cost is not None:
        speed_up = result.acceptance_length / max(cost, 1.0)
        parts.append(f"{speed_up:.2f} times the baseline's speed")
    return ", ".join(parts)


def describe_acceptance(result: Generation, rows: int) -> str:
    """Describe the acceptance length, and the share of each source of drafts if there are several.

    Only the first `rows` rows count.
    """
    calls, sources = sum(result.steps[:rows]), result.accepted_by
    of_it = ""
    if len(sources) > 1 and calls:
        gained = ((sum(counts[:rows]) / calls, name) for name, counts in sources.items())
        of_it = f" ({', '.join(f'{tokens:.2f} of {name}' for tokens, name in gained)})"
    return f"acceptance length {result.acceptance_length:.2f}{of_it}"


def describe_cost(result: Generation, cost: float) -> str:
    """Describe the speed-up of row 0 in a sentence.

    `cost` is the time of a target call divided by the time of a baseline call. The sentence says so
    if most accepted tokens come from prompt lookup, or if the text repeats itself. A call that
    verifies drafts cannot be faster than a baseline call, so a cost below 1 is noise and counts as
    1.
    """
    speed_up = result.acceptance_length / max(cost, 1.0)
    sentence = f"a call takes {cost:.2f} times as long as the baseline's; speed-up {speed_up:.2f}"
    alone = result.accepted_by.keys() == {LOOKUP}
    if speed_up < _CLEARLY_SLOWER:
        advice = (
            "lower --lookup-tokens, or leave it out"
            if alone
            else "try --no-drafter, or another tree"
        )
        return f"{sentence}; {advice}"
    if speed_up < _CLEARLY_FASTER:
        return f"{sentence}, no clear difference"
    accepted = {name: counts[0] for name, counts in result.accepted_by.items()}
    if not alone and 2 * accepted.get(LOOKUP, 0) > sum(accepted.values()):
        sentence += " by prompt lookup, which needs no head (--no-drafter)"
    if repeats_itself(result.tokens[0]):
        sentence += "; the text repeats itself, which any drafter guesses"
    return sentence


def update_seconds(stamps: Sequence[float]) -> float | None:
    """Return the median seconds per update, from the times at which updates ended.

    The result is None if there are fewer than three updates after the first.
    """
    updates = [after - before for before, after in pairwise(stamps)]
    return median(updates) if len(updates) >= _UPDATES else None


class ShownText(NamedTuple):
    """A text that has been shown while it was decoded.

    Attributes:
      text: the text of row 0.
      update: the last update; None if there was none.
      stamps: clock times in seconds at which updates ended; the first update is prefill.
      counts: number of tokens decoded up to each of these times.
    """

    text: str
    update: Update | None
    stamps: list[float]
    counts: list[int]


def show_stream(
    updates: Generator[Update], gap: str, screen: Screen, stop: Event | None = None
) -> ShownText:
    """Write the text of row 0 to the screen while it is decoded.

    Args:
      updates: the updates of a stream, which is closed at the end.
      gap: text that the chat template writes before an answer; it is not shown.
      screen: the screen to write to.
      stop: event that ends the text after the next update; Ctrl-C sets it. Without an event, Ctrl-C
        raises KeyboardInterrupt.
    """
    whole, text, update, stamps, counts = "", "", None, [], []
    decided = 0
    try:
        for update in updates:
            gained = max(1, len(update.tokens[0]))
            # Separate writes are only needed if the pieces differ in colour.
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
    """Measure the median seconds per update of the baseline, without compiling.

    Returns None if the decoder is the baseline itself, if a grammar may end its text, or if `room`
    is too small.

    Args:
      decoder: decoder whose updates are compared with those of the baseline.
      prompt: token ids of the decoder's prompt; the time of a step grows with the text.
      room: number of tokens in the cache, including the prompt.
      steps_per_update: decode steps per update of the decoder.
      kept_cache: a cache to reuse; its text is overwritten.
    """
    # Prefill is one of the updates.
    needed = 1 + steps_per_update * (1 + _BASELINE_UPDATES)
    if decoder.drafter is None or isinstance(decoder.drafter, RootOnly) or decoder.grammar:
        return None
    if room < len(prompt) + needed:
        return None
    # Keep the drafter in the program, so that prefill is not compiled again.
    endless = decoder.format._replace(stop_tokens=(), stop_strings=[])
    baseline = decoder._replace(
        tree=_ROOT_ALONE,
        format=endless,
        sampling=dataclasses.replace(decoder.sampling, min_tokens=0),
        mirror=None,
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
