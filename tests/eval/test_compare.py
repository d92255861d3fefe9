"""`python -m eval compare`: every way of drafting against the baseline, per sampling."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import yaml
from chat_folders import write_lines
from pair_prompts import PROMPTS, generate_each
from tiny_folders import add_template, encode, run_module, write_pair, write_yaml
from tiny_models import forgetful_target, imitating_drafter

from eval import benchmark
from eval.commands import evaluate
from eval.config import CompareSettings
from eval.measured import open_measured
from redrafter_jax import InputError, PromptLookup, SamplingConfig, TreeConfig, generate
from redrafter_jax.drafters.base import LoadedHead
from redrafter_jax.files.target_files import TargetFiles
from redrafter_jax.files.tree_table import TreeTable, TunedTree, write_tree_table
from redrafter_jax.models.target import Target
from redrafter_jax.settings.files import load_settings

pytestmark = pytest.mark.usefixtures("quick_compilation")

NEW_TOKENS = 16
HEAD = TreeConfig(beam_width=2, draft_rounds=2)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory, pair_settings: dict[str, Any]) -> Path:
    folder = tmp_path_factory.mktemp("compare")
    values = {
        "target": pair_settings["target"],
        "prompts": pair_settings["prompts"],
        "drafters": {
            "lookup": {"tree": {"lookup_tokens": 3}},
            "head": {
                "drafter": pair_settings["drafter"],
                "tree": {"beam_width": 2, "draft_rounds": 2},
            },
        },
        "samplings": [{"temperature": 0.0}, {"temperature": 0.8}],
        "dtype": "float32",
        "max_new_tokens": NEW_TOKENS,
        "report_dir": str(folder),
    }
    return write_yaml(folder / "compare.yaml", values)


def test_methods_count_what_generate_counts_and_keep_the_text(
    config: Path,
    habitual_target: Target,
    good_drafter: LoadedHead,
    capsys: pytest.CaptureFixture[str],
) -> None:
    evaluate(["compare", "--config", str(config)])
    shown = capsys.readouterr().out
    report = json.loads((config.parent / "compare.json").read_text())
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
    page = (config.parent / "compare.md").read_text()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines()]
    heads = [cells for cells in rows if cells[1:2] == ["head"] and len(cells) > 6]
    assert [cells[0] for cells in heads] == 2 * ["all prompts", "even", "odd"]
    assert [(cells[2], cells[-1]) for cells in heads[:2]] == [("5", "5 of 5"), ("3", "3 of 3")]
    counts = report["samplings"][0]["methods"]["head"]["calls_per_depth"]
    assert f"({counts[1]} of {counts[0]}), " in heads[0][6]
    for cells in heads[:6]:
        assert all(cell in shown for cell in (*cells[3:6], cells[-1]))
    assert (config.parent / "compare.png").exists()

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


def test_a_grid_without_the_clock_counts_what_generate_counts(
    config: Path,
    tmp_path: Path,
    habitual_target: Target,
    good_drafter: LoadedHead,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """All prompts in one batch, in a table with a column for each sampling."""
    drafter = load_settings(CompareSettings, config).drafters["head"].drafter
    tree = "{beam_width: 3, draft_rounds: 3, num_nodes: [7, null], sharpness: 1.5}"
    words = ["clock=false", f"drafters={{head: {{drafter: {drafter}, tree: {tree}}}}}"]
    evaluate(["--config", str(config), f"report_dir={tmp_path}", *words])
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
def test_a_mesh_changes_no_count(config: Path, tmp_path: Path) -> None:
    """The last batch is of one prompt alone."""
    reports = []
    for name, words in (("alone", []), ("split", ["mesh.model=2", "batch_size=2"])):
        folder = tmp_path / name
        evaluate(["--config", str(config), f"report_dir={folder}", "clock=false", *words])
        cases = json.loads((folder / "compare.json").read_text())["samplings"]
        counts = ("accept_counts", "target_calls", "identical")
        methods = [case["methods"] for case in cases]
        reports.append([{n: [m[n][c] for c in counts] for n in m} for m in methods])
    assert reports[0] == reports[1]


def test_auto_takes_the_tree_of_the_drafters_table_at_each_temperature(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    drafter = load_settings(CompareSettings, config).drafters["head"].drafter
    assert drafter is not None
    folder = shutil.copytree(drafter, tmp_path / "drafter")
    trees = (TunedTree(1, 0.0, None, 1.0, 1.0), TunedTree(1, 0.8, HEAD, 1.2, 1.1))
    write_tree_table(folder / "draft.yaml", TreeTable("any", "float32", trees))
    ways = f"drafters={{head: {{drafter: {folder}, tree: auto}}}}"
    evaluate(["--config", str(config), f"report_dir={tmp_path}", ways, "prompt_count=2"])
    cases = json.loads((tmp_path / "compare.json").read_text())["samplings"]
    greedy, sampled = (case["ways"]["head"] for case in cases)
    assert (greedy["tree"], greedy["num_nodes"]) == (None, 1)
    assert (TreeConfig(**sampled["tree"]), sampled["num_nodes"]) == (HEAD, 5)
    *_, line, _ = capsys.readouterr().out.splitlines()
    assert line.startswith("greedy: By the drafter's table no drafting is the fastest: `eval tune`")


def test_without_the_clock_auto_takes_the_tree_of_one_prompt_unless_a_batch_size_is_given(
    config: Path, tmp_path: Path
) -> None:
    drafter = load_settings(CompareSettings, config).drafters["head"].drafter
    assert drafter is not None
    folder = shutil.copytree(drafter, tmp_path / "drafter")
    trees = (TunedTree(1, 0.0, HEAD, 1.2, 1.1), TunedTree(5, 0.0, TreeConfig(1, 1), 1.2, 1.1))
    write_tree_table(folder / "draft.yaml", TreeTable("any", "float32", trees))
    ways = f"drafters={{head: {{drafter: {folder}, tree: auto}}}}"
    few = ("clock=false", "samplings=[{temperature: 0}]", "max_new_tokens=2")
    for index, (words, tree) in enumerate((([], HEAD), (["batch_size=5"], TreeConfig(1, 1)))):
        report = tmp_path / str(index)
        evaluate(["--config", str(config), f"report_dir={report}", ways, *few, *words])
        (case,) = json.loads((report / "compare.json").read_text())["samplings"]
        assert TreeConfig(**case["ways"]["head"]["tree"]) == tree


def test_a_head_without_a_tree_is_not_read(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trees = (TunedTree(1, 0.0, None, 1.0, 1.0),)
    write_tree_table(tmp_path / "draft.yaml", TreeTable("any", "float32", trees))
    for name in ("find_drafter", "load_drafter"):
        monkeypatch.setattr(f"eval.compare.{name}", lambda *_, **__: pytest.fail("it is read"))
    ways = f"drafters={{head: {{drafter: {tmp_path}, tree: auto}}}}"
    few = ("clock=false", "samplings=[{temperature: 0}]", "max_new_tokens=2")
    evaluate(["--config", str(config), f"report_dir={tmp_path}", ways, *few])
    (case,) = json.loads((tmp_path / "compare.json").read_text())["samplings"]
    assert case["verdict"]["kind"] == "no tree"


def test_a_pipe_gets_progress_on_stderr_and_the_tables_on_stdout(
    config: Path, tmp_path: Path
) -> None:
    """As users start it; texts that prefill ends leave speeds after it unknown."""
    words = (f"report_dir={tmp_path}", "max_new_tokens=1", "samplings=[{temperature: 0.0}]")
    finished = run_module("eval", "--config", str(config), *words)
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
    assert verdict.startswith("greedy: Too little data to tell: 5 texts, and 8 are the fewest; gi")
    (case,) = json.loads((tmp_path / "compare.json").read_text())["samplings"]
    head = case["methods"]["head"]
    assert (head["identical"], head["target_calls"], head["decode_only"]["speedup"]) == (
        1.0,
        0,
        None,
    )
    assert head["acceptance_rate_per_depth"] == [None, None]


def test_texts_that_are_not_the_baselines_are_counted_and_told(
    config: Path,
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
    evaluate(["--config", str(config), f"report_dir={tmp_path}", one])
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
        pytest.param(
            "good",
            0.0,
            "Too little data to tell: [5-8] of 8 texts repeat themselves",
            marks=pytest.mark.long,
        ),
    ],
)
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
    tree = {"beam_width": 2, "draft_rounds": 2}
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
    assert re.search(r"[;,] (give|more|decode|it needs) ", line)


class Killed(BaseException):
    """What no code under test expects."""


@pytest.fixture(scope="module")
def conversations(
    config: Path, tmp_path_factory: pytest.TempPathFactory, pair_settings: dict[str, Any]
) -> Path:
    """Settings of a question of two turns and one of one, in a chat template."""
    folder = tmp_path_factory.mktemp("conversations")
    questions = [
        {"question_id": "a", "category": "two", "turns": ["abc", "de"]},
        {"question_id": "b", "category": "one", "turns": ["w"]},
    ]
    prompts = folder / "question.jsonl"
    prompts.write_text("".join(json.dumps(row) + "\n" for row in questions))
    values = yaml.safe_load(config.read_text()) | {
        "target": add_template(Path(pair_settings["target"]), folder),
        "prompts": str(prompts),
        "max_new_tokens": 8,
        "report_dir": str(folder),
    }
    return write_yaml(folder / "compare.yaml", values)


@pytest.mark.long
def test_without_the_clock_the_turns_of_all_questions_are_one_batch(
    conversations: Path, tmp_path: Path
) -> None:
    words = ["clock=false", "max_new_tokens=2", f"report_dir={tmp_path}"]
    evaluate(["--config", str(conversations), *words])
    report = json.loads((tmp_path / "compare.json").read_text())
    assert report["batch_size"] == 3
    for case in report["samplings"]:
        assert {run["batch"] for run in case["runs"]} == {0}
        read = {name: own["bytes_per_step"] for name, own in case["methods"].items()}
        # Four nodes in place of one, of three rows, whose embeddings are 32 numbers.
        assert read["lookup"] - read["baseline"] == (4 - 1) * 3 * 32 * 4


@pytest.fixture(scope="module")
def resumed(conversations: Path) -> Path:
    """The file of measurements of a run of five turns that was killed within the third."""
    path = conversations.parent / "compare.jsonl"
    decode, decoded = benchmark.decode_batch, []

    def decode_or_die(method: benchmark.Method, batch: benchmark.Batch) -> benchmark.Run:
        # What is measured, the answers of two first turns, two whole turns.
        if path.read_bytes().count(b"\n") == 5:
            decoded.append(batch)
        if len(decoded) == 2:
            raise Killed
        return decode(method, batch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(benchmark, "decode_batch", decode_or_die)
        with pytest.raises(Killed):
            evaluate(["compare", f"--config={conversations}"])
    return path


def test_a_killed_run_goes_on_to_a_report_that_holds_every_measurement_once(
    resumed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = resumed.read_bytes()
    resumed.write_bytes(before + b'{"sampling":0,"batch":2,"re')
    command = ["compare", f"--config={resumed.parent / 'compare.yaml'}"]
    evaluate(command)
    whole = resumed.read_bytes()
    assert whole.startswith(before)
    kept = [json.loads(line) for line in whole.splitlines()[3:]]
    names = ("baseline", "head", "lookup")
    assert [(row["sampling"], row["batch"], *row["runs"]) for row in kept] == [
        (sampling, batch, *names) for sampling in range(2) for batch in range(3)
    ]
    report = json.loads((resumed.parent / "compare.json").read_text())
    for sampling, case in enumerate(report["samplings"]):
        rows = [(row["id"], row["turn"], row["category"]) for row in case["prompts"]]
        assert rows == [("a", 1, "two"), ("b", 1, "one"), ("a", 2, "two")]
        assert {name: ours["identical"] for name, ours in case["methods"].items()} == dict.fromkeys(
            names, 1.0
        )
        assert case["categories"]["two"]["prompts"] == 2
        seconds = {(run["method"], run["batch"]): run["decode_seconds"] for run in case["runs"]}
        assert len(seconds) == len(case["runs"]) == 9
        for row in kept[3 * sampling : 3 * sampling + 3]:
            for name, run in row["runs"].items():
                assert seconds[name, row["batch"]] == run["decode_seconds"]

    # All is there: nothing is decoded once more.
    for module in ("benchmark", "questions"):
        monkeypatch.delattr(f"eval.{module}.decode_batch")
    evaluate(command)
    again = json.loads((resumed.parent / "compare.json").read_text())
    assert again["samplings"] == report["samplings"]
    assert resumed.read_bytes() == whole


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["dtype=bfloat16"], r'settings: dtype "float32" \(now "bfloat16"\); use another'),
        (["max_new_tokens=9", "first_seed=2"], r"max_new_tokens 8 \(now 9\), first_seed 0 \(now 2"),
        (["turns=1"], r'prompts, turns "all" \(now 1\);'),
        (["drafters.head.tree.beam_width=3"], r"other settings: drafters\.head;"),
        (["drafters={lookup: {tree: {lookup_tokens: 3}}}"], r"settings: drafters\.head;"),
    ],
)
def test_measurements_of_something_else_are_refused(
    resumed: Path, overrides: list[str], sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(TargetFiles, "load")
    with pytest.raises(InputError, match=sentence):
        evaluate(["compare", f"--config={resumed.parent / 'compare.yaml'}", *overrides])


def test_other_models_and_files_of_something_else_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "compare.jsonl"
    open_measured(path, {"target": "a" * 64, "jax": "1"})
    with pytest.raises(InputError, match=r'settings: target, jax "1" \(now "2"\); use another'):
        open_measured(path, {"target": "b" * 64, "jax": "2"})
    path.write_text(path.read_text() + '{"prompt": "x"}\n')
    with pytest.raises(
        InputError, match=r"compare.jsonl, line 2 is not a measurement of eval compare"
    ):
        open_measured(path, {"target": "a" * 64, "jax": "1"})
