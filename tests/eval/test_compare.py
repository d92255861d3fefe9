"""`python -m eval compare`: every way of drafting against the baseline, per sampling."""

import json
import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from chat_folders import write_lines
from pair_prompts import PROMPTS, generate_each
from tiny_folders import encode, run_module, write_pair, write_yaml
from tiny_models import forgetful_target, imitating_drafter

from eval import benchmark
from eval.commands import evaluate
from eval.config import CompareSettings
from redrafter_jax import PromptLookup, SamplingConfig, TreeConfig, generate
from redrafter_jax.drafters.base import LoadedHead
from redrafter_jax.models.target import Target
from redrafter_jax.settings.files import load_settings

pytestmark = pytest.mark.usefixtures("quick_compilation")

NEW_TOKENS = 16
HEAD = TreeConfig(beam_width=2, draft_rounds=2)


def test_methods_count_what_generate_counts_and_keep_the_text(
    compared: Path,
    habitual_target: Target,
    good_drafter: LoadedHead,
    capsys: pytest.CaptureFixture[str],
) -> None:
    evaluate(["compare", "--config", str(compared)])
    shown = capsys.readouterr().out
    report = json.loads((compared.parent / "compare.json").read_text())
    assert [case["described"] for case in report["samplings"]] == ["greedy", "T 0.8"]
    for case in report["samplings"]:
        nodes = {name: way["num_nodes"] for name, way in case["ways"].items()}
        assert nodes == {"baseline": 1, "lookup": 4, "head": 5}
        sampling = SamplingConfig(**case["sampling"])
        for name, drafter, draft in (
            ("baseline", None, None),
            ("lookup", PromptLookup(), TreeConfig(beam_width=1, draft_rounds=3)),
            ("head", good_drafter, HEAD),
        ):
            how = {"max_new_tokens": NEW_TOKENS, "tree": draft, "sampling": sampling}
            expected = generate_each(habitual_target, drafter, **how)
            ours = case["methods"][name]
            assert ours["identical"] == 1.0
            assert ours["target_calls"] == sum(one.steps[0] for one in expected)
            counts = np.sum([one.accept_counts[0] for one in expected], axis=0)
            assert ours["accept_counts"] == counts.tolist()
            for row, one in zip(case["prompts"], expected, strict=True):
                own = row["methods"][name]
                assert (own["new_tokens"], own["target_calls"]) == (NEW_TOKENS, one.steps[0])
    assert {"python", "jax", "flax"} <= report["versions"].keys()
    page = (compared.parent / "compare.md").read_text()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines()]
    heads = [cells for cells in rows if cells[1:2] == ["head"] and len(cells) > 6]
    assert [cells[0] for cells in heads] == 2 * ["all prompts", "even", "odd"]
    assert [(cells[2], cells[-1]) for cells in heads[:2]] == [("5", "5 of 5"), ("3", "3 of 3")]
    counts = report["samplings"][0]["methods"]["head"]["calls_per_depth"]
    assert f"({counts[1]} of {counts[0]}), " in heads[0][6]
    for cells in heads[:6]:
        assert all(cell in shown for cell in (*cells[3:6], cells[-1]))
    assert (compared.parent / "compare.png").exists()

    # float32; W e, then L=2 layers of K=2 heads of H=8 for each token in the cache.
    sizes = [
        sum(leaf.nbytes for leaf in jax.tree.leaves(model.params))
        for model in (habitual_target, good_drafter)
    ]
    row, token = 32 * 4, 2 * 2 * 2 * 8 * 4
    weights = sizes[0] - 24 * row
    for part, cached in (
        (report["samplings"][0], 10.8),
        (report["samplings"][0]["categories"]["even"], 10),
    ):
        cache = round(cached * token)
        read = {name: ours["bytes_per_step"] for name, ours in part["methods"].items()}
        assert read == {
            "baseline": weights + row + cache,
            "lookup": weights + 4 * row + cache,
            "head": weights + 5 * row + 2 * sizes[1] + 3 * row + cache,
        }
        drafted = {name: ours["drafted_per_step"] for name, ours in part["methods"].items()}
        assert drafted == {"baseline": 0, "lookup": 3, "head": 4}


