"""Large ragged batches in which every row samples its own way: both texts are the same.

`test_parity` tries many small batches; here one batch holds every temperature with every filter.
"""

import dataclasses
import json
from collections.abc import Sequence
from itertools import islice, product
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from flax import nnx
from places import CONFIGS
from tiny_models import imitating_drafter

from redrafter_jax import (
    DraftConfig,
    Generation,
    SamplingConfig,
    generate,
    generate_autoregressive,
    load_target,
)
from redrafter_jax.config import DrafterConfig
from redrafter_jax.drafters.recurrent_head import DraftModel, init_drafter
from redrafter_jax.models.target import Target
from redrafter_jax.parallel.model import Model
from redrafter_jax.text.tokenizer import load_tokenizer

TEMPERATURES = (0.0, 0.7, 1.0, 1.3)
FILTERS: tuple[dict[str, Any], ...] = (
    {},
    {"top_k": 5},
    {"top_p": 0.9},
    {"min_p": 0.05},
    {"top_k": 8, "top_p": 0.95, "min_p": 0.02},
)
SAMPLINGS = [
    SamplingConfig(temperature, **filters)
    for temperature, filters in product(TEMPERATURES, FILTERS)
]
TREES = {
    "chain": DraftConfig(beam_width=1, draft_rounds=4),
    "all nodes": DraftConfig(beam_width=4, draft_rounds=4),
    "node budget": DraftConfig(beam_width=6, draft_rounds=4, num_nodes=10),
    "final beams only": DraftConfig(beam_width=4, draft_rounds=4, final_beams_only=True),
    "deep and sharp": DraftConfig(beam_width=3, draft_rounds=7, num_nodes=12, sharpness=2.5),
    "wide beam": DraftConfig(beam_width=16, draft_rounds=2, candidates=20),
    "copied tokens": DraftConfig(beam_width=3, draft_rounds=2, num_nodes=8, lookup_tokens=3),
}


class Requests(NamedTuple):
    """A batch of rows, each with its own prompt, limit, sampling and seed."""

    prompts: list[list[int]]
    max_new_tokens: list[int]
    sampling: list[SamplingConfig]
    seeds: list[int]


def draw_requests(seed: int, prompts: Sequence[list[int]], longest: int) -> Requests:
    """A row per prompt; the samplings take turns."""
    random = np.random.default_rng(seed)
    rows = len(prompts)
    return Requests(
        prompts=list(prompts),
        max_new_tokens=random.integers(1, longest + 1, size=rows).tolist(),
        sampling=[SAMPLINGS[row % len(SAMPLINGS)] for row in range(rows)],
        seeds=random.integers(2**31, size=rows).tolist(),
    )


def difference(row: int, requests: Requests, plain: list[int], ours: list[int]) -> str:
    """Where the row's texts part, in words."""
    pairs = list(zip(plain, ours, strict=False))
    place = next((place for place, (a, b) in enumerate(pairs) if a != b), len(pairs))
    return (
        f"row {row}, {requests.sampling[row]}, seed {requests.seeds[row]}, "
        f"prompt of {len(requests.prompts[row])}: new token {place} is "
        f"{ours[place : place + 1]}, in plain decoding {plain[place : place + 1]}"
    )


def check_equality(
    target: Target, drafter: DraftModel, draft: DraftConfig, requests: Requests
) -> Generation:
    """Both texts of all rows; returns the speculative generation."""
    arguments = requests._asdict()
    plain = generate_autoregressive(target, **arguments, eos_token_ids=())
    ours = generate(target, drafter, **arguments, draft=draft, eos_token_ids=())
    assert [len(tokens) for tokens in plain.tokens] == requests.max_new_tokens
    differences = [
        difference(row, requests, *texts)
        for row, texts in enumerate(zip(plain.tokens, ours.tokens, strict=True))
        if texts[0] != texts[1]
    ]
    assert not differences, "\n".join(differences)
    return ours


def test_a_difference_is_named_by_row_sampling_and_place() -> None:
    requests = draw_requests(0, [[1, 2], [3]], longest=4)
    named = difference(1, requests, [5, 6, 7], [5, 8])
    assert "row 1" in named
    assert str(SAMPLINGS[1]) in named
    assert "new token 1 is [8], in plain decoding [6]" in named
    assert "new token 2 is [], in plain decoding [7]" in difference(0, requests, [5, 6, 7], [5, 6])


def gain_of(generation: Generation, rows: Sequence[int]) -> float:
    """Mean acceptance length of some rows."""
    counts = generation.accept_counts[rows].sum(axis=0)
    return float(counts @ np.arange(1, len(counts) + 1) / counts.sum())


def check_gain(generation: Generation, requests: Requests, least: float) -> None:
    """At no temperature is the equality that of texts without accepted drafts."""
    for temperature in TEMPERATURES:
        rows = [row for row, one in enumerate(requests.sampling) if one.temperature == temperature]
        assert gain_of(generation, rows) > least, f"temperature {temperature}"


