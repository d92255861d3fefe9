"""Commands that evaluate, with models as drafters."""

import json
from pathlib import Path
from typing import Any

import jax
import pytest
from tiny_folders import write_yaml

from eval.commands import evaluate
from redrafter_jax import InputError
from redrafter_jax.files.tree_table import TreeTable
from redrafter_jax.models.target import Target

pytestmark = pytest.mark.usefixtures("quick_compilation")

ROUNDS = 2
CHAIN = {"beam_width": 1, "draft_rounds": ROUNDS}


@pytest.fixture
def settings(pair_settings: dict[str, Any], tmp_path: Path) -> dict[str, Any]:
    return {
        "target": pair_settings["target"],
        "prompts": pair_settings["prompts"],
        "prompt_count": 2,
        "dtype": "float32",
        "max_new_tokens": 16,
        "report_dir": str(tmp_path / "report"),
    }


@pytest.mark.long
def test_they_are_compared_as_heads_are(
    settings: dict[str, Any], tmp_path: Path, habitual_target: Target
) -> None:
    drafters = {
        "part": {"drafter": "self:layers=1", "tree": CHAIN},
        "model": {"drafter": settings["target"], "tree": CHAIN},
    }
    evaluate(["--config", str(write_yaml(tmp_path / "c.yaml", settings | {"drafters": drafters}))])
    (case,) = json.loads((tmp_path / "report" / "compare.json").read_text())["samplings"]
    found = case["methods"]
    assert [found[name]["identical"] for name in drafters] == [1.0, 1.0]
    # A model that drafts for itself is always right; of 15 tokens each call gains three.
    assert found["model"]["target_calls"] == 2 * 5
    assert found["part"]["target_calls"] > 2 * 5

    def bytes_of(tree: Any) -> int:
        return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))

    params: Any = habitual_target.params
    layers, ends = params["layers"], [params["norm"], params["lm_head"]]
    rest = found["baseline"]["bytes_per_step"] + 2 * params["embed_tokens"].get_value()[0].nbytes
    read = {name: found[name]["bytes_per_step"] - rest for name in drafters}
    assert read == {
        "part": ROUNDS * bytes_of((layers[0], ends)),
        "model": ROUNDS * bytes_of((layers, ends)) + bytes_of((layers, params["norm"])),
    }


def test_a_part_of_the_target_is_tuned_into_a_file_that_is_named(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tuned = {"drafter": "self:layers=1", "trees": [CHAIN], "batch_sizes": [1], "pairs": 2}
    path = str(write_yaml(tmp_path / "tune.yaml", settings | tuned))
    with pytest.raises(
        InputError, match=r"drafter is self:layers=1, not a local folder; .*output=F"
    ):
        evaluate(["tune", "--config", path])
    written: list[TreeTable] = []
    monkeypatch.setattr("eval.tune.write_tree_table", lambda _, table: written.append(table))
    evaluate(["tune", "--config", path, f"output={tmp_path / 'trees.yaml'}"])
    assert [tree.batch_size for tree in written[0].trees] == [1]
