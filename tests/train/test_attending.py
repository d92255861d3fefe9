"""Training of heads that attend, whole runs: features, resuming, and the head that comes out."""

import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from chat_folders import write_lines
from tiny_folders import write_untrained_target
from tiny_models import assert_same
from train_runs import Start, assert_same_weights, rows, settings, trial

from redrafter_jax import TreeConfig, generate, generate_autoregressive, load_drafter, load_target
from redrafter_jax.config import TargetConfig
from redrafter_jax.files.drafter_files import save_drafter
from redrafter_jax.files.target_files import TargetFiles
from redrafter_jax.files.target_weights import save_target
from redrafter_jax.models.target import init_target

pytestmark = pytest.mark.usefixtures("quick_compilation")

V = 300
CONFIG = TargetConfig(V, 16, 24, 3, 2, 2, 8, 1e4, 1e-5, 64, True, (0,))
KINDS: dict[str, dict[str, Any]] = {
    "recurrent": {"exit_dim": 16, "attention": True, "context_layers": [1]},
    "eagle3": {"context_layers": [0, 1]},
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    write_untrained_target(folder, functions=20)
    louder = jax.tree.map(lambda leaf: leaf * 8 if leaf.ndim == 2 else leaf, init_target(CONFIG, 0))
    save_target(louder, folder)
    return folder


def values(target: Path, folder: Path, kind: str, **changes: Any) -> dict[str, Any]:
    """A run on two sources, several documents in a row, that reads features of all tokens."""
    short = [{"input_ids": [n, n + 1, n + 2, n + 3], "loss_mask": [0, 1, 1, 1]} for n in range(22)]
    files = write_lines(target.parent / "short.jsonl", *short)
    stated = {
        "drafter": KINDS[kind] | {"kind": kind, "draft_vocab_size": 60},
        "data": {
            "sources": [{"folder": str(target)}, {"files": [files]}],
            "sequence_length": 16,
            "pack": True,
        },
        "loss": {"soft": 0.5, "hard": 0.5, "lk": 0.5, "tv": 0.5, "chunk_length": 5},
        "steps": 6,
        "log_every": 1,
        "checkpoint_every": 3,
        "features": str(folder / "features"),
    }
    return settings(target, folder / "run") | stated | changes


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_from_features_resumes_to_the_same_bits_and_is_one_online(
    target: Path, tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    stated = values(target, tmp_path, kind)
    start(stated, "features", f"top_k={V}")
    start(stated | {"features": None, "output_dir": str(tmp_path / "online")})
    with monkeypatch.context() as patch:
        # The layers of the target are not even loaded.
        patch.delattr(TargetFiles, "load")
        start(stated)
    kept, online = rows(tmp_path / "run"), rows(tmp_path / "online")
    for name in ("loss", "round_0/soft_loss", "round_1/tv_loss"):
        losses = [[row[name] for row in run] for run in (kept, online)]
        np.testing.assert_allclose(*losses, rtol=2**-7, err_msg=name)
    for run in ("run", "online"):
        again = tmp_path / f"{run}_again"
        shutil.copytree(tmp_path / run, again)
        shutil.rmtree(again / "checkpoints" / "6")
        features = stated["features"] if run == "run" else None
        told = start(stated | {"features": features, "output_dir": str(again)})
        assert "resumed from step 3" in told.out
        assert_same_weights(again, tmp_path / run)


@pytest.mark.parametrize("kind", ["eagle3", "recurrent"])
@pytest.mark.long
def test_the_head_that_comes_out_loads_decodes_and_starts_another_run(
    target: Path, tmp_path: Path, start: Start, kind: str
) -> None:
    output = tmp_path / "run"
    acceptance = trial(tmp_path, every=6, max_new_tokens=4, tree={"draft_rounds": 2})
    start(values(target, tmp_path, kind, features=None, acceptance=acceptance))
    head: Any = load_drafter(output / "drafter", "float32")
    assert len(head.config.draft_tokens) == 60
    save_drafter(head, tmp_path / "saved")
    assert_same(load_drafter(tmp_path / "saved", "float32"), head)
    assert_same_files(tmp_path / "saved", output / "drafter")
    model = load_target(target, "float32")
    options: dict[str, Any] = {"max_new_tokens": 12, "eos_token_ids": ()}
    prompts = [[5, 6, 7], list(range(20))]
    expected = generate_autoregressive(model, prompts, **options)
    tree = TreeConfig(beam_width=3, draft_rounds=3)
    assert generate(model, head, prompts, tree=tree, **options).tokens == expected.tokens
    stated = values(target, tmp_path, kind, features=None, output_dir=str(tmp_path / "second"))
    stated["drafter"] |= {"initial_drafter": str(output / "drafter"), "draft_vocab_size": "auto"}
    start(stated)
    before, after = rows(output), rows(tmp_path / "second")
    assert after[0]["loss"] < before[0]["loss"]


def assert_same_files(ours: Path, theirs: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        assert (ours / name).read_bytes() == (theirs / name).read_bytes()
