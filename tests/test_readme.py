"""README's blocks of code, as they stand: a first reader copies them."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from needs import fetched
from places import ROOT
from servers import HTTP, serving_process

from redrafter_jax.commands.parser import read_arguments
from redrafter_jax.files.real_models import SMOLLM2

TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
COMMANDS = [
    line.partition("#")[0].strip()
    for language, block in BLOCKS
    if language == "bash"
    for line in block.splitlines()
]
# The folder of the programs that this environment has installed, `redrafter` among them.
ENVIRONMENT = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}


def test_it_is_short() -> None:
    assert len(TEXT.splitlines()) <= 100


def test_its_links_lead_to_files_of_the_repository() -> None:
    links = re.findall(r"\]\((?!http)([^)#]+)", TEXT)
    assert len(links) > 10
    assert [link for link in links if not (ROOT / link).exists()] == []


@pytest.mark.parametrize("command", [one for one in COMMANDS if one.startswith("redrafter")])
def test_its_commands_are_words_that_the_program_takes(command: str) -> None:
    words = shlex.split(command)[1:]
    if words[0] in ("chat", "serve") and "--target" not in words:
        words += ["--target", "any"]  # else it is looked for on this machine
    assert read_arguments(words).command == words[0]


def test_what_is_not_a_command_of_ours_is_the_installation() -> None:
    assert [one for one in COMMANDS if not one.startswith("redrafter")] == [
        "pip install '.[serve]'",
        "pip install '.[serve,train]'",
    ]


@pytest.mark.long
def test_its_python_tells_the_targets_own_text() -> None:
    fetched(SMOLLM2)
    (code,) = [block for language, block in BLOCKS if language == "python"]
    ended = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    told = re.search(r"([\d.]+) tokens per target call\n$", ended.stdout)
    assert told is not None
    # How much more depends on the machine: while a tree does not pay, nothing is drafted.
    assert float(told[1]) >= 1.0


@pytest.mark.long
def test_its_chat_answers() -> None:
    fetched(SMOLLM2)
    (command,) = [one for one in COMMANDS if " chat " in one and "--target" not in one]
    ended = subprocess.run(
        shlex.split(command),
        cwd=ROOT,
        env=ENVIRONMENT,
        input="What is the capital of France?\n",
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert "Paris" in ended.stdout


@pytest.mark.long
def test_its_server_begins_to_answer() -> None:
    fetched(SMOLLM2)
    (command,) = [one for one in COMMANDS if " serve " in one]
    # On a free port, for another server may have the one that it would take.
    with serving_process(*shlex.split(command)[2:]) as (base, _):
        assert HTTP.get(f"{base}/v1/models").json()["data"][0]["chat"]
