"""Features: what the target says, kept on disk; training from it is training online."""

import errno
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from chat_folders import write_lines
from rich.filesize import decimal
from safetensors.numpy import load_file, save_file
from tiny_folders import change_json, write_untrained_target
from train_runs import Start, assert_same_weights, rows, run_train, settings, trial

from redrafter_jax.config import TargetConfig
from redrafter_jax.files.target_files import TargetFiles, load_target, open_target
from redrafter_jax.files.target_weights import save_target
from redrafter_jax.models.target import init_target
from train.config import TrainSettings
from train.loss import TopTokens, dense_log_probs
from train.setup import load_sources

pytestmark = pytest.mark.usefixtures("quick_compilation")

V, LENGTH = 300, 16
CONFIG = TargetConfig(V, 16, 24, 3, 2, 2, 8, 1e4, 1e-5, 64, True, (0,))


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    write_untrained_target(folder, functions=20)
    louder = jax.tree.map(lambda leaf: leaf * 8 if leaf.ndim == 2 else leaf, init_target(CONFIG, 0))
    save_target(louder, folder)
    return folder


def values(target: Path, folder: Path, **changes: Any) -> dict[str, Any]:
    """A run on two sources, several documents in a row, that reads features."""
    short = [{"input_ids": [n, n + 1, n + 2, n + 3], "loss_mask": [0, 1, 1, 1]} for n in range(22)]
    files = write_lines(target.parent / "short.jsonl", *short)
    data = {
        "sources": [{"folder": str(target)}, {"files": [files]}],
        "sequence_length": LENGTH,
        "pack": True,
    }
    stated = {"data": data, "steps": 6, "log_every": 1, "checkpoint_every": 3}
    return settings(target, folder / "run", **stated, features=str(folder / "features")) | changes


def test_features_are_what_the_target_says_of_every_token(
    target: Path, tmp_path: Path, start: Start
) -> None:
    stated = values(target, tmp_path, drafter={"exit_dim": 16, "context_layers": [0, 1]})
    said = start(stated, "features", "top_k=5").err
    sources = load_sources(TrainSettings.model_validate(stated), open_target(target))
    tokens, segments = (
        np.concatenate([getattr(made.windows, name) for _, made in sources])
        for name in ("tokens", "segments")
    )
    there = segments > 0
    count = int(there.sum())
    # Two layers and the last one, and 5 tokens with an id of 2 bytes each; where each row begins.
    size = decimal(count * (3 * 16 * 2 + 5 * 4) + 8 * (len(tokens) + 1))
    folder = tmp_path / "features"
    assert f"{count:,} tokens take {size} in {folder}, of which {size} are to be" in said
    kept = load_file(folder / "00000.safetensors")
    np.testing.assert_array_equal(kept["starts"], np.cumsum([0, *there.sum(axis=1)]))
    decoder = load_target(target, "float32").merge()
    hidden, _, _ = jax.jit(partial(decoder.forward, context_layers=(0, 1)))(tokens, segments)
    hidden = decoder.of_one_scale(hidden)
    scores = np.asarray(jax.nn.log_softmax(decoder.logits(hidden)))[there]
    best = np.sort(scores)[:, :-6:-1]
    near = partial(np.testing.assert_allclose, rtol=2**-8, atol=1e-5)
    near(kept["hidden"].astype(np.float32), hidden[there])
    near(kept["log_probs"].astype(np.float32), best)
    near(np.take_along_axis(scores, kept["token_ids"].astype(int), axis=-1), best)


