"""Conversations of `eval compare`, and a run that is killed among them and goes on."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from tiny_folders import add_template, write_yaml

from eval import benchmark
from eval.commands import evaluate
from eval.measured import open_measured
from redrafter_jax import InputError
from redrafter_jax.files.target_files import TargetFiles

pytestmark = pytest.mark.usefixtures("quick_compilation")


class Killed(BaseException):
    """What no code under test expects."""


@pytest.fixture(scope="module")
def conversations(
    compared: Path, tmp_path_factory: pytest.TempPathFactory, pair_settings: dict[str, Any]
) -> Path:
    """Settings of a question of two turns and one of one, in a chat template."""
    folder = tmp_path_factory.mktemp("conversations")
    questions = [
        {"question_id": "a", "category": "two", "turns": ["abc", "de"]},
        {"question_id": "b", "category": "one", "turns": ["w"]},
    ]
    prompts = folder / "question.jsonl"
    prompts.write_text("".join(json.dumps(row) + "\n" for row in questions))
    values = yaml.safe_load(compared.read_text()) | {
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
