"""Timing of decoding methods on the same prompts.

In a timed turn, all methods decode the same batch, one directly after the other. All commands of
`eval` that decode prompts use this module.
"""

import time
from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import batched
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int

from redrafter_jax.config import MirrorConfig, SamplingConfig, TreeConfig
from redrafter_jax.config.drafting import longest_path, node_count
from redrafter_jax.drafters.base import Drafter, LoadedHead, RootOnly, as_drafter, check_drafting
from redrafter_jax.drafters.lookup import PromptLookup
from redrafter_jax.engine.messages import MirrorCounts, Token
from redrafter_jax.engine.requests import Batch, check_batch, slots_for
from redrafter_jax.generation import collect, engine_of, not_numbers
from redrafter_jax.models.target import Target
from redrafter_jax.progress import track
from redrafter_jax.text.prompts import EncodedPrompts

from .config import RowSettings


class Method(NamedTuple):
    """A decoding method, from `drafting` or `baseline`.

    Attributes:
      target: the target.
      drafter: the drafter.
      tree: shape of the draft trees; None for the baseline.
      mirror: settings for drafting the next trees while the target verifies; None to draft after
        each target call.
    """

    target: Target
    drafter: Drafter
    tree: TreeConfig | None
    mirror: MirrorConfig | None = None

    @property
    def num_nodes(self) -> int:
        """N, the number of tokens per row that one target call reads."""
        return node_count(self.tree)


def baseline(target: Target) -> Method:
    """Make the method of autoregressive decoding."""
    return Method(target, RootOnly(), None)


def drafting(target: Target, head: LoadedHead | Drafter | None, tree: TreeConfig | None) -> Method:
    """Make a method of speculative decoding.

    Args:
      target: the target.
      head: a trained head or a drafter; None for prompt lookup alone.
      tree: shape of the draft trees; None makes the baseline instead. For prompt lookup alone, only
        `tree.lookup_tokens` is used.

    Raises:
      InputError: the drafter does not fit the target, or cannot draft the tree; or the tree is
        deeper than the target's position limit.
    """
    if tree is None:
        return baseline(target)
    drafter = as_drafter(PromptLookup() if head is None else head)
    if head is None:
        tree = TreeConfig(beam_width=1, draft_rounds=tree.lookup_tokens)
    check_drafting(target.config, drafter, tree)
    return Method(target, drafter, tree)


class Run(NamedTuple):
    """The result of decoding one batch, with wall times.

    The other fields are those of `redrafter_jax.Generation`.

    Attributes:
      prefill_seconds: seconds from lists of prompts until the first token of each row is on the
        device; 0 if the run is not timed.
      decode_seconds: seconds from then until all tokens are on the host; 0 if the run is not timed.
      mirror: counts of the trees that were drafted ahead; None without `Method.mirror`.
    """

    tokens: list[list[int]]
    steps: list[int]
    accept_counts: Int[np.ndarray, "B P"]
    accepted_by: dict[str, list[int]]
    prefill_seconds: float
    decode_seconds: float
    mirror: MirrorCounts | None = None

    @property
    def seconds(self) -> float:
        """Wall time of the whole call, in seconds."""
        return self.prefill_seconds + self.decode_seconds

    @property
    def new_tokens(self) -> int:
        """Number of new tokens of all rows."""
        return sum(len(row) for row in self.tokens)

    def select(self, rows: Sequence[int]) -> "Run":
        """Return the run restricted to these rows."""
        return self._replace(
            tokens=[self.tokens[row] for row in rows],
            steps=[self.steps[row] for row in rows],
            accept_counts=self.accept_counts[list(rows)],
            accepted_by={
                name: [counts[row] for row in rows] for name, counts in self.accepted_by.items()
            },
        )

    @property
    def decoded_tokens(self) -> int:
        """Number of new tokens of all rows without the first of each row, which prefill decides."""
        return self.new_tokens - len(self.tokens)


class TimedTurn(NamedTuple):
    """The runs of all methods on one batch, one directly after the other.

    Attributes:
      batch: index of the batch.
      repeat: number of earlier turns with this batch.
      runs: the run of each method, by its name.
    """

    batch: int
    repeat: int
    runs: dict[str, Run]

    def untimed(self) -> "TimedTurn":
        """Return the same turn with all times set to 0."""
        times = {"prefill_seconds": 0.0, "decode_seconds": 0.0}
        return self._replace(runs={name: run._replace(**times) for name, run in self.runs.items()})


