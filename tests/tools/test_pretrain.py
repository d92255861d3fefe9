"""`python -m tools.pretrain`: a tokenizer and a small target that others can load."""

import json
import math
import sys
from dataclasses import asdict
from pathlib import Path

import jax
import numpy as np
import pytest
from tiny_folders import write_yaml
from tiny_models import tiny_config
from tokenizers import Tokenizer

from redrafter_jax.errors import InputError
from redrafter_jax.files.target_files import load_target
from redrafter_jax.settings.files import load_settings
from tools.pretrain import PretrainSettings, main

pytestmark = pytest.mark.usefixtures("quick_compilation")

SHAPE = tiny_config(
    vocab_size=300,
    num_hidden_layers=1,
    max_position_embeddings=32,
    tie_word_embeddings=True,
    eos_token_ids=(0,),
)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pretrain")
    for name in ("train.py", "held.py"):
        lines = [f"def {name[0]}{n}(x):\n    return x + {n}\n" for n in range(300)]
        (folder / name).write_text("".join(lines))
    settings = {
        "target": asdict(SHAPE),
        "data": {
            "sources": [{"folder": str(folder), "held_out": ["held.py"]}],
            "sequence_length": 32,
        },
        "optimizer": {"learning_rate": 1e-2, "batch_size": 4, "accumulation_steps": 2},
        "steps": 40,
        "output_dir": str(folder / "target"),
    }
    return write_yaml(folder / "pretrain.yaml", settings)


@pytest.mark.long
def test_the_target_learns_what_it_never_saw(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["pretrain", "--config", str(config)])
    main()
    folder = config.parent / "target"
    report = json.loads((folder / "pretrain_report.json").read_text())
    assert report["held_out_loss_nats_per_token"] < 0.7 * math.log(300)
    assert report["training_tokens"] == 40 * 8 * 32
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.get_vocab_size() <= 300
    # The end token opens and closes the document; the first token of each window is not scored.
    tokens = [0, *tokenizer.encode((config.parent / "held.py").read_text()).ids, 0]
    held = np.zeros((math.ceil(len(tokens) / 32), 32), np.int32)
    held.flat[: len(tokens)] = tokens
    # The loss is that of the target as it was written.
    decoder = load_target(folder, "float32").merge()
    forward = jax.jit(lambda tokens: decoder.logits(decoder.forward(tokens)[0]))
    logits = np.asarray(forward(held), np.float64)
    log_probs = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    losses = [
        -log_probs[divmod(place - 1, 32)][token]
        for place, token in enumerate(tokens)
        if place % 32 != 0
    ]
    assert report["held_out_tokens"] == len(losses)
    assert report["held_out_loss_nats_per_token"] == pytest.approx(np.mean(losses), rel=1e-5)


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("target.vocab_size=256", "target.vocab_size is 256 and must be 257 or more"),
        ("target.eos_token_ids=[1]", r"eos_token_ids is \[1\] and must be \[0\]"),
        ("data.sequence_length=33", "data.sequence_length is 33, but must be from 2 to 32"),
    ],
)
def test_settings_that_cannot_train_are_refused(config: Path, override: str, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        load_settings(PretrainSettings, config, [override])
