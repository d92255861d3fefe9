"""The user's turns: where a template has them, and which of them are none."""

from collections.abc import Callable
from pathlib import Path

import pytest
import regenerated
from chat_folders import CONFIG, END, IM_END, SPECIAL, VOCABULARY, chat_tokenizer

from redrafter_jax.text.chat_formats import FORMATS
from redrafter_jax.text.chat_template import ChatTemplate, Turn
from train.config import RegenerateSettings
from train.regenerate.conversations import Conversation, Exchange, Row, TurnEncoder
from train.regenerate.questions import (
    UserTurn,
    chat_writer,
    drop_repeated,
    find_user_turn,
    read_question,
)

TOKENIZER = chat_tokenizer()


def llama_2(turns: list[Turn], asks: bool) -> str:
    """`[INST]` is plain text."""
    user, *rest = turns
    return f"<s>[INST] {user['content']} [/INST]" + "".join(turn["content"] for turn in rest)


def shouting(turns: list[Turn], asks: bool) -> str:
    """What the template writes before the words depends on them."""
    return f"<|im_start|>{len(turns[-1]['content'])}\n{turns[-1]['content']}<|im_end|>"


def chatml(turns: list[Turn], asks: bool) -> str:
    said = "".join(f"<|im_start|>{t['role']}\n{t['content']}<|im_end|>\n" for t in turns)
    return "<s>" + said + "<|im_start|>assistant\n" * asks


def strict(turns: list[Turn], asks: bool) -> str:
    raise ValueError("no turns are good enough")


def as_template(render: Callable[[list[Turn], bool], str]) -> ChatTemplate:
    return ChatTemplate("a test", render, adds_special_tokens=False)


@pytest.mark.parametrize(
    ("render", "expected"),
    [
        (chatml, UserTurn("<s><|im_start|>user\n", "<|im_end|>", IM_END, SPECIAL)),
        (llama_2, UserTurn("<s>[INST]", "[/INST]", None, (*SPECIAL, "[INST]"), " ")),
        (
            FORMATS["vicuna_v1.1"].render,
            UserTurn(
                "A chat between a curious user and an artificial intelligence assistant. The "
                "assistant gives helpful, detailed, and polite answers to the user's questions. "
                "USER:",
                "ASSISTANT:",
                None,
                (*SPECIAL, "USER:"),
                " ",
            ),
        ),
        (shouting, None),
        (strict, None),
        (lambda turns, asks: turns[-1]["content"] + "\n", None),
        (lambda turns, asks: "Q: " + turns[-1]["content"] + "\n", None),
        (lambda turns, asks: "Q: " + turns[-1]["content"].upper() + "\nA:", None),
    ],
)
def test_the_users_words_are_found_by_rendering(
    render: Callable[[list[Turn], bool], str], expected: UserTurn | None
) -> None:
    assert find_user_turn(as_template(render), TOKENIZER) == expected


def test_later_turns_are_asked_for_after_the_history() -> None:
    history = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
    turn = find_user_turn(as_template(chatml), TOKENIZER, history)
    assert turn is not None
    assert turn.opening == (
        "<s><|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHo<|im_end|>\n<|im_start|>user\n"
    )


TOKEN = UserTurn("<|im_start|>user\n", "<|im_end|>", IM_END, SPECIAL)
WORD = UserTurn("USER:", "ASSISTANT:", None, (*SPECIAL, "USER:"))


@pytest.mark.parametrize(
    ("turn", "written", "words", "fault"),
    [
        (TOKEN, " Why is it so? <|im_end|>", "Why is it so?", None),
        (TOKEN, "Why is it so?", "Why is it so?", "a question without an end"),
        (TOKEN, "<|im_end|>", "", "an empty or short question"),
        (TOKEN, " Hm?\n<|im_end|>", "Hm?", "an empty or short question"),
        (TOKEN, "Why?? <s><|im_end|>", "Why?? <s>", "a question with a marker of the template"),
        (TOKEN, "Say USER: now<|im_end|>", "Say USER: now", None),
        # Of a token for each letter: 15, and 16 of which all 4-grams are one,
        (TOKEN, "a" * 15 + "<|im_end|>", "a" * 15, None),
        (TOKEN, "a" * 16 + "<|im_end|>", "a" * 16, "a question that repeats itself"),
        # and 17 4-grams of which 9 and 8 are distinct.
        (TOKEN, "abcdefghiabcdefghiab<|im_end|>", "abcdefghiabcdefghiab", None),
        (
            TOKEN,
            "abcdefghabcdefghabcd<|im_end|>",
            "abcdefghabcdefghabcd",
            "a question that repeats itself",
        ),
        (WORD, " Why is it so? ASSISTANT: Well", "Why is it so?", None),
        (WORD, " Why is it so?</s>", "Why is it so?", None),
        (WORD, " Why is it so?", "Why is it so?", "a question without an end"),
        (WORD, "Why? USER: ASSISTANT:", "Why? USER:", "a question with a marker of the template"),
        # Behind an opening, which alone is no question.
        ((TOKEN, "Write a poem"), "<|im_end|>", "Write a poem", "an empty or short question"),
        ((TOKEN, "Write a poem"), " on me.<|im_end|>", "Write a poem on me.", None),
    ],
)
def test_questions_that_are_none_are_left_out(
    turn: UserTurn | tuple[UserTurn, str], written: str, words: str, fault: str | None
) -> None:
    turn, begun = (turn, "") if isinstance(turn, UserTurn) else turn
    encoder = TurnEncoder(TOKENIZER, as_template(chatml), (IM_END, END), 64, VOCABULARY)
    tokens = TOKENIZER.encode(written, add_special_tokens=False).ids
    assert read_question(tokens, encoder, turn, begun) == (words, fault)


@pytest.mark.parametrize(
    ("render", "opening"), [(chatml, "<s><|im_start|>user\nWhy"), (llama_2, "<s>[INST] Why")]
)
def test_an_opening_stands_where_the_template_has_the_users_words(
    render: Callable[[list[Turn], bool], str], opening: str
) -> None:
    values = {"prompts": "self", "count": 1, "data": {"sequence_length": 64}}
    settings = RegenerateSettings.model_validate(
        regenerated.settings(Path("x"), Path("y"), **values, user_openings=["Why"])
    )
    writer = chat_writer(TOKENIZER, as_template(render), CONFIG, set(), settings)
    request = next(writer.write(0))
    assert request.prompt == TOKENIZER.encode(opening, add_special_tokens=False).ids


def test_a_question_that_was_asked_before_ends_the_conversation() -> None:
    row = [Row([1], [1], 1, 0)]
    asked = {"Old?"}
    conversation = Conversation(
        [Exchange("New?", row), Exchange("Old?", row), Exchange("Newer?", row)], None
    )
    assert drop_repeated(conversation, asked) == (
        conversation.exchanges[:1],
        "a question that was asked before",
    )
    assert asked == {"Old?", "New?"}
    twice = Conversation([Exchange("A?", row), Exchange("A?", row)], None)
    assert drop_repeated(twice, asked) == (twice.exchanges[:1], "a question that was asked before")
    # The question of an answer that was left out may be asked again.
    unanswered = Conversation([Exchange("B?", None)], "why")
    assert drop_repeated(unanswered, asked) == ([], "why")
    assert "B?" not in asked
