"""Measures the speed-up of a decode step at each acceptance length; acceptance is forced.

The target's vocabulary projection is zero. So the target always chooses token 0, and its text is
known in advance. The drafter does all of its work, and then the tokens of its tree are replaced.
The deepest path gets token 0 down to a given depth. All other nodes get tokens that the target
never chooses.
"""

import argparse
import time
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from eval.abstract import random_state
from eval.step_parts import reset_state, slots_needed
from pallas_kernels.timing import take_turns
from redrafter_jax.command_line import run
from redrafter_jax.config import TargetConfig, TreeConfig
from redrafter_jax.drafters.base import Drafter, RootOnly
from redrafter_jax.engine.device import decode_rows
from redrafter_jax.models.target import Decoder, Target
from redrafter_jax.types import CacheShape, Decided, DecodeState, KVCache, TokenTree, View
from tools.gpu.measured import run_piece
from tools.gpu.shapes import FULL, SMALL, TREE, make_pair

# The token that a target with a zero projection chooses.
_TEXT = 0


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ForcedDrafter(Drafter):
    """A drafter that wraps another one and forces the depth of the accepted path.

    Attributes:
      inner: the drafter that drafts.
      depth: depth of the accepted path, at most the depth of the tree.
    """

    inner: Drafter
    depth: Int[Array, ""]

    @property
    def name(self) -> str:
        return f"forced {self.inner.name}"

    def layers(self, target: TargetConfig) -> tuple[int, ...]:
        return self.inner.layers(target)

    @property
    def cache(self) -> CacheShape | None:
        return self.inner.cache

    def empty(self, target: Decoder, rows: int) -> Any:
        return self.inner.empty(target, rows)

    def read(
        self, target: Decoder, own: Any, cache: KVCache, decided: Decided
    ) -> tuple[Any, KVCache]:
        return self.inner.read(target, own, cache, decided)

    def propose(
        self,
        target: Decoder,
        own: Any,
        cache: KVCache,
        view: View,
        noise: Float[Array, "B P V"],
        tree: TreeConfig,
    ) -> TokenTree:
        """Return the inner drafter's tree with replaced tokens; siblings have distinct tokens."""
        drafted = self.inner.propose(target, own, cache, view, noise, tree)
        deepest = jnp.argmax(drafted.depth, axis=1)[:, None, None]
        on_path = jnp.take_along_axis(drafted.mask, deepest, axis=1)[:, 0]
        accepted = on_path & (drafted.depth <= self.depth)
        tokens = jnp.where(accepted, _TEXT, 1 + jnp.arange(tree.budget))
        kept = (drafted.depth == 0) | (drafted.tokens < 0)
        return drafted._replace(tokens=jnp.where(kept, drafted.tokens, tokens))


def without_scores(target: Target) -> Target:
    """Return the target with a zero vocabulary projection."""

    def clear(path: tuple[Any, ...], leaf: Array) -> Array:
        return jnp.zeros_like(leaf) if "lm_head" in jax.tree_util.keystr(path) else leaf

    return replace(target, params=jax.tree_util.tree_map_with_path(clear, target.params))


def measure(settings: argparse.Namespace) -> dict[str, Any]:
    """Measure each accepted depth: tokens per step, time per step, and speed-up."""
    shape, size = ("small", SMALL) if settings.small else ("llama_3_1_8b", FULL)
    target, drafter = make_pair(shape)
    target = without_scores(target)
    cached = size.slots - slots_needed(size.steps, TREE.max_path)
    empty = random_state(target, drafter, 1, size.slots)
    state = [empty._replace(speculates=~empty.done)]
    gained: dict[int | None, float] = {}

    def step(depth: int | None) -> float:
        """Return the seconds per step at this accepted depth; None is the baseline."""
        ours, tree = (RootOnly(), None)
        if depth is not None:
            ours, tree = ForcedDrafter(drafter, jnp.int32(depth)), TREE
        before: DecodeState = reset_state(state[0], cached, state[0].sampling, done=False)
        rows = jax.block_until_ready(jnp.arange(1))
        started = time.perf_counter()
        state[0], (gains, _) = jax.block_until_ready(
            decode_rows(target, ours, before, rows, size.steps, tree=tree, steps=size.steps)
        )
        taken = (time.perf_counter() - started) / size.steps
        gained[depth] = float(np.mean(gains.counts))
        return taken

    depths = [None, *range(TREE.draft_rounds + 1)]
    timers = {depth: lambda depth=depth: step(depth) for depth in depths}
    for _ in take_turns(timers, 1):  # compile and warm up
        pass
    seconds: dict[int | None, list[float]] = {depth: [] for depth in depths}
    for depth, taken in take_turns(timers, size.repeats):
        seconds[depth].append(taken)
    alone = np.asarray(seconds[None])
    rows = [
        {
            "depth": depth,
            "acceptance_length": gained[depth],
            "milliseconds": sorted(1000 * taken for taken in seconds[depth]),
            "tokens_per_second": gained[depth] / float(np.median(seconds[depth])),
            "speedup": float(np.median(gained[depth] * alone / np.asarray(seconds[depth]))),
        }
        for depth in depths
    ]
    return {"shape": shape, "slots": size.slots, "num_nodes": TREE.budget, "rows": rows}


def main() -> None:
    """Measure, and write the rows."""
    run_piece(argparse.ArgumentParser(prog="python -m tools.gpu.acceptance"), measure)


if __name__ == "__main__":
    run(main)
