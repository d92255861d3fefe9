"""`python -m eval plan`: what a pair needs of a GPU, against numbers worked out by hand."""

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest
import tiny_shapes
from places import CONFIGS
from tiny_folders import write_yaml

from eval.abstract import abstract_drafter, abstract_state, abstract_target, bytes_of
from eval.commands import evaluate
from eval.plan import bytes_read
from eval.shapes import PlanSettings
from pallas_kernels.aot import AotUnavailableError
from pallas_kernels.gpus import GPUS
from redrafter_jax import InputError
from redrafter_jax.drafters.base import LoadedHead, as_drafter
from redrafter_jax.files.target_weights import save_target
from redrafter_jax.models.target import Target
from redrafter_jax.settings.files import load_settings
from redrafter_jax.types import DecodeState

TARGET = tiny_shapes.TARGET | {"intermediate_size": 32, "tie_word_embeddings": False}
VALUES: dict[str, Any] = {
    "target": TARGET,
    "tree": {"beam_width": 2, "draft_rounds": 3, "num_nodes": 5},
    "batch_size": 3,
    "slots": 64,
}
# Per layer q, o 16 x 16, k, v 16 x 8, three feed-forward matrices 16 x 32, two norms.
LAYERS = 2 * (2 * 256 + 2 * 128 + 3 * 512 + 2 * 16)
EMBEDDING = 24 * 16
NORM = 16
# Two recurrent matrices and a bias; two blocks of 32 x 32 and a bias; the projection 32 x 24.
DRAFTER = 2 * 256 + 16 + 2 * (32 * 32 + 32) + 32 * 24
# Keys and values: layers x rows x heads x slots x head_dim.
CACHE = 2 * 2 * 3 * 1 * 64 * 8


def shapes_of(settings: PlanSettings) -> tuple[Target, LoadedHead, DecodeState]:
    target = abstract_target(settings.target.build(), jnp.bfloat16)
    drafter = abstract_drafter(settings.drafter_config(settings.tree.draft_rounds), jnp.bfloat16)
    state = abstract_state(target, as_drafter(drafter), settings.batch_size, settings.slots)
    return target, drafter, state


def read_with(**changes: Any) -> dict[str, int]:
    settings = PlanSettings.model_validate(VALUES | {"report_dir": "unused"} | changes)
    return bytes_read(*shapes_of(settings), settings.tree)


def test_a_step_reads_weights_and_cache_once_and_the_drafter_every_round() -> None:
    once = LAYERS + NORM + EMBEDDING + CACHE
    assert read_with() == {
        # Three rows; round one is fed the root, rounds two and three two tokens each.
        "draft": 2 * (3 * DRAFTER + 3 * 5 * 16),
        "verification": 2 * (once + 3 * 5 * 16),
        "baseline": 2 * (once + 3 * 1 * 16),
    }


def test_medusa_heads_are_read_once_and_so_is_what_the_target_lends_them() -> None:
    # Three heads of two blocks, 16 x 16 and a bias each; a projection 16 x 24.
    blocks = 3 * 2 * (256 + 16)
    own = {"kind": "medusa", "num_draft_layers": 2}
    assert read_with(drafter=own)["draft"] == 2 * (blocks + 3 * 16 * 24)
    assert read_with(drafter=own | {"head": "target"})["draft"] == 2 * (blocks + 16 * 24)


def test_a_tied_embedding_is_read_once_as_the_vocabulary_projection() -> None:
    read = read_with(target=TARGET | {"tie_word_embeddings": True})
    assert read["baseline"] == read["verification"] == 2 * (LAYERS + NORM + EMBEDDING + CACHE)


