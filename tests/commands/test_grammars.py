"""Commands whose texts are held to a grammar, or are to have a least length."""

import io
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from schemas import END, end_tokenizer, pair
from tiny_folders import PairFolders, add_template, write_pair

pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> PairFolders:
    """A pair over bytes, with a chat template."""
    folder = tmp_path_factory.mktemp("bytes")
    written = write_pair(folder, *pair())
    end_tokenizer().save(str(folder / "target" / "tokenizer.json"))
    config = folder / "target" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"eos_token_id": END}))
    return written._replace(target=add_template(folder / "target", folder))


def words_of(folders: PairFolders, command: str, *more: str) -> list[str]:
    return [command, "--target", folders.target, "--drafter", folders.drafter, *more]


@pytest.mark.usefixtures("nothing_compiles")
def test_without_the_package_it_is_one_sentence(
    run_redrafter: Any, folders: PairFolders, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    asked = words_of(folders, "generate", "--prompt", "a", "--max-new-tokens", "9", "--regex", "b")
    code, out, err = run_redrafter(*asked)
    assert (code, out) == (2, "")
    assert "need the package llguidance, which is not installed" in err
    assert err.count("\n") == 1


@pytest.mark.long
def test_generate_writes_a_match_and_ends_well(run_redrafter: Any, folders: PairFolders) -> None:
    pytest.importorskip("llguidance")
    asked = ("--prompt", "a", "--max-new-tokens", "60", "--regex", "[a-c]{40}")
    code, out, err = run_redrafter(*words_of(folders, "generate", *asked))
    assert code == 0, err
    assert re.fullmatch("[a-c]{40}\n", out)


@pytest.mark.long
@pytest.mark.parametrize(
    ("options", "answer"),
    [
        (("--regex", "(yes|no)!"), "(yes|no)!"),
        # More than the warm-up decodes, and than the last answer has room for.
        (("--min-tokens", "30", "--max-new-tokens", "20"), ".*"),
    ],
)
def test_chat_begins_and_answers(
    run_redrafter: Any,
    folders: PairFolders,
    monkeypatch: pytest.MonkeyPatch,
    options: tuple[str, ...],
    answer: str,
) -> None:
    pytest.importorskip("llguidance")
    monkeypatch.setattr(sys, "stdin", io.StringIO("So?\n"))
    code, out, err = run_redrafter(*words_of(folders, "chat", "--context-length", "90", *options))
    assert code == 0, err
    assert re.fullmatch(answer, out.strip(), re.DOTALL)


@pytest.mark.long
def test_the_last_batch_of_prompts_is_written_too(
    run_redrafter: Any, folders: PairFolders, tmp_path: Path
) -> None:
    prompts, output = tmp_path / "prompts.jsonl", tmp_path / "rows.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in "abc"))
    asked = ["--prompts", str(prompts), "--output", str(output), "--batch-size", "2"]
    more = ("--max-new-tokens", "6", "--min-tokens", "3")
    code, _, err = run_redrafter(*words_of(folders, "generate", *asked, *more))
    assert code == 0, err
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert [len(row["tokens"]) >= 3 for row in rows] == [True] * 3