def make_batches(
    asked: EncodedPrompts, batch_size: int | None, sampling: SamplingConfig, rows: RowSettings
) -> list[Batch]:
    """Split the prompts into batches in order; the last batch may be smaller.

    The seed of a row is `rows.first_seed` plus the number of its prompt in the file.

    Args:
      asked: the encoded prompts.
      batch_size: number of rows in a batch; None for one batch of all rows.
      sampling: sampling settings of all rows.
      rows: settings with the limits of the answers.
    """
    return [
        Batch(
            prompts=[row for _, row in own],
            max_new_tokens=rows.max_new_tokens,
            sampling=sampling,
            seeds=[rows.first_seed + prompt.number for prompt, _ in own],
            eos_token_ids=asked.stop_tokens,
        )
        for own in batched(
            zip(asked.prompts, asked.rows, strict=True), batch_size or len(asked.rows)
        )
    ]


def warm_up(work: Iterable[tuple[Hashable, Method, Batch]], times: int) -> None:
    """Decode one batch of every array shape with every method, untimed; the first run compiles.

    Args:
      work: for every later run: a key of the method, the method, and the batch.
      times: number of untimed runs per method and array shape.
    """
    chosen = {}
    for name, method, batch in work:
        shape = state_shape(method, batch)
        chosen.setdefault((name, shape), (method, batch))
    warming = list(chosen.values()) * times
    for method, batch in track(warming, len(warming), "measure: compile and warm up"):
        decode_batch(method, batch)


def measure(
    methods: Mapping[str, Method],
    batches: Sequence[Batch],
    repeats: int,
    done: Container[tuple[int, int]] = (),
    advance: Callable[[int], None] = lambda _: None,
) -> Iterator[TimedTurn]:
    """Time all methods on every batch, `repeats` times; call `warm_up` first.

    The runs of a turn directly follow each other, so that a slow minute of the machine affects all
    methods. The method that comes first changes from turn to turn.

    Args:
      methods: the methods by name.
      batches: the batches.
      repeats: number of turns per batch.
      done: (batch, repeat) pairs of the turns to leave out.
      advance: called with 1 after every run.
    """
    names = list(methods)
    for repeat in range(repeats):
        for index, batch in enumerate(batches):
            if (index, repeat) in done:
                continue
            first = (repeat + index) % len(names)
            order = names[first:] + names[:first]
            runs = {}
            for name in order:
                runs[name] = decode_batch(methods[name], batch)
                advance(1)
            yield TimedTurn(index, repeat, {name: runs[name] for name in names})


def decode_batch(
    method: Method, batch: Batch, watch: Callable[[str, Any], object] | None = None
) -> Run:
    """Decode a batch as `generate` does, and time prefill and decoding.

    `watch` is the callback `Mirror.watch`, for a method that drafts ahead.

    Raises:
      InputError: a prompt or a seed does not fit, as in `generate`.
    """
    target, drafter, tree, mirror = method
    started = time.perf_counter()
    requests = check_batch(target.config, batch)
    engine = engine_of(
        target, drafter, requests, tree, adaptive=False, log_probs=False, mirror=mirror
    )
    rows: dict[int, list[Token]] = {engine.submit(request): [] for request in requests}

    def advance(steps: int | None) -> None:
        for event in engine.advance(passes=None, steps=steps):
            rows[event.number] += event.decided
            if event.ended == "not numbers":
                raise not_numbers(target)

    advance(0)
    if engine.mirror is not None and watch is not None:
        engine.mirror.watch = watch
    prefilled = time.perf_counter()
    while engine.busy:
        advance(None)
    result = collect(engine, list(rows.values()), log_probs=False)
    return Run(
        result.tokens,
        result.steps,
        result.accept_counts,
        result.accepted_by,
        prefill_seconds=prefilled - started,
        decode_seconds=time.perf_counter() - prefilled,
        mirror=result.mirror,
    )


def state_shape(method: Method, batch: Batch) -> tuple[int, int]:
    """Return the numbers of rows and cache slots of a batch's decode state.

    Batches with the same numbers use the same compiled program.
    """
    rows = check_batch(method.target.config, batch)
    longest = max(len(row.prompt) + row.max_new_tokens for row in rows)
    return len(rows), slots_for(longest, longest_path(method.tree))
