"""The host side of mirror decoding, which drafts the next trees while the target verifies.

The host starts the programs in order, and copies arrays between the target's and the drafter's
devices.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding
from jaxtyping import Array, Int

from redrafter_jax.config import MirrorConfig, TargetConfig, TreeConfig
from redrafter_jax.decoding.mirror import forked_pages
from redrafter_jax.drafters.base import Drafter, RootOnly
from redrafter_jax.engine.device import Chunk
from redrafter_jax.engine.gains import Gains
from redrafter_jax.engine.memory import CacheCost
from redrafter_jax.engine.messages import MirrorCounts
from redrafter_jax.engine.mirror_device import (
    Relay,
    begin_pass,
    complete_pass,
    draft_now,
    draft_outcomes,
    pick_tree,
    read_along,
    without_layers,
)
from redrafter_jax.engine.state import page_bytes, row_shapes
from redrafter_jax.errors import InputError
from redrafter_jax.models.cache import split_layers
from redrafter_jax.models.target import Target
from redrafter_jax.parallel.mesh import check_target, data_shards, make_mesh, place, shardings
from redrafter_jax.types import DecodeState, TokenTree

Tree = TypeVar("Tree")


def check_mirror(
    target: Target,
    drafter: Drafter,
    trees: tuple[TreeConfig | None, ...],
    mirror: MirrorConfig,
    adaptive: bool | None = None,
) -> TreeConfig:
    """Check the arguments of mirror decoding, and return the shape of the trees to draft ahead.

    Raises:
      InputError: the target, the drafter or the trees are not supported, or devices are missing.
    """
    most = target.config.num_hidden_layers - 1
    if mirror.layer > most:
        raise InputError(
            f"MirrorConfig.layer is {mirror.layer}; the target has {most + 1} layers, so give a "
            f"layer from 1 to {most}."
        )
    [tree, *others] = trees
    if others:
        raise InputError(
            "tree is a table of trees, but mirror drafts one tree; give a TreeConfig, or on the "
            "command line an option of the tree such as --draft-rounds."
        )
    if isinstance(drafter, RootOnly):
        raise InputError("mirror is given, but there is no drafter; leave mirror out.")
    if tree is None:
        raise InputError(
            "mirror is given, but the tree is the root alone, as in a table where no tree beats "
            "the baseline; give a TreeConfig, or on the command line an option of the tree such as "
            "--draft-rounds."
        )
    if tree.mean_nodes is not None:
        raise InputError(
            f"TreeConfig.mean_nodes is {tree.mean_nodes}, but mirror does not share nodes between "
            "rows; leave mean_nodes out."
        )
    if adaptive:
        raise InputError("adaptive is True, but mirror drafts in every step; leave adaptive out.")
    if mirror.candidates > target.config.vocab_size:
        raise InputError(
            f"MirrorConfig.candidates is {mirror.candidates}; the vocabulary has "
            f"{target.config.vocab_size} tokens, so give that number or fewer."
        )
    if data_shards(target.mesh) > 1 or jax.process_count() > 1:
        raise InputError(
            "mirror decodes a batch on one group of devices, but the mesh splits the batch, or the "
            "job has several processes; set the mesh's data to 1, and use one process."
        )
    _drafter_devices(target, mirror)
    return tree


def mirror_costs(
    target: Target,
    drafter: Drafter,
    trees: tuple[TreeConfig | None, ...],
    mirror: MirrorConfig,
    slots: int,
) -> list[CacheCost]:
    """Return the result of `cache_costs` with mirror decoding.

    Raises:
      InputError: the errors of `check_mirror`.
    """
    tree = check_mirror(target, drafter, trees, mirror)
    mesh = _drafter_mesh(target, mirror)
    there = replace(target, mesh=mesh or target.mesh)
    own = page_bytes(there, drafter.apart()) - page_bytes(there, RootOnly())
    alone, ahead = page_bytes(target, RootOnly()), own * _ahead_pages(slots, tree, mirror)
    if mesh is None:
        return [CacheCost(alone + own, ahead)]
    return [CacheCost(alone), CacheCost(own, ahead)]


def _ahead_pages(rows: int, tree: TreeConfig, mirror: MirrorConfig) -> int:
    """Return the number of cache pages for the paths of all guessed outcomes of a step."""
    return rows * mirror.count(tree) * forked_pages(tree.max_path)


def _drafter_mesh(target: Target, mirror: MirrorConfig) -> Mesh | None:
    """Return the mesh of devices that only the drafter uses; None if it shares the target's."""
    devices = _drafter_devices(target, mirror)
    return make_mesh(model=len(devices), devices=devices) if devices else None


