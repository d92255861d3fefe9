"""EAGLE heads of every dialect against their authors' own code (tools/goldens/eagle_heads.py)."""

from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import sampling_arrays

from redrafter_jax import TreeConfig, load_drafter, load_target
from redrafter_jax.config import SamplingConfig
from redrafter_jax.drafters.bind import as_drafter
from redrafter_jax.drafters.eagle import EagleDrafter
from redrafter_jax.models.cache import init_cache, split_layers
from redrafter_jax.models.target import Target
from redrafter_jax.types import Decided, KVCache, View

pytestmark = pytest.mark.usefixtures("quick_compilation")

GOLDENS = Path(__file__).parents[1] / "goldens/eagle"
HEADS = sorted(path.name for path in GOLDENS.iterdir() if (path / "answers.npz").exists())
TEXT, CHAIN = (np.load(GOLDENS / "text.npz")[name].tolist() for name in ("text", "chain"))
LENGTHS = (1, 63, 64, 65, 300)
CHUNK, SLOTS = 64, 384


class Read(NamedTuple):
    """A head that has read texts of all lengths, each followed by the root, and the answers."""

    drafter: EagleDrafter
    own: jax.Array
    cache: KVCache
    answers: dict[str, np.ndarray]


@pytest.fixture(scope="module")
def target() -> Target:
    return load_target(GOLDENS / "target", "float32")


@pytest.fixture(scope="module", params=HEADS)
def read(request: pytest.FixtureRequest, target: Target) -> Read:
    """In a batch of ragged rows, chunk by chunk."""
    folder = GOLDENS / request.param
    drafter: Any = as_drafter(load_drafter(folder, "float32"))
    lengths, B = jnp.asarray(LENGTHS), len(LENGTHS)
    padded = jnp.asarray(np.pad(TEXT, (0, SLOTS + 1)), jnp.int32)

    @jax.jit
    def read_chunk(
        target: Target, drafter: EagleDrafter, own: Any, cache: KVCache, begin: jax.Array
    ) -> tuple[Any, KVCache]:
        decoder = target.merge()
        start = jnp.minimum(begin, lengths)
        count = jnp.clip(lengths - start, 0, CHUNK)
        places = start[:, None] + jnp.arange(CHUNK)
        following = jnp.where(places == lengths[:, None] - 1, CHAIN[0], padded[places + 1])
        theirs, ours = split_layers(cache, target.config)
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
    _, ours = split_layers(cache, target.config)
    return Read(drafter, own, ours, dict(np.load(folder / "answers.npz")))


def test_scores_along_a_chain_are_the_authors(target: Target, read: Read) -> None:
    lengths, chain = jnp.asarray(LENGTHS), jnp.asarray(CHAIN)
    tree = TreeConfig(beam_width=1, draft_rounds=len(CHAIN))

    @jax.jit
    def follow(target: Target, drafter: EagleDrafter, own: jax.Array, cache: KVCache) -> jax.Array:
        advance, grown = drafter.begin(target.merge(), own, cache, lengths, tree)
        tokens = jnp.broadcast_to(chain[:, None, None], (len(CHAIN), len(LENGTHS), 1))
        grown, first = advance(grown, tokens[0], 0)
        _, rest = jax.lax.scan(
            lambda grown, one: advance(grown, *one),
            grown,
            (tokens[1:], jnp.arange(1, len(CHAIN))),
        )
        return jnp.concatenate([first[None], rest])[:, :, 0]

    scores = follow(target, read.drafter, read.own, read.cache)
    for row, length in enumerate(LENGTHS):
        expected = read.answers[f"after_{length}"]
        assert np.abs(expected).max() > 1
        np.testing.assert_allclose(scores[:, row], expected, atol=1e-4)


def test_a_rollout_of_training_is_the_authors(target: Target, read: Read) -> None:
    """SpecForge's and speculators' answers are of their training; the others' say the same."""
    head = read.drafter.model.merge()
    if head.config.version == "1":
        pytest.skip("heads of the first version are not trained here")
    rows = np.zeros((len(LENGTHS), max(LENGTHS) + len(CHAIN)), np.int32)
    for row, length in zip(rows, LENGTHS, strict=True):
        row[: length + len(CHAIN)] = TEXT[:length] + CHAIN

    @jax.jit
    def unroll(target: Target, drafter: EagleDrafter, tokens: jax.Array) -> jax.Array:
        decoder, head, rounds = target.merge(), drafter.model.merge(), len(CHAIN)
        hidden, _, _ = decoder.forward(tokens, None, drafter.layers(target.config))
        embedded = head.embed(jnp.roll(tokens, -1, axis=1), decoder)
        contexts = head.contexts(hidden, embedded, jnp.ones_like(tokens), rounds)
        scores = head.unroll(contexts, embedded, rounds, drafter.scorer(decoder))
        return jnp.stack([*scores], axis=2)

    scores = unroll(target, read.drafter, jnp.asarray(rows))
    for row, length in enumerate(LENGTHS):
        expected = read.answers[f"after_{length}"]
        np.testing.assert_allclose(scores[row, length - 1], expected, atol=1e-4)


def test_a_tree_is_the_authors(target: Target, read: Read) -> None:
    if "tokens" not in read.answers:
        pytest.skip("the authors' code grows no tree")
    # Their `depth` counts the rounds after the first; `total_tokens` is the root's too.
    tree = TreeConfig(beam_width=10, draft_rounds=4, num_nodes=11, rerank=True)
    row = slice(LENGTHS.index(63), LENGTHS.index(63) + 1)
    view = View(
        tokens=jnp.zeros((1, SLOTS), jnp.int32),
        lengths=jnp.asarray(LENGTHS[row]),
        root=jnp.asarray(CHAIN[:1]),
        sampling=sampling_arrays([SamplingConfig()], [0], target.config.vocab_size),
    )
    own, cache = jax.tree.map(lambda leaf: leaf[row], (read.own, read.cache))
    noise = jnp.zeros((1, tree.max_path, target.config.vocab_size))
    drafted = jax.jit(
        lambda target, drafter: drafter.propose(target.merge(), own, cache, view, noise, tree)
    )(target, read.drafter)
    ours = paths(np.asarray(drafted.tokens[0]), np.asarray(drafted.parents[0]))
    theirs = paths(read.answers["tokens"], read.answers["parents"])
    # They order siblings otherwise.
    assert ours == theirs
    assert len(ours) == tree.budget
    assert max(map(len, ours)) >= 4


def paths(tokens: np.ndarray, parents: np.ndarray) -> set[tuple[int, ...]]:
    """The tokens from the root to every node."""
    found: list[tuple[int, ...]] = []
    for node, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
        found.append((*found[parent], int(token)) if node else (int(token),))
    return set(found)
