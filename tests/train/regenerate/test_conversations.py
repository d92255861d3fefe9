"""`python -m train regenerate` on conversations: the target's own answers."""

import re
from pathlib import Path

import jax
import numpy as np
import pytest
from chat_folders import IM_END, VOCABULARY, chat_tokenizer, data_settings, files_with, write_lines
from regenerated import CHATS, LENGTH, LIMIT, LONG, Regeneration, chat, read, settings

from redrafter_jax.config import SamplingConfig
from redrafter_jax.errors import InputError
from redrafter_jax.files.target_files import load_target
from redrafter_jax.text.chat_template import ChatTemplate, Turn
from train.config import RegenerateSettings
from train.data.chat import load_template
from train.regenerate.conversations import (
    Conversation,
    RecordedConversation,
    Row,
    TurnEncoder,
    run_conversation,
)

pytestmark = pytest.mark.usefixtures("quick_compilation")

TOKENIZER = chat_tokenizer()


def test_every_answer_is_the_targets_own_after_the_tokens_before_it(
    rewriting: Regeneration,
) -> None:
    decoder = load_target(rewriting.target, "float32").merge()

    @jax.jit
    def best(tokens: jax.Array) -> jax.Array:
        hidden, _, _ = decoder.forward(tokens[None])
        return decoder.logits(hidden)[0].argmax(axis=-1)

    greedy = [row for row in read(rewriting.finished) if row["temperature"] == 0]
    assert {row["seed"] for row in greedy} == {0, 2}
    for row in greedy:
        ids, mask = np.array(row["input_ids"]), np.array(row["loss_mask"], bool)
        expected = np.asarray(best(np.resize(ids, LENGTH)))[: len(ids) - 1]
        np.testing.assert_array_equal(ids[1:][mask[1:]], expected[mask[1:]])


def test_answers_end_with_their_turn_or_are_counted_as_cut(rewriting: Regeneration) -> None:
    rows = read(rewriting.finished)
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


@pytest.mark.long
def test_neither_a_drafter_nor_a_mesh_changes_a_byte(
    chat_folder: Path, rewriting: Regeneration, tmp_path: Path
) -> None:
    output, drafter = tmp_path / "rows.jsonl", str(chat_folder / "drafter")
    tree = {"beam_width": 2, "draft_rounds": 2}
    rewriting(output, drafter=drafter, tree=tree, mesh={"data": 2})
    assert output.read_bytes() == rewriting.finished.read_bytes()


