"""Conversations as text."""

import json
from pathlib import Path
from typing import Any

import pytest
from chat_folders import (
    BEGIN,
    CHATML,
    END,
    IM_END,
    IM_START,
    TURNS,
    chat_tokenizer,
    files_with,
    write_tokenizer,
)
from tiny_folders import byte_tokenizer

from redrafter_jax.engine.requests import token_lists
from redrafter_jax.errors import InputError
from redrafter_jax.text.chat_formats import FORMATS
from redrafter_jax.text.chat_template import (
    NO_TEMPLATE,
    ChatTemplate,
    Turn,
    encode_turns,
    end_tokens,
    find_template,
)


def load(target: Path, name: Any = "tokenizer", **options: Any) -> Any:
    files = files_with(chat_tokenizer(), target)
    return find_template(name, files, "--chat-template ", **options)


def test_vicuna_is_written_as_published() -> None:
    assert FORMATS["vicuna_v1.1"].render(TURNS, False) == (
        "A chat between a curious user and an artificial intelligence assistant. The assistant "
        "gives helpful, detailed, and polite answers to the user's questions. USER: Hi ASSISTANT: "
        "Hello</s>USER: Bye ASSISTANT: Ciao</s>"
    )
    system = {"role": "system", "content": "Be brief."}
    assert (
        FORMATS["vicuna_v1.1"].render([system, *TURNS[:1]], True) == "Be brief. USER: Hi ASSISTANT:"
    )
    # An answer begins after a space and ends with its token.
    template = load(Path("any"), "vicuna_v1.1")
    assert (template.gap, template.end, template.adds_special_tokens) == (" ", "</s>", True)


