"""Chat templates behind a server: their arguments, and what their errors tell a client."""

from pathlib import Path
from typing import Any

from chat_folders import CHATML, chat_tokenizer, write_tokenizer
from fake_engine import FakeEngine
from servers import HTTP, serving

from redrafter_jax.files.target_files import open_target
from redrafter_jax.text.chat_template import find_template

TEMPLATE = (
    "{% if messages[0].content == 'no' %}{{ raise_exception('Not that.') }}{% endif %}"
    "{% if enable_thinking is defined and not enable_thinking %}quiet{% endif %}" + CHATML
)
QUIET = {"enable_thinking": False}


def ask(base: str, content: str = "Hi", **asked: Any) -> Any:
    turns = [{"role": "user", "content": content}]
    asked = {"model": "tiny", "messages": turns, "seed": 0, "max_tokens": 5} | asked
    return HTTP.post(f"{base}/v1/chat/completions", json=asked)


def test_arguments_of_a_request_are_the_templates_and_errors_hold_no_path(tmp_path: Path) -> None:
    own = write_tokenizer(tmp_path / "secret", TEMPLATE)
    files = open_target(own)
    template = find_template("tokenizer", files, "")
    (tmp_path / "file.jinja").write_text(TEMPLATE)
    file = find_template(str(tmp_path / "file.jinja"), files, "")
    for chosen in (template, file):
        with serving(FakeEngine(), tokenizer=chat_tokenizer(), template=chosen) as base:
            answers = [
                ask(base, chat_template_kwargs=given).json()["choices"][0]["message"]["content"]
                for given in ({}, QUIET, {"enable_thinking": True})
            ]
            # The engine answers with the prompt's own text.
            assert answers == ["user", "quiet", "user"]
            refused = [
                ask(base, "no"),
                ask(base, chat_template_kwargs={"enable_thinkin": False}),
                ask(base, chat_template_kwargs={"chat_template": "{{ 1 }}"}),
                ask(base, chat_template_kwargs={"messages": []}),
                ask(base, chat_template_kwargs=[]),
                ask(base, stop=["<|im_end|>x"]),
                HTTP.get(f"{base}/nothing"),
                ask(base, "long" * 1000),
            ]
        errors = [answer.json()["error"] for answer in refused]
        for answer, error in zip(refused, errors, strict=True):
            assert answer.status_code in (400, 404)
            assert str(tmp_path) not in answer.text
            assert "secret" not in error["message"]
        assert errors[0]["message"].endswith(" refuses the turns: Not that.")
        assert errors[1]["message"].endswith(
            "reads no argument 'enable_thinkin'; did you mean 'enable_thinking'?"
        )
        assert [error["param"] for error in errors[1:5]] == ["chat_template_kwargs"] * 4


def test_arguments_given_at_the_start_hold_unless_a_request_says_otherwise(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path, TEMPLATE)
    template = find_template("tokenizer", open_target(folder), "", QUIET)
    with serving(FakeEngine(), tokenizer=chat_tokenizer(), template=template) as base:
        contents = [
            ask(base, chat_template_kwargs=given).json()["choices"][0]["message"]["content"]
            for given in ({}, {"enable_thinking": True})
        ]
    assert contents == ["quiet", "user"]
