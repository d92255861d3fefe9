"""`python -m train.regenerate` on conversations: the target's own answers."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import yaml
from chat_folders import (
    CONFIG,
    IM_END,
    chat_tokenizer,
    write_lines,
    write_tokenizer,
)
from tiny_models import random_drafter, random_target, tiny_config

from redrafter_jax.checkpoints.huggingface import load_target, save_drafter, save_target
from redrafter_jax.config import DrafterConfig
from redrafter_jax.errors import InputError
from redrafter_jax.parallel.model import Model
from train.config import RegenerateSettings
from train.data.chat import ChatTemplate, load_template
from train.data.files import read_raw
from train.data.records import parse
from train.data.settings import DataSettings, SourceSettings
from train.data.types import Chat, Raw, Tokens, Turn
from train.regenerate import __main__ as program
from train.regenerate.conversations import (
    Conversation,
    Row,
    Speaker,
    add_answer,
    first_question,
    plan_batches,
    rewrite,
)
from train.regenerate.writer import Request

pytestmark = pytest.mark.usefixtures("quick_compilation")

TOKENIZER = chat_tokenizer()
# Prompts and limits such that every batch is of one shape: nothing is compiled twice.
LENGTH, LIMIT = 128, 4
LONG = "What is it that you would like to tell me about it tonight"


def chat(*contents: str, system: str | None = None) -> dict[str, Any]:
    """User and assistant in turns."""
    turns = [
        {"role": ("user", "assistant")[index % 2], "content": content}
        for index, content in enumerate(contents)
    ]
    return {"messages": [{"role": "system", "content": system}] * (system is not None) + turns}


CHATS = [
    chat(LONG, "RECORDED", "B", "RECORDED", system="Be kind"),
    chat(f"{LONG}, or right at once?", "RECORDED"),
    chat(f"{LONG}, or then at last", "RECORDED", "C", "RECORDED"),
]


def talkative_target():
    """Letters, and now and then the end of a turn."""
    config = tiny_config(
        vocab_size=CONFIG.vocab_size,
        num_hidden_layers=1,
        eos_token_ids=CONFIG.eos_token_ids,
    )
    target = random_target(config, seed=3)
    decoder = target.merge()
    head = np.array(decoder.lm_head[...])
    said = {IM_END, *(TOKENIZER.token_to_id(letter) for letter in "abcdefghijklmnopqrstuvwxyz")}
    head[:, [token for token in range(config.vocab_size) if token not in said]] = 0
    head[:, IM_END] *= 3
    decoder.lm_head[...] = jax.numpy.asarray(4 * head)
    return Model.split(config, decoder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("conversations")
    write_tokenizer(folder / "target")
    target = talkative_target()
    save_target(target, folder / "target")
    shape = DrafterConfig(target.config.vocab_size, target.config.hidden_size, 24, 1)
    save_drafter(random_drafter(shape), folder / "drafter")
    write_lines(folder / "chats.jsonl", *CHATS)
    return folder


def run(folder: Path, output: Path, **changes: object) -> None:
    settings = {
        "target": str(folder / "target"),
        "target_dtype": "float32",
        "data": {"sources": [{"files": [str(folder / "chats.jsonl")]}], "sequence_length": LENGTH},
        "max_new_tokens": LIMIT,
        "batch_size": 2,
        "temperatures": [0.0, 0.8],
        "output": str(output),
    }
    path = output.with_suffix(".yaml")
    path.write_text(yaml.safe_dump(settings | changes))
    program.regenerate(["--config", str(path)])


def read(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in output.read_text().splitlines()]


@pytest.fixture(scope="module")
def finished(folder: Path) -> Path:
    run(folder, folder / "rows.jsonl")
    return folder / "rows.jsonl"


def test_every_answer_is_the_targets_own_after_the_tokens_before_it(
    folder: Path, finished: Path
) -> None:
    decoder = load_target(folder / "target", "float32").merge()

    @jax.jit
    def best(tokens: jax.Array) -> jax.Array:
        hidden, _, _ = decoder.forward(tokens[None])
        return decoder.logits(hidden)[0].argmax(axis=-1)

    rows = read(finished)
    assert {row["seed"] for row in rows} == {0, 1, 2}
    greedy = [row for row in rows if row["temperature"] == 0]
    assert {row["seed"] for row in greedy} == {0, 2}
    for row in greedy:
        ids, mask = np.array(row["input_ids"]), np.array(row["loss_mask"], bool)
        padded = np.zeros(LENGTH, int)
        padded[: len(ids)] = ids
        expected = np.asarray(best(padded))[: len(ids) - 1]
        np.testing.assert_array_equal(ids[1:][mask[1:]], expected[mask[1:]])


def test_answers_end_with_their_turn_or_are_counted_as_cut(finished: Path) -> None:
    rows = read(finished)
    for row in rows:
        marks = "".join(map(str, row["loss_mask"]))
        answers = [row["input_ids"][run.start() : run.end()] for run in re.finditer("1+", marks)]
        ended = [answer[-1] == IM_END for answer in answers]
        assert (row["answers"], row["cut"]) == (len(answers), ended.count(False))
        for answer, has_end in zip(answers, ended, strict=True):
            assert IM_END not in answer[:-1]
            assert len(answer) == LIMIT or has_end
    assert sum(row["answers"] for row in rows) == 5
    assert 0 < sum(row["cut"] for row in rows) < 5


def test_what_others_say_is_kept_and_recorded_answers_are_not(finished: Path) -> None:
    texts = {
        row["record"].rpartition(", ")[2]: TOKENIZER.decode(
            row["input_ids"], skip_special_tokens=False
        )
        for row in read(finished)
    }

    def turns(*contents: str) -> str:
        roles = ("user", "assistant") * 2
        said = zip(roles, contents, strict=False)
        return "".join(rf"<\|im_start\|>{role}\n{content}<\|im_end\|>\n" for role, content in said)

    answer, last = "([a-z]{0,4})", r"<\|im_start\|>assistant\n[a-z]{0,4}(<\|im_end\|>)?"
    opening = r"<\|im_start\|>system\nBe kind<\|im_end\|>\n"
    assert re.fullmatch(opening + turns(LONG, answer, "B") + last, texts["line 1"])
    assert re.fullmatch(turns(rf"{LONG}, or right at once\?") + last, texts["line 2"])
    assert re.fullmatch(turns(f"{LONG}, or then at last", answer, "C") + last, texts["line 3"])


def test_training_reads_the_rows_as_they_are(finished: Path) -> None:
    raws = list(read_raw(SourceSettings(files=[str(finished)])))
    records = [parse(raw, None) for raw in raws if isinstance(raw, Raw)]
    assert [record.ids for record in records if isinstance(record, Tokens)] == [
        row["input_ids"] for row in read(finished)
    ]


@pytest.mark.parametrize("data", [1, pytest.param(2, marks=pytest.mark.long)])
def test_neither_a_drafter_nor_a_mesh_changes_a_byte(
    folder: Path, finished: Path, tmp_path: Path, data: int
) -> None:
    drafter = {"drafter": str(folder / "drafter"), "draft": {"beam_width": 2, "draft_rounds": 2}}
    run(folder, tmp_path / "rows.jsonl", **drafter, mesh={"data": data})
    assert (tmp_path / "rows.jsonl").read_bytes() == finished.read_bytes()


def test_a_stopped_run_goes_on_after_its_last_whole_conversation(
    folder: Path, finished: Path, tmp_path: Path
) -> None:
    output = tmp_path / "rows.jsonl"
    lines = finished.read_bytes().splitlines(keepends=True)
    output.write_bytes(lines[0] + lines[1][:-20])
    run(folder, output)
    assert output.read_bytes() == finished.read_bytes()
    run(folder, output)
    assert output.read_bytes() == finished.read_bytes()


@pytest.mark.parametrize(
    "changes",
    [
        {"temperatures": [0.5]},
        {"max_new_tokens": 5},
        {"data": {"sequence_length": LENGTH - 1}},
        {"data": {"shuffle_seed": 1}},
    ],
)
def test_rows_of_other_settings_are_refused_and_kept(
    folder: Path,
    finished: Path,
    tmp_path: Path,
    changes: dict[str, Any],
) -> None:
    output = tmp_path / "rows.jsonl"
    before = finished.read_bytes() + b'{"seed"'
    output.write_bytes(before)
    sources = [{"files": [str(folder / "chats.jsonl")]}]
    if "data" in changes:
        data = {"sources": sources, "sequence_length": LENGTH} | changes["data"]
        changes = {"data": data}
    with pytest.raises(InputError, match=r"is no row of this run's 3 prompts .*\{date_string"):
        run(folder, output, **changes)
    assert output.read_bytes() == before


def test_a_source_of_one_line_is_no_output(folder: Path, tmp_path: Path) -> None:
    source = tmp_path / "one.jsonl"
    source.write_text(json.dumps(CHATS[0]))
    before = source.read_bytes()
    data = {"sources": [{"files": [str(tmp_path / "*.jsonl")]}], "sequence_length": LENGTH}
    with pytest.raises(
        InputError, match=r"one.jsonl is a file of data.sources.0 .* another output"
    ):
        run(folder, source, data=data)
    with pytest.raises(InputError, match=r"""ends with '{"messages": .* use another output"""):
        run(folder, source)
    assert source.read_bytes() == before


