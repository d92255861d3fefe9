"""The programs of mirror decoding: two on the target's devices, four on the drafter's devices.

Each program is dispatched separately. So on separate devices, the target's second program and the
drafting of the next trees run at the same time.
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
    EarlyExit,
    Outcomes,
    draft_ahead,
    exit_early,
    guess_outcomes,
    pick,
    read_decided,
)
from redrafter_jax.decoding.step import as_asked, decided_path, finish, propose, step_noise
from redrafter_jax.drafters.base import Drafter
from redrafter_jax.engine.gains import Gains, gains_of_step
from redrafter_jax.models.cache import first_layers
from redrafter_jax.models.target import Decoder, Target
from redrafter_jax.parallel.mesh import per_shard
from redrafter_jax.parallel.model import Model
from redrafter_jax.types import Decided, DecodeState, Halfway, KVCache, TokenTree, View


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Relay(Drafter):
    """A stand-in for a drafter on the target's devices, which records what the drafter must read.

    The state of a `Relay` is the `Decided` that `read` was last called with.

    Attributes:
      drafter_layers: target layers that the drafter reads; None if the drafter reads tokens only.
      chunk: C, number of tokens in a chunk of a prompt.
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


class StepEnd(NamedTuple):
    """What the drafter needs to know about a completed step.

    Attributes:
      last: index of the last accepted node.
      root: the token that the target chose after this node.
      decided: the accepted path.
      ended: whether a row is done, so that it needs no further tree.
    """

    last: Int[Array, " B"]
    root: Int[Array, " B"]
    decided: Decided
    ended: Bool[Array, " B"]


def without_layers(target: Target) -> Target:
    """Return a target with only the parts that drafters use: embedding, norm and projection."""
    decoder = target.merge()
    decoder.layers = nnx.List([])
    return replace(Model.split(target.config, decoder), mesh=target.mesh, source=target.source)


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
) -> tuple[Float[Array, "B P V"], Halfway, EarlyExit]:
    """Run the target's first layers over the trees, and guess the tokens that it will choose.

    The arguments are not donated.

    Returns:
      The noise of the step, the pass through the first layers, and the guesses.
    """
    decoder, V, layers = target.merge(), target.config.vocab_size, relay.drafter_layers
    noise = step_noise(state, config.max_path, V)
    cache = first_layers(_asked(state, idle).cache, mirror.layer)
    begun = decoder.tree_layers(None, tree, cache, mirror.layer, layers or ())
    # Leaves k guesses after each node that are not its children.
    most = min(mirror.candidates + config.extensions + (config.lookup_tokens > 0), V)
    return noise, begun, exit_early(decoder, begun, tree, noise, state.sampling, most, layers)


@partial(jax.jit, donate_argnames="state", static_argnames="top")
@per_shard
def complete_pass(
    target: Target,
    relay: Relay,
    state: DecodeState,
    tree: TokenTree,
    noise: Float[Array, "B P V"],
    begun: Halfway,
    idle: Bool[Array, " B"],
    *,
    top: int | None,
) -> tuple[DecodeState, Gains, StepEnd]:
    """Run the target's remaining layers, and finish the step.

    Args:
      target: the target model.
      relay: the drafter's stand-in.
      state: decode state of B rows, donated.
      tree: the trees to verify.
      noise: the noise, from `begin_pass`.
      begun: the pass through the first layers, from `begin_pass`.
      idle: whether a row takes no part in the step.
      top: number of most likely tokens to report per position, as in `read_rows`.

    Returns:
      The state, the gains of the step, and what the drafter needs to know.
    """
    decoder, V, layers = target.merge(), target.config.vocab_size, relay.drafter_layers
    asked = _asked(state, idle)
    whole = decoder.tree_layers(begun, tree, asked.cache, len(decoder.layers), layers or ())
    verified = decoder.tree_outputs(whole, tree)
    batch = state._replace(done=asked.done)
    after, trace = finish(decoder, batch, tree, verified, noise)
    gains = gains_of_step(~batch.done, trace, verified, V, top)
    newest = jnp.maximum(trace.gained - 1, 0)[:, None]
    last = jnp.take_along_axis(trace.accepted.path, newest, axis=1)[:, 0]
    decided = relay.without_hidden(decided_path(batch, verified, trace))
    end = StepEnd(last, after.root, decided, after.done)
    return after._replace(done=jnp.where(idle, state.done, after.done)), gains, end


def _asked(state: DecodeState, idle: Bool[Array, " B"]) -> DecodeState:
    """Return the state with idle rows marked as done, and cache length 0 for all done rows."""
    return as_asked(state._replace(done=state.done | idle))


@partial(jax.jit, static_argnames="config")
@per_shard
def draft_now(
    lender: Target, drafter: Drafter, state: DecodeState, *, config: TreeConfig
) -> TokenTree:
    """Draft a tree for every row while the target waits."""
    noise = step_noise(state, config.max_path, lender.config.vocab_size)
    return propose(lender.merge(), drafter, state, noise, config)


@partial(jax.jit, donate_argnames="state", static_argnames=("mirror", "config"))
@per_shard
def draft_outcomes(
    lender: Target,
    drafter: Drafter,
    state: DecodeState,
    tree: TokenTree,
    guessed: EarlyExit,
    *,
    mirror: MirrorConfig,
    config: TreeConfig,
) -> tuple[DecodeState, Outcomes, TokenTree]:
    """Draft the next tree for every guessed outcome; see `draft_ahead`."""
    outcomes = guess_outcomes(tree, guessed, mirror.candidates, mirror.count(config))
    decoder, hidden = lender.merge(), guessed.hidden
    state, trees = draft_ahead(decoder, drafter, state, tree, hidden, outcomes, config)
    return state, outcomes, trees


@jax.jit
@per_shard
def pick_tree(
    lender: Target, trees: TokenTree, outcomes: Outcomes, end: StepEnd
) -> tuple[TokenTree, Int[Array, " B"]]:
    """Return the trees and the ranks of the outcomes that occurred; see `pick`."""
    del lender  # only used by `per_shard`, for the mesh
    return pick(trees, outcomes, end.last, end.root)


@partial(jax.jit, donate_argnames="state")
@per_shard
def read_along(
    lender: Target,
    drafter: Drafter,
    state: DecodeState,
    decided: Decided,
    is_new: Bool[Array, " B"],
) -> DecodeState:
    """Let the drafter read decided tokens; new rows start from the drafter's empty state."""
    decoder = lender.merge()

    def begin(empty: Any, own: Any) -> Any:
        return jnp.where(is_new.reshape(-1, *(1,) * (own.ndim - 1)), empty, own)

    own = jax.tree.map(begin, drafter.empty(decoder, len(is_new)), state.own)
    return read_decided(decoder, drafter, state._replace(own=own), decided)
