"""Folders to train with, and `python -m train` in this process."""

from pathlib import Path
from typing import Any

import pytest
from chat_folders import write_tokenizer
from tiny_folders import write_untrained_target
from train_runs import Start, run_train


@pytest.fixture(scope="session")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained target, its tokenizer and a text."""
    folder = tmp_path_factory.mktemp("target")
    write_untrained_target(folder, functions=400)
    return folder


@pytest.fixture(scope="session")
def chat_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tokenizer of a target that chats, without the target."""
    return write_tokenizer(tmp_path_factory.mktemp("chat_target"))


@pytest.fixture
def start(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Start:
    """`run_train`, which must end with this exit code; what it printed."""

    def run(values: dict[str, object], *words: str, code: object = 0) -> Any:
        ended = run_train(tmp_path, values, *words)
        said = capfd.readouterr()
        assert ended == code, said
        return said

    return run