@pytest.mark.parametrize(
    ("config", "target_parameters", "drafter_parameters", "cache_bytes"),
    [
        # Two of 32000 x 4096; per layer 4 x 4096 x 4096, 3 x 4096 x 11008, two norms; the norm.
        # Drafter: 2 x 4096 x 4096 + 4096, 2 x (8192 x 8192 + 8192), 8192 x 32000.
        # Cache: 64 arrays of 32 heads x 4096 slots x 128, two bytes each; a length, 64 numbers.
        ("plan_vicuna_7b.yaml", 6_738_415_616, 429_936_640, 2_147_483_908),
        # Keys and values of 8 heads; 128256 tokens; 14336 within.
        ("plan_llama_3_1_8b.yaml", 8_030_261_248, 1_218_465_792, 536_871_172),
    ],
)
def test_the_configurations_have_the_published_sizes(
    config: str, target_parameters: int, drafter_parameters: int, cache_bytes: int
) -> None:
    target, drafter, state = shapes_of(load_settings(PlanSettings, CONFIGS / config))
    assert bytes_of(target) == 2 * target_parameters
    assert bytes_of(drafter) == 2 * drafter_parameters
    assert bytes_of(state.cache) == cache_bytes


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return write_yaml(tmp_path / "plan.yaml", VALUES | {"report_dir": str(tmp_path / "report")})


def test_the_command_prints_needs_and_bounds(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--gpu", "b200", "--batch", "1", "--cache", "128")
    evaluate(["plan", "--config", str(config), *flags])
    told = capsys.readouterr().out
    report = json.loads((config.parent / "report" / "plan.json").read_text())
    assert report["config"]["gpu"] == "b200"
    needs = report["needs_bytes"]
    assert needs["target"] == 2 * (LAYERS + NORM + 2 * EMBEDDING)
    assert needs["drafter"] == 2 * DRAFTER
    # One row of twice as many slots, its length, and the numbers of two pages.
    assert needs["cache"] == 2 * (CACHE // 3 * 2) + 4 + 8
    assert report["needed_bytes"] == sum(size or 0 for size in needs.values())
    assert report["memory_bytes"] == GPUS["b200"].memory_bytes
    assert report["fits"] is True
    for name, read in report["reads_bytes"].items():
        assert report["bound_milliseconds"][name] == pytest.approx(1000 * read / 8e12)
    assert "It fits." in told
    assert "not measurements" in told
    # Computed, or said why not.
    compiled = report["temporaries_missing"] is None
    assert bool(needs["temporaries"]) == compiled
    assert list(report["steps"]) == list(report["launches"]) == ["baseline", "tree"] * compiled
    for name, counts in report["steps"].items():
        launches = sum(one["times"] for one in report["launches"][name])
        assert counts["greedy"]["launches"] == launches <= counts["sampled"]["launches"]
    assert ("A step as compiled" in told) == compiled


def test_a_target_is_a_model_as_everywhere_else(
    tmp_path: Path, habitual_target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_target(habitual_target, tmp_path)
    (tmp_path / "model.safetensors").unlink()  # config.json is enough
    monkeypatch.chdir(tmp_path)
    evaluate(["plan", "--target", str(tmp_path), "--cache", "64"])
    report = json.loads((tmp_path / "runs" / "plan" / "plan.json").read_text())
    assert report["config"]["target"]["hidden_size"] == habitual_target.config.hidden_size
    assert report["needs_bytes"]["target"] == bytes_of(habitual_target) // 2  # of float32


def test_without_a_target_the_command_asks_for_one() -> None:
    with pytest.raises(InputError, match="give --target, a folder or hub id, or --config"):
        evaluate(["plan", "--gpu", "h200"])


def test_what_does_not_fit_is_said(
    config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def unavailable(*arguments: Any) -> None:
        raise AotUnavailableError("Not today.")

    monkeypatch.setattr("eval.plan.gpu_mesh", unavailable)
    # 3 rows x 4 arrays x 2^31 slots x 8 x 2 bytes = 412 GB.
    evaluate(["plan", "--config", str(config), "slots=2147483616", "gpu=h100"])
    said = capsys.readouterr().out
    assert "temporaries are not computed: Not today." in said
    assert "Without temporaries: It does not fit." in said
