"""Published heads that have read the texts of their goldens, to be held to the authors' answers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import sampling_arrays

from redrafter_jax import TreeConfig, load_drafter
from redrafter_jax.config import SamplingConfig
from redrafter_jax.drafters.base import Drafter, as_drafter
from redrafter_jax.drafters.grow import Advance, Grown
from redrafter_jax.models.cache import init_cache, rows_of, split_layers
from redrafter_jax.models.target import Decoder, Target
from redrafter_jax.types import Decided, KVCache, TokenTree, View

GOLDENS = Path(__file__).parents[1] / "goldens"
TEXT, CHAIN = (np.load(GOLDENS / "eagle/text.npz")[name].tolist() for name in ("text", "chain"))
LENGTHS = (1, 63, 64, 65, 300)
CHUNK, SLOTS = 64, 384
# Of the goldens' beam searches.
BEAMS = TreeConfig(beam_width=3, draft_rounds=4, num_nodes=9)
# From a drafter, the target, the state and the cache to how a tree of a chain's shape grows.
Begin = Callable[[Any, Decoder, Any, KVCache, TreeConfig], tuple[Advance, Grown]]


class Read(NamedTuple):
    """A head that has read texts of all lengths, each followed by the root, and the answers."""

    drafter: Drafter
    own: Any
    cache: KVCache
    answers: dict[str, np.ndarray]


def heads_in(kind: str) -> list[str]:
    """The goldens of a kind."""
    return sorted(path.parent.name for path in (GOLDENS / kind).glob("*/answers.npz"))


def heads_for_make_test(kind: str, *names: str) -> list[Any]:
    """The goldens of a kind as parameters; those without a name here are for `make test-all`."""
    assert {*names} <= {*heads_in(kind)}
    long = pytest.mark.long
    return [name if name in names else pytest.param(name, marks=long) for name in heads_in(kind)]


def read_texts(folder: Path, target: Target) -> Read:
    """A head that reads in a batch of ragged rows, chunk by chunk."""
    drafter: Any = as_drafter(load_drafter(folder, "float32"))
    lengths, B = jnp.asarray(LENGTHS), len(LENGTHS)
    padded = jnp.asarray(np.pad(TEXT, (0, SLOTS + 1)), jnp.int32)

    @jax.jit
    def read_chunk(
        target: Target, drafter: Any, own: Any, cache: KVCache, begin: jax.Array
    ) -> tuple[Any, KVCache]:
        decoder = target.merge()
        start = jnp.minimum(begin, lengths)
        count = jnp.clip(lengths - start, 0, CHUNK)
        places = start[:, None] + jnp.arange(CHUNK)
        following = jnp.where(places == lengths[:, None] - 1, CHAIN[0], padded[places + 1])
        theirs, ours = split_layers(cache, target.config.num_hidden_layers)
        layers = drafter.layers(target.config)
        hidden, theirs = decoder.extend(padded[places], theirs, count, layers)
        decided = Decided(padded[places], following, hidden, start, count)
        own, ours = drafter.read(decoder, own, ours, decided)
        return own, theirs._replace(
            keys=theirs.keys + ours.keys, values=theirs.values + ours.values
        )

    cache = init_cache(target.config, B, SLOTS, jnp.float32, drafter.cache)
    own = drafter.empty(target.merge(), B)
    for begin in range(0, max(LENGTHS), CHUNK):
        own, cache = read_chunk(target, drafter, own, cache, jnp.asarray(begin))
    _, ours = split_layers(cache, target.config.num_hidden_layers)
    return Read(drafter, own, ours, dict(np.load(folder / "answers.npz")))


def follow_chain(
    read: Read, target: Target, begin: Begin, *, unrolled: bool = False
) -> tuple[jax.Array, jax.Array | None]:
    """Scores after each token of the chain below every text, [R B U], and how they are trusted."""
    tree, rounds = TreeConfig(beam_width=1, draft_rounds=len(CHAIN)), len(CHAIN)
    chain = jnp.asarray(CHAIN)

    @jax.jit
    def follow(target: Target, drafter: Any, own: Any, cache: KVCache) -> Any:
        advance, grown = begin(drafter, target.merge(), own, cache, tree)
        tokens = jnp.broadcast_to(chain[:, None, None], (rounds, len(LENGTHS), 1))

        def one_round(grown: Grown, fed: Any) -> Any:
            grown, scores = advance(grown, *fed)
            return grown._replace(trust=None), (scores, grown.trust)

        if unrolled:
            made = []
            for round in range(rounds):
                grown, one = one_round(grown, (tokens[round], round))
                made.append(one)
            return jax.tree.map(lambda *leaves: jnp.stack(leaves)[:, :, 0], *made)
        grown, first = one_round(grown, (tokens[0], 0))
        _, rest = jax.lax.scan(one_round, grown, (tokens[1:], jnp.arange(1, rounds)))
        return jax.tree.map(
            lambda one, more: jnp.concatenate([one[None], more])[:, :, 0], first, rest
        )

    return follow(target, read.drafter, read.own, read.cache)


def draft_tree(read: Read, target: Target, tree: TreeConfig) -> TokenTree:
    """The tree below the text of 63 tokens, greedily, and its root."""
    row = slice(LENGTHS.index(63), LENGTHS.index(63) + 1)
    view = View(
        tokens=jnp.zeros((1, SLOTS), jnp.int32),
        lengths=jnp.asarray(LENGTHS[row]),
        root=jnp.asarray(CHAIN[:1]),
        sampling=sampling_arrays([SamplingConfig()], [0], target.config.vocab_size),
    )
    own = jax.tree.map(lambda leaf: leaf[row], read.own)
    cache = rows_of(read.cache, jnp.arange(len(LENGTHS))[row])
    noise = jnp.zeros((1, tree.max_path, target.config.vocab_size))
    return jax.jit(
        lambda target, drafter: drafter.propose(target.merge(), own, cache, view, noise, tree)
    )(target, read.drafter)


def assert_beam_search(drafted: TokenTree, answers: dict[str, np.ndarray]) -> None:
    """The tree has the paths and log-probabilities of the golden's beam search, and the root."""
    found = paths(np.asarray(drafted.tokens[0]), np.asarray(drafted.parents[0]))
    ours = dict(zip(found, np.asarray(drafted.log_probs[0]), strict=True))
    theirs = [tuple(int(token) for token in path if token >= 0) for path in answers["paths"]]
    assert ours.keys() == {(CHAIN[0],), *theirs}
    np.testing.assert_allclose([ours[path] for path in theirs], answers["log_probs"], atol=1e-4)


def paths(tokens: np.ndarray, parents: np.ndarray) -> list[tuple[int, ...]]:
    """The tokens from the root to every node."""
    found: list[tuple[int, ...]] = []
    for node, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
        found.append((*found[parent], int(token)) if node else (int(token),))
    return found
