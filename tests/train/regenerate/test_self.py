"""`prompts: self`, whole runs: the target writes both sides, or whole texts."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from chat_folders import END, IM_END, chat_tokenizer, data_settings
from regenerated import read, run, settings
from tiny_folders import write_untrained_target

from redrafter_jax import SamplingConfig, generate, load_target
from redrafter_jax.errors import InputError
from train.data.chat import load_template
from train.regenerate import questions

pytestmark = pytest.mark.usefixtures("quick_compilation")

TOKENIZER = chat_tokenizer()


def invent(folder: Path, output: Path, **changes: Any) -> list[dict[str, Any]]:
    own: dict[str, Any] = {
        "prompts": "self",
        "data": {"sequence_length": 160} | changes.pop("data", {}),
        "turns": 2,
        "max_user_tokens": 12,
        "max_new_tokens": 6,
        "count": 9,
        "batch_size": 3,
    }
    return run(settings(folder, output, **(own | changes)))


@pytest.fixture(scope="module")
def target_folder(chat_folder: Path) -> Path:
    return chat_folder / "target"


@pytest.fixture(scope="module")
def finished(target_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("self") / "rows.jsonl"
    invent(target_folder, output)
    return output


def test_questions_and_answers_are_the_targets_own(target_folder: Path, finished: Path) -> None:
    target = load_target(target_folder, "float32")
    template = load_template(data_settings({"files": ["x"]}), target_folder, TOKENIZER)

    def say(text: str, limit: int, sampling: SamplingConfig, seed: int) -> list[int]:
        prompt = TOKENIZER.encode(text, add_special_tokens=False).ids
        said = generate(
            target, None, [prompt], max_new_tokens=limit, sampling=sampling, seeds=[seed],
            eos_token_ids=(IM_END, END),
        )  # fmt: skip
        return said.tokens[0]

    rows = read(finished)
    first = [row for row in rows if row["row"] == 0]
    assert len(first) == 9
    assert {row["temperature"] for row in first} == {0.0, 0.8}
    for row in first[:4]:
        text = "<|im_start|>user\n"
        written = say(text, 12, SamplingConfig(1.0, top_p=0.95), row["seed"])
        assert written[-1] == IM_END
        (question, *_), asked = row["questions"], TOKENIZER.decode(written[:-1])
        assert question == asked.strip()
        prompt = template.render([{"role": "user", "content": question}], True)
        answer = say(prompt, 6, SamplingConfig(row["temperature"]), row["seed"])
        begun = TOKENIZER.encode(prompt, add_special_tokens=False).ids
        assert row["input_ids"][: len(begun) + len(answer)] == begun + answer
        assert row["loss_mask"][: len(begun) + len(answer)] == [0] * len(begun) + [1] * len(answer)


def test_a_stopped_run_goes_on_with_the_same_bytes(
    target_folder: Path, finished: Path, tmp_path: Path
) -> None:
    whole = finished.read_bytes()
    output = tmp_path / "rows.jsonl"
    for kept, changes in ((len(whole) // 2, {"batch_size": 2}), (len(whole) - 9, {})):
        output.write_bytes(whole[:kept])
        invent(target_folder, output, **changes)
        assert output.read_bytes() == whole
    invent(target_folder, output, count=4)
    assert output.read_bytes() == whole
    invent(target_folder, output, count=11)
    assert output.read_bytes().startswith(whole)


def test_another_first_seed_writes_the_conversations_from_there_on(
    target_folder: Path, finished: Path, tmp_path: Path
) -> None:
    told = read(finished)
    later = [row for row in told if row["seed"] >= told[-1]["seed"] // 2]
    first = later[0]["seed"]
    count = sum(row["row"] == 0 for row in later)
    rows = invent(target_folder, tmp_path / "rows.jsonl", first_seed=first, count=count)
    # What was dropped before them is another run's to tell.
    assert [row | {"dropped": {}} for row in rows] == [row | {"dropped": {}} for row in later]
    with pytest.raises(InputError, match="is no row of this run"):
        invent(target_folder, tmp_path / "rows.jsonl", first_seed=first + 1)


def test_tokens_end_a_run_too(target_folder: Path, finished: Path, tmp_path: Path) -> None:
    rows = invent(target_folder, tmp_path / "rows.jsonl", count=None, tokens=60)
    assert rows == read(finished)[: len(rows)]
    carry = [sum(row["loss_mask"]) for row in rows]
    assert sum(carry) >= 60 > sum(carry[:-1]) - carry[-1]


def test_questions_begin_with_the_openings_in_turns(target_folder: Path, tmp_path: Path) -> None:
    openings = ["How", "Why"]
    changes = {"turns": 1, "user_openings": openings, "max_user_tokens": 20, "count": 6}
    rows = invent(target_folder, tmp_path / "rows.jsonl", **changes)
    target = load_target(target_folder, "float32")
    for row in rows:
        # Two temperatures: seeds 0 and 1 begin alike.
        opening = openings[row["seed"] // 2 % 2]
        assert row["user_opening"] == opening
        prompt = TOKENIZER.encode(f"<|im_start|>user\n{opening}", add_special_tokens=False).ids
        said = generate(
            target, None, [prompt], max_new_tokens=20, sampling=SamplingConfig(1.0, top_p=0.95),
            seeds=[row["seed"]], eos_token_ids=(IM_END, END),
        )  # fmt: skip
        assert row["questions"] == [(opening + TOKENIZER.decode(said.tokens[0][:-1])).strip()]
    assert {row["user_opening"] for row in rows} == {*openings}
    with pytest.raises(InputError, match="is no row of this run"):
        invent(target_folder, tmp_path / "rows.jsonl", **(changes | {"user_openings": ["How"]}))


def test_no_question_is_asked_twice_and_what_is_dropped_is_told(
    target_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    narrow = {"turns": 1, "user_sampling": {"temperature": 0.3}, "temperatures": [0.0]}
    rows = invent(target_folder, tmp_path / "rows.jsonl", **narrow)
    asked = [question for row in rows for question in row["questions"]]
    assert len(asked) == len({*asked})
    dropped = sum(row["dropped"].get("a question that was asked before", 0) for row in rows)
    assert dropped > 0
    assert f"{dropped} × a question that was asked before" in capsys.readouterr().err
    # Half the run is forgotten, the questions are not.
    output = tmp_path / "rows.jsonl"
    whole = output.read_bytes()
    output.write_bytes(whole[: len(whole) // 2])
    invent(target_folder, output, **narrow)
    assert output.read_bytes() == whole


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"max_user_tokens": 1}, "a question without an end"),
        ({"data": {"sequence_length": 5}}, "no room for a question in data.sequence_length"),
    ],
)
def test_a_run_without_questions_ends(
    target_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, Any],
    reason: str,
) -> None:
    monkeypatch.setattr(questions, "MOST_DROPPED", 5)
    with pytest.raises(InputError, match=rf"5 conversations in a row .* \(5 × {reason}\)"):
        invent(target_folder, tmp_path / "rows.jsonl", **changes)


@pytest.mark.parametrize(
    "changes",
    [{"turns": 1}, {"user_sampling": {"temperature": 0.9}}, {"max_new_tokens": 5}],
)
def test_rows_of_other_settings_are_refused(
    target_folder: Path, finished: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    output = tmp_path / "rows.jsonl"
    output.write_bytes(finished.read_bytes())
    with pytest.raises(InputError, match="line 1 is no row of this run"):
        invent(target_folder, output, **changes)
    assert output.read_bytes() == finished.read_bytes()


def test_a_template_without_a_users_turn_is_refused(target_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "target"
    shutil.copytree(target_folder, folder)
    template = "{% for turn in messages %}{{ turn.content }}\n{% endfor %}"
    (folder / "chat_template.jinja").write_text(template)
    with pytest.raises(InputError, match="does not show where a user's words begin"):
        invent(folder, tmp_path / "rows.jsonl")


@pytest.mark.long
def test_a_base_model_writes_texts(tmp_path: Path) -> None:
    folder = tmp_path / "target"
    folder.mkdir()
    write_untrained_target(folder, functions=50)
    base = {"turns": 1, "max_user_tokens": 256, "data": {"sequence_length": 32}}
    base |= {"max_new_tokens": None}
    output = tmp_path / "rows.jsonl"
    with pytest.raises(InputError, match=r"user_openings is for chat models, and .* has no chat"):
        invent(folder, output, **(base | {"user_openings": ["Why"]}))
    rows = invent(folder, output, **base)
    assert [row["input_ids"][0] for row in rows] == [*{row["input_ids"][0]: 0 for row in rows}]
    target = load_target(folder, "float32")
    for row in rows:
        assert row["loss_mask"] == [0] + [1] * (len(row["input_ids"]) - 1)
        written = generate(
            target, None, [row["input_ids"][:1]], max_new_tokens=31,
            sampling=SamplingConfig(row["temperature"]), seeds=[row["seed"]],
        )  # fmt: skip
        assert row["input_ids"][1:] == written.tokens[0]
    whole = output.read_bytes()
    output.write_bytes(whole[: len(whole) // 2])
    # Which are for those who ask.
    invent(folder, output, **(base | {"user_openings": "varied"}))
    assert output.read_bytes() == whole
