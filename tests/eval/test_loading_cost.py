"""`python -m eval load`: the host's memory while a checkpoint is loaded."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from eval import loading_cost
from eval.loading_cost import measure_loading, write_random_checkpoint
from eval.shape_config import LoadSettings
from redrafter_jax import InputError, load_target

# 102 MB in bfloat16, of which no weight has more than 12.6.
VALUES: dict[str, Any] = {
    "target": {
        "vocab_size": 512,
        "hidden_size": 1536,
        "intermediate_size": 4096,
        "num_hidden_layers": 2,
        "num_attention_heads": 12,
        "num_key_value_heads": 12,
        "head_dim": 128,
        "max_position_embeddings": 64,
        "tie_word_embeddings": True,
    },
}
MB = 10**6


def test_no_more_than_a_weight_waits_on_the_host(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "load.yaml"
    config.write_text(yaml.safe_dump(VALUES | {"report_dir": str(tmp_path / "report")}))
    measure_loading(["--config", str(config)])
    folder = tmp_path / "report"
    assert [path.name for path in folder.iterdir()] == ["load.json"]
    report = json.loads((folder / "load.json").read_text())
    assert report["checkpoint_bytes"] == report["loaded_bytes"]
    assert report["checkpoint_bytes"] > 100 * MB > 7 * report["largest_weight_bytes"]
    # A second copy of everything would be 102 MB; code that is loaded on the way takes 20.
    assert 0 < report["above_copy_bytes"] < 60 * MB
    assert "MB of host memory above the device's copy" in capsys.readouterr().out


def test_the_checkpoint_that_is_made_is_one(tmp_path: Path) -> None:
    small = VALUES["target"] | {"hidden_size": 8, "intermediate_size": 8, "head_dim": 2}
    settings = LoadSettings(target=small, report_dir=tmp_path)
    write_random_checkpoint(settings.target.build(), tmp_path, shards=3)
    assert len(list(tmp_path.glob("model-*-of-00003.safetensors"))) == 3
    target = load_target(tmp_path, dtype="float32")
    assert target.merge().layers[1].mlp.down_proj[...].std() > 0.2


def test_systems_that_do_not_tell_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading_cost, "_STATUS", tmp_path / "nothing")
    path = tmp_path / "load.yaml"
    path.write_text(yaml.safe_dump(VALUES | {"report_dir": str(tmp_path / "report")}))
    with pytest.raises(InputError, match=r"nothing is missing: memory is measured on Linux alone"):
        measure_loading(["--config", str(path)])
