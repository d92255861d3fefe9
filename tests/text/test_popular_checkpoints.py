"""Folders with the peculiarities of popular checkpoints, in small: transformers' ids and texts."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from chat_folders import CHATML, auto_tokenizer, write_sentencepiece
from tiny_folders import byte_tokenizer
from tokenizers import Tokenizer, processors

from redrafter_jax.errors import InputError
from redrafter_jax.files.target_files import open_target
from redrafter_jax.text.chat_template import (
    NoTemplateError,
    encode_turns,
    end_tokens,
    find_template,
    user_turn,
)

TURNS = [user_turn("Hi"), {"role": "assistant", "content": "Yes"}, user_turn("So?")]
CHATML_MARKS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
LLAMA_3 = (
    "{{ bos_token }}{% for turn in messages %}<|start_header_id|>{{ turn.role }}<|end_header_id|>"
    "\n\n{% if loop.first %}{{ date_string|default('26 Jul 2024') }} {% endif %}"
    "{{ turn.content | trim }}<|eot_id|>{% endfor %}{% if add_generation_prompt %}"
    "<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
QWEN_3 = CHATML.replace(
    "assistant\n{% endif %}",
    "assistant\n{% if enable_thinking is defined and enable_thinking is false %}"
    "<think>\n\n</think>\n\n{% endif %}{% endif %}",
)
DEEPSEEK = (
    "{{ bos_token }}{% for turn in messages %}{% if turn.role == 'user' %}<|User|>"
    "{{ turn.content }}{% else %}<|Assistant|>{{ turn.content.split('</think>')[-1] }}<|end|>"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|Assistant|><think>\n{% endif %}"
)
DEEPSEEK_MARKS = ("<|begin|>", "<|end|>", "<|User|>", "<|Assistant|>", "<think>", "</think>")
DEEPSEEK_ROLES = {"bos_token": "<|begin|>", "eos_token": "<|end|>", "legacy": True}
MISTRAL = (
    "{{ bos_token }}{% for turn in messages %}{% if turn.role == 'user' %}[INST] {{ turn.content }}"
    "[/INST]{% elif turn.role == 'assistant' %} {{ turn.content }}{{ eos_token }}{% else %}"
    "{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}"
)
ZEPHYR = (
    "{% for turn in messages %}<|{{ turn.role }}|>\n{{ turn.content }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


class Checkpoint(NamedTuple):
    """What stands beside a byte-level `tokenizer.json`, which knows none of the marks."""

    model_type: str
    tokenizer_class: str | None
    marks: tuple[str, ...]
    template: Any
    roles: dict[str, Any]
    thinks: bool = False


QWEN = {"bos_token": None, "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
CHECKPOINTS = {
    "Llama 3.1 Instruct": Checkpoint(
        "llama",
        "PreTrainedTokenizerFast",
        ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        LLAMA_3,
        {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"},
    ),
    "Qwen2.5 Instruct": Checkpoint("qwen2", "Qwen2Tokenizer", CHATML_MARKS, CHATML, QWEN),
    "Qwen3": Checkpoint(
        "qwen3", "Qwen2Tokenizer", (*CHATML_MARKS, "<think>", "</think>"), QWEN_3, QWEN, thinks=True
    ),
    "SmolLM2 Instruct": Checkpoint(
        "llama",
        "GPT2Tokenizer",
        CHATML_MARKS,
        CHATML,
        {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "unk_token": "<|endoftext|>"},
    ),
    # A class that would split at spaces of SentencePiece, of which there are none.
    "DeepSeek-R1-Distill-Qwen": Checkpoint(
        "qwen2", "LlamaTokenizerFast", DEEPSEEK_MARKS, DEEPSEEK, DEEPSEEK_ROLES, thinks=True
    ),
    "DeepSeek-R1-Distill-Llama": Checkpoint(
        "llama", "LlamaTokenizerFast", DEEPSEEK_MARKS, DEEPSEEK, DEEPSEEK_ROLES, thinks=True
    ),
    # Several templates, of which the default is meant.
    "Hermes 3": Checkpoint(
        "llama",
        "PreTrainedTokenizerFast",
        CHATML_MARKS,
        [{"name": "default", "template": CHATML}, {"name": "tool_use", "template": "x"}],
        {"eos_token": "<|im_end|>"},
    ),
    "no class": Checkpoint("llama", None, CHATML_MARKS, CHATML, {"eos_token": "<|im_end|>"}),
}


def read_tokenizer(folder: Path) -> Tokenizer:
    return open_target(folder).tokenizer


def write_checkpoint(folder: Path, one: Checkpoint) -> Path:
    tokenizer = byte_tokenizer()
    if "bos_token" in one.roles and one.roles["bos_token"] == "<|begin_of_text|>":
        tokenizer.add_special_tokens(["<|begin_of_text|>"])
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<|begin_of_text|> $A", special_tokens=[("<|begin_of_text|>", 256)]
        )
    tokenizer.save(str(folder / "tokenizer.json"))
    added = {
        str(256 + place): {"content": mark, "normalized": False, "special": "think>" not in mark}
        for place, mark in enumerate(one.marks)
    }
    own = {"added_tokens_decoder": added, "chat_template": one.template, **one.roles}
    settings = own | ({"tokenizer_class": one.tokenizer_class} if one.tokenizer_class else {})
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text(json.dumps({"model_type": one.model_type}))
    return folder


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_ids_and_texts_of_byte_level_tokenizers(tmp_path: Path, name: str) -> None:
    one = CHECKPOINTS[name]
    folder = write_checkpoint(tmp_path, one)
    tokenizer, theirs = read_tokenizer(folder), auto_tokenizer(folder)
    template = find_template("tokenizer", open_target(folder), "")
    ids = encode_turns(template, tokenizer, TURNS)
    assert ids == theirs.apply_chat_template(TURNS, add_generation_prompt=True, return_dict=False)
    # Marks are tokens of their own, and there is one that opens a text at most.
    text = tokenizer.decode(ids, skip_special_tokens=False)
    written = [mark for mark in one.marks if mark in text]
    assert len(written) > 1
    for mark in written:
        assert ids.count(256 + one.marks.index(mark)) == text.count(mark)
    opening = one.roles.get("bos_token")
    if opening is not None and opening != "<|im_start|>":
        assert text.count(opening) == 1
    # What is plain text comes back, and answers end.
    plain = "Hello  w\u00f6rld's 123\n\n x"
    assert tokenizer.decode(tokenizer.encode(plain, add_special_tokens=False).ids) == plain
    ends = end_tokens(template, tokenizer, (), [TURNS[:1]])
    assert [tokenizer.id_to_token(end) for end in ends] == [one.roles["eos_token"]]
    assert template.thinks is one.thinks


SENTENCEPIECE = {
    "Mistral 7B v0.1": ("mistral", {"chat_template": MISTRAL, "legacy": False}),
    "TinyLlama Chat": ("llama", {"chat_template": ZEPHYR, "legacy": False}),
    "Llama 2 Chat": ("llama", {"chat_template": MISTRAL, "legacy": True}),
}


@pytest.mark.parametrize("name", SENTENCEPIECE)
def test_ids_and_texts_of_sentencepieces_tokenizers(tmp_path: Path, name: str) -> None:
    model_type, changes = SENTENCEPIECE[name]
    folder = tmp_path / "target"
    write_sentencepiece(folder)
    settings = folder / "tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | changes))
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    tokenizer = read_tokenizer(folder)
    template = find_template("tokenizer", open_target(folder), "")
    ids = encode_turns(template, tokenizer, TURNS)
    assert ids == auto_tokenizer(folder).apply_chat_template(
        TURNS, add_generation_prompt=True, return_dict=False
    )
    assert ids.count(1) == (0 if name == "TinyLlama Chat" else 1)
    assert 2 in ids, "an answer's end is one token"
    assert end_tokens(template, tokenizer, (), [TURNS[:1]]) == (2,)
    if changes["chat_template"] is MISTRAL:
        with pytest.raises(InputError, match="refuses the turns: Only user and assistant roles"):
            encode_turns(template, tokenizer, [{"role": "system", "content": "x"}])


def test_vicuna_brings_no_template_and_a_built_in_is_offered(tmp_path: Path) -> None:
    folder = tmp_path / "vicuna"
    write_sentencepiece(folder)
    tokenizer = read_tokenizer(folder)
    with pytest.raises(NoTemplateError, match=r"chat_template=llama2 or .*vicuna_v1\.1 or zephyr"):
        find_template("tokenizer", open_target(folder), "chat_template=")
    template = find_template("vicuna_v1.1", open_target(folder), "")
    ids = encode_turns(template, tokenizer, TURNS)
    assert (ids[0], ids.count(1), ids.count(2)) == (1, 1, 1)
    assert tokenizer.decode(ids).endswith("USER: Hi ASSISTANT: YesUSER: So? ASSISTANT:")


def test_a_class_that_is_not_the_vocabularys_is_one_sentence(tmp_path: Path) -> None:
    one = Checkpoint("gemma3_text", "GemmaTokenizer", ("<bos>",), CHATML, {"bos_token": "<bos>"})
    folder = write_checkpoint(tmp_path, one)
    with pytest.raises(InputError, match="as a GemmaTokenizer, which cannot tokenize a text"):
        read_tokenizer(folder)