@pytest.mark.parametrize(
    ("top_k", "changes"),
    [
        # The whole distribution, which the losses read whole.
        (
            V,
            {
                "loss": {"soft": 1.0, "hard": 0.5, "lk": 0.5, "chunk_length": 5},
                "drafter": {"exit_dim": 16, "draft_vocab_size": 40, "context_layers": [1]},
            },
        ),
        # As much of it as the loss reads.
        pytest.param(
            9,
            {
                "loss": {"soft_top_k": 9, "soft_temperature": 2.0, "chunk_length": 8},
                "drafter": {"exit_dim": 16, "head": "target", "initial_head": "target"},
                "target_dtype": "bfloat16",
            },
            marks=pytest.mark.long,
        ),
    ],
)
def test_training_from_features_is_training_online_to_bfloat16_rounding(
    target: Path,
    tmp_path: Path,
    start: Start,
    monkeypatch: pytest.MonkeyPatch,
    top_k: int,
    changes: dict[str, Any],
) -> None:
    stated = values(target, tmp_path, **changes)
    # A layer more than the drafter reads.
    start(stated, "features", f"top_k={top_k}", "drafter.context_layers=[0, 1]")
    start(stated | {"features": None, "output_dir": str(tmp_path / "online")})
    # The layers of the target are not even loaded.
    monkeypatch.delattr(TargetFiles, "load")
    start(stated)
    kept, online = rows(tmp_path / "run"), rows(tmp_path / "online")
    epsilon = 2**-8  # of bfloat16
    for name in ("loss", "round_0/soft_loss", "round_1/soft_loss", "round_1/hard_loss"):
        np.testing.assert_allclose(
            [row[name] for row in kept], [row[name] for row in online], rtol=epsilon, err_msg=name
        )


@pytest.mark.long
def test_a_run_from_features_resumes_tries_and_refuses_other_features(
    target: Path, tmp_path: Path, start: Start
) -> None:
    acceptance = trial(tmp_path, every=3, max_new_tokens=2, tree={"draft_rounds": 1})
    stated = values(target, tmp_path, acceptance=acceptance)
    start(stated, "features", "top_k=5")
    start(stated)
    assert [row["step"] for row in rows(tmp_path / "run") if "acceptance_length" in row] == [3, 6]
    again = tmp_path / "again"
    shutil.copytree(tmp_path / "run", again)
    shutil.rmtree(again / "checkpoints" / "6")
    assert "resumed from step 3" in start(stated | {"output_dir": str(again)}).out
    assert_same_weights(again, tmp_path / "run")
    change_json(tmp_path / "features" / "index.json", rows_per_pass=3)
    assert "a run with other contents of features;" in start(stated, code=2).err