def random_prompts(seed: int, rows: int, vocab_size: int) -> list[list[int]]:
    random = np.random.default_rng(seed)
    return [random.integers(vocab_size, size=random.integers(1, 41)).tolist() for _ in range(rows)]


@pytest.mark.parametrize("tree", TREES)
def test_drafters_change_no_token_however_often_they_are_right(
    habitual_target: Target, good_drafter: DraftModel, tree: str
) -> None:
    seed = 2 * list(TREES).index(tree)
    requests = draw_requests(seed, random_prompts(seed, 80, 24), longest=48)
    ours = check_equality(habitual_target, good_drafter, TREES[tree], requests)
    check_gain(ours, requests, least=1.5)

    seed += 1
    fair = imitating_drafter(habitual_target, corruption=0.5)
    requests = draw_requests(seed, random_prompts(seed, 80, 24), longest=48)
    ours = check_equality(habitual_target, fair, TREES[tree], requests)
    # Paths of every length: what was rejected along them must leave no trace either.
    assert (ours.accept_counts.sum(axis=0) > 0).all()


@jax.jit
def read(target: Target, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The last hidden states and the logits."""
    module = target.merge()
    hidden = module.forward(tokens)[0]
    return hidden, module.logits(hidden)


def regressed_drafter(target: Target, texts: Sequence[list[int]]) -> DraftModel:
    """A drafter without recurrence, its projection fitted to the target by least squares.

    It sees the target's last hidden state and a fixed vector of the last token; it is fitted to the
    target's own logits one and two tokens after that state.
    """
    D, V = target.config.hidden_size, target.config.vocab_size
    module = target.merge()
    tokens = np.asarray(texts)
    contexts, logits = map(np.asarray, read(target, jnp.asarray(tokens)))
    embedding = np.asarray(module.embed_tokens[...])
    mix = np.random.default_rng(0).normal(size=(D, D)) / embedding.std() / np.sqrt(D)
    states = oracles.silu(embedding @ mix)[tokens]

    ahead = [(np.dstack((contexts[:, :-far], states[:, far:])), logits[:, far:]) for far in (1, 2)]
    features = np.concatenate([seen.reshape(-1, 2 * D) for seen, _ in ahead])
    answers = np.concatenate([said.reshape(-1, V) for _, said in ahead])
    gram = features.T @ features
    ridge = 1e-3 * gram.diagonal().mean() * np.eye(2 * D)
    projection = np.linalg.solve(gram + ridge, features.T @ answers)

    config = DrafterConfig(V, D, exit_dim=2 * D, num_draft_layers=0)
    head = init_drafter(config, 0).merge()
    head.rnn_w.kernel[...] = jnp.asarray(mix, jnp.float32)
    head.rnn_u.kernel[...] = jnp.zeros((D, D))
    head.lm_head.kernel[...] = jnp.asarray(projection, jnp.float32)
    return Model.split(config, head)


def test_a_model_of_real_text_says_the_same_with_and_without_drafts() -> None:
    folder = CONFIGS / "demo_target"
    target = load_target(folder, "float32")
    with (CONFIGS / "demo_regenerated.jsonl").open() as lines:
        texts = [json.loads(line)["input_ids"][:64] for line in islice(lines, 48)]
    drafter = regressed_drafter(target, [text for text in texts if len(text) == 64])

    tokenizer = load_tokenizer(folder)
    rows = (CONFIGS / "demo_prompts.jsonl").read_text().splitlines()
    read = [tokenizer.encode(json.loads(row)["prompt"]).ids for row in rows]
    lengths = np.random.default_rng(0).integers(3, 65, size=len(SAMPLINGS))
    prompts = [read[row % len(read)][:length] for row, length in enumerate(lengths)]
    requests = draw_requests(0, prompts, longest=32)
    draft = DraftConfig(beam_width=4, draft_rounds=4, num_nodes=12)
    ours = check_equality(target, drafter, draft, requests)
    check_gain(ours, requests, least=1.2)


def test_a_drafter_that_knows_half_the_vocabulary_changes_no_token(
    habitual_target: Target, good_drafter: DraftModel
) -> None:
    tokens = tuple(range(1, 24, 2))
    head = good_drafter.merge()
    config = dataclasses.replace(good_drafter.config, draft_tokens=tokens)
    small = init_drafter(config, 0).merge()
    nnx.update(small, nnx.state(head))
    small.lm_head.kernel = nnx.Param(head.lm_head.kernel[...][:, tokens])
    requests = draw_requests(77, random_prompts(77, 80, 24), longest=48)
    tree = TREES["node budget"]
    ours = check_equality(habitual_target, Model.split(config, small), tree, requests)
    check_gain(ours, requests, least=1.1)
