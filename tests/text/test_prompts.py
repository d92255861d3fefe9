"""Prompt files: what is read, and what is refused by file and line."""

import json
from pathlib import Path

import pytest
from tiny_folders import character_tokenizer, encode

from redrafter_jax.errors import InputError
from redrafter_jax.text.chat_template import NO_TEMPLATE, ChatTemplate
from redrafter_jax.text.prompts import (
    EncodedPrompts,
    Prompt,
    PromptEncoding,
    encode_later_turns,
    encode_prompts,
    read_prompts,
    tokenize_to_length,
)


def write(folder: Path, *lines: str) -> Path:
    path = folder / "prompts.jsonl"
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def test_a_prompt_may_stand_alone_and_is_then_named_by_its_line(tmp_path: Path) -> None:
    # Separators inside a string end no row.
    lines = '{"prompt": "def f("}', '{"prompt": "  two\\nlines\u2028\x85 "}'
    prompts = read_prompts(write(tmp_path, *lines))
    assert [prompt.name for prompt in prompts] == ["1", "2"]
    assert [prompt.text for prompt in prompts] == ["def f(", "  two\nlines\u2028\x85 "]


def test_of_a_spec_bench_row_every_turn_is_kept_unless_the_first_alone_is_asked_for(
    tmp_path: Path,
) -> None:
    row = {"question_id": 81, "category": "writing", "turns": ["Compose.", "Rewrite."]}
    path = write(tmp_path, json.dumps(row | {"reference": ["..."]}))
    (prompt,) = read_prompts(path)
    assert prompt == Prompt("81", ("Compose.", "Rewrite."), "writing", f"{path}, line 1", 0)
    assert prompt.text == "Compose."
    assert [prompt.turns for prompt in read_prompts(path, turns=1)] == [("Compose.",)]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("", "the row is empty"),
        ("{'prompt': 'x'}", "not valid JSON"),
        ('{"prompt": ' + "9" * 5000 + "}", "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ('["x"]', "must be a JSON object"),
        ('{"question_id": 1}', "holds neither"),
        ('{"prompt": "x", "turns": ["x"]}', "holds both"),
        ('{"prompt": ""}', "not empty"),
        ('{"prompt": 3}', "'prompt' is 3"),
        (r'{"prompt": "\ud800 a"}', r"'prompt' holds '\ud800' at character 0, a lone surrogate"),
        ('{"turns": "x"}', "at least one string"),
        ('{"turns": ["x", null]}', "'turns[1]' is None"),
        ('{"prompt": "x", "category": 3}', "'category' is 3"),
    ],
)
def test_a_malformed_row_is_named_by_file_line_and_reason(
    tmp_path: Path, line: str, reason: str
) -> None:
    path = write(tmp_path, '{"prompt": "good"}', line, '{"prompt": "good"}')
    with pytest.raises(InputError) as error:
        read_prompts(path)
    assert str(error.value).startswith(f"{path}, line 2: ")
    assert reason in str(error.value)


def test_a_file_that_is_missing_or_not_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="No such file"):
        read_prompts(tmp_path / "none.jsonl")
    (tmp_path / "binary.jsonl").write_bytes(b'{"prompt": "\xff"}')
    with pytest.raises(InputError, match="not UTF-8 text at byte 12"):
        read_prompts(tmp_path / "binary.jsonl")
    (tmp_path / "nothing.jsonl").write_bytes(b"")
    with pytest.raises(InputError, match=r"nothing.jsonl is empty; give one row per line"):
        read_prompts(tmp_path / "nothing.jsonl")


def test_a_count_takes_the_first_rows_and_never_fewer(tmp_path: Path) -> None:
    path = write(tmp_path, *(json.dumps({"prompt": letter}) for letter in "abc"))
    assert [prompt.text for prompt in read_prompts(path, 2)] == ["a", "b"]
    with pytest.raises(InputError, match=r"prompt_count is 4, but .* holds 3 prompts"):
        read_prompts(path, 4)


def prompt_of(*turns: str, number: int = 4) -> Prompt:
    return Prompt("1", turns, None, f"p.jsonl, line {number + 1}", number)


