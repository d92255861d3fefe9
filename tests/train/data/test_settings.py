"""A source is of one kind and states what belongs to it."""

from typing import Any

import pytest

from train.data.settings import DataSettings

VICUNA = {"chat_template": "vicuna_v1.1", "template_arguments": {"enable_thinking": False}}


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ({}, "a source needs one of folder, files and hub"),
        ({"folder": ".", "hub": "a/b"}, "this one folder and hub"),
        ({"files": ["a"], "held_out": ["b"]}, "held_out belongs to folder, not files"),
        ({"folder": ".", "format": "text"}, "format belongs to files or hub, not folder"),
        ({"folder": ".", "include": ["."]}, r"'\.' is no glob below the folder"),
        ({"folder": ".", "held_out": ["/etc/*.py"]}, r"'/etc/\*\.py' is no glob below the folder"),
        ({"folder": ".", "exclude": ["a**/b.py"]}, r"has '\*\*' beside other letters"),
    ],
)
def test_sources_that_contradict_themselves_are_refused(
    source: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence):
        DataSettings.model_validate({"sources": [source], "sequence_length": 8})


def test_arguments_that_no_template_reads_are_refused() -> None:
    with pytest.raises(ValueError, match="template_arguments are for the tokenizer's template"):
        DataSettings.model_validate({"sources": [{"folder": "a"}], "sequence_length": 8} | VICUNA)


def test_settings_can_be_read_back_as_they_are_printed() -> None:
    for source in ({"folder": "a"}, {"files": ["a"]}, {"hub": "a/b", "split": "test"}):
        data = DataSettings.model_validate({"sources": [source], "sequence_length": 8})
        assert DataSettings.model_validate(data.model_dump(mode="json")) == data
