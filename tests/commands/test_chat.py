"""`python -m redrafter_jax chat`: turns in a pipe, each the target's own text."""

import io
import json
import os
import re
import signal
import sys
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from engine_runs import ROOM, WARM, decoded_alone
from tiny_folders import PairFolders, add_template, decode
from tiny_models import random_drafter

from redrafter_jax import RecurrentConfig, SamplingConfig, save_drafter
from redrafter_jax.commands import chat
from redrafter_jax.commands.terminal import Screen
from redrafter_jax.models.target import Target

pytestmark = pytest.mark.usefixtures("quick_compilation")

# Answers end before a newline, so that a conversation is its lines.
STOP = "\n"


@pytest.fixture(scope="module")
def folders(folders: PairFolders, tmp_path_factory: pytest.TempPathFactory) -> PairFolders:
    target = add_template(Path(folders.target), tmp_path_factory.mktemp("models"))
    return folders._replace(target=target)


def plain_answer(
    target: Target, *lines: str, sampling: SamplingConfig = WARM, seed: int = 3
) -> str:
    """The baseline's answer to the conversation, each turn a line, up to the end of the room."""
    prompt = "".join(f"{line}\n" for line in lines)
    tokens, _ = decoded_alone(target, prompt, ROOM, seed, sampling)
    return decode(tokens).partition(STOP)[0]


