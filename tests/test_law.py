"""The sampled text follows the target's law: every sequence as often as its probability says.

The vocabulary is so small that all sequences of three tokens can be enumerated. Their exact
probabilities come from the target reading each of them, in float64 and with the oracle's filters;
none of the library's sampling takes part in them.
"""

import inspect
from collections.abc import Callable
from functools import cache, partial
from itertools import product
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from tiny_models import forgetful_target, imitating_drafter, tiny_config

from redrafter_jax import Generation, MirrorConfig, SamplingConfig, TreeConfig, generate
from redrafter_jax.decoding import step
from redrafter_jax.decoding.accept import accept, choose_tokens
from redrafter_jax.drafters.base import LoadedHead
from redrafter_jax.engine import runner
from redrafter_jax.models.target import Target
from redrafter_jax.parallel.model import Model
from redrafter_jax.types import Accepted, Sampling, TokenTree

# Over so many rows the checks of annotations would take half of the time.
pytestmark = pytest.mark.usefixtures("unchecked_shapes")

V = 5
LENGTH = 3
SEQUENCES = list(product(range(V), repeat=LENGTH))
PROMPT = [3, 0, 2, 1]
ROWS = 12_800
BATCHES = 4


def contrary(drafter: LoadedHead) -> LoadedHead:
    """The drafter turned round: what it found most likely it now finds least likely."""
    # A copy, for a merged module shares its parameters.
    head = jax.tree.map(jnp.copy, drafter).merge()
    head.lm_head.kernel[...] = -head.lm_head.kernel[...]
    return Model.split(drafter.config, head)


@cache
def target(layers: int = 1) -> Target:
    # The seed is one of a law without very rare sequences: chi-square wants some of each.
    config = tiny_config(
        vocab_size=V,
        hidden_size=8,
        intermediate_size=12,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=4,
    )
    return forgetful_target(memory=0.5, seed=10, config=config, contrast=1.0)


@cache
def drafters(layers: int = 1) -> dict[str, LoadedHead]:
    good = imitating_drafter(target(layers))
    fair = imitating_drafter(target(layers), corruption=1.0)
    return {"good": good, "fair": fair, "adversarial": contrary(good)}


class Case(NamedTuple):
    """One way to draft and to sample."""

    drafter: str
    tree: TreeConfig
    sampling: SamplingConfig
    mirror: MirrorConfig | None = None

    @property
    def layers(self) -> int:
        """Of the target, which mirror decoding takes in two parts."""
        return 1 if self.mirror is None else 2


CHAIN = TreeConfig(beam_width=1, draft_rounds=2)
ALL_NODES = TreeConfig(beam_width=2, draft_rounds=2)
FINAL_BEAMS = TreeConfig(beam_width=3, draft_rounds=2, num_nodes=4, final_beams_only=True)
DEEP_AND_SHARP = TreeConfig(beam_width=2, draft_rounds=3, num_nodes=5, sharpness=2.5)

CASES = {
    "chain": Case("good", CHAIN, SamplingConfig(1.4)),
    "final beams under a budget, top-k": Case("fair", FINAL_BEAMS, SamplingConfig(1.0, top_k=3)),
    "deep and sharp, 0.8 top-p": Case(
        "adversarial", DEEP_AND_SHARP, SamplingConfig(0.8, top_p=0.9)
    ),
    "mirror": Case("fair", CHAIN, SamplingConfig(1.0), MirrorConfig(layer=1, candidates=2)),
}


@cache
def exact_law(sampling: SamplingConfig, layers: int = 1) -> np.ndarray:
    """Probability of each of `SEQUENCES` after the prompt."""
    module = target(layers).merge()
    tokens = jnp.asarray([PROMPT + list(sequence) for sequence in SEQUENCES])
    logits = np.asarray(module.logits(module.forward(tokens)[0]), np.float64)
    law = np.ones(len(SEQUENCES))
    for row, sequence in enumerate(SEQUENCES):
        for place, token in enumerate(sequence, start=len(PROMPT) - 1):
            scores = oracles.filtered_scores(logits[row, place], sampling)
            law[row] *= oracles.softmax(scores)[token]
    # The target reads in float32; the sum of the law shows how little that matters.
    assert abs(law.sum() - 1) < 1e-6
    return law


def sample(case: Case, first_seed: int = 0) -> Generation:
    """One batch."""
    return generate(
        target(case.layers),
        drafters(case.layers)[case.drafter],
        [PROMPT] * ROWS,
        max_new_tokens=LENGTH,
        tree=case.tree,
        sampling=case.sampling,
        seeds=range(first_seed, first_seed + ROWS),
        eos_token_ids=(),
        mirror=case.mirror,
    )


def count_sequences(case: Case, batches: int, first_seed: int = 0) -> np.ndarray:
    """How often each of `SEQUENCES` is drawn; no two rows have the same seed."""
    counts = np.zeros(len(SEQUENCES), int)
    for batch in range(batches):
        drawn = np.asarray(sample(case, first_seed + batch * ROWS).tokens)
        counts += np.bincount(drawn @ V ** np.arange(LENGTH)[::-1], minlength=len(SEQUENCES))
    return counts


