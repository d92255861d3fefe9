"""What training unrolls against what decoding drafts: the same scores along the same text."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import sampling_arrays
from tiny_models import ATTENTION, random_drafter, random_target, tiny_config

from redrafter_jax import RecurrentConfig, TreeConfig
from redrafter_jax.config import LinearScaling, SamplingConfig
from redrafter_jax.config.drafter import HeadConfig
from redrafter_jax.drafters.base import as_drafter
from redrafter_jax.drafters.eagle_head import EagleConfig
from redrafter_jax.drafters.head_drafter import HeadDrafter
from redrafter_jax.drafters.kinds import kind_of
from redrafter_jax.models.cache import init_cache, split_layers
from redrafter_jax.models.target import Target
from redrafter_jax.types import Beams, Decided, KVCache, View

pytestmark = pytest.mark.usefixtures("quick_compilation")

TARGET = tiny_config(num_hidden_layers=8)
V, D, ROUNDS = TARGET.vocab_size, TARGET.hidden_size, 3
SOME = (0, 2, 3, 5, 8, 13, 21)
EAGLE = EagleConfig(V, D, "3", D, 24, 4, 2, 6)
SHAPES: dict[str, HeadConfig] = {
    "recurrent": RecurrentConfig(V, D, 20, 1, context_layers=(1,)),
    "attending": RecurrentConfig(V, D, 20, 1, **ATTENTION),
    "attending, of several layers": RecurrentConfig(
        V,
        D,
        20,
        0,
        cell="gru",
        head="target",
        context_layers=(0, 3),
        draft_tokens=SOME,
        **ATTENTION,
    ),
    "eagle3": EAGLE,
    "eagle3 as published since": replace(
        EAGLE,
        draft_tokens=SOME,
        context_layers=(0, 2, 4, 5),
        fc_norm=True,
        norm_output=True,
        rope_scaling=LinearScaling(2.0),
    ),
    "eagle3, the target's projection": replace(EAGLE, head="target", draft_tokens=SOME),
}
# Documents of these lengths share two rows of 24 tokens; the first row ends in padding.
ROWS = ((5, 2, 13), (24,))
LENGTHS = [length for row in ROWS for length in row]
# Tokens that each document reads at once, in turns: ragged, and sometimes none.
CHUNKS = (1, 3, 0, 4, 2)
TOKENS = np.random.default_rng(3).integers(0, V, (2, 24)).astype(np.int32)
SEGMENTS = np.zeros((2, 24), np.int32)
for row, lengths in enumerate(ROWS):
    SEGMENTS[row, : sum(lengths)] = np.repeat(np.arange(len(lengths)) + 1, lengths)
DOCUMENTS = [
    TOKENS[row, SEGMENTS[row] == number + 1]
    for row, lengths in enumerate(ROWS)
    for number in range(len(lengths))
]


def unrolled(target: Target, drafter: HeadDrafter) -> list[np.ndarray]:
    """Of every document the scores [length, R, U], from the packed rows as training has them."""

    @jax.jit
    def scores(target: Target, drafter: HeadDrafter) -> jax.Array:
        decoder, head = target.merge(), drafter.model.merge()
        tokens, segments = jnp.asarray(TOKENS), jnp.asarray(SEGMENTS)
        hidden, _, _ = decoder.forward(tokens, segments, drafter.layers(target.config))
        training = kind_of(drafter.model.config).training
        assert training is not None
        hidden = hidden if training.raw_layers else decoder.of_one_scale(hidden)
        embedded = decoder.stored_embeddings(jnp.roll(tokens, -1, axis=1))
        contexts = head.contexts(hidden, embedded, segments, ROUNDS)
        ahead = jnp.pad(embedded, ((0, 0), (0, ROUNDS), (0, 0)))
        scorer = drafter.scorer(decoder)
        return jnp.stack([*head.unroll(contexts, ahead, ROUNDS, scorer)], axis=2)

    rows = np.asarray(scores(target, drafter))
    return [
        rows[row, SEGMENTS[row] == number + 1]
        for row, lengths in enumerate(ROWS)
        for number in range(len(lengths))
    ]


@pytest.fixture
def drafted(monkeypatch: pytest.MonkeyPatch) -> Callable[..., jax.Array]:
    """Scores [B, R, U] that `propose` makes after each token of a path, chosen for it."""
    seen: list[jax.Array] = []
    path: list[jax.Array] = []

    def follow(advance: Any, grown: Any, root: jax.Array, *rest: Any, **how: Any) -> Beams:
        del how
        del rest
        grown, logits = advance(grown, root[:, None], 0)
        seen.append(logits[:, 0])
        for number in range(1, ROUNDS):
            # Drafters tell the first round from the others, which are a scan, by its type.
            grown, logits = advance(grown, path[0][:, number, None], jnp.asarray(number))
            seen.append(logits[:, 0])
        nothing = jnp.zeros((len(root), ROUNDS, 1), jnp.int32)
        return Beams(nothing, nothing, jnp.zeros(nothing.shape))

    for module in ("recurrent", "eagle"):
        monkeypatch.setattr(f"redrafter_jax.drafters.{module}.grow", follow)

    def draft(
        target: Target,
        drafter: HeadDrafter,
        own: Any,
        cache: KVCache,
        lengths: jax.Array,
        tokens: jax.Array,
    ) -> jax.Array:
        view = View(
            tokens=jnp.zeros((len(lengths), 1), jnp.int32),
            lengths=lengths,
            root=tokens[:, 0],
            sampling=sampling_arrays([SamplingConfig()] * len(lengths), [0] * len(lengths), V),
        )
        tree = TreeConfig(beam_width=1, draft_rounds=ROUNDS)
        noise = jnp.zeros((len(lengths), tree.max_path, V))
        path[:], seen[:] = [tokens], []
        drafter.propose(target.merge(), own, cache, view, noise, tree)
        return jnp.stack(seen, axis=1)

    return jax.jit(draft)


@pytest.mark.parametrize(
    "name",
    [
        name if name in ("attending", "eagle3") else pytest.param(name, marks=pytest.mark.long)
        for name in SHAPES
    ],
)
def test_training_unrolls_what_decoding_drafts(
    name: str, drafted: Callable[..., jax.Array]
) -> None:
    """Documents in packed rows, and each alone, read by pieces into the drafter's own cache."""
    target = random_target(TARGET)
    drafter: Any = as_drafter(random_drafter(SHAPES[name], seed=1))
    expected = unrolled(target, drafter)
    B, C, longest = len(DOCUMENTS), max(CHUNKS), max(LENGTHS)
    texts = np.zeros((B, longest + C + ROUNDS + 1), np.int32)
    hidden = []
    for text, document in zip(texts, DOCUMENTS, strict=True):
        text[: len(document)] = document
    decoder = target.merge()
    forward = jax.jit(lambda tokens: decoder.forward(tokens, None, drafter.layers(TARGET))[0])
    hidden = np.asarray(forward(jnp.asarray(texts)))
    read = jax.jit(
        lambda target, drafter, own, cache, decided: drafter.read(
            target.merge(), own, cache, decided
        )
    )
    cache = init_cache(TARGET, B, longest + 2 * C, jnp.float32, drafter.cache)
    _, cache = split_layers(cache, TARGET.num_hidden_layers)
    own, starts, compared = drafter.empty(decoder, B), np.zeros(B, int), 0
    for turn in range(2 * longest):
        counts = np.asarray([CHUNKS[(turn + b) % len(CHUNKS)] for b in range(B)])
        # The last token of a text is a root.
        counts = np.minimum(counts, np.asarray(LENGTHS) - 1 - starts)
        places = starts[:, None] + np.arange(C)
        decided = Decided(
            *(jnp.asarray(np.take_along_axis(texts, at, axis=1)) for at in (places, places + 1)),
            hidden=jnp.asarray(np.take_along_axis(hidden, places[..., None], axis=1)),
            start=jnp.asarray(starts, jnp.int32),
            count=jnp.asarray(counts, jnp.int32),
        )
        cache = cache._replace(lengths=decided.start)
        own, cache = read(target, drafter, own, cache, decided)
        starts += counts
        path = np.take_along_axis(texts, starts[:, None] + np.arange(ROUNDS), axis=1)
        lengths = jnp.asarray(starts, jnp.int32)
        cache = cache._replace(lengths=lengths)
        scores = np.asarray(drafted(target, drafter, own, cache, lengths, jnp.asarray(path)))
        for row in np.flatnonzero(counts):
            position = starts[row] - 1
            rounds = min(ROUNDS, LENGTHS[row] - starts[row])
            np.testing.assert_allclose(
                scores[row, :rounds], expected[row][position, :rounds], atol=1e-5, rtol=1e-5
            )
            compared += rounds
    assert (starts == np.asarray(LENGTHS) - 1).all()
    assert compared > 40
