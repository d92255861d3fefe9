"""Sessions, which write a text or a conversation; many are decoded together."""

from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, TypeAlias, TypeVar

from redrafter_jax.config import TreeConfig
from redrafter_jax.drafters.base import Drafter, LoadedHead
from redrafter_jax.engine.engine import Engine
from redrafter_jax.engine.messages import Request
from redrafter_jax.generation import not_numbers
from redrafter_jax.models.target import Target
from redrafter_jax.parallel.mesh import data_shards

Result = TypeVar("Result")
# Yields requests one after the other, is sent the new tokens of each, and returns a result.
Session: TypeAlias = Generator[Request, list[int], Result]
# Rows of the output, as JSON objects.
JsonRows: TypeAlias = list[dict[str, Any]]

# Decode steps between two checks for finished rows.
STEPS = 16
# An eighth of the rows are prefilled together, in passes of `_PASS_TOKENS` tokens. In the time in
# which a GPU reads the weights, it can multiply them by about 200 tokens.
_GROUPS = 8
_PASS_TOKENS = 256
_LONGEST_CHUNK = 64


def make_engine(
    target: Target,
    drafter: LoadedHead | Drafter | None,
    tree: TreeConfig | None,
    rows: int,
    length: int,
    stop_tokens: Sequence[int],
) -> Engine:
    """Make an engine with settings for throughput.

    Args:
      target: the target.
      drafter: the drafter; None for autoregressive decoding.
      tree: shape of the draft trees; None for the default.
      rows: number of texts that are decoded together.
      length: maximum number of tokens of a text, prompt included.
      stop_tokens: tokens that end a text.
    """
    shards = data_shards(target.mesh)
    group = -(-rows // (_GROUPS * shards))
    return Engine(
        target,
        drafter,
        tree=tree,
        slots=rows,
        context_length=length,
        stop_tokens=stop_tokens,
        steps_per_call=STEPS,
        prefill_chunk=min(max(_PASS_TOKENS // (group * shards), 1), _LONGEST_CHUNK),
        prefill_rows=group,
        # A row's steps are then the same program whatever other rows do, and round alike.
        prefill_joins=False,
        row_counts=(),
    )


def run_sessions(
    engine: Engine,
    sessions: Iterator[Session[Result]],
    unfinished: Result | None = None,
    is_late: Callable[[], bool] = lambda: False,
    on_end: Callable[[Result], None] = lambda _: None,
) -> Iterator[Result]:
    """Run many sessions together and yield their results in order.

    Up to two sessions are open per slot of the engine, so that a free slot always finds a waiting
    request.

    Args:
      engine: the engine that decodes.
      sessions: the sessions, which are begun in order.
      unfinished: the result to yield for a session that `is_late` cuts short. If None, `is_late` is
        never called.
      is_late: called every few decode steps. Once it returns True, each session with new tokens
        receives them, as if its request had reached its limit. A session without new tokens, or
        one that then makes another request, is cut short.
      on_end: called with a session's result as soon as the session ends, possibly before the
        results of earlier sessions are known.

    Raises:
      InputError: the target's logits are not finite.
    """
    # Request number to the session's number, the session and the new tokens so far.
    running: dict[int, tuple[int, Session[Result], list[int]]] = {}
    ended: dict[int, Result] = {}
    numbered = enumerate(sessions)
    first = 0

    def resume(number: int, session: Session[Result], tokens: list[int] | None) -> None:
        try:
            request = next(session) if tokens is None else session.send(tokens)
        except StopIteration as stop:
            ended[number] = stop.value
            on_end(stop.value)
            return
        running[engine.submit(request)] = number, session, []

    while True:
        while first in ended:
            yield ended.pop(first)
            first += 1
        if unfinished is not None and is_late():
            last = max([*ended, *(number for number, *_ in running.values())], default=-1)
            for number, session, tokens in list(running.values()):
                if tokens:
                    resume(number, session, tokens)
            yield from (ended.get(number, unfinished) for number in range(first, last + 1))
            return
        if len(running) < 2 * engine.slots and (started := next(numbered, None)):
            resume(*started, None)
        elif running:
            for event in engine.advance(passes=None):
                number, session, tokens = running[event.number]
                tokens += event.tokens
                if event.ended == "not numbers":
                    raise not_numbers(engine.target)
                if event.ended:
                    del running[event.number]
                    resume(number, session, tokens)
        else:
            return