def test_a_conversation_that_stands_twice_is_refused(
    folder: Path, finished: Path, tmp_path: Path
) -> None:
    output = tmp_path / "rows.jsonl"
    output.write_bytes(finished.read_bytes() * 2)
    with pytest.raises(InputError, match=r"line \d is no row of this run"):
        run(folder, output)


def test_records_that_cannot_be_rewritten_are_told(
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    files = write_lines(
        tmp_path / "more.jsonl",
        {"text": "no conversation"},
        chat("x" * LENGTH, "RECORDED"),
        {"messages": [{"role": "user", "content": "alone"}]},
        chat(f"{LONG}, do you not", "RECORDED"),
    )
    sources = [{"files": [str(folder / "chats.jsonl"), files]}]
    data = {"sources": sources, "sequence_length": LENGTH}
    output = tmp_path / "rows.jsonl"
    run(folder, output, data=data, count=4)
    told = capsys.readouterr().err
    assert f"1 × no conversation (first at {files}, line 1)" in told
    assert "1 × no room for an answer in data.sequence_length" in told
    assert "1 × no assistant turn" in told
    assert f"rows of 4 conversations in {output}: 6 answers, of which " in told
    with pytest.raises(InputError, match="count is 5, but the data gives 4 conversations"):
        run(folder, output, data=data, count=5)
    with pytest.raises(InputError, match="3 of 7 records cannot be rewritten"):
        run(folder, output, data=data | {"skips": "refuse"})
    texts = {"files": [write_lines(tmp_path / "texts.jsonl", {"text": "plain"})]}
    with pytest.raises(InputError, match=r"data.sources.1 .* holds no conversation to rewrite"):
        run(folder, output, data=data | {"sources": [*sources, texts]})


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"draft": {"beam_width": 2}}, "draft is how a drafter drafts; give drafter"),
        ({"prompt_tokens": 8}, "count is missing"),
        ({"prompt_tokens": 8, "count": 1}, "max_new_tokens is for conversations"),
        ({"data": {"train_turns": "last"}}, "does not read data.train_turns"),
        (
            {"data": {"sources": [{"files": ["x"], "weight": 2}]}},
            "does not read data.sources.weight",
        ),
    ],
)
def test_settings_that_do_not_go_together_are_refused(
    folder: Path,
    tmp_path: Path,
    changes: dict[str, Any],
    sentence: str,
) -> None:
    if "data" in changes:
        sources = [{"files": [str(folder / "chats.jsonl")]}]
        changes = {"data": {"sources": sources, "sequence_length": LENGTH} | changes["data"]}
    with pytest.raises(InputError, match=sentence):
        run(folder, tmp_path / "rows.jsonl", **changes)