def test_the_tokenizers_own_template_gets_its_arguments(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path, "{{ mood }}" + CHATML)
    template = load(folder, arguments={"mood": "calm"})
    assert template.render(TURNS[:1], True) == (
        "calm<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert (template.gap, template.end, template.adds_special_tokens) == ("", "</s>", False)
    assert template.name == "the target's tokenizer"


def test_a_template_is_taken_where_the_tokenizer_brings_one(tmp_path: Path) -> None:
    own = write_tokenizer(tmp_path / "own")
    assert load(own, None).name == "the target's tokenizer"
    assert load(own, "none") is NO_TEMPLATE
    assert load(own, "vicuna_v1.1").end == "</s>"
    without = write_tokenizer(tmp_path / "without", template=None)
    assert load(without, None) is NO_TEMPLATE
    # A file of its own, as newer tokenizers are saved; nothing at all; and what is damaged.
    (without / "chat_template.jinja").write_text(CHATML)
    assert load(without, None) is not NO_TEMPLATE
    assert load(tmp_path, None) is NO_TEMPLATE
    settings = own / "tokenizer_config.json"
    settings.write_text(settings.read_text()[:-1])
    with pytest.raises(InputError, match="transformers cannot load the tokenizer"):
        load(own, None)


def test_what_transformers_makes_of_turns_is_a_prompt(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    folder = write_tokenizer(tmp_path)
    tokenizer: Any = AutoTokenizer.from_pretrained(str(folder))
    expected, longer = (
        encode_turns(load(folder), chat_tokenizer(), turns) for turns in (TURNS[:1], TURNS[:3])
    )
    for options in ({}, {"return_tensors": "np"}, {"return_dict": False}):
        made = tokenizer.apply_chat_template(TURNS[:1], add_generation_prompt=True, **options)
        assert token_lists([made]) == [expected]
        if options != {"return_dict": False}:  # a list of numbers could be many prompts
            assert token_lists(made) == [expected]
    several = tokenizer.apply_chat_template([TURNS[:1], TURNS[:3]], add_generation_prompt=True)
    assert token_lists(several) == [expected, longer]
    tokenizer.pad_token = tokenizer.eos_token
    padded = tokenizer(["ab", "c"], padding=True, padding_side="left", return_tensors="np")
    with pytest.raises(InputError, match="is padded"):
        token_lists(padded)


def test_a_missing_template_or_token_is_named_with_the_way_out(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path, None)
    sentence = (
        r"no chat template; save one beside it as chat_template\.jinja, or give a file with "
        r"--chat-template FILE, or a built-in with --chat-template chatml or llama2 or "
        r"mistral_v0\.1 or vicuna_v1\.1 or zephyr\.$"
    )
    with pytest.raises(InputError, match=sentence):  # those whose tokens the tokenizer has
        load(folder)
    with pytest.raises(InputError, match="needs the token '</s>', but the tokenizer of x has no"):
        find_template("vicuna_v1.1", files_with(byte_tokenizer()), "--chat-template ")
    with pytest.raises(InputError, match=r"give a file with --chat-template FILE\.$"):
        find_template("tokenizer", files_with(byte_tokenizer(), folder), "--chat-template ")
    with pytest.raises(
        InputError, match=r"^--chat-template vicunna names no chat template; .*chatml"
    ):
        load(folder, "vicunna")


def test_code_that_comes_with_a_tokenizer_is_never_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tokenizer(tmp_path)
    stated = json.loads((tmp_path / "tokenizer_config.json").read_text())
    stated |= {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": [None, "own.Own"]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(stated))
    (tmp_path / "own.py").write_text("raise SystemExit('it ran')\n")
    # The first message of a conversation in a pipe is no consent.
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    with pytest.raises(InputError, match="transformers cannot load the tokenizer"):
        load(tmp_path)


def test_special_tokens_are_the_templates_or_else_the_tokenizers(tmp_path: Path) -> None:
    chatml, vicuna = load(write_tokenizer(tmp_path)), load(Path("any"), "vicuna_v1.1")
    first = [encode_turns(one, chat_tokenizer(), TURNS[:1])[0] for one in (chatml, vicuna)]
    assert first == [IM_START, BEGIN]


def test_turns_that_a_template_refuses_are_one_sentence(tmp_path: Path) -> None:
    refusing = load(write_tokenizer(tmp_path, "{{ raise_exception('no system\\nturn') }}"))
    with pytest.raises(InputError, match=r"^The chat template of .* refuses the turns: no system"):
        encode_turns(refusing, chat_tokenizer(), TURNS)
    with pytest.raises(InputError, match="but the next role must be 'user'"):
        encode_turns(load(Path("x"), "vicuna_v1.1"), chat_tokenizer(), TURNS[1:])


def test_answers_end_where_target_tokenizer_and_template_say(tmp_path: Path) -> None:
    vicuna = load(Path("any"), "vicuna_v1.1")
    assert end_tokens(vicuna, chat_tokenizer(), (END, 7), [TURNS[:1]]) == (END, 7)
    assert end_tokens(vicuna._replace(end=None), chat_tokenizer(), (7,), []) == (7,)
    own = load(write_tokenizer(tmp_path))
    # The tokenizer's eos_token is another than the one that ChatML ends a turn with.
    assert end_tokens(own, chat_tokenizer(), (7,), [TURNS[:1]]) == (7, END, IM_END)

    def render(turns: list[Turn], asks: bool) -> str:
        if turns[0]["content"] == "silence":
            return "<|im_start|>"
        if turns[0]["role"] == "system":
            raise ValueError("no system turn")
        return "".join(f"{turn['content']}\n" for turn in turns) + "<|im_end|>" * len(turns[:-2])

    written = ChatTemplate("written", render, False)
    silent, refused = [{"role": "user", "content": "silence"}], [{"role": "system", "content": ""}]
    assert end_tokens(written, chat_tokenizer(), (), [silent, refused, TURNS[:3]]) == (IM_END,)
    # The first that is written says it: here an answer ends with no special token.
    assert end_tokens(written, chat_tokenizer(), (), [TURNS[:1], TURNS[:3]]) == ()
