"""The programs of mirror decoding: two on the target's devices, four on the drafter's.

Each program is one dispatch, so that the target's second part and drafting ahead run concurrently
on separate devices.
"""

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from redrafter_jax.config import MirrorConfig, TargetConfig, TreeConfig
from redrafter_jax.decoding.mirror import (
    DrafterRows,
    EarlyExit,
    Outcomes,
    draft_ahead,
    exit_early,
    exit_width,
    forked_pages,
    guess_outcomes,
    pick,
    read_decided,
)
from redrafter_jax.decoding.step import decided_path, draft, finish, step_noise
from redrafter_jax.drafters.base import Drafter
from redrafter_jax.engine.gains import Gains, gains_of_step
from redrafter_jax.models.cache import first_layers, init_cache
from redrafter_jax.models.target import Decoder, Target
from redrafter_jax.parallel.mesh import per_shard
from redrafter_jax.parallel.model import Model
from redrafter_jax.sampling import draw_noise
from redrafter_jax.types import (
    Decided,
    DecodeState,
    Halfway,
    KVCache,
    Sampling,
    TokenTree,
    View,
)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Relay(Drafter):
    """A stand-in for a drafter on the target's devices, which keeps the arguments of `read`.

    Its state is the last `Decided` of each row.

    Attributes:
      drafter_layers: target layers that the drafter reads; None if it reads tokens only.
      chunk: C, tokens of a chunk.
    """

    drafter_layers: tuple[int, ...] | None = field(metadata={"static": True})
    chunk: int = field(metadata={"static": True})

    @property
    def name(self) -> str:
        return "relay"

    def layers(self, target: TargetConfig) -> tuple[int, ...]:
        del target
        return self.drafter_layers or ()

    def empty(self, target: Decoder, rows: int) -> Decided:
        layers, C = self.drafter_layers, self.chunk
        width = 0 if layers is None else (1 + len(layers)) * target.config.hidden_size
        tokens, counts = jnp.zeros((rows, C), jnp.int32), jnp.zeros(rows, jnp.int32)
        hidden = jnp.zeros((rows, C, width), target.dtype)
        return Decided(tokens, tokens, hidden, counts, counts)

    def read(
        self, target: Decoder, own: Decided, cache: KVCache, decided: Decided
    ) -> tuple[Decided, KVCache]:
        del target, own
        return self.without_hidden(decided), cache

    def without_hidden(self, decided: Decided) -> Decided:
        """Drop the hidden states if the drafter does not read them."""
        if self.drafter_layers is not None:
            return decided
        return decided._replace(hidden=decided.hidden[..., :0])

    def propose(
        self,
        target: Decoder,
        own: Decided,
        cache: KVCache,
        view: View,
        noise: Float[Array, "B P V"],
        tree: TreeConfig,
    ) -> TokenTree:
        raise NotImplementedError("the drafter proposes, not its relay")


class FirstPart(NamedTuple):
    """The noise of a step, and a target pass over the trees after its first layers."""

    noise: Float[Array, "B P V"]
    begun: Halfway


class StepEnd(NamedTuple):
    """The outcome of a step that the drafter needs.

    Attributes:
      last: index of the last accepted node.
      decided: the accepted path.
      ended: rows that need no further tree.
    """

    last: Int[Array, " B"]
    decided: Decided
    ended: Bool[Array, " B"]


def without_layers(target: Target) -> Target:
    """Keep only the parts of a target that drafters use: embedding, final norm and projection."""
    decoder = target.merge()
    decoder.layers = nnx.List([])
    return replace(Model.split(target.config, decoder), mesh=target.mesh, source=target.source)


@partial(jax.jit, static_argnames=("rows", "slots", "pages", "outcomes", "max_path"))
def empty_drafter_rows(
    lender: Target,
    drafter: Drafter,
    *,
    rows: int,
    slots: int,
    pages: int,
    outcomes: int,
    max_path: int,
) -> DrafterRows:
    """Create the drafter's empty rows, with pages for M = `outcomes` forks of each row."""
    decoder, numbers, whole = lender.merge(), jnp.zeros(rows), jnp.zeros(rows, jnp.int32)
    total = pages + rows * outcomes * forked_pages(max_path)
    config = decoder.config.with_layers(1)
    cache = init_cache(config, rows, slots, decoder.dtype, drafter.cache, total)
    return DrafterRows(
        own=drafter.empty(decoder, rows),
        cache=cache._replace(keys=cache.keys[1:], values=cache.values[1:]),
        tokens=jnp.zeros((rows, slots), jnp.int32),
        speculates=jnp.ones(rows, bool),
        sampling=Sampling(numbers, whole, numbers, numbers, whole),
    )


