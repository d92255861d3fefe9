"""Conversations as their templates write them, and the tokens that the assistant writes."""

import dataclasses
import re
from pathlib import Path

import numpy as np
import pytest
from chat_folders import (
    CHATML,
    CONFIG,
    IM_END,
    IM_START,
    TURNS,
    chat_tokenizer,
    data_settings,
    files_with,
    write_sentencepiece,
    write_tokenizer,
)
from hypothesis import given
from hypothesis import strategies as st
from places import ROOT

from redrafter_jax.errors import InputError
from redrafter_jax.files.target_files import open_target
from redrafter_jax.text.chat_formats import FORMATS
from redrafter_jax.text.chat_template import ChatTemplate, Turn
from train.data.chat import load_template
from train.data.documents import encode_records
from train.data.settings import DataSettings
from train.data.types import Chat, Document, Skip

SOURCE = {"files": ["rows.jsonl"]}
VICUNA = data_settings(SOURCE, chat_template="vicuna_v1.1")
OWN = data_settings(SOURCE)
LAST = data_settings(SOURCE, train_turns="last")


@pytest.fixture(scope="module")
def chatml(chat_target: Path) -> ChatTemplate:
    return load_template(OWN, open_target(chat_target))


def encode(
    template: ChatTemplate, turns: list[Turn], settings: DataSettings = OWN
) -> Document | Skip:
    records = [Chat("rows.jsonl, line 1", turns)]
    (made,) = encode_records(records, settings, chat_tokenizer(), CONFIG, lambda: template)
    return made


def learnt(document: Document | Skip) -> str:
    """The text of the tokens that are learnt, a bar between tokens that are not neighbours."""
    assert isinstance(document, Document)
    tokenizer, places = chat_tokenizer(), np.flatnonzero(document.loss_mask)
    runs = np.split(places, np.flatnonzero(np.diff(places) > 1) + 1)
    decoded = [
        tokenizer.decode(document.tokens[run].tolist(), skip_special_tokens=False) for run in runs
    ]
    return "|".join(decoded)


def test_an_answer_of_weight_0_carries_no_loss_and_is_no_last_one(chatml: ChatTemplate) -> None:
    records = [Chat("rows.jsonl, line 1", TURNS, without_loss=frozenset({1}))]
    (made,) = encode_records(records, OWN, chat_tokenizer(), CONFIG, lambda: chatml)
    assert learnt(made) == "Ciao<|im_end|>\n"
    records = [Chat("rows.jsonl, line 1", TURNS, without_loss=frozenset({3}))]
    (made,) = encode_records(records, LAST, chat_tokenizer(), CONFIG, lambda: chatml)
    assert learnt(made) == "Hello<|im_end|>\n"


def test_what_the_template_writes_nothing_of_is_told(chatml: ChatTemplate) -> None:
    named = [TURNS[0] | {"name": "Ann", "tool_calls": []}, TURNS[1]]
    made = encode(chatml, named)
    assert isinstance(made, Document)
    assert made.unread == ("name of a turn", "tool_calls of a turn")
    with_name = chatml._replace(
        render=lambda turns, _: "".join(turn.get("name", "") + turn["content"] for turn in turns)
    )
    made = encode(with_name, named)
    assert isinstance(made, Document)
    assert made.unread == ("tool_calls of a turn",)


def test_vicunas_answers_and_their_end_carry_loss() -> None:
    template = load_template(VICUNA, files_with(chat_tokenizer()))
    document = encode(template, TURNS, VICUNA)
    assert learnt(document) == " Hello</s>| Ciao</s>"
    assert isinstance(document, Document)
    whole = chat_tokenizer().decode(document.tokens.tolist(), skip_special_tokens=False)
    assert whole == "<s>" + FORMATS["vicuna_v1.1"].render(TURNS, False)


def slow_mask(tokens: list[int]) -> list[bool]:
    """Token by token: what follows the assistant's name is learnt, through the end of the turn."""
    opening = [IM_START, *chat_tokenizer().encode("assistant\n", add_special_tokens=False).ids]
    (newline,) = chat_tokenizer().encode("\n", add_special_tokens=False).ids
    mask, inside = [], False
    for place in range(len(tokens)):
        inside = inside or tokens[place - len(opening) : place] == opening
        mask.append(inside)
        if place and tokens[place - 1 : place + 1] == [IM_END, newline]:
            inside = False
    return mask


