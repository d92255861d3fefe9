"""The built-in chat formats, written out by hand as their models' authors publish them."""

import pytest

from redrafter_jax.text.chat_formats import FORMATS

SYSTEM = {"role": "system", "content": "Be brief."}
TURNS = [
    {"role": "user", "content": " Hi {x} "},
    {"role": "assistant", "content": "Yes"},
    {"role": "user", "content": "So?"},
]
WRITTEN = {
    "chatml": "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n Hi {x} <|im_end|>\n"
    "<|im_start|>assistant\nYes<|im_end|>\n<|im_start|>user\nSo?<|im_end|>\n"
    "<|im_start|>assistant\n",
    "gemma": "<bos><start_of_turn>user\nBe brief.\n\nHi {x}<end_of_turn>\n<start_of_turn>model\n"
    "Yes<end_of_turn>\n<start_of_turn>user\nSo?<end_of_turn>\n<start_of_turn>model\n",
    "llama2": "<s>[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\nHi {x} [/INST] Yes </s>"
    "<s>[INST] So? [/INST]",
    "llama3": "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nHi {x}<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\nYes<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nSo?<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n",
    "mistral": "<s>[INST] Be brief.\n\n Hi {x} [/INST] Yes</s>[INST] So?[/INST]",
    "mistral_v0.1": "<s>[INST] Be brief.\n\n Hi {x}  [/INST] Yes</s>[INST] So? [/INST]",
    "vicuna_v1.1": "Be brief. USER:  Hi {x}  ASSISTANT: Yes</s>USER: So? ASSISTANT:",
    "zephyr": "<|system|>\nBe brief.</s>\n<|user|>\n Hi {x} </s>\n<|assistant|>\nYes</s>\n"
    "<|user|>\nSo?</s>\n<|assistant|>\n",
}


@pytest.mark.parametrize("name", FORMATS)
def test_conversations_are_written_as_published(name: str) -> None:
    form = FORMATS[name]
    assert form.render([SYSTEM, *TURNS], True) == WRITTEN[name]
    # What stands before an answer stays as more turns follow, so that answers can be trained on.
    before, after = (
        form.render([SYSTEM, *TURNS[:1]], True),
        form.render([SYSTEM, *TURNS[:2]], False),
    )
    assert WRITTEN[name].startswith(after)
    assert after == f"{before}{form.gap}Yes{form.closing}"
    assert form.closing.strip() == form.tokens[-1]
    with pytest.raises(ValueError, match=r"has the role 'assistant', but .* must be 'user'"):
        form.render(TURNS[1:], True)
