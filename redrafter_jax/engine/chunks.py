"""The NumPy inputs of the next prefill or decode program."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Int

from redrafter_jax.config import TargetConfig
from redrafter_jax.engine.device import Chunk
from redrafter_jax.engine.messages import OWN_STOPS, Request
from redrafter_jax.engine.requests import Batch, check_batch, row_arrays
from redrafter_jax.engine.scheduler import Row
from redrafter_jax.models.target import Target
from redrafter_jax.types import Controls

# Minimum width of the bias arrays, so that one program serves most requests; doubled as needed.
_BIASES = 512


def make_row(
    target: Target,
    number: int,
    request: Request,
    stop_tokens: tuple[int, ...],
    stop_width: int | None = None,
) -> Row:
    """Check a request as `generate` does, and return it as a row of the scheduler.

    Args:
      target: the target model.
      number: number of the request.
      request: the request.
      stop_tokens: stop tokens of a request whose `stop_tokens` are None.
      stop_width: E, maximum number of stop tokens; None takes the number of stop tokens of this
        request, rounded up to a multiple of 8.

    Raises:
      InputError: a value does not fit the target, or there are too many stop tokens.
    """
    stops = stop_tokens if request.stop_tokens is None else request.stop_tokens
    prompt, limit, seed, sampling, *_ = request
    (checked,) = check_batch(target.config, Batch([list(prompt)], limit, sampling, [seed], [stops]))
    arrays = row_arrays(target.config, checked, stop_width)
    grammar = request.grammar
    matcher = None
    if grammar is not None:
        from redrafter_jax.engine.constrained import check_grammar

        check_grammar(target.config, grammar, sampling, stops)
        matcher = grammar.begin()
    return Row(number, request, arrays, text=list(prompt), matcher=matcher)


def idle_row(target: Target, stop_tokens: Sequence[int]) -> Row:
    """Build the row that unused places of a prefill pass read.

    The row has the maximum number of stop tokens, so its arrays have the shapes of all other rows.
    """
    return make_row(target, -1, Request([0], 1, 0), (*stop_tokens, *[0] * OWN_STOPS))


def beginnings(
    slots: Sequence[Row | None], admitted: Mapping[int, int], part: int, shape: tuple[int, int]
) -> tuple[Int[np.ndarray, " G"], Int[np.ndarray, "G S"]]:
    """Find the new rows whose prefix is already cached, and the tokens of these prefixes.

    Args:
      slots: row in each slot; None if the slot is free.
      admitted: slots of the requests that have just got their slots, by place in the pass.
      part: number of slots per shard of the mesh.
      shape: (G, S): the number of places in the pass, and the maximum number of tokens of a row.

    Returns:
      For each place, the row's index within its shard, or `part` if the row has no cached prefix;
      and the tokens of the prefix, padded with zeros.
    """
    rows, tokens = np.full(shape[0], part, np.int32), np.zeros(shape, np.int32)
    for at, index in admitted.items():
        row = slots[index]
        if row is not None and row.cached:
            rows[at] = index % part
            tokens[at, : row.cached] = row.text[: row.cached]
    return rows, tokens


def next_chunk(
    slots: Sequence[Row | None],
    places: Mapping[int, int],
    part: int,
    shape: tuple[int, int],
    idle: Row,
) -> Chunk:
    """Build the next chunk of some prompts, and count its tokens as cached.

    Args:
      slots: row in each slot; None if the slot is free.
      places: slots whose prompts are read, by place in the pass.
      part: number of slots per shard of the mesh.
      shape: (G, C): the number of places in the pass, and the number of tokens in a chunk.
      idle: row to read at all places without a prompt.
    """
    G, C = shape
    # Row `part` is out of range: an idle place.
    rows, begins = np.full(G, part, np.int32), np.zeros(G, np.int32)
    is_new = np.zeros(G, bool)
    tokens = np.zeros((G, C + 1), np.int32)
    speculates, arrays = np.ones(G, bool), [idle.arrays] * G
    for at, index in places.items():
        row = slots[index]
        assert row is not None
        begin = row.cached
        fresh = row.text[begin : begin + C + 1]
        rows[at], begins[at], is_new[at] = index % part, begin, row.is_new
        row.is_new = False
        tokens[at, : len(fresh)] = fresh
        speculates[at], arrays[at] = row.request.speculate, row.arrays
        row.cached = min(begin + C, row.read_until)
    requests: Any = jax.tree.map(lambda *one: np.concatenate(one), *arrays)
    requests = requests._replace(tokens=tokens[:, :C])
    return Chunk._make([rows, begins, is_new, tokens[:, C], speculates, requests])


def controls_of(
    config: TargetConfig, requests: Mapping[int, Request], rows: int
) -> Controls | None:
    """Build the `Controls` of requests; None if no request has penalties, biases or `min_tokens`.

    Args:
      config: configuration of the target.
      requests: requests, by place in the batch.
      rows: number of places; places without a request have no controls.
    """
    asked = {at: one.sampling for at, one in requests.items() if one.sampling.adjusts}
    if not asked:
        return None
    most = max(len(one.logit_bias or ()) for one in asked.values())
    width = max(_BIASES, 1 << max(most - 1, 0).bit_length())

    controls = Controls(
        prompt_lengths=_filled(0, rows),
        min_tokens=_filled(0, rows),
        repetition=_filled(1.0, rows),
        presence=_filled(0.0, rows),
        frequency=_filled(0.0, rows),
        bias_tokens=_filled(config.vocab_size, rows, width),
        biases=_filled(0.0, rows, width),
    )
    for at, one in asked.items():
        values = (
            *(len(requests[at].prompt), one.min_tokens),
            *(one.repetition_penalty, one.presence_penalty, one.frequency_penalty),
        )
        for own, value in zip(controls, values, strict=False):
            own[at] = value
        biases = one.logit_bias or {}
        controls.bias_tokens[at, : len(biases)] = list(biases)
        controls.biases[at, : len(biases)] = list(biases.values())
    return controls


def _filled(value: int | float, *shape: int) -> Any:
    """Array filled with a value: int32 for an int, float32 for a float."""
    return np.full(shape, value, np.int32 if isinstance(value, int) else np.float32)


def first_masks(
    rows: Mapping[int, Row], count: int, vocab_size: int
) -> Int[np.ndarray, "G words"] | None:
    """Build bit masks of the tokens that the rows' grammars allow next, one mask per place.

    Returns None if no row has a grammar.
    """
    matchers = {at: row.matcher for at, row in rows.items() if row.matcher is not None}
    if not matchers:
        return None
    masks = np.full((count, -(-vocab_size // 32)), -1, np.int32)
    for at, matcher in matchers.items():
        masks[at] = matcher.mask
    return masks


def next_batch(
    active: Sequence[int], rows: int, parts: Sequence[range]
) -> tuple[Int[np.ndarray, " G"], dict[int, int]]:
    """Lay out the next decode batch.

    Args:
      active: slots to decode.
      rows: G, number of places in the batch, at least the number of slots to decode.
      parts: ranges of slots, one per shard of the mesh.

    Returns:
      For each place, the row's index within its shard, or the shard's size if the place is idle;
      and the slots by place, without idle places.
    """
    size = len(parts[0])
    batch = np.full(rows, size, np.int32)
    places: dict[int, int] = {}
    for number, part in enumerate(parts):
        own = [index for index in active if index in part]
        for at, index in enumerate(own, start=number * rows // len(parts)):
            # In a batch of all rows, the place is the slot.
            place = index if rows == size * len(parts) else at
            batch[place], places[place] = index - part.start, index
    return batch, places