# Every turn is a line, and an answer begins with w.
LINES = ChatTemplate(
    "lines",
    lambda turns, asks: "".join(f"{turn['content']}\n" for turn in turns) + "w" * asks,
    adds_special_tokens=False,
    end="v",
)


def how(template: ChatTemplate, positions: int = 20) -> PromptEncoding:
    return PromptEncoding(
        template, character_tokenizer(), (7,), max_new_tokens=10, positions=positions
    )


def ask_with(template: ChatTemplate, *texts: str) -> EncodedPrompts:
    return encode_prompts(how(template), list(map(prompt_of, texts)))


def test_prompts_become_tokens_that_leave_room_and_are_never_cut() -> None:
    asked = ask_with(NO_TEMPLATE, "abc", "a" * 10)
    assert asked.rows == [encode("abc"), encode("a" * 10)]
    assert (asked.template, asked.stop_tokens) == ("none", (7,))
    with pytest.raises(InputError, match=r"line 5: the prompt has 11 tokens and max_new"):
        ask_with(NO_TEMPLATE, "a" * 11)
    with pytest.raises(InputError, match=r"line 5: .* no tokens"):
        ask_with(NO_TEMPLATE, "é")


def test_in_a_template_a_prompt_is_a_users_turn_and_the_answer_has_its_own_end() -> None:
    asked = ask_with(LINES, "abc", "de")
    assert asked.rows == [encode("abc\nw"), encode("de\nw")]
    assert (asked.template, asked.stop_tokens) == ("lines", (7, *encode("v")))
    with pytest.raises(InputError, match=r"has 11 tokens in the chat template and max_new"):
        ask_with(LINES, "a" * 9)


def test_a_later_turn_stands_behind_the_turns_and_answers_before_it() -> None:
    prompts = [prompt_of("a", "b", "c"), prompt_of("d", number=5), prompt_of("e", "f", number=6)]
    first = encode_prompts(how(LINES, positions=40), prompts)
    # v ends an answer, and so does token 7, which is h; a line break at an edge is left out.
    answers = [["klv", "\nmnhq"], ["ijij"]]
    wanted: list[list[str]] = []

    def answer(asked: EncodedPrompts) -> list[list[int]]:
        wanted.append([prompt.text for prompt in asked.prompts])
        return [encode(text) for text in answers[len(wanted) - 1]]

    asked = encode_later_turns(how(LINES, positions=40), first, answer)
    assert wanted == [["a", "e"], ["a"]]
    texts = ["a\nw", "d\nw", "e\nw", "a\nkl\nb\nw", "e\nmn\nf\nw", "a\nkl\nb\nijij\nc\nw"]
    assert asked.rows == [encode(text) for text in texts]
    assert asked.turns == [1, 1, 1, 2, 2, 3]
    assert [prompt.number for prompt in asked.prompts] == [4, 5, 6, 4, 6, 4]
    assert asked.stop_tokens == first.stop_tokens
    with pytest.raises(InputError, match=r"line 5, turn 2: the prompt has 16 tokens in the chat"):
        encode_later_turns(
            how(LINES), encode_prompts(how(LINES), prompts[:1]), lambda _: [encode("k" * 10)]
        )


def test_several_turns_need_a_chat_template() -> None:
    with pytest.raises(InputError, match=r"line 5: the row has 2 turns, .* or turns=1"):
        encode_prompts(how(NO_TEMPLATE), [prompt_of("a", "b")])


def test_longer_prompts_are_the_files_own_text_in_its_order() -> None:
    prompts = [prompt_of(text) for text in ("abc", "def\nabc", "w", "mnopqrstuvwa", "kk")]
    tokens = tokenize_to_length(prompts, character_tokenizer(), 3, 20)
    assert tokens == encode("mnopqrstuvwakkabcdef")
    assert tokenize_to_length(prompts, character_tokenizer(), 3, 2) == encode("mn")
    with pytest.raises(InputError, match="and later: the tokenizer finds no tokens in any prompt"):
        tokenize_to_length([prompt_of("XYZ")], character_tokenizer(), 0, 20)
