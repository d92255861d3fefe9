"""Every model family against Hugging Face: logits, greedy text, and trees that keep it."""

from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from places import GOLDENS
from trees import tree_of

from redrafter_jax import TreeConfig, generate, load_target, make_mesh
from redrafter_jax.decoding.accept import accept
from redrafter_jax.drafters.lookup import PromptLookup
from redrafter_jax.models.cache import append, commit, init_cache
from redrafter_jax.models.target import Target
from redrafter_jax.types import KVCache, TokenTree

FAMILIES = GOLDENS / "families"
# A chain of four below the root, with a wrong sibling at every depth but the last.
PARENTS = [0, 0, 0, 1, 1, 3, 3, 5]
CHAIN = [1, 3, 5, 7]
LOOKUP = TreeConfig(beam_width=1, draft_rounds=4)
S, P = 80, 5

# Compiles faster; every family has programs of its own.
quick_jit = partial(
    jax.jit,
    compiler_options={
        "xla_backend_optimization_level": 0,
        "xla_llvm_disable_expensive_passes": True,
    },
)


@pytest.fixture(scope="module", params=sorted(FAMILIES.iterdir()), ids=lambda folder: folder.name)
def folder(request: pytest.FixtureRequest) -> Path:
    return request.param


@pytest.fixture(scope="module")
def answers(folder: Path) -> dict[str, np.ndarray]:
    with np.load(folder / "answers.npz") as arrays:
        return dict(arrays)


@pytest.fixture(scope="module")
def target(folder: Path) -> Target:
    return load_target(folder, dtype="float32")


@quick_jit
def read(target: Target, tokens: Any, length: Any) -> tuple[jax.Array, KVCache]:
    decoder = target.merge()
    hidden, keys, values = decoder.forward(tokens)
    empty = init_cache(target.config, 1, S, hidden.dtype)
    return decoder.logits(hidden)[0], append(empty, keys, values, length)


@quick_jit
def step(target: Target, tree: TokenTree, cache: KVCache) -> tuple[jax.Array, KVCache]:
    """The tokens that the target chooses for itself along the tree, padded with -1."""
    verified = target.merge().tree_forward(tree, cache)
    chosen = verified.logits.argmax(axis=-1).astype(jnp.int32)
    accepted = accept(tree, chosen, P)
    cache = commit(cache, verified.keys, verified.values, accepted.path, accepted.count)
    gained = jnp.take_along_axis(chosen, accepted.path, axis=1)[0]
    return jnp.where(jnp.arange(P) < accepted.count[0], gained, -1), cache


def tree_below(root: int, chain: list[int]) -> TokenTree:
    """These tokens one below the other, each with a wrong sibling; the rest is padding."""
    tokens = np.full(len(PARENTS), -1)
    tokens[0] = root
    for node, token in zip(CHAIN, chain, strict=False):
        for sibling, wrong in ((node, 0), (node + 1, 1)):
            if sibling < len(PARENTS):
                tokens[sibling] = (token + wrong) % 24
    return tree_of(tokens[None], [PARENTS])


def test_float32_logits_are_hugging_faces(target: Target, answers: dict[str, np.ndarray]) -> None:
    text = np.concatenate([answers["prompt"], answers["greedy"]])
    logits, _ = read(target, text[None], np.asarray([64]))
    difference = np.abs(np.asarray(logits) - answers["logits"]).max()
    assert difference < 1e-4 * np.abs(answers["logits"]).max()


def test_greedy_text_is_hugging_faces(target: Target, answers: dict[str, np.ndarray]) -> None:
    """Four tokens are drafted, of which the last is sometimes wrong."""
    prompt, expected = answers["prompt"].tolist(), answers["greedy"].tolist()
    assert len(expected) >= 40
    padded = np.asarray([prompt + [0] * (64 - len(prompt))])
    logits, cache = read(target, padded, np.asarray([len(prompt)]))
    text, steps = [int(logits[len(prompt) - 1].argmax())], 0
    while len(text) < len(expected):
        chain = expected[len(text) : len(text) + 4]
        if steps % 3 == 2:
            chain[-1] = (chain[-1] + 5) % 24
        gained, cache = step(target, tree_below(text[-1], chain), cache)
        text += [int(token) for token in gained if token >= 0]
        steps += 1
    # The last call may choose one token more.
    assert text[: len(expected)] == expected
    assert steps < 13


@pytest.mark.parametrize(
    ("folder", "share"),
    [
        pytest.param(FAMILIES / "llama_bias", 0.05, marks=pytest.mark.long),
        (FAMILIES / "qwen2_window_yarn", 0.05),
        pytest.param(FAMILIES / "qwen3", 0.05, marks=pytest.mark.long),
        # Seven layers: transformers' own bfloat16 logits are off by 0.094.
        (FAMILIES / "gemma3", 0.12),
    ],
    indirect=["folder"],
)
def test_bfloat16_logits_are_near_hugging_faces(
    folder: Path, answers: dict[str, np.ndarray], share: float
) -> None:
    half = load_target(folder, dtype="bfloat16")
    assert all(leaf.dtype == jnp.bfloat16 for leaf in jax.tree.leaves(half.params))
    text = np.concatenate([answers["prompt"], answers["greedy"]])
    logits, _ = read(half, text[None], np.asarray([64]))
    difference = np.abs(np.asarray(logits) - answers["logits"])
    assert difference.mean() < share * np.abs(answers["logits"]).mean()


@pytest.mark.usefixtures("quick_compilation")
@pytest.mark.parametrize(
    ("folder", "devices"),
    [
        pytest.param(FAMILIES / "qwen2_window_yarn", None, marks=pytest.mark.long),
        (FAMILIES / "gemma3", None),
        pytest.param(FAMILIES / "gemma3", 2, marks=pytest.mark.long),
    ],
    indirect=["folder"],
)
def test_generate_writes_hugging_faces_text_past_windows_and_thresholds(
    folder: Path, answers: dict[str, np.ndarray], devices: int | None
) -> None:
    """The whole way at once, for the families with most variations."""
    prompt, expected = answers["prompt"].tolist(), answers["greedy"].tolist()
    mesh = make_mesh(model=devices) if devices else None
    target = load_target(folder, dtype="float32", mesh=mesh)
    options: dict[str, Any] = {"max_new_tokens": len(expected), "tree": LOOKUP}
    speculative = generate(target, PromptLookup(), [prompt], **options)
    assert speculative.tokens == [expected]
    assert speculative.acceptance_length > 1.1
