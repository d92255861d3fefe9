"""`python -m tools.pretrain`: a tokenizer and a small target that others can load."""

import json
import math
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
import yaml
from tokenizers import Tokenizer

from redrafter_jax.checkpoints.huggingface import load_target
from redrafter_jax.errors import InputError
from redrafter_jax.settings.files import load_settings
from tools.pretrain import PretrainSettings, held_out_loss, main
from train.data.types import Windows

pytestmark = pytest.mark.usefixtures("quick_compilation")

SHAPE = {
    "vocab_size": 300,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1.0e-5,
    "max_position_embeddings": 32,
    "tie_word_embeddings": True,
    "eos_token_ids": [0],
}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pretrain")
    for name in ("train.py", "held.py"):
        lines = [f"def {name[0]}{n}(x):\n    return x + {n}\n" for n in range(300)]
        (folder / name).write_text("".join(lines))
    settings = {
        "target": SHAPE,
        "data": {
            "sources": [{"folder": str(folder), "held_out": ["held.py"]}],
            "sequence_length": 32,
        },
        "optimizer": {"learning_rate": 1e-2, "batch_size": 4, "accumulation_steps": 2},
        "steps": 40,
        "output_dir": str(folder / "target"),
    }
    path = folder / "pretrain.yaml"
    path.write_text(yaml.safe_dump(settings))
    return path


@pytest.fixture(scope="module")
def exported(config: Path) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["pretrain", "--config", str(config)])
        main()
    return config.parent / "target"


@pytest.mark.long
def test_the_target_learns_what_it_never_saw(exported: Path) -> None:
    report = json.loads((exported / "pretrain_report.json").read_text())
    assert report["held_out_loss_nats_per_token"] < 0.7 * math.log(300)
    assert report["training_tokens"] == 40 * 8 * 32
    tokenizer = Tokenizer.from_file(str(exported / "tokenizer.json"))
    assert tokenizer.get_vocab_size() <= 300
    # The end token opens and closes the document; the first token of each window is not scored.
    tokens = [0, *tokenizer.encode((exported.parent / "held.py").read_text()).ids, 0]
    rows = math.ceil(len(tokens) / 32)
    assert report["held_out_tokens"] == len(tokens) - rows
    # The loss is that of the target as it was written.
    held = np.zeros((rows, 32), np.int32)
    held.flat[: len(tokens)] = tokens
    counted = np.arange(held.size).reshape(held.shape) < len(tokens)
    windows = Windows(held, counted, np.ones_like(held))
    loss, _ = held_out_loss(load_target(exported, "float32"), windows)
    assert report["held_out_loss_nats_per_token"] == pytest.approx(loss, rel=1e-6)


@pytest.mark.long
def test_the_held_out_loss_is_the_cross_entropy_of_every_counted_token(exported: Path) -> None:
    target = load_target(exported, "float32")
    generator = np.random.default_rng(0)
    # Four windows make a batch.
    tokens = generator.integers(0, 300, (6, 8)).astype(np.int32)
    mask = generator.random((6, 8)) < 0.5

    @jax.jit
    def forward(tokens: jax.Array) -> jax.Array:
        decoder = target.merge()
        return decoder.logits(decoder.forward(tokens)[0])

    logits = np.asarray(forward(tokens), np.float64)
    log_probs = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    terms = [
        -log_probs[b, t, tokens[b, t + 1]] for b in range(6) for t in range(7) if mask[b, t + 1]
    ]
    mean, counted = held_out_loss(target, Windows(tokens, mask, np.ones_like(tokens)))
    assert counted == len(terms)
    np.testing.assert_allclose(mean, np.mean(terms), rtol=1e-5)


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("target.vocab_size=256", "target.vocab_size is 256 .* needs 257 or more"),
        ("target.eos_token_ids=[1]", r"ends texts with \[0\]"),
        ("data.sequence_length=33", "data.sequence_length is 33; give it 2 to 32"),
    ],
)
def test_settings_that_cannot_train_are_refused(config: Path, override: str, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        load_settings(PretrainSettings, config, [override])
