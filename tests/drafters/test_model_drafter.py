"""A model as the drafter of another, against its own passes over whole texts."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from tiny_models import random_target, tiny_config
from trees import live_paths

from redrafter_jax import SamplingConfig, TreeConfig
from redrafter_jax.config import Llama3Scaling, TargetConfig
from redrafter_jax.decoding.step import propose
from redrafter_jax.drafters.base import Drafter
from redrafter_jax.drafters.model_drafter import ModelDrafter
from redrafter_jax.engine.requests import Batch
from redrafter_jax.generation import engine_of
from redrafter_jax.models.target import Target
from redrafter_jax.types import DecodeState, TokenTree

pytestmark = pytest.mark.usefixtures("quick_compilation")

# Of other widths and depths than the target's, and of every variation that attention knows.
DRAFTERS: dict[str, TargetConfig] = {
    "Llama": tiny_config(
        hidden_size=16,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=4,
        rope_scaling=Llama3Scaling(4.0, 1.0, 4.0, 128),
        tie_word_embeddings=True,
    ),
    "Qwen": tiny_config(num_hidden_layers=1, attention_bias=True, qk_norm=True),
    "Gemma": tiny_config(
        sliding_window=3,
        windowed_layers=(0,),
        rope_local_base_freq=300.0,
        query_pre_attn_scalar=5.0,
        hidden_act="gelu_pytorch_tanh",
        output_norms=True,
        zero_centered_norms=True,
        scaled_embeddings=True,
    ),
}
V = tiny_config().vocab_size
TEXT: list[int] = np.random.default_rng(4).integers(0, V, 310).tolist()
# One token, a chunk of prefill but one, a whole one, one more, and several with a tail.
LENGTHS = [1, 63, 64, 65, 300]
PROMPTS = [TEXT[row : row + length] for row, length in enumerate(LENGTHS)]
SAMPLINGS = [
    SamplingConfig(),
    SamplingConfig(temperature=0.7),
    SamplingConfig(temperature=1.3, top_k=7, top_p=0.9, min_p=0.02),
    SamplingConfig(),
    SamplingConfig(temperature=1.0),
]
CHAIN = TreeConfig(beam_width=1, draft_rounds=4)
TREE = TreeConfig(beam_width=3, draft_rounds=3)


@pytest.fixture(scope="module", params=DRAFTERS)
def model(request: pytest.FixtureRequest) -> Target:
    return random_target(DRAFTERS[request.param], seed=2)


@jax.jit
def _scores(model: Target, text: Any) -> jax.Array:
    decoder = model.merge()
    hidden, _, _ = decoder.forward(text)
    return decoder.logits(hidden)


def logits_after(model: Target, text: list[int]) -> Callable[[tuple[int, ...]], np.ndarray]:
    """The model's scores after a text and a path below it: one pass over all, without a cache."""

    def after(path: tuple[int, ...]) -> np.ndarray:
        whole = [*text, *path]
        # One shape for all; nothing sees the padding.
        padded = np.asarray([whole + [0] * (320 - len(whole))], np.int32)
        return np.asarray(_scores(model, padded)[0, len(whole) - 1], np.float64)

    return after


def state_after(
    target: Target, drafter: Drafter, prompts: list[list[int]], tree: TreeConfig
) -> DecodeState:
    """The state of an engine that has read the prompts, and has decoded nothing."""
    reader, requests = engine_of(
        target, drafter, Batch(prompts, [8] * len(prompts), SAMPLINGS), tree, None, False
    )
    for request in requests:
        reader.submit(request)
    reader.advance(passes=None, steps=0)
    return reader._state


def drafted(
    target: Target, drafter: Drafter, state: DecodeState, noise: np.ndarray, tree: TreeConfig
) -> TokenTree:
    run = jax.jit(
        lambda target, drafter, state, noise: propose(target.merge(), drafter, state, noise, tree)
    )
    return jax.tree.map(np.asarray, run(target, drafter, state, jnp.asarray(noise)))


@pytest.mark.parametrize(
    "tree",
    [
        CHAIN,
        TREE,
        TreeConfig(1, 1),
        TreeConfig(3, 4, num_nodes=8, sharpness=1.5, candidates=9),
        TreeConfig(2, 3, num_nodes=9, rerank=True),
    ],
    ids=str,
)
def test_a_tree_is_that_of_passes_over_whole_texts(
    target: Target, model: Target, tree: TreeConfig
) -> None:
    drafter = ModelDrafter(model)
    state = state_after(target, drafter, PROMPTS, tree)
    noise = np.random.default_rng(6).gumbel(size=(len(PROMPTS), tree.max_path, V))
    noise[[one.temperature == 0 for one in SAMPLINGS]] = 0
    noise = noise.astype(np.float32)
    grown = drafted(target, drafter, state, noise, tree)
    for row, prompt in enumerate(PROMPTS):
        root = int(state.root[row])
        trace = oracles.beam_search(
            logits_after(model, prompt), range(V), root, noise[row], SAMPLINGS[row], tree, V
        )
        width = tree.extensions
        expected = {one.path: one.log_prob for found in trace for one in found[:width]}
        best = sorted(expected, key=lambda path: -expected[path])[: tree.budget - 1]
        paths = live_paths(grown, row)
        likely = {(root,), *(path for path in best if expected[path] > -np.inf)}
        assert set(paths) == likely
        live = grown.log_probs[row, grown.tokens[row] >= 0]
        scores = dict(zip(paths, live, strict=True))
        for path in likely - {(root,)}:
            assert scores[path] == pytest.approx(expected[path], rel=1e-4, abs=1e-4)