def test_records_that_cannot_be_rewritten_are_told(
    rewriting: Regeneration, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = write_lines(
        tmp_path / "more.jsonl",
        {"text": "no conversation"},
        chat("x" * LENGTH, "RECORDED"),
        {"messages": [{"role": "user", "content": "alone"}]},
        chat(f"{LONG}, do you not", "RECORDED"),
    )
    sources = [{"files": [write_lines(tmp_path / "chats.jsonl", *CHATS), files]}]
    output = tmp_path / "rows.jsonl"
    rewriting(output, data={"sources": sources}, count=4)
    told = capsys.readouterr().err
    assert f"1 × no conversation (first at {files}, line 1)" in told
    assert "1 × no room for an answer in data.sequence_length" in told
    assert "1 × no assistant turn" in told
    assert f"rows of 4 conversations in {output}: 6 answers, of which " in told
    texts = [*sources, {"files": [write_lines(tmp_path / "texts.jsonl", {"text": "plain"})]}]
    for data, count, sentence in (
        ({"sources": sources}, 5, "count is 5, but the data gives 4 conversations"),
        ({"sources": sources, "skips": "refuse"}, 4, "3 of 7 records cannot be rewritten"),
        ({"sources": texts}, 4, r"data.sources.1 .* holds no conversation to rewrite"),
    ):
        with pytest.raises(InputError, match=sentence):
            rewriting(output, data=data, count=count)


@pytest.fixture(scope="module")
def encoder(chat_folder: Path) -> TurnEncoder:
    template = load_template(
        data_settings({"files": ["x"]}), files_with(TOKENIZER, chat_folder / "target")
    )
    return TurnEncoder(TOKENIZER, template, (IM_END,), 400, VOCABULARY)


def answered(
    encoder: TurnEncoder, turns: list[Turn], *answers: str
) -> tuple[list[Row], str | None]:
    """The rows of one conversation whose answers are given, and why later ones are left out."""
    data = {"sources": [{"files": ["x"]}], "sequence_length": LENGTH}
    values = settings(Path("x"), Path("rows.jsonl"), data=data, max_new_tokens=LIMIT)
    session = run_conversation(
        encoder,
        RecordedConversation("line 1", turns, []).next_question,
        1,
        RegenerateSettings.model_validate(values),
    )
    *sent, last = (TOKENIZER.encode(answer, add_special_tokens=False).ids for answer in answers)
    request = next(session)
    for tokens in sent:
        request = session.send(tokens)
    assert (request.seed, request.sampling) == (1, SamplingConfig(0.8))
    with pytest.raises(StopIteration) as ended:
        session.send(last)
    conversation: Conversation = ended.value.value
    rows = [exchange.rows for exchange in conversation.exchanges if exchange.rows is not None]
    return rows[-1], conversation.left_out


def shown(row: Row) -> str:
    """The row's text, what carries loss in brackets."""
    text, before = "", 0
    for token, mark in zip(row.tokens, row.mask, strict=True):
        text += "[" * (mark > before) + "]" * (mark < before)
        text += TOKENIZER.decode([token], skip_special_tokens=False)
        before = mark
    return (text + "]" * before).replace("<|im_start|>", "<").replace("<|im_end|>", ">")


TWICE = chat("Hi", "a", "Bye", "b")["messages"]


def test_a_row_goes_on_with_the_next_answer_and_the_end_of_a_cut_one_carries_no_loss(
    encoder: TurnEncoder,
) -> None:
    (row,), left_out = answered(encoder, TWICE, "He", "So<|im_end|>")
    assert shown(row) == "<user\nHi>\n<assistant\n[He]>\n<user\nBye>\n<assistant\n[So>]"
    assert (row.answers, row.cut, left_out) == (2, 1, None)


def test_an_answer_that_is_spelt_otherwise_starts_a_row(encoder: TurnEncoder) -> None:
    # Chat programs strip what the target wrote; half a character is another one.
    for written, kept in ((" Hey<|im_end|>", "Hey"), ("<|im_start|><|im_end|>", "")):
        first, second = answered(encoder, TWICE, written, "So<|im_end|>")[0]
        answer = written.replace("<|im_start|>", "<").replace("<|im_end|>", ">")
        assert shown(first) == f"<user\nHi>\n<assistant\n[{answer}]"
        assert shown(second) == (f"<user\nHi>\n<assistant\n{kept}>\n<user\nBye>\n<assistant\n[So>]")


def test_a_template_that_rewrites_the_past_gives_a_row_per_answer(encoder: TurnEncoder) -> None:
    """As reasoning models' templates do, this one leaves out thoughts of earlier turns."""

    def render(turns: list[Turn], asks: bool) -> str:
        said = [turn["content"].rpartition("/think ")[2] for turn in turns]
        return " ".join(said) + (" A:" if asks else "")

    thinker = encoder._replace(template=ChatTemplate("thinker", render, False))
    rows, _ = answered(thinker, TWICE, "hm/think Hey<|im_end|>", "ah/think So<|im_end|>")
    assert [shown(row) for row in rows] == ["Hi A:[hm/think Hey>]", "Hi Hey Bye A:[ah/think So>]"]


@pytest.mark.parametrize(
    ("turn", "reason"),
    [
        (
            {"role": "tool", "content": "42"},
            "a tool answers a call that the rewritten conversation does not hold",
        ),
        ({"role": "user", "content": "x" * 400}, "no room for an answer in data.sequence_length"),
    ],
)
def test_what_ends_a_conversation_early_is_kept_with_it(
    encoder: TurnEncoder, turn: Turn, reason: str
) -> None:
    rows, left_out = answered(encoder, [*TWICE[:2], turn, TWICE[3]], "Hey<|im_end|>")
    assert ([row.answers for row in rows], left_out) == ([1], reason)