@pytest.mark.long
def test_a_grid_without_the_clock_counts_what_generate_counts(
    compared: Path,
    tmp_path: Path,
    habitual_target: Target,
    good_drafter: LoadedHead,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """All prompts in one batch, in a table with a column for each sampling."""
    drafter = load_settings(CompareSettings, compared).drafters["head"].drafter
    tree = "{beam_width: 3, draft_rounds: 3, num_nodes: [7, null], sharpness: 1.5}"
    words = ["clock=false", f"drafters={{head: {{drafter: {drafter}, tree: {tree}}}}}"]
    evaluate(["--config", str(compared), f"report_dir={tmp_path}", *words])
    shown = capsys.readouterr().out
    report = json.loads((tmp_path / "compare.json").read_text())
    names = ("head, N=7", "head, N=10")
    whole = {}
    for case in report["samplings"]:
        assert list(case["ways"]) == ["baseline", *names]
        assert case["verdict"]["kind"] == "not timed"
        for name, nodes in zip(names, (7, 10), strict=True):
            ours = case["methods"][name]
            whole = generate(
                habitual_target,
                good_drafter,
                [encode(text) for text in PROMPTS],
                max_new_tokens=NEW_TOKENS,
                tree=TreeConfig(3, 3, nodes, sharpness=1.5),
                sampling=SamplingConfig(**case["sampling"]),
            )
            assert ours["target_calls"] == sum(whole.steps)
            assert ours["accept_counts"] == whole.accept_counts.sum(axis=0).tolist()
            assert (ours["identical"], ours["speedup"]) == (1.0, None)
            assert f"{ours['acceptance_length']:.2f}" in shown
        assert {run["decode_seconds"] for run in case["runs"]} == {0}
    assert re.search(r"method +greedy +T 0\.8 +identical", shown)
    assert "Most accepted: 'head, N=" in shown.splitlines()[-1]
    assert "speedup" not in (tmp_path / "compare.md").read_text().partition("speedup:")[0]
    assert (tmp_path / "compare.png").exists()


@pytest.mark.long
def test_a_mesh_changes_no_count(compared: Path, tmp_path: Path) -> None:
    """The last batch is of one prompt alone."""
    reports = []
    for name, words in (("alone", []), ("split", ["mesh.model=2", "batch_size=2"])):
        folder = tmp_path / name
        evaluate(["--config", str(compared), f"report_dir={folder}", "clock=false", *words])
        cases = json.loads((folder / "compare.json").read_text())["samplings"]
        counts = ("accept_counts", "target_calls", "identical")
        methods = [case["methods"] for case in cases]
        reports.append([{n: [m[n][c] for c in counts] for n in m} for m in methods])
    assert reports[0] == reports[1]


@pytest.mark.long
def test_a_pipe_gets_progress_on_stderr_and_the_tables_on_stdout(
    compared: Path, tmp_path: Path
) -> None:
    """As users start it; texts that prefill ends leave speeds after it unknown."""
    words = (f"report_dir={tmp_path}", "max_new_tokens=1", "samplings=[{temperature: 0.0}]")
    finished = run_module("eval", "--config", str(compared), *words)
    assert finished.returncode == 0, finished.stderr
    told = finished.stderr.splitlines()
    assert [line for line in told if ": 0 of " in line] == [
        "measure: compile and warm up: 0 of 3",
        "measure: 0 of 15",
    ]
    # On a slow machine there are lines between them.
    assert [line for line in told if ": 0 of " not in line and not line.endswith(" s left")] == []
    assert "\x1b" not in finished.stdout
    for words in ("5 of 5", "chat template: none; answers of 1 tokens (1 to 1), 0 ended by"):
        assert words in finished.stdout
    *_, place, verdict = finished.stdout.splitlines()
    assert str(tmp_path / "compare.json") in place
    assert verdict.startswith("greedy: Too little data to tell: 5 texts, but 8 are needed; gi")
    (case,) = json.loads((tmp_path / "compare.json").read_text())["samplings"]
    head = case["methods"]["head"]
    assert (head["identical"], head["target_calls"], head["decode_only"]["speedup"]) == (
        1.0,
        0,
        None,
    )
    assert head["acceptance_rate_per_depth"] == [None, None]


def test_texts_that_are_not_the_baselines_are_counted_and_told(
    compared: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    decode = benchmark.decode_batch

    def cut(method: benchmark.Method, batch: benchmark.Batch) -> benchmark.Run:
        run = decode(method, batch)
        wrong = method.num_nodes == 5 and batch.seeds == [1]
        return run._replace(tokens=[[*run.tokens[0][:-1], 0]]) if wrong else run

    monkeypatch.setattr(benchmark, "decode_batch", cut)
    one = "samplings=[{temperature: 0.0}]"
    evaluate(["--config", str(compared), f"report_dir={tmp_path}", one])
    (case,) = json.loads((tmp_path / "compare.json").read_text())["samplings"]
    same = {name: ours["identical"] for name, ours in case["methods"].items()}
    assert same == {"baseline": 1.0, "lookup": 1.0, "head": 0.8}
    assert "4 of 5" in capsys.readouterr().out


# Not "Faster: 'head'", nor 'both'.
NO_GAIN = (
    "Slower than no drafting|No clear difference|Too little data|Faster: 'lookup'"
    "|Faster by prompt lookup, not by the head"
)


@pytest.mark.parametrize(
    ("head", "memory", "last"),
    [
        ("random", 1.0, NO_GAIN),
        # It says everything again: whatever drafts is right.
        ("good", 0.0, "Too little data to tell: [5-8] of 8 texts repeat themselves"),
    ],
)
@pytest.mark.long
def test_no_last_line_gives_a_gain_to_a_head_that_has_none(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    drafter: LoadedHead,
    head: str,
    memory: float,
    last: str,
) -> None:
    target = forgetful_target(memory)
    folders = write_pair(tmp_path, target, imitating_drafter(target) if head == "good" else drafter)
    prompts = write_lines(tmp_path / "prompts.jsonl", *({"prompt": one * 2} for one in "abcdefgh"))
    tree = {"beam_width": 2, "draft_rounds": 4}
    values: dict[str, Any] = {
        "target": folders.target,
        "prompts": prompts,
        "dtype": "float32",
        "max_new_tokens": 24,
        "stop": "never",
        "warm_ups": 1,
        "report_dir": str(tmp_path),
    }
    values["drafters"] = {
        "lookup": {"tree": {"lookup_tokens": 4}},
        "head": {"drafter": folders.drafter, "tree": tree},
        "both": {"drafter": folders.drafter, "tree": tree | {"lookup_tokens": 4}},
    }
    evaluate(["compare", f"--config={write_yaml(tmp_path / 'settings.yaml', values)}"])
    line = capsys.readouterr().out.splitlines()[-1]
    assert re.match(f"greedy: ({last})", line)
    assert re.search(r"[;,] (give|more|decode|measure|it needs) ", line)
