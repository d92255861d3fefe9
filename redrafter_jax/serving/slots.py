"""Rows that decode together, each of which the next request takes when its own has ended.

The shapes are fixed at the start, so that nothing is compiled for a new request: a group of them
is prefilled by itself and its rows replace free ones of the decode state. What is decided for a
request depends on nothing but the request, as in `generate`.
"""

import heapq
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Int

from redrafter_jax.config import SamplingConfig
from redrafter_jax.decoding.step import decode
from redrafter_jax.drafters.base import Drafter
from redrafter_jax.errors import InputError
from redrafter_jax.generation import start
from redrafter_jax.models.target import Target
from redrafter_jax.parallel.mesh import constrain, data_shards, place, shardings, to_host
from redrafter_jax.requests import slots_for
from redrafter_jax.types import DecodeState

# Rows that are prefilled together, as a part of all, and tokens of them that one pass reads. A GPU
# reads the weights in the time that it needs to multiply them by some 200 tokens.
_GROUPS = 8
_PASS_TOKENS = 256
_LONGEST_CHUNK = 64


class Request(NamedTuple):
    """What one row is asked for.

    Attributes:
      prompt: token ids.
      max_new_tokens: limit on what is decided.
      seed: of its noise.
      sampling: how its tokens are chosen.
    """

    prompt: list[int]
    max_new_tokens: int
    seed: int
    sampling: SamplingConfig = SamplingConfig()


class Slots:
    """A fixed number of rows of one decode state, and the requests that wait for one.

    Args:
      target: the target model.
      drafter: from `bind_drafter`.
      rows: B, a multiple of the mesh's `data`.
      context_length: tokens that a request may come to, its prompt included.
      stop_tokens: that end a row.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        rows: int,
        context_length: int,
        stop_tokens: Sequence[int],
    ) -> None:
        self.rows = rows
        self._target = target
        self._drafter = drafter
        self._context_length = context_length
        self._stop_tokens = list(stop_tokens)
        shards = data_shards(target.mesh)
        self._group = -(-rows // (_GROUPS * shards)) * shards
        self._waiting: list[tuple[int, Request]] = []
        # By row, the number of its request and the tokens of its prompt.
        self._running: dict[int, tuple[int, int]] = {}
        self._state: DecodeState | None = None

    @property
    def busy(self) -> bool:
        """Whether a request waits or is decoded."""
        return bool(self._waiting or self._running)

    def submit(self, number: int, request: Request) -> None:
        """Let a request wait for a row; those of lower numbers come first.

        Raises:
          InputError: it may come to more tokens than a row has room for.
        """
        length, limit = len(request.prompt), request.max_new_tokens
        if length + limit > self._context_length:
            raise InputError(
                f"Request {number} asks for {length} prompt and {limit} new tokens, but rows have "
                f"room for {self._context_length}; ask for fewer, or make longer rows."
            )
        heapq.heappush(self._waiting, (number, request))

    def advance(self, max_steps: int) -> list[tuple[int, list[int]]]:
        """Fill free rows and decode until all rows are done, `max_steps` at most.

        Returns:
          The requests that ended: number, and new tokens up to and including the stop token.

        Raises:
          InputError: a request does not fit the target.
        """
        while waiting := min(self._group, len(self._waiting)):
            free = [row for row in range(self.rows) if row not in self._running]
            if len(free) < waiting:
                break
            self._admit(free[:waiting])
        if self._state is None:
            return []
        state = decode(self._target, self._drafter, self._state, max_steps)
        self._state = state
        tokens, lengths, done = to_host((state.tokens, state.cache.lengths, state.done))
        ended = []
        for row, (number, length) in list(self._running.items()):
            if done[row]:
                ended.append((number, tokens[row, length : lengths[row] + 1].tolist()))
                del self._running[row]
        return ended

    def _admit(self, rows: list[int]) -> None:
        """Prefill the first requests that wait, one for each of the rows, which are free."""
        chosen = [heapq.heappop(self._waiting) for _ in rows]
        # A group is filled up with rows that end at once and go nowhere.
        idle = self._group - len(rows)
        requests = [request for _, request in chosen] + [Request([0], 1, 0)] * idle
        fresh, _ = start(
            self._target,
            self._drafter,
            [request.prompt for request in requests],
            [request.max_new_tokens for request in requests],
            [request.sampling for request in requests],
            [request.seed for request in requests],
            self._stop_tokens,
            slots=slots_for(self._context_length, self._drafter.max_path),
            chunk=min(max(_PASS_TOKENS // self._group, 1), _LONGEST_CHUNK),
        )
        mesh = self._target.mesh
        state = _free_rows(fresh, self.rows, mesh) if self._state is None else self._state
        into = place(jnp.asarray(rows + [self.rows] * idle), mesh)
        self._state = replace_rows(state, fresh, into, mesh=mesh)
        for row, (number, request) in zip(rows, chosen, strict=True):
            self._running[row] = number, len(request.prompt)


@partial(jax.jit, donate_argnames="state", static_argnames="mesh")
def replace_rows(
    state: DecodeState, fresh: DecodeState, rows: Int[Array, " G"], *, mesh: Mesh | None = None
) -> DecodeState:
    """The state with the rows of another one, of the same slots, in place of some of its own.

    Args:
      state: of B rows, donated.
      fresh: of G rows.
      rows: for each of them, which row it becomes; B and above for none.
      mesh: that both are split over.
    """

    def put(ours: Array, new: Array) -> Array:
        return ours.at[rows].set(new, mode="drop")

    return constrain(jax.tree.map(put, state, fresh), mesh)


def _free_rows(like: DecodeState, rows: int, mesh: Mesh | None) -> DecodeState:
    """A state of so many rows, all done, with nothing in them; in all else as the given one."""

    def make() -> DecodeState:
        empty = jax.tree.map(lambda leaf: jnp.zeros((rows, *leaf.shape[1:]), leaf.dtype), like)
        return empty._replace(done=jnp.ones(rows, bool))

    if mesh is None:
        return make()
    # Each device makes its own part: no one could hold the whole.
    return jax.jit(make, out_shardings=shardings(jax.eval_shape(make), mesh))()
