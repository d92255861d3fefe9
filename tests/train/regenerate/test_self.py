"""`prompts: self`, whole runs: the target writes both sides, or whole texts."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chat_folders import END, IM_END, chat_tokenizer, data_settings, files_with
from regenerated import Regeneration, read

from redrafter_jax import SamplingConfig, generate, load_target
from redrafter_jax.errors import InputError
from redrafter_jax.models.target import Target
from train.data.chat import load_template
from train.regenerate import questions

pytestmark = pytest.mark.usefixtures("quick_compilation")

TOKENIZER = chat_tokenizer()
AS_USERS = SamplingConfig(1.0, top_p=0.95)


def say(target: Target, text: str, limit: int, sampling: SamplingConfig, seed: int) -> list[int]:
    prompt = TOKENIZER.encode(text, add_special_tokens=False).ids
    said = generate(
        target, None, [prompt], max_new_tokens=limit, sampling=sampling, seeds=[seed],
        eos_token_ids=(IM_END, END),
    )  # fmt: skip
    return said.tokens[0]


def test_questions_and_answers_are_the_targets_own(inventing: Regeneration) -> None:
    target = load_target(inventing.target, "float32")
    template = load_template(
        data_settings({"files": ["x"]}), files_with(TOKENIZER, inventing.target)
    )

    rows = read(inventing.finished)
    first = [row for row in rows if row["row"] == 0]
    assert len(first) == 9
    assert {row["temperature"] for row in first} == {0.0, 0.8}
    for row in first[:4]:
        written = say(target, "<|im_start|>user\n", 12, AS_USERS, row["seed"])
        assert written[-1] == IM_END
        (question, *_), asked = row["questions"], TOKENIZER.decode(written[:-1])
        assert question == asked.strip()
        prompt = template.render([{"role": "user", "content": question}], True)
        answer = say(target, prompt, 6, SamplingConfig(row["temperature"]), row["seed"])
        begun = TOKENIZER.encode(prompt, add_special_tokens=False).ids
        assert row["input_ids"][: len(begun) + len(answer)] == begun + answer
        assert row["loss_mask"][: len(begun) + len(answer)] == [0] * len(begun) + [1] * len(answer)


def test_another_first_seed_writes_the_conversations_from_there_on(
    inventing: Regeneration, tmp_path: Path
) -> None:
    told = read(inventing.finished)
    later = [row for row in told if row["seed"] >= told[-1]["seed"] // 2]
    first = later[0]["seed"]
    count = sum(row["row"] == 0 for row in later)
    rows = inventing(tmp_path / "rows.jsonl", first_seed=first, count=count)
    # What was dropped before them is another run's to tell.
    assert [row | {"dropped": {}} for row in rows] == [row | {"dropped": {}} for row in later]
    with pytest.raises(InputError, match="is not a row of this run"):
        inventing(tmp_path / "rows.jsonl", first_seed=first + 1)


def test_tokens_end_a_run_too(inventing: Regeneration, tmp_path: Path) -> None:
    rows = inventing(tmp_path / "rows.jsonl", count=None, tokens=60)
    assert rows == read(inventing.finished)[: len(rows)]
    carry = [sum(row["loss_mask"]) for row in rows]
    assert sum(carry) >= 60 > sum(carry[:-1]) - carry[-1]


def test_questions_begin_with_the_openings_in_turns(
    inventing: Regeneration, tmp_path: Path
) -> None:
    openings = ["How", "Why"]
    changes = {"turns": 1, "user_openings": openings, "max_user_tokens": 20, "count": 6}
    rows = inventing(tmp_path / "rows.jsonl", **changes)
    target = load_target(inventing.target, "float32")
    for row in rows:
        # Two temperatures: seeds 0 and 1 begin alike.
        opening = openings[row["seed"] // 2 % 2]
        assert row["user_opening"] == opening
        said = say(target, f"<|im_start|>user\n{opening}", 20, AS_USERS, row["seed"])
        assert row["questions"] == [(opening + TOKENIZER.decode(said[:-1])).strip()]
    assert {row["user_opening"] for row in rows} == {*openings}
    with pytest.raises(InputError, match="is not a row of this run"):
        inventing(tmp_path / "rows.jsonl", **(changes | {"user_openings": ["How"]}))


def test_what_the_target_asked_carries_loss_if_it_is_to(
    inventing: Regeneration, tmp_path: Path
) -> None:
    openings = ["How", ""]
    changes = {"turns": 2, "user_openings": openings, "max_user_tokens": 20, "count": 6}
    told = inventing(tmp_path / "told.jsonl", **changes)
    rows = inventing(tmp_path / "rows.jsonl", **changes, user_loss=True)
    assert [row["input_ids"] for row in rows] == [row["input_ids"] for row in told]
    target = load_target(inventing.target, "float32")
    whole = later = 0
    for row, plain in zip(rows, told, strict=True):
        ids, added = row["input_ids"], np.subtract(row["loss_mask"], plain["loss_mask"])
        assert added.min() == 0
        answered = np.flatnonzero(plain["loss_mask"])[0]
        later += row["answers"] == 2 and added[answered:].any()
        if row["row"] > 0:
            continue
        read = f"<|im_start|>user\n{row['user_opening']}"
        said = say(target, read, 20, AS_USERS, row["seed"])
        begin = len(TOKENIZER.encode(read, add_special_tokens=False).ids)
        assert not added[:begin].any()
        if ids[begin : begin + len(said)] == said:
            whole += 1
            assert added[begin : begin + len(said)].all()
        else:
            # Leading spaces are not part of a question.
            assert not added[begin : begin + len(said)].all()
    assert whole >= 3
    assert later >= 2, "second questions carry loss too"
    with pytest.raises(InputError, match="is not a row of this run"):
        inventing(tmp_path / "rows.jsonl", **changes)


def test_no_question_is_asked_twice_and_what_is_dropped_is_told(
    inventing: Regeneration, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    narrow = {"turns": 1, "user_sampling": {"temperature": 0.3}, "temperatures": [0.0]}
    rows = inventing(tmp_path / "rows.jsonl", **narrow)
    asked = [question for row in rows for question in row["questions"]]
    assert len(asked) == len({*asked})
    dropped = sum(row["dropped"].get("a question that was asked before", 0) for row in rows)
    assert dropped > 0
    assert f"{dropped} × a question that was asked before" in capsys.readouterr().err
    # Half the run is forgotten, the questions are not.
    output = tmp_path / "rows.jsonl"
    whole = output.read_bytes()
    output.write_bytes(whole[: len(whole) // 2])
    inventing(output, **narrow)
    assert output.read_bytes() == whole


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"max_user_tokens": 1}, "a question without an end"),
        ({"data": {"sequence_length": 5}}, "no room for a question in data.sequence_length"),
    ],
)
def test_a_run_without_questions_ends(
    inventing: Regeneration,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, Any],
    reason: str,
) -> None:
    monkeypatch.setattr(questions, "MOST_DROPPED", 5)
    with pytest.raises(InputError, match=rf"5 conversations in succession .* \(5 × {reason}\)"):
        inventing(tmp_path / "rows.jsonl", **changes)


def test_a_template_without_a_users_turn_is_refused(
    inventing: Regeneration, tmp_path: Path
) -> None:
    folder = tmp_path / "target"
    shutil.copytree(inventing.target, folder)
    template = "{% for turn in messages %}{{ turn.content }}\n{% endfor %}"
    (folder / "chat_template.jinja").write_text(template)
    with pytest.raises(InputError, match="does not show where a user's words begin"):
        Regeneration(folder, tmp_path, **inventing.values)(tmp_path / "rows.jsonl")


@pytest.mark.long
def test_a_base_model_writes_texts(target_folder: Path, tmp_path: Path) -> None:
    output, data = tmp_path / "rows.jsonl", {"sequence_length": 32}
    base = Regeneration(target_folder, tmp_path, prompts="self", data=data, count=9, batch_size=3)
    with pytest.raises(InputError, match=r"user_openings is for chat models, but .* has no chat"):
        base(output, user_openings=["Why"])
    rows = base(output)
    assert [row["input_ids"][0] for row in rows] == [*{row["input_ids"][0]: 0 for row in rows}]
    target = load_target(target_folder, "float32")
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
    base(output, user_openings="varied")
    assert output.read_bytes() == whole