@pytest.fixture
def talk(run_redrafter: Any, folders: PairFolders, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Exit code, answers and messages of a conversation in a pipe; no answer counts as slow."""
    monkeypatch.setattr(chat, "baseline_seconds", lambda *_: 1e9)
    models = ["--target", folders.target, "--drafter", folders.drafter]
    warm = ["--temperature", "1", "--stop", STOP, "--seed", "3", "--context-length", str(ROOM)]

    def talk(typed: str, *more: str) -> tuple[int, list[str], list[str]]:
        monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
        code, out, err = run_redrafter("chat", *models, *warm, *more)
        return code, out.splitlines(), err.splitlines()[2:] if code == 0 else err.splitlines()

    return talk


COUNTS = (
    r"(\d+) tokens, [\d.]+ tokens/s, acceptance length ([\d.]+), \d+ target calls after prefill"
    r"(; a call takes .*)?"
)


def test_every_turn_in_a_pipe_is_the_text_of_the_whole_conversation(
    talk: Any, habitual_target: Target
) -> None:
    first = plain_answer(habitual_target, "abc")
    second = plain_answer(habitual_target, "abc", first, "def")
    assert first
    assert second
    # The last line needs no newline, and an empty one is no message.
    code, answers, told = talk("abc\n\n  \ndef", "-v")
    assert (code, answers) == (0, [first, second])
    assert [bool(re.fullmatch(COUNTS, line)) for line in told[:2]] == [True, True]
    # With the newline that ended it: prefill decided one token.
    assert int(told[0].split()[0]) == len(first) + 1


def test_shown_is_who_proposed_each_token_and_the_text_stays(
    talk: Any, habitual_target: Target
) -> None:
    # Adaptive decoding may leave the tree at any time, and then nothing has a colour.
    code, answers, told = talk("abc\n", "--show", "--color", "always", "--adaptive", "off")
    assert code == 0
    shown = "\n".join(answers)
    assert re.sub(r"\x1b\[\d+m", "", shown) == plain_answer(habitual_target, "abc")
    assert set(re.findall(r"\x1b\[(\d+)m", shown)) == {"36", "0"}
    assert told[0].startswith("Colours show who proposed a token: the target, ")
    code, _, told = talk("abc\n", "--show")
    assert (code, len(told)) == (2, 1)
    assert "give --color always, or leave --show out." in told[0]


def test_how_an_answer_was_decoded_is_told_where_it_was_slow(
    talk: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for baseline_seconds, told_lines in ((1e9, 0), (1e-9, 1)):
        monkeypatch.setattr(chat, "baseline_seconds", lambda *_, told=baseline_seconds: told)
        _, _, told = talk("/temperature 0\nuvw\n")
        counts = [line for line in told if re.fullmatch(COUNTS, line)]
        assert len(counts) == told_lines
    assert counts[0].endswith("; try --no-drafter, or another tree")


def test_commands_and_what_they_refuse_are_one_sentence_each(
    talk: Any, habitual_target: Target
) -> None:
    typed = "/temperature 0\n/temperature hot\n/temperature -1\n/what\n/reset 1\n/help\n"
    code, answers, told = talk(typed + "/quit\nnever answered\n")
    assert (code, answers) == (0, [])
    assert told[:5] == [
        "The temperature is 0.",
        "error: /temperature takes a number such as 0.7, but 'hot' was given; the temperature "
        "stays 0.",
        "error: /temperature is -1.0; it must be 0 or more; the temperature stays 0.",
        "error: /what is not a command; see /help, or begin the message with // if it starts with "
        "/.",
        "error: /reset takes no value, but '1' was given; see /help.",
    ]
    listed = [line.split()[0] for line in told[5:] if line.startswith("/")]
    assert listed == ["/system", "/temperature", "/retry", "/save", "/reset", "/help", "/quit"]
    # A reset forgets the turns, but not the system's.
    code, answers, told = talk("abc\n/reset\nabc\n", "--system", "sub")
    assert answers == [plain_answer(habitual_target, "sub", "abc")] * 2
    assert "The conversation is forgotten." in told


def test_the_system_turn_changes_and_the_conversation_stays(
    talk: Any, habitual_target: Target
) -> None:
    first = plain_answer(habitual_target, "abc")
    second = plain_answer(habitual_target, "sub", "abc", first, "def")
    third = plain_answer(habitual_target, "abc", first, "def", second, "g")
    typed = "abc\n/system\n/system sub\ndef\n/system\n/system -\ng\n"
    _, answers, told = talk(typed)
    assert answers == [first, second, third]
    assert [line for line in told if "system turn" in line] == [
        "The system turn: none",
        "The system turn is set.",
        "The system turn: sub",
        "There is no system turn.",
    ]
    # What was set outlives a reset.
    _, answers, _ = talk("/system sub\nabc\n/reset\nabc\n")
    assert answers == [plain_answer(habitual_target, "sub", "abc")] * 2


def test_a_retry_answers_the_last_message_with_the_next_seed(
    talk: Any, habitual_target: Target
) -> None:
    first = plain_answer(habitual_target, "abc")
    again = plain_answer(habitual_target, "abc", seed=4)
    after = plain_answer(habitual_target, "abc", again, "def", seed=4)
    assert first != again
    code, answers, told = talk("/retry\nabc\n/retry\ndef\n")
    assert (code, answers) == (0, [first, again, after])
    assert told[0] == "error: There is no answer to retry yet; send a message first."
    assert told[1] == "The seed is 4."
    _, answers, told = talk("/temperature 0\nabc\n/retry\n")
    assert answers[0] == answers[1]
    assert "The seed is 4; greedy answers do not change." in told


def test_a_conversation_is_saved_and_overwrites_nothing_but_itself(
    talk: Any, habitual_target: Target, tmp_path: Path
) -> None:
    first = plain_answer(habitual_target, "abc")
    path, other = tmp_path / "chat.jsonl", tmp_path / "other.jsonl"
    other.write_text("precious")
    saves = f"/save {path}\nabc\n/save {path}\n/save {other}\n/save\n/save {tmp_path}/no/a\n"
    _, _, told = talk(saves, "--system", "sub")
    first = plain_answer(habitual_target, "sub", "abc")
    turns = [("system", "sub"), ("user", "abc"), ("assistant", first)]
    messages = [{"role": role, "content": content} for role, content in turns]
    (line,) = path.read_text().splitlines()
    assert json.loads(line) == {"messages": messages}
    assert other.read_text() == "precious"
    assert [line for line in told if not line.startswith("The context")] == [
        f"Wrote {path}.",
        f"Wrote {path}.",
        f"error: {other} exists already; give /save another name.",
        "error: /save needs the name of a file to write; see /help.",
        f"error: Cannot write {tmp_path}/no/a: No such file or directory.",
    ]


def test_what_was_pasted_is_one_message_and_no_command(
    talk: Any, habitual_target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat, "read_messages", lambda: iter(["/quit\nabc", "//a"]))
    # The tokenizer knows no slash, and leaves it out.
    first = plain_answer(habitual_target, "quit", "abc")
    _, answers, _ = talk("")
    assert answers == [first, plain_answer(habitual_target, "quit", "abc", first, "a")]


def test_what_meets_the_end_of_the_room_or_its_limit_says_so(
    talk: Any, habitual_target: Target
) -> None:
    code, answers, told = talk("a" * 119 + "\nabc\n")
    assert (code, answers) == (0, [plain_answer(habitual_target, "abc")])
    assert told[0] == (
        "error: With this message the conversation has 120 tokens and leaves no room for an answer "
        "within --context-length 120; the message was not sent. Shorten it, or start over with "
        "/reset."
    )
    for message, more, sentence in (
        ("a" * 116, [], "The context of 120 tokens is full; /reset starts over."),
        ("abc", ["--max-new-tokens", "3"], "The answer was cut off at --max-new-tokens 3."),
    ):
        _, answers, told = talk(f"/temperature 0\n{message}\n", *more)
        assert (len(answers[0]), told[-1]) == (3, sentence)
    # The last token that is allowed completes a string that ends the answer.
    answer = answers[0]
    limit = ["--max-new-tokens", "3", "--stop", answer[2]]
    assert answer[2] not in answer[:2]
    _, answers, told = talk("/temperature 0\nabc\n", *limit)
    assert answers == [answer[:2]]
    assert not told[-1].startswith("The answer was cut off")


def test_a_bad_argument_is_one_sentence_before_anything_is_compiled(
    talk: Any, tmp_path: Path
) -> None:
    save_drafter(random_drafter(RecurrentConfig(9, 8, 16, 1)), tmp_path / "other")
    for more, reason in (
        (["--context-length", "513"], "must be from 3 to the target's 512 positions"),
        (["--system", os.fsdecode(b"\xff")], "a lone surrogate"),
        (["--drafter", str(tmp_path / "other")], "use a drafter trained for this target"),
    ):
        code, answers, told = talk("abc\n", *more)
        assert (code, answers, len(told)) == (2, [], 1)
        assert reason in told[0]


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_stops_an_answer_which_stays_in_the_conversation(
    talk: Any, monkeypatch: pytest.MonkeyPatch, habitual_target: Target
) -> None:
    whole = plain_answer(habitual_target, "uvw", sampling=SamplingConfig())
    write, pieces = Screen.write, count()

    def interrupt(screen: Screen, *arguments: Any) -> None:
        write(screen, *arguments)
        if next(pieces) == 3:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(Screen, "write", interrupt)
    _, (part, answer), told = talk("/temperature 0\nuvw\n/temperature 1\nabc\n", "-v")
    assert told[1].startswith("stopped; ")
    assert whole.startswith(part)
    assert 0 < len(part) < len(whole)
    assert answer == plain_answer(habitual_target, "uvw", part, "abc")