SETTINGS = RegenerateSettings.model_validate(
    {
        "target": "target",
        "data": {"sources": [{"files": ["chats.jsonl"]}], "sequence_length": 400},
        "max_new_tokens": 20,
        "batch_size": 4,
        "temperatures": [0.0, 0.5],
        "output": "rows.jsonl",
    }
)


def say_in_turn(speaker: Speaker, turns: list[Turn], *answers: str) -> tuple[list[Row], Any]:
    """The rows of one conversation whose answers are given; an answer ends with `.`."""
    left = [TOKENIZER.encode(answer, add_special_tokens=False).ids for answer in answers]
    asked: list[Request] = []

    def write(requests: Sequence[Request], stop_tokens: Sequence[int]) -> list[list[int]]:
        asked.extend(requests)
        return [left.pop(0)]

    (rewritten,) = rewrite(write, speaker, [Conversation(1, "line 1", turns, [])], SETTINGS)
    assert {(request.seed, request.temperature) for request in asked} <= {(1, 0.5)}
    return rewritten.rows, rewritten.left_out


@pytest.fixture(scope="module")
def speaker(folder: Path) -> Speaker:
    data = DataSettings.model_validate({"sources": [{"files": ["x"]}], "sequence_length": 400})
    template = load_template(data, folder / "target", TOKENIZER)
    return Speaker(TOKENIZER, template, (IM_END,), 400)