def distance_and_bound(counts: np.ndarray, law: np.ndarray) -> tuple[float, float]:
    """Chi-square over the sequences that the filters leave possible; no other may occur."""
    possible = law > 0
    assert counts[~possible].sum() == 0
    distance = oracles.chi_square(counts[possible], law[possible])
    return distance, oracles.CHI_SQUARE_BOUND[int(possible.sum()) - 1]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("chain", marks=pytest.mark.long),
        "deep and sharp, 0.8 top-p",
        pytest.param("final beams under a budget, top-k", marks=pytest.mark.long),
        pytest.param("mirror", marks=pytest.mark.long),
    ],
)
def test_sequences_are_drawn_as_often_as_the_target_says(name: str) -> None:
    case = CASES[name]
    # Each case has its own seeds: the same ones would draw the same text once more.
    first_seed = list(CASES).index(name) * BATCHES * ROWS
    counts = count_sequences(case, BATCHES, first_seed)
    assert counts.sum() > 50_000
    distance, bound = distance_and_bound(counts, exact_law(case.sampling, case.layers))
    assert distance < bound


def test_the_law_of_the_last_token_depends_on_more_than_the_token_before() -> None:
    # Or else a wrong cache would not show in it.
    law = exact_law(SamplingConfig(1.0)).reshape(V, V, V)
    last = law / law.sum(axis=-1, keepdims=True)
    assert np.ptp(last, axis=0).max() > 0.15


@pytest.mark.long
def test_the_drafters_are_as_good_as_their_names() -> None:
    # Two at most: of the three tokens the prefill chooses the first.
    good, fair, adversarial = (
        sample(Case(drafter, CHAIN, SamplingConfig(1.0))).acceptance_length
        for drafter in ("good", "fair", "adversarial")
    )
    assert good > 1.5 > fair > adversarial > 1


# Mutations: with these the law must break, or the test above proves nothing. Each chooses the
# tokens after every node, and `accept` follows its choices down a tree that stays valid.

Rule = Callable[[TokenTree, jax.Array, jax.Array, Sampling], jax.Array]


def best_drafts(tree: TokenTree, logits: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Per node: its best child, that child's token, and the target's probability of the token.

    A node without children is its own best child, of probability 0.
    """
    nodes = jnp.arange(tree.tokens.shape[1])
    children = (tree.parents[:, None, :] == nodes[:, None]) & (nodes > 0)
    # The beams of a round are sorted, so the first child is the best one.
    best = jnp.where(children.any(axis=-1), children.argmax(axis=-1), nodes)
    tokens = jnp.take_along_axis(tree.tokens, best, axis=1)
    probabilities = jax.nn.softmax(logits)
    likely = jnp.take_along_axis(probabilities, tokens[..., None], axis=-1)[..., 0]
    return best, tokens, jnp.where(best == nodes, 0.0, likely)


def accept_by_the_ratio_of_probabilities(
    tree: TokenTree, logits: jax.Array, noise: jax.Array, sampling: Sampling
) -> jax.Array:
    """Accept with probability min(1, p / q), as if a beam were a sample of the drafter."""
    best, tokens, p = best_drafts(tree, logits)
    q = jnp.exp(jnp.take_along_axis(tree.log_probs, best, axis=1) - tree.log_probs)

    def toss(seed: jax.Array, drawn: jax.Array) -> jax.Array:
        key = jax.random.fold_in(
            jax.random.key(seed), jax.lax.bitcast_convert_type(drawn, jnp.uint32)
        )
        return jax.random.uniform(key, tokens.shape[1:])

    coins = jax.vmap(toss)(sampling.seeds, noise[:, 0, 0])
    rejected = (p > 0)[..., None] & (jnp.arange(V) == tokens[..., None])
    others = choose_tokens(jnp.where(rejected, -jnp.inf, logits), tree.depth, noise, sampling)
    return jnp.where(coins * q < p, tokens, others)


def choose_with_the_noise_of_the_step(
    tree: TokenTree, logits: jax.Array, noise: jax.Array, sampling: Sampling
) -> jax.Array:
    """One noise for all nodes of the step, whatever their position."""
    return choose_tokens(logits, jnp.zeros_like(tree.depth), noise, sampling)


@pytest.mark.long
@pytest.mark.parametrize(
    "rule", [accept_by_the_ratio_of_probabilities, choose_with_the_noise_of_the_step]
)
def test_a_wrong_rule_breaks_the_law(monkeypatch: pytest.MonkeyPatch, rule: Rule) -> None:
    def decide(
        tree: TokenTree, logits: jax.Array, noise: jax.Array, sampling: Sampling
    ) -> tuple[jax.Array, Accepted]:
        chosen = rule(tree, logits, noise, sampling)
        return chosen, accept(tree, chosen, noise.shape[1])

    inner = inspect.unwrap(runner.decode_rows)
    monkeypatch.setattr(step, "decide", decide)
    # A function of its own, so that no trace of the right step is reused.
    anew = partial(jax.jit, static_argnames=("tree", "steps", "top"))
    monkeypatch.setattr(
        runner, "decode_rows", anew(lambda *arguments, **options: inner(*arguments, **options))
    )
    case = Case("fair", ALL_NODES, SamplingConfig(1.0))
    # Half of the draws that the right rule has to stand.
    counts = count_sequences(case, BATCHES // 2)
    distance, bound = distance_and_bound(counts, exact_law(case.sampling))
    assert distance > 3 * bound
