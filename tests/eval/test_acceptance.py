"""`python -m eval acceptance`: the grid's counts are those of `generate`."""

import json
import sys
from contextlib import redirect_stdout
from io import StringIO
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest
from pair_prompts import PROMPTS
from tiny_folders import encode, write_yaml

from eval.__main__ import main
from eval.commands import evaluate
from eval.rankings import RANKINGS, with_ranking
from redrafter_jax import SamplingConfig, TreeConfig, generate
from redrafter_jax.drafters.head_drafter import LoadedHead
from redrafter_jax.drafters.lookup import PromptLookup
from redrafter_jax.models.target import Target
from redrafter_jax.types import Sampling

pytestmark = pytest.mark.usefixtures("quick_compilation")

# As many as other modules decode at once.
FOUR = PROMPTS[:4]
NEW_TOKENS = 24
SAMPLINGS: list[dict[str, Any]] = [{"temperature": 0.0}, {"temperature": 1.0, "top_p": 0.9}]
NODES = (7, 10)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory, pair_settings: dict[str, Any]) -> Path:
    folder = tmp_path_factory.mktemp("acceptance")
    values = pair_settings | {
        "prompt_count": len(FOUR),
        "dtype": "float32",
        "max_new_tokens": NEW_TOKENS,
        "samplings": SAMPLINGS,
        "trees": {
            "beam_width": 3,
            "draft_rounds": 3,
            "num_nodes": [7, None],
            "sharpness": [1.5],
        },
        "rankings": list(RANKINGS),
        "report_dir": str(folder / "report"),
    }
    return write_yaml(folder / "acceptance.yaml", values)


@pytest.fixture(scope="module")
def report(config: Path) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(StringIO()) as printed:
        patch.setattr(sys, "argv", ["eval", "acceptance", "--config", str(config)])
        main()
    assert "the share of greedy" in printed.getvalue()
    folder = config.parent / "report"
    return json.loads((folder / "acceptance.json").read_text())


def test_the_grid_is_whole_and_every_text_the_baselines(report: dict[str, Any]) -> None:
    names = ("sampling", "num_nodes", "sharpness", "ranking")
    rows = {tuple(row[name] for name in names): row for row in report["rows"]}
    samplings = ("greedy", "T 1, top_p 0.9")
    assert rows.keys() == set(product(samplings, NODES, [1.5], RANKINGS))
    assert len(report["rows"]) == len(rows)
    assert {row["identical"] for row in rows.values()} == {1.0}
    for (_, *tree), row in rows.items():
        greedy = rows["greedy", *tree]["acceptance_length"]
        assert row["share_of_greedy"] == pytest.approx(row["acceptance_length"] / greedy)
    for nodes in NODES:
        seen, blind = (
            rows["T 1, top_p 0.9", nodes, 1.5, ranking]["acceptance_length"]
            for ranking in ("shared", "blind")
        )
        assert seen > blind, "drafts that see the noise are right more often"


def test_the_counts_are_those_of_generate(
    report: dict[str, Any], habitual_target: Target, good_drafter: LoadedHead
) -> None:
    # One budget: `generate` has programs of its own for each.
    rows = [row for row in report["rows"] if (row["ranking"], row["num_nodes"]) == ("shared", 7)]
    for row, sampling in zip(rows, (None, SamplingConfig(1.0, top_p=0.9)), strict=True):
        whole = generate(
            habitual_target,
            good_drafter,
            [encode(text) for text in FOUR],
            max_new_tokens=NEW_TOKENS,
            tree=TreeConfig(3, 3, 7, sharpness=1.5),
            sampling=sampling,
        )
        assert row["target_calls"] == sum(whole.steps)
        assert row["accept_counts"] == whole.accept_counts.sum(axis=0).tolist()
        assert row["acceptance_length"] == pytest.approx(whole.acceptance_length)


@pytest.mark.long
def test_a_mesh_changes_no_row(config: Path, tmp_path: Path, report: dict[str, Any]) -> None:
    trees = "trees={beam_width: 3, draft_rounds: 3, num_nodes: [7], sharpness: [1.5]}"
    split = ("mesh.model=2", trees, "rankings=[blind]", f"samplings=[{SAMPLINGS[1]}]")
    # The last batch is of one prompt alone.
    evaluate(
        ["acceptance", "--config", str(config), f"report_dir={tmp_path}", *split, "batch_size=3"]
    )
    (row,) = json.loads((tmp_path / "acceptance.json").read_text())["rows"]
    names = ("sampling", "num_nodes", "ranking")
    (alone,) = (one for one in report["rows"] if all(one[name] == row[name] for name in names))
    for name in ("accept_counts", "target_calls"):
        assert row[name] == alone[name]
    assert row["identical"] == 1.0


class OnlySampling(NamedTuple):
    """As much of a state as rankings look at."""

    sampling: Sampling


class Recorder(PromptLookup):
    """Keeps what it is shown."""

    def propose(self, decoder: Any, state: Any, noise: jax.Array) -> Any:
        return noise, state.sampling


@pytest.mark.usefixtures("unchecked_shapes")
def test_rankings_show_what_their_names_say() -> None:
    draft = TreeConfig(3, 3, sharpness=2.0)
    sampling = Sampling(
        temperature=jnp.ones(1),
        top_k=jnp.full(1, 5),
        top_p=jnp.full(1, 0.9),
        min_p=jnp.full(1, 0.1),
        seeds=jnp.zeros(1, jnp.int32),
    )
    weights = {"shared": 1.0, "weak noise": 0.5, "unfiltered": 1.0, "blind": 0.0}
    state: Any = OnlySampling(sampling)
    for name in RANKINGS:
        ranked: Any = with_ranking(Recorder(), name, draft)
        noise, shown = ranked.propose(None, state, jnp.ones(1))
        assert noise == weights[name]
        kept = [bool((ours == theirs).all()) for ours, theirs in zip(shown, sampling, strict=True)]
        filtered = name != "unfiltered"
        assert kept == [True, filtered, filtered, filtered, True]
