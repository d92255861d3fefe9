"""Sources become documents in literal tokens; lines of any content are documents or skips."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
from chat_folders import (
    BEGIN,
    CHATML,
    CONFIG,
    END,
    RECORDS,
    TURNS,
    VOCABULARY,
    chat_tokenizer,
    data_settings,
    files_with,
    write_lines,
    write_tokenizer,
)
from hypothesis import given
from hypothesis import strategies as st
from tiny_folders import byte_tokenizer

from redrafter_jax.errors import InputError
from redrafter_jax.files.target_files import open_target
from train.data.documents import SourceDocuments, encode_records, load_documents
from train.data.types import Document, Text


def load(target: Path, *sources: object, **changes: object) -> list[SourceDocuments]:
    files = files_with(chat_tokenizer(), target, CONFIG)
    return load_documents(data_settings(*sources, **changes), files)


def ids(text: str) -> list[int]:
    return chat_tokenizer().encode(text, add_special_tokens=False).ids


def test_a_text_is_opened_and_closed(chat_target: Path, tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("")
    path = write_lines(tmp_path / "a.jsonl", {"text": "ab"}, {"text": "c</s>"})
    folder, files = load(
        chat_target, {"folder": str(tmp_path), "include": ["*.txt"]}, {"files": [path]}
    )
    (empty,), (first, second) = folder.documents, files.documents
    assert (empty.place, empty.tokens.tolist()) == ("empty.txt", [BEGIN, END])
    assert first.tokens.tolist() == [BEGIN, *ids("ab"), END]
    assert first.loss_mask.tolist() == [False, True, True, True]
    # Closed already.
    assert second.tokens.tolist() == [BEGIN, *ids("c"), END]


def test_a_tokenizer_without_a_begin_token_has_texts_opened_by_the_end_token() -> None:
    texts, settings = [Text("a", "ab")], data_settings({"files": ["a"]})
    (document,) = encode_records(texts, settings, byte_tokenizer(), CONFIG, pytest.fail)
    assert isinstance(document, Document)
    assert document.tokens.tolist() == [END, *byte_tokenizer().encode("ab").ids, END]
    assert document.loss_mask.tolist() == [False, True, True, True]


def test_all_formats_may_stand_in_one_source(chat_target: Path, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", *RECORDS.values())
    (source,) = load(chat_target, {"files": [path], "weight": 2.5})
    assert (source.name, source.weight) == (f"data.sources.0 ({path})", 2.5)
    messages, conversations, alpaca, _, tokens = source.documents
    assert messages.tokens.tolist() == conversations.tokens.tolist()
    assert alpaca.tokens[alpaca.loss_mask].tolist() == ids("3<|im_end|>\n")
    assert tokens.tokens.tolist() == [1, 2, 3]
    assert tokens.loss_mask.tolist() == [False, True, True]


def test_more_records_than_are_encoded_at_a_time_keep_their_order(
    chat_target: Path, tmp_path: Path
) -> None:
    rows = [{"text": f"{n}"} if n % 3 else RECORDS["tokens"] for n in range(600)]
    path = write_lines(tmp_path / "a.jsonl", *rows[:300], {"text": ""}, *rows[300:])
    (source,) = load(chat_target, {"files": [path]})
    texts = [
        chat_tokenizer().decode(document.tokens.tolist()) if document.kind == "text" else "tokens"
        for document in source.documents
    ]
    assert texts == [row.get("text", "tokens") for row in rows]
    assert [(skip.place, skip.reason) for skip in source.skips] == [
        (f"{path}, line 301", "text is blank")
    ]


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        ([], r"data\.sources\.0 \(.*\) has nothing to train on: it has no records"),
        (
            [{"a": 1}, {"text": ""}, {"b": 1}],
            r"all 3 records are left out: 2 × unknown format \(first at .*line 1: none of the "
            r"keys .*\); 1 × text is blank \(first at .*line 2\)\.",
        ),
        ([{"input_ids": [1, 2], "loss_mask": [0, 0]}] * 2, "2 × no token carries loss"),
        (
            [{"input_ids": [1, 2], "loss_mask": [1, 1]}] * 3,
            "masks of all 3 records count every token, .* set full_masks: allow",
        ),
        (
            [RECORDS["text"], {"input_ids": [1, VOCABULARY], "loss_mask": [0, 1]}],
            r"line 2 holds token 260, which is outside the vocabulary of 260 tokens",
        ),
        ([{"input_ids": [-1, 10**30], "loss_mask": [0, 1]}], "line 1 holds token -1"),
    ],
)
def test_data_that_cannot_be_meant_stops_the_run(
    chat_target: Path, tmp_path: Path, rows: list[object], sentence: str
) -> None:
    path = write_lines(tmp_path / "a.jsonl", *rows)
    with pytest.raises(InputError, match=sentence):
        load(chat_target, {"files": [path]})


def test_full_masks_and_skips_are_allowed_or_refused(chat_target: Path, tmp_path: Path) -> None:
    full = {"input_ids": [1, 2], "loss_mask": [1, 1]}
    path = write_lines(tmp_path / "a.jsonl", full, {"text": 3}, [])
    files = {"files": [path], "full_masks": "allow"}
    (source,) = load(chat_target, files, skips="allow")
    assert (len(source.documents), len(source.skips)) == (1, 2)
    most = (
        r"2 of 3 records are left out, more than half: 1 × text is not a string \(first at .*line 2"
    )
    with pytest.raises(InputError, match=rf"{most}.*set data\.skips=allow"):
        load(chat_target, files)
    # Half is not more than half.
    half = write_lines(tmp_path / "half.jsonl", full, {"text": 3})
    load(chat_target, {"files": [half], "full_masks": "allow"})
    with pytest.raises(
        InputError, match=r"2 of 3 records cannot be used: 1 × text is not a string"
    ):
        load(chat_target, files, skips="refuse")
    # One mask that is not full is enough.
    load(chat_target, {"files": [write_lines(tmp_path / "b.jsonl", full, RECORDS["tokens"])]})


def test_an_answer_whose_first_token_joins_the_prompts_last_carries_no_loss(tmp_path: Path) -> None:
    # A byte tokenizer with one merge: "n" and "H" become one token, across the answer's boundary.
    glued = write_tokenizer(tmp_path / "glued", CHATML.replace("\n", "n"))
    written = json.loads((glued / "tokenizer.json").read_text())
    written["model"]["vocab"]["nH"] = VOCABULARY
    written["model"]["merges"] = [["n", "H"]]
    (glued / "tokenizer.json").write_text(json.dumps(written))
    path = write_lines(tmp_path / "a.jsonl", RECORDS["messages"])
    alone = write_lines(tmp_path / "alone.jsonl", {"messages": TURNS[:2]})
    config = dataclasses.replace(CONFIG, vocab_size=VOCABULARY + 1)
    (source,) = load_documents(
        data_settings({"files": [path, alone]}),
        files_with(open_target(glued).tokenizer, glued, config),
    )
    (document,), (skip,) = source.documents, source.skips
    assert (skip.place, skip.reason) == (f"{alone}, line 1", "no token carries loss")
    assert skip.detail == "a token spans the boundary of every answer"
    assert document.left_out == 1
    learnt = document.tokens[document.loss_mask].tolist()
    assert (
        open_target(glued).tokenizer.decode(learnt, skip_special_tokens=False) == "Ciao<|im_end|>n"
    )
    with pytest.raises(InputError, match=r"answers of 1 records carry no loss, .*line 1"):
        load_documents(
            data_settings({"files": [path]}, skips="refuse"),
            files_with(open_target(glued).tokenizer, glued, config),
        )


def test_texts_need_no_chat_template_and_conversations_do(tmp_path: Path) -> None:
    bare = write_tokenizer(tmp_path / "bare", template=None)
    text = write_lines(tmp_path / "a.jsonl", RECORDS["text"])
    chat = write_lines(tmp_path / "b.jsonl", RECORDS["messages"])
    load(bare, {"files": [text]})
    with pytest.raises(
        InputError, match=r"has no chat template; .*data\.chat_template=chatml or .*vicuna_v1"
    ):
        load(bare, {"files": [chat]})
    load(bare, {"files": [chat]}, chat_template="vicuna_v1.1")


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"eos_token_ids": ()}, "states no eos_token_id"),
        (
            {"max_position_embeddings": 63},
            "sequence_length is 64, but the target has 63 positions",
        ),
    ],
)
def test_a_target_that_does_not_fit_the_data_is_named(
    chat_target: Path, changes: dict[str, Any], sentence: str
) -> None:
    config = dataclasses.replace(CONFIG, **changes)
    files = files_with(chat_tokenizer(), chat_target, config)
    with pytest.raises(InputError, match=sentence):
        load_documents(data_settings({"files": ["a.jsonl"]}), files)


def test_a_tokenizer_may_have_more_tokens_than_its_target_but_no_record_one_of_them(
    chat_target: Path, tmp_path: Path
) -> None:
    # The last of 260 tokens, <|im_end|>, is here one that was added for padding.
    config = dataclasses.replace(CONFIG, vocab_size=VOCABULARY - 1)
    fine = write_lines(tmp_path / "fine.jsonl", RECORDS["text"], RECORDS["alpaca"])
    vicuna = {"chat_template": "vicuna_v1.1"}
    files = files_with(chat_tokenizer(), chat_target, config)
    load_documents(data_settings({"files": [fine]}, **vicuna), files)
    for row in (
        {"text": "a<|im_end|>"},
        {"messages": [TURNS[0], {"role": "assistant", "content": "b<|im_end|>"}]},
        {"input_ids": [1, VOCABULARY - 1], "loss_mask": [0, 1]},
    ):
        path = write_lines(tmp_path / "padded.jsonl", RECORDS["text"], row)
        told = r"padded.jsonl, line 2 holds token 259 \('<\|im_end\|>'\), which is outside .* 259"
        with pytest.raises(InputError, match=told):
            load_documents(data_settings({"files": [path]}, **vicuna), files)


HEALTHY = [json.dumps(row).encode() for row in RECORDS.values()]
# The keys of all formats and of their turns.
KEYS = st.sampled_from([
    "messages", "role", "content", "conversations", "from", "value",
    "instruction", "input", "output", "text", "input_ids", "loss_mask",
])  # fmt: skip
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters(exclude_categories=[]))  # halves of surrogate pairs too
    | st.sampled_from(["user", "assistant", "human", "gpt"]),
    lambda part: st.lists(part, max_size=3) | st.dictionaries(KEYS, part, max_size=3),
    max_leaves=12,
)
RECORDS_SPOILED = st.builds(
    lambda row, changes: json.dumps(row | changes).encode(),
    st.sampled_from(list(RECORDS.values())),
    st.dictionaries(KEYS, VALUES, min_size=1, max_size=2),
)
BYTES_SPOILED = st.builds(
    lambda line, place, junk: (line[:place] + junk + line[place + 1 :]).replace(b"\n", b" "),
    st.sampled_from(HEALTHY),
    st.integers(0, 80),
    st.binary(max_size=8),
)
LINES = st.lists(RECORDS_SPOILED | BYTES_SPOILED | st.just(b"[" * 50_000), min_size=1, max_size=4)


@given(LINES)
def test_spoiled_lines_are_counted_and_the_healthy_ones_kept(
    chat_target: Path, spoiled: list[bytes]
) -> None:
    path = chat_target / "rows.jsonl"
    path.write_bytes(b"\n".join([*HEALTHY, *spoiled, b""]))
    settings = data_settings({"files": [str(path)]}, chat_template="vicuna_v1.1")
    try:
        (source,) = load_documents(settings, files_with(chat_tokenizer(), chat_target, CONFIG))
    except InputError as error:
        # The one fault of a line that stops a run.
        if not re.search(rf"{path}, line \d+ holds token .* outside the vocabulary", str(error)):
            raise
        return
    assert len(source.documents) + len(source.skips) == len(HEALTHY) + len(spoiled)
    assert len(source.documents) >= len(HEALTHY)
    assert len({skip.place for skip in source.skips}) == len(source.skips)