@partial(jax.jit, static_argnames=("mirror", "config"))
@per_shard
def begin_pass(
    target: Target,
    relay: Relay,
    state: DecodeState,
    tree: TokenTree,
    idle: Bool[Array, " B"],
    *,
    mirror: MirrorConfig,
    config: TreeConfig,
) -> tuple[FirstPart, EarlyExit]:
    """Run the target's first layers, and guess the outcomes from them; donates nothing.

    For the pass, idle and done rows have an empty text.
    """
    decoder, V = target.merge(), target.config.vocab_size
    noise = step_noise(state, config.max_path, V)
    lengths = jnp.where(state.done | idle, 0, state.cache.lengths)
    cache = first_layers(state.cache, mirror.layer)._replace(lengths=lengths)
    begun = decoder.begin_tree(tree, cache, mirror.layer, relay.layers(target.config))
    most = exit_width(mirror, config, V)
    layers = relay.drafter_layers
    guessed = exit_early(decoder, begun, tree, noise, state.sampling, most, layers)
    return FirstPart(noise, begun), guessed


@partial(jax.jit, donate_argnames="state", static_argnames="top")
@per_shard
def complete_pass(
    target: Target,
    relay: Relay,
    state: DecodeState,
    tree: TokenTree,
    first: FirstPart,
    idle: Bool[Array, " B"],
    *,
    top: int | None,
) -> tuple[DecodeState, Gains, StepEnd]:
    """Run the target's remaining layers, and finish the step."""
    decoder, kept = target.merge(), state.done
    batch = state._replace(done=kept | idle)
    lengths = jnp.where(batch.done, 0, state.cache.lengths)
    cache = state.cache._replace(lengths=lengths)
    verified = decoder.complete_tree(first.begun, tree, cache, relay.layers(target.config))
    after, trace = finish(decoder, batch, tree, verified, first.noise)
    gains = gains_of_step(~batch.done, trace, verified, target.config.vocab_size, top)
    newest = jnp.maximum(trace.gained - 1, 0)[:, None]
    last = jnp.take_along_axis(trace.accepted.path, newest, axis=1)[:, 0]
    decided = relay.without_hidden(decided_path(batch, verified, trace))
    after = after._replace(done=jnp.where(idle, kept, after.done))
    return after, gains, StepEnd(last, decided, after.done | idle)


@partial(jax.jit, static_argnames="config")
@per_shard
def draft_now(
    lender: Target, drafter: Drafter, rows: DrafterRows, *, config: TreeConfig
) -> TokenTree:
    """Draft a tree for every row while the target waits."""
    decoder, lengths = lender.merge(), rows.cache.lengths
    noise = draw_noise(rows.sampling, lengths + 1, config.max_path, decoder.config.vocab_size)
    return draft(decoder, drafter, rows.own, rows.cache, rows.view, rows.speculates, noise, config)


@partial(jax.jit, donate_argnames="rows", static_argnames=("mirror", "config"))
@per_shard
def draft_outcomes(
    lender: Target,
    drafter: Drafter,
    rows: DrafterRows,
    tree: TokenTree,
    guessed: EarlyExit,
    *,
    mirror: MirrorConfig,
    config: TreeConfig,
) -> tuple[DrafterRows, Outcomes, TokenTree]:
    """Draft the next tree for every guessed outcome; see `draft_ahead`."""
    outcomes = guess_outcomes(tree, guessed, mirror.candidates, mirror.count(config))
    rows, trees = draft_ahead(lender.merge(), drafter, rows, tree, guessed, outcomes, config)
    return rows, outcomes, trees


@jax.jit
@per_shard
def pick_tree(
    lender: Target, trees: TokenTree, outcomes: Outcomes, end: StepEnd
) -> tuple[TokenTree, Bool[Array, " B"]]:
    """Select the trees of the actual outcomes, and which rows have one; see `pick`."""
    del lender  # only used by `per_shard`, for the mesh
    newest = jnp.maximum(end.decided.count - 1, 0)[:, None]
    root = jnp.take_along_axis(end.decided.following, newest, axis=1)[:, 0]
    return pick(trees, outcomes, end.last, root)


@partial(jax.jit, donate_argnames="rows")
@per_shard
def read_along(
    lender: Target,
    drafter: Drafter,
    rows: DrafterRows,
    decided: Decided,
    is_new: Bool[Array, " B"],
) -> DrafterRows:
    """Let the drafter read decided tokens; rows that are new start from an empty state."""
    decoder = lender.merge()

    def begin(empty: Any, own: Any) -> Any:
        return jnp.where(is_new.reshape(-1, *(1,) * (own.ndim - 1)), empty, own)

    own = jax.tree.map(begin, drafter.empty(decoder, len(is_new)), rows.own)
    return read_decided(decoder, drafter, rows._replace(own=own), decided)