def shown(row: Row) -> str:
    """The row's text, what carries loss in brackets."""
    text, before = "", 0
    for token, mark in zip(row.tokens, row.mask, strict=True):
        text += "[" * (mark > before) + "]" * (mark < before)
        text += TOKENIZER.decode([token], skip_special_tokens=False)
        before = mark
    return (text + "]" * before).replace("<|im_start|>", "<").replace("<|im_end|>", ">")


TWICE = chat("Hi", "a", "Bye", "b")["messages"]


def test_a_row_goes_on_with_the_next_answer(speaker: Speaker) -> None:
    (row,), left_out = say_in_turn(speaker, TWICE, "Hey<|im_end|>", "So long<|im_end|>")
    assert shown(row) == ("<user\nHi>\n<assistant\n[Hey>]\n<user\nBye>\n<assistant\n[So long>]")
    assert (row.answers, row.cut, left_out) == (2, 0, None)


def test_the_end_of_a_cut_answer_carries_no_loss(speaker: Speaker) -> None:
    (row,), _ = say_in_turn(speaker, TWICE, "He", "So<|im_end|>")
    assert shown(row) == "<user\nHi>\n<assistant\n[He]>\n<user\nBye>\n<assistant\n[So>]"
    assert row.cut == 1


def test_an_answer_that_is_spelt_otherwise_starts_a_row(speaker: Speaker) -> None:
    # Chat programs strip what the target wrote; half a character is another one.
    for written, kept in ((" Hey<|im_end|>", "Hey"), ("<|im_start|><|im_end|>", "")):
        first, second = say_in_turn(speaker, TWICE, written, "So<|im_end|>")[0]
        answer = written.replace("<|im_start|>", "<").replace("<|im_end|>", ">")
        assert shown(first) == f"<user\nHi>\n<assistant\n[{answer}]"
        assert shown(second) == (f"<user\nHi>\n<assistant\n{kept}>\n<user\nBye>\n<assistant\n[So>]")


def test_a_template_that_rewrites_the_past_gives_a_row_per_answer(speaker: Speaker) -> None:
    """As reasoning models' templates do, this one leaves out thoughts of earlier turns."""

    def render(turns: list[Turn], asks: bool) -> str:
        said = [turn["content"].rpartition("/think ")[2] for turn in turns]
        return " ".join(said) + (" A:" if asks else "")

    thinker = speaker._replace(template=ChatTemplate("thinker", render, False))
    rows, _ = say_in_turn(thinker, TWICE, "hm/think Hey<|im_end|>", "ah/think So<|im_end|>")
    assert [shown(row) for row in rows] == ["Hi A:[hm/think Hey>]", "Hi Hey Bye A:[ah/think So>]"]


@pytest.mark.parametrize(
    ("turn", "reason"),
    [
        ({"role": "tool", "content": "42"}, "a tool answers a call that is not made again"),
        ({"role": "user", "content": "x" * 400}, "no room for an answer in data.sequence_length"),
    ],
)
def test_what_ends_a_conversation_early_is_kept_with_it(
    speaker: Speaker, turn: Turn, reason: str
) -> None:
    rows, left_out = say_in_turn(speaker, [*TWICE[:2], turn, TWICE[3]], "Hey<|im_end|>")
    assert ([row.answers for row in rows], left_out) == ([1], reason)


def test_the_first_question_comes_before_all_recorded_answers() -> None:
    record = Chat("line 1", chat("Hi", "Hello", "Bye", "Ciao")["messages"])
    assert first_question(record) == [{"role": "user", "content": "Hi"}]


def test_batches_hold_conversations_that_are_alike() -> None:
    sizes = [(2, 9), (1, 5), (2, 3), (1, 8), (1, 1)]
    conversations = [
        Conversation(seed, "", chat(*"ab" * answers)["messages"], [0] * length)
        for seed, (answers, length) in enumerate(sizes)
    ]
    planned = plan_batches(conversations, 2)
    assert [[one.seed for one in batch] for batch in planned] == [[4, 1], [3, 2], [0]]


def test_rows_are_joined_only_where_the_prompt_goes_on() -> None:
    first = add_answer([], [1, 2], [3], cut=False)
    assert first == [Row([1, 2, 3], [0, 0, 1], 1, 0)]
    assert add_answer(first, [1, 2, 3, 4], [5, 6], cut=True) == [
        Row([1, 2, 3, 4, 5, 6], [0, 0, 1, 0, 1, 1], 2, 1)
    ]
    assert add_answer(first, [1, 2, 4], [5], cut=False) == [
        *first,
        Row([1, 2, 4, 5], [0, 0, 0, 1], 1, 0),
    ]
