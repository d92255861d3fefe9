"""A real Gemma 3, quantized, against PyTorch and SentencePiece."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mixed_lines import digests, mixed_lines
from needs import fetched
from places import GOLDENS

from redrafter_jax import TargetConfig, generate, load_target
from redrafter_jax.drafters.lookup import PromptLookup
from redrafter_jax.files.real_models import GEMMA3
from redrafter_jax.files.target_files import open_target
from redrafter_jax.models.target import Target

pytestmark = pytest.mark.long

COUNT = 10


@pytest.fixture(scope="module")
def path() -> Path:
    return fetched(GEMMA3)


@pytest.fixture(scope="module")
def target(path: Path) -> Target:
    return load_target(path, "float32")


@pytest.fixture(scope="module")
def answers() -> dict[str, np.ndarray]:
    with np.load(GOLDENS / "gguf" / "gemma3_270m.npz") as arrays:
        return dict(arrays)


def test_the_header_and_llama_cpps_defaults_are_googles_configuration(target: Target) -> None:
    """As `config.json` of google/gemma-3-270m states it."""
    windowed = tuple(layer for layer in range(18) if layer not in (5, 11, 17))
    assert target.config == TargetConfig(
        vocab_size=262_144,
        hidden_size=640,
        intermediate_size=2048,
        num_hidden_layers=18,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=256,
        rope_theta=1e6,
        rms_norm_eps=1e-6,
        max_position_embeddings=32_768,
        tie_word_embeddings=True,
        eos_token_ids=(1,),
        qk_norm=True,
        sliding_window=512,
        windowed_layers=windowed,
        rope_local_base_freq=1e4,
        query_pre_attn_scalar=256.0,
        hidden_act="gelu_pytorch_tanh",
        output_norms=True,
        zero_centered_norms=True,
        scaled_embeddings=True,
    )


def test_float32_logits_are_pytorchs(target: Target, answers: dict[str, np.ndarray]) -> None:
    @jax.jit
    def last_logits(target: Target, tokens: jax.Array, lengths: jax.Array) -> jax.Array:
        decoder = target.merge()
        hidden, _, _ = decoder.forward(tokens)
        last = lengths[:, None] - jnp.arange(8, 0, -1)
        return decoder.logits(jnp.take_along_axis(hidden, last[..., None], axis=1))

    texts = [np.append(answers[f"prompt_{i}"], answers[f"greedy_{i}"]) for i in range(COUNT)]
    lengths = np.asarray([len(text) for text in texts])
    longest = max(len(text) for text in texts)
    padded = np.stack([np.pad(text, (0, longest - len(text))) for text in texts])
    logits = list(np.asarray(last_logits(target, padded, lengths)))
    long = answers["text_long"]
    assert len(long) > 512, "the window hides some of it"
    logits += list(np.asarray(last_logits(target, long[None], np.asarray([len(long)]))))
    for ours, name in zip(logits, [*range(COUNT), "long"], strict=True):
        largest, scored = answers[f"largest_{name}"], ours[:, answers[f"scored_{name}"]]
        assert np.abs(scored - answers[f"logits_{name}"]).max() < 1e-4 * largest.max()
        np.testing.assert_allclose(ours.max(axis=1), largest, rtol=1e-4)


@pytest.mark.parametrize("drafter", [None, PromptLookup()], ids=["autoregressive", "lookup"])
def test_greedy_texts_are_pytorchs(
    target: Target, answers: dict[str, np.ndarray], drafter: PromptLookup | None
) -> None:
    prompts = [answers[f"prompt_{i}"].tolist() for i in range(COUNT)]
    written = generate(target, drafter, prompts, max_new_tokens=64, eos_token_ids=())
    assert written.tokens == [answers[f"greedy_{i}"].tolist() for i in range(COUNT)]


def test_ids_of_10_000_lines_are_sentencepieces(path: Path, answers: dict[str, np.ndarray]) -> None:
    encoded = open_target(path).tokenizer.encode_batch(mixed_lines(), add_special_tokens=False)
    np.testing.assert_array_equal(digests(line.ids for line in encoded), answers["ids"])