def test_features_that_were_killed_go_on_to_the_same_bits(
    target: Path, tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("train.features._SHARD_BYTES", 4000)
    stated = values(target, tmp_path)
    whole, killed = tmp_path / "features", tmp_path / "killed"
    start(stated, "features", "top_k=5")
    expected = {path.name: path.read_bytes() for path in whole.iterdir()}
    assert len(expected) > 4

    def killed_in_the_third(arrays: dict[str, np.ndarray], path: Path) -> None:
        if path.name == "00002.safetensors":
            path.with_name(".tmpAbCdEf").write_bytes(b"half")
            raise OSError(errno.ENOSPC, "No space left on device")
        save_file(arrays, path)

    stated["features"] = str(killed)
    with monkeypatch.context() as patch:
        patch.setattr("train.features.save_file", killed_in_the_third)
        start(stated, "features", "top_k=5", code=2)
    told = start(stated, code=2).err
    assert f"holds 2 of {len(expected) - 1} shards; write the others with" in told
    assert "rows read: 0 of " in start(stated, "features", "top_k=5").err
    assert {path.name: path.read_bytes() for path in killed.iterdir()} == expected
    assert "of which 0 bytes are to be written" in start(stated, "features", "top_k=5").err
    (killed / "00001.safetensors").write_bytes(expected["00001.safetensors"][:100])
    assert "00001.safetensors cannot be read (" in start(stated, code=2).err


@pytest.mark.parametrize(
    ("changes", "words", "sentence"),
    [
        ({"target_dtype": "bfloat16"}, (), "features of another target_dtype (float32, not bf"),
        ({"drafter": {"exit_dim": 16, "context_layers": [1]}}, (), "another drafter.context_layer"),
        ({}, ("data.pack=false",), "holds no features of the rows of data.sources.1 ("),
        ({"loss": {"soft_top_k": 6}}, (), "loss.soft_top_k is 6, but "),
        ({"loss": {"soft_temperature": 2.0}}, (), "loss.soft_temperature is 2, which needs"),
        (
            {"drafter": {"exit_dim": 16, "draft_vocab_size": 9}},
            ("loss.soft_temperature=2", "loss.soft_top_k=4"),
            "set drafter.draft_vocab_size=null",
        ),
        (
            {"features": "nowhere"},
            (),
            "nowhere holds no features; write them with `python -m train",
        ),
        ({"features": None}, ("features",), "features is missing; set the output folder"),
        ({}, ("features", "top_k=301"), "top_k is 301, but the target has 300 tokens"),
        ({}, ("features", "top_k=6"), "holds features with other values of top_k; set features"),
    ],
)
def test_features_that_do_not_fit_are_refused(
    target: Path,
    kept: Path,
    start: Start,
    changes: dict[str, Any],
    words: tuple[str, ...],
    sentence: str,
) -> None:
    assert sentence in start(values(target, kept, **changes), *words, code=2).err


@pytest.fixture(scope="module")
def kept(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of features, 5 tokens each."""
    folder = tmp_path_factory.mktemp("kept")
    run_train(folder, values(target, folder), "features", "top_k=5")
    return folder


def test_another_target_a_full_disk_and_a_foreign_index_are_refused(
    target: Path, tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "target"
    shutil.copytree(target, own)
    stated = values(own, tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr("shutil.disk_usage", lambda _: shutil._ntuple_diskusage(9, 9, 0))
        assert "space, but 0 bytes are free; make room" in start(stated, "features", code=2).err
    start(stated, "features")
    save_target(init_target(CONFIG, 1), own)
    assert "holds features of another target (" in start(stated, code=2).err
    (tmp_path / "features" / "index.json").write_text("{}")
    assert "index.json is not an index of features" in start(stated, code=2).err


@pytest.mark.long
def test_on_a_mesh_features_and_training_from_them_are_those_of_one_device(
    target: Path, kept: Path, tmp_path: Path, start: Start
) -> None:
    mesh = {"data": 2, "model": 2}
    start(values(target, tmp_path, mesh=mesh), "features", "top_k=5")
    paths = [place / "features" / "00000.safetensors" for place in (tmp_path, kept)]
    made, expected = map(load_file, paths)
    for name in ("hidden", "log_probs"):
        np.testing.assert_allclose(
            made[name].astype(np.float32), expected[name].astype(np.float32), rtol=2**-6, atol=1e-4
        )
    np.testing.assert_array_equal(made["starts"], expected["starts"])
    start(values(target, kept, output_dir=str(tmp_path / "single")))
    start(values(target, kept, output_dir=str(tmp_path / "mesh"), mesh=mesh))
    losses = [[row["loss"] for row in rows(tmp_path / name)] for name in ("mesh", "single")]
    np.testing.assert_allclose(*losses, rtol=1e-4)


def test_the_tokens_beyond_the_k_share_what_is_left() -> None:
    probabilities = np.asarray([[0.5, 0.25], [0.75, 0.25]])
    top = TopTokens(jnp.log(probabilities), jnp.asarray([[3, 0], [1, 4]]))
    expected = [[0.25, 0.25 / 3, 0.25 / 3, 0.5, 0.25 / 3], [0, 0.75, 0, 0, 0.25]]
    np.testing.assert_allclose(np.exp(dense_log_probs(top, 5)), expected, atol=1e-6)
    some = dense_log_probs(top, 5, jnp.asarray([1, 2, 4]))
    np.testing.assert_allclose(np.exp(some), np.asarray(expected)[:, [1, 2, 4]], atol=1e-6)
    # Rounded too low, the k leave more than the last of them has.
    rounded = TopTokens(jnp.log(jnp.asarray([[0.5, 0.1]])), top.token_ids[:1])
    np.testing.assert_allclose(
        np.exp(dense_log_probs(rounded, 4))[0], [0.1, 0.1, 0.1, 0.5], atol=1e-6
    )
    whole = TopTokens(jnp.log(probabilities[:1]), jnp.asarray([[1, 0]]))
    np.testing.assert_allclose(np.exp(dense_log_probs(whole, 2)), [[0.25, 0.5]], atol=1e-6)
    # Padding, of which zeros are kept: nothing is left for the tokens that the drafter knows.
    padding = TopTokens(jnp.zeros((1, 64)), jnp.zeros((1, 64), int))
    assert jnp.isfinite(dense_log_probs(padding, 50_000, jnp.asarray([1, 2, 4]))).all()
