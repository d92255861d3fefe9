"""A source is of one kind and states what belongs to it."""

from typing import Any

import pytest

from train.data.settings import DataSettings, SourceSettings


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({}, "a source needs one of folder, files and hub"),
        ({"folder": ".", "hub": "a/b"}, "this one folder and hub"),
        ({"files": []}, "at least 1 item"),
        ({"files": ["a"], "held_out": ["b"]}, "held_out belongs to folder, not files"),
        ({"files": ["a"], "split": "test"}, "split belongs to hub, not files"),
        ({"folder": ".", "format": "text"}, "format belongs to files or hub, not folder"),
        ({"hub": "a/b", "weight": 0}, "greater than or equal to 0.0001"),
        ({"hub": "a/b", "format": "csv"}, "'messages', 'conversations', 'alpaca', 'text' or"),
    ],
)
def test_sources_that_contradict_themselves_are_refused(
    values: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence):
        SourceSettings.model_validate(values)


def test_settings_can_be_read_back_as_they_are_printed() -> None:
    for source in ({"folder": "a"}, {"files": ["a"]}, {"hub": "a/b", "split": "test"}):
        data = DataSettings.model_validate({"sources": [source], "sequence_length": 8})
        assert DataSettings.model_validate(data.model_dump(mode="json")) == data


def test_arguments_that_no_template_reads_are_refused() -> None:
    values = {
        "sources": [{"folder": "a"}],
        "sequence_length": 8,
        "chat_template": "vicuna_v1.1",
        "template_arguments": {"enable_thinking": False},
    }
    with pytest.raises(ValueError, match="template_arguments are for the tokenizer's template"):
        DataSettings.model_validate(values)