def _drafter_devices(target: Target, mirror: MirrorConfig) -> list[Any]:
    taken = jax.tree.leaves(target.params)[0].devices()
    free = [device for device in jax.devices() if device not in taken]
    if mirror.drafter_devices > len(free):
        raise InputError(
            f"MirrorConfig.drafter_devices is {mirror.drafter_devices}, but the target leaves "
            f"{len(free)} devices free; give {len(free)} or fewer."
        )
    return free[: mirror.drafter_devices]


class Mirror:
    """Runs the steps in which target and drafter run at the same time; holds the drafter's state.

    Attributes:
      counts: counts of drafter calls and ready trees.
      relay: a stand-in for the drafter on the target's devices; it records what the drafter must
        read.
      watch: function that is called with the name and the result of every program and transfer of a
        step. A function that waits for the result can time each of them, but then they do not
        overlap.

    Args:
      target: the target model.
      drafter: the drafter, as returned by `Drafter.prepare`.
      tree: the shape of the trees.
      mirror: settings of mirror decoding.
      rows: B, number of rows.
      slots: S, maximum number of tokens of a row.
      pages: number of pages of the target's cache.
      chunk: C, number of tokens that a prefill pass reads of each prompt.
      top: number of most likely tokens to report per position, as in `read_rows`.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        tree: TreeConfig,
        mirror: MirrorConfig,
        *,
        rows: int,
        slots: int,
        pages: int,
        chunk: int,
        top: int | None,
    ) -> None:
        self.counts = MirrorCounts()
        self.watch: Callable[[str, Any], object] = lambda name, result: None
        layers = drafter.layers(target.config) if drafter.reads_hidden else None
        self.relay = Relay(layers, chunk)
        self._target, self._tree, self._mirror, self._top = target, tree, mirror, top
        mesh, alone = target.mesh, _drafter_mesh(target, mirror)
        # Shardings of arrays on the target's and on the drafter's devices; None if they are shared.
        self._home: Any = None
        self._away: Any = None
        drafter, lender = drafter.apart(), without_layers(target)
        if alone is not None:
            if mesh is None:
                self._home = SingleDeviceSharding(*jax.tree.leaves(target.params)[0].devices())
            else:
                self._home = NamedSharding(mesh, PartitionSpec())
            mesh = alone
            self._away = NamedSharding(mesh, PartitionSpec())
            for model in drafter.models:
                if isinstance(model.config, TargetConfig):
                    check_target(model.config, mesh, "drafter")
            lender, drafter = place(lender, mesh), place(drafter, mesh)
        self._lender, self._drafter = lender, drafter
        pages += _ahead_pages(rows, tree, mirror)
        shapes = row_shapes(lender, drafter, rows, slots, 1, pages)
        _, cache = split_layers(shapes.cache, target.config.num_hidden_layers)
        shapes = shapes._replace(cache=cache)

        def zeros(leaf: Any, sharding: Any = None) -> Array:
            return jnp.zeros(leaf.shape, leaf.dtype, device=sharding)

        # Its cache has only the drafter's layers; the pages of the outcomes come last.
        self._state = jax.tree.map(zeros, shapes, *([shardings(shapes, mesh)] if mesh else []))
        # Trees of the next step, on the drafter's devices; None if they must still be drafted.
        self._ready: TokenTree | None = None

    def commit(self, state: DecodeState) -> DecodeState:
        """Put the state on the target's devices, so that the first program compiles only once."""
        return _put(state, self._home) if self._target.mesh is None else state

    def read(self, state: DecodeState, chunk: Chunk, live: list[int]) -> None:
        """Let the drafter read the tokens that the target has just read.

        Args:
          state: state after the prefill pass; `state.own` was recorded by `relay`, which takes the
            drafter's place on the target's devices.
          chunk: the tokens that were read.
          live: indices of the rows that were read.
        """
        rows = len(state.done)
        is_new, reads = np.zeros((2, rows), bool)
        reads[live] = True
        new = np.asarray(chunk.rows)[np.asarray(chunk.is_new)]
        is_new[new[new < rows]] = True
        decided = state.own._replace(count=jnp.where(reads, state.own.count, 0))
        self._follow(state)
        self._state = read_along(*self._side, *_put((decided, is_new), self._away))
        self._ready = None

    def decode(
        self, state: DecodeState, rows: Int[np.ndarray, " B"], most: int
    ) -> tuple[DecodeState, tuple[Gains, Any]]:
        """Decode all rows as `decode_rows` does.

        Args:
          state: decode state of B rows, donated.
          rows: index of the row at each place: i at place i, or B if the place is idle.
          most: maximum number of steps.
        """
        B, counts, watch = len(rows), self.counts, self.watch
        idle, settings = jnp.asarray(rows >= B), {"mirror": self._mirror, "config": self._tree}
        none = _put(jnp.zeros(B, bool), self._away)
        self._follow(state)
        gains: list[Gains] = []
        while len(gains) < most:
            trees = self._ready
            if trees is None:
                trees = draft_now(*self._side, config=self._tree)
                watch("now", trees)
                counts.now += 1
            sent = _put(trees, self._home)
            watch("send tree", sent)
            target = self._target, self.relay, state, sent
            *begun, guessed = begin_pass(*target, idle, **settings)
            watch("begin", guessed)
            # Dispatch the target's second part first; the drafter's inputs are sent meanwhile.
            state, gained, end = complete_pass(*target, *begun, idle, top=self._top)
            watch("complete", end)
            guessed = _put(guessed, self._away)
            watch("send guess", guessed)
            self._state, outcomes, ahead = draft_outcomes(*self._side, trees, guessed, **settings)
            watch("ahead", ahead)
            end = _put(end, self._away)
            watch("send end", end)
            picked, rank = pick_tree(self._lender, ahead, outcomes, end)
            watch("pick", picked)
            self._state = read_along(*self._side, end.decided, none)
            watch("read", self._state)
            gains.append(gained)
            ranks, ended = jax.device_get((rank, end.ended))
            self._ready = picked if ((ranks >= 0) | ended).all() else None
            counts.steps += 1
            counts.outcomes += int((~ended).sum())
            counts.ranks.update(ranks[~ended & (ranks >= 0)].tolist())
            if ended.all():
                break
        steps: Any = jax.device_get(gains)
        stacked = jax.tree.map(lambda *leaves: np.stack(leaves, axis=1), *steps)
        return state, (stacked, jax.device_get(state.done))

    @property
    def _side(self) -> tuple[Target, Drafter, DecodeState]:
        """The first arguments of the programs on the drafter's devices."""
        return self._lender, self._drafter, self._state

    def _follow(self, state: DecodeState) -> None:
        """Copy the target's state to the drafter's state, except `own` and the cached layers."""
        own, cache = self._state.own, self._state.cache
        small = state._replace(own=(), cache=state.cache._replace(keys=(), values=()))
        told = jax.tree.map(jnp.copy, _put(small, self._away))
        cache = told.cache._replace(keys=cache.keys, values=cache.values)
        self._state = told._replace(own=own, cache=cache)


def _put(tree: Tree, place: Any) -> Tree:
    """Copy arrays to the devices of a sharding; None leaves the arrays where they are."""
    return tree if place is None else jax.device_put(tree, place)
