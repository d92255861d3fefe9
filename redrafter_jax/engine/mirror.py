"""The host side of mirror decoding: the order of programs, and transfers between device groups."""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding
from jaxtyping import Int

from redrafter_jax.config import MirrorConfig, TargetConfig, TreeConfig
from redrafter_jax.drafters.base import Drafter, RootOnly
from redrafter_jax.engine.device import Chunk
from redrafter_jax.engine.gains import Gains
from redrafter_jax.engine.messages import MirrorCounts
from redrafter_jax.engine.mirror_device import (
    Relay,
    begin_pass,
    complete_pass,
    draft_now,
    draft_outcomes,
    empty_drafter_rows,
    pick_tree,
    read_along,
    without_layers,
)
from redrafter_jax.errors import InputError
from redrafter_jax.models.target import Target
from redrafter_jax.parallel.mesh import check_target, data_shards, make_mesh, place
from redrafter_jax.types import DecodeState, TokenTree

Tree = TypeVar("Tree")


def check_mirror(
    target: Target,
    drafter: Drafter,
    trees: tuple[TreeConfig | None, ...],
    mirror: MirrorConfig,
    adaptive: bool | None,
) -> TreeConfig:
    """Check the arguments of mirror decoding, and return the shape of the trees to draft ahead.

    Raises:
      InputError: the target, the drafter or the trees are not supported, or devices are missing.
    """
    most = target.config.num_hidden_layers - 1
    if mirror.layer > most:
        raise InputError(
            f"MirrorConfig.layer is {mirror.layer}; the target has {most + 1} layers, so it must "
            f"be from 1 to {most}."
        )
    [tree, *others] = trees
    if isinstance(drafter, RootOnly) or tree is None:
        raise InputError("mirror is given, but there is no drafter; leave mirror out.")
    if others:
        raise InputError("tree is a table of trees, but mirror drafts one tree; give a TreeConfig.")
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
            "mirror decodes a batch on one group of devices, but the mesh splits the batch; set "
            "data to 1, and use one process."
        )
    _drafter_devices(target, mirror)
    return tree


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
    """Runs the steps in which target and drafter run together, and holds the drafter's rows.

    Attributes:
      counts: counts of drafter calls and ready trees.
      relay: a stand-in for the drafter on the target's devices, which records what the drafter must
        read.
      watch: callback with the name and the result of every program that a step starts; it returns
        the result. A callback that waits for the result can time each program, but then programs do
        not overlap.

    Args:
      target: the target model.
      drafter: the drafter, prepared for the target.
      tree: the shape of the trees.
      mirror: settings for drafting ahead.
      rows: B, number of rows.
      slots: S, maximum number of tokens of a row.
      pages: number of pages of the target's cache.
      chunk: C, prompt tokens that are read at once.
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
        self.watch: Callable[[str, Any], Any] = lambda name, result: result
        layers = drafter.layers(target.config) if drafter.reads_hidden else None
        self.relay = Relay(layers, chunk)
        self._target, self._tree, self._mirror, self._top = target, tree, mirror, top
        mesh, devices = target.mesh, _drafter_devices(target, mirror)
        # Shardings of arrays on the target's and on the drafter's devices; None if they are shared.
        self._home: Any = None
        self._away: Any = None
        drafter = drafter.apart()
        lender = without_layers(target)
        if devices:
            if mesh is None:
                self._home = SingleDeviceSharding(*jax.tree.leaves(target.params)[0].devices())
            else:
                self._home = NamedSharding(mesh, PartitionSpec())
            mesh = make_mesh(model=len(devices), devices=devices)
            self._away = NamedSharding(mesh, PartitionSpec())
            for model in drafter.models:
                if isinstance(model.config, TargetConfig):
                    check_target(model.config, mesh, "drafter")
            lender, drafter = place(lender, mesh), place(drafter, mesh)
        self._lender, self._drafter = lender, drafter
        empty = empty_drafter_rows(
            lender,
            drafter,
            rows=rows,
            slots=slots,
            pages=pages,
            outcomes=mirror.count(tree),
            max_path=tree.max_path,
        )
        self._rows = place(empty, mesh)
        # Trees of the next step, on the drafter's devices; None if they must still be drafted.
        self._ready: TokenTree | None = None

    def commit(self, state: DecodeState) -> DecodeState:
        """Commit the state to its devices, so that the first program is not compiled twice."""
        return _put(state, self._home) if self._target.mesh is None else state

    def read(self, state: DecodeState, chunk: Chunk, live: list[int]) -> None:
        """Let the drafter read the tokens that the target has just read.

        Args:
          state: state after the pass, which holds the output of `relay`.
          chunk: the tokens that were read.
          live: rows that read tokens.
        """
        rows = len(state.done)
        is_new, reads = np.zeros((2, rows), bool)
        reads[live] = True
        new = np.asarray(chunk.rows)[np.asarray(chunk.is_new)]
        is_new[new[new < rows]] = True
        decided = state.own._replace(count=jnp.where(reads, state.own.count, 0))
        self._follow(state)
        self._rows = read_along(
            self._lender, self._drafter, self._rows, self._send(decided), self._send(is_new)
        )
        self._ready = None

    def decode(
        self, state: DecodeState, rows: Int[np.ndarray, " B"], most: int
    ) -> tuple[DecodeState, tuple[Gains, Any]]:
        """Decode all rows as `decode_rows` does.

        Args:
          state: decode state of B rows, donated.
          rows: row of the state at each place: i at place i, or B if the place is idle.
          most: maximum number of steps.
        """
        B = len(rows)
        idle, tree = jnp.asarray(rows >= B), self._tree
        none = self._send(jnp.zeros(B, bool))
        self._follow(state)
        gains: list[Gains] = []
        while len(gains) < most:
            trees = self._ready
            if trees is None:
                trees = draft_now(self._lender, self._drafter, self._rows, config=tree)
                trees = self.watch("now", trees)
                self.counts.now += 1
            nodes: TokenTree = self.watch("send tree", _put(trees, self._home))
            inputs = self._target, self.relay, state, nodes
            begun = begin_pass(*inputs, idle, mirror=self._mirror, config=tree)
            first, guessed = self.watch("begin", begun)
            # Dispatch the target's second part first; the drafter's inputs are sent meanwhile.
            completed = complete_pass(*inputs, first, idle, top=self._top)
            state, gained, end = self.watch("complete", completed)
            guessed = self.watch("send guess", self._send(guessed))
            sides = self._lender, self._drafter, self._rows
            drafted = draft_outcomes(*sides, trees, guessed, mirror=self._mirror, config=tree)
            self._rows, outcomes, ahead = self.watch("ahead", drafted)
            end = self.watch("send end", self._send(end))
            picked, fits = self.watch("pick", pick_tree(self._lender, ahead, outcomes, end))
            read = read_along(self._lender, self._drafter, self._rows, end.decided, none)
            self._rows = self.watch("read", read)
            gains.append(gained)
            fitting, ended = jax.device_get((fits, end.ended))
            self._ready = picked if (fitting | ended).all() else None
            self.counts.steps += 1
            self.counts.ahead += 1
            self.counts.outcomes += int((~ended).sum())
            self.counts.prepared += int((fitting & ~ended).sum())
            if ended.all():
                break
        steps: Any = jax.device_get(gains)
        stacked = jax.tree.map(lambda *leaves: np.stack(leaves, axis=1), *steps)
        return state, (stacked, jax.device_get(state.done))

    def _follow(self, state: DecodeState) -> None:
        """Copy to the drafter's rows the fields of the state that the engine may have changed."""
        cache = self._rows.cache
        told = state.tokens, state.speculates, state.sampling, state.cache.table
        told = self._send((*told, state.cache.lengths))
        tokens, speculates, sampling, table, lengths = jax.tree.map(jnp.copy, told)
        self._rows = self._rows._replace(
            tokens=tokens,
            speculates=speculates,
            sampling=sampling,
            cache=cache._replace(table=table, lengths=lengths),
        )

    def _send(self, tree: Tree) -> Tree:
        """Copy arrays to the drafter's devices."""
        return _put(tree, self._away)


def _put(tree: Tree, place: Any) -> Tree:
    return tree if place is None else jax.device_put(tree, place)