@given(
    st.lists(
        st.fixed_dictionaries(
            {
                "role": st.sampled_from(["system", "user", "assistant"]),
                "content": st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
            }
        ),
        max_size=6,
    )
)
def test_masks_are_those_of_a_walk_over_the_tokens(chatml: ChatTemplate, turns: list[Turn]) -> None:
    answer = {"role": "assistant", "content": "Hello"}
    document = encode(chatml, [TURNS[0], *turns, answer, *turns])
    assert isinstance(document, Document)
    assert document.loss_mask.tolist() == slow_mask(document.tokens.tolist())


# It leaves thoughts out of all turns but the last.
FORGETS = (
    "{% for turn in messages %}{{ turn.role }}:{% if loop.last %}(thought){% endif %}"
    "{{ turn.content }}\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)


# The first says how long the conversation is.
@pytest.mark.parametrize("template", ["{{ messages | length }}" + CHATML, FORGETS])
def test_templates_that_are_not_prefix_stable_stop_the_run(tmp_path: Path, template: str) -> None:
    loaded = load_template(OWN, open_target(write_tokenizer(tmp_path, template)))
    for settings, sentence in (
        (OWN, "turn 2 of 4, .* set data.train_turns=last"),
        (LAST, "turn 4 of 4, .*; use another template"),
    ):
        with pytest.raises(InputError, match=rf"is not prefix-stable: .*line 1, {sentence}"):
            encode(loaded, TURNS, settings)


def test_the_last_answer_alone_may_carry_loss_where_earlier_turns_are_rewritten(
    tmp_path: Path,
) -> None:
    template = FORGETS.replace("loop.last", "loop.last and turn.role == 'assistant'")
    loaded = load_template(OWN, open_target(write_tokenizer(tmp_path, template)))
    assert learnt(encode(loaded, [*TURNS, TURNS[0]], LAST)) == "(thought)Ciao\n"


def test_a_template_gets_its_arguments_and_may_refuse(tmp_path: Path) -> None:
    template = CHATML + "{{ 1 / 0 if refuse }}{{ raise_exception('no ' + why) if why }}"
    folder = write_tokenizer(tmp_path, template)
    half = [{"role": "\ud800", "content": "x"}]
    for arguments, turns, fault in (
        ({"refuse": True}, TURNS, "division"),
        ({"why": "tools"}, TURNS, "no tools"),
        ({}, [*half, *TURNS], "surrogates not allowed"),
    ):
        settings = data_settings(SOURCE, template_arguments=arguments)
        skip = encode(load_template(settings, open_target(folder)), turns)
        assert isinstance(skip, Skip)
        assert skip.reason == "the chat template refuses the turns"
        assert fault in skip.detail
    assert isinstance(encode(load_template(OWN, open_target(folder)), TURNS), Document)


def test_the_template_of_the_documentation_lets_every_answer_carry_loss(tmp_path: Path) -> None:
    (page,) = re.findall(r"```jinja\n(.*?)```", (ROOT / "docs" / "chat.md").read_text(), re.DOTALL)
    folder = tmp_path / "target"
    write_sentencepiece(folder)
    (folder / "chat_template.jinja").write_text(page)
    files = open_target(folder)
    tokenizer, template = files.tokenizer, load_template(OWN, files)
    said = ["Hello there", "2", "if x:\n    y", "Ciao."]
    turns = [turn | {"content": text} for turn, text in zip(TURNS, said, strict=True)]
    config = dataclasses.replace(CONFIG, vocab_size=tokenizer.get_vocab_size())
    records = [Chat("rows.jsonl, line 1", turns)]
    (document,) = encode_records(records, OWN, tokenizer, config, lambda: template)
    assert isinstance(document, Document)
    assert document.tokens[0] == tokenizer.token_to_id("<s>")
    assert list(document.tokens).count(1) == 1
    learnt = tokenizer.decode(
        document.tokens[document.loss_mask].tolist(), skip_special_tokens=False
    )
    assert learnt == "2</s>\nCiao.</s>\n"
