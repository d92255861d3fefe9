"""`python -m redrafter_jax generate`: the text as it is decided, errors as sentences."""

import io
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from engine_runs import WARM, decoded_alone
from tiny_folders import PairFolders, add_template, character_tokenizer, decode, run_module
from tokenizers import AddedToken

from redrafter_jax import SamplingConfig
from redrafter_jax.commands import options
from redrafter_jax.models.target import Target

pytestmark = pytest.mark.usefixtures("quick_compilation")

PROMPT = "abc\ndef"
# As many as test_chat.py has room for, so that both compile the same programs.
NEW_TOKENS = 100
GREEDY = SamplingConfig()


def arguments_of(folders: PairFolders, *more: str, prompt: str = PROMPT) -> list[str]:
    limit = str(NEW_TOKENS)
    models = ["--target", folders.target, "--drafter", folders.drafter]
    return ["generate", *models, "--prompt", prompt, "--max-new-tokens", limit, *more]


def plain_text(
    target: Target, prompt: str = PROMPT, seed: int = 0, sampling: SamplingConfig = GREEDY
) -> str:
    return decode(decoded_alone(target, prompt, NEW_TOKENS, seed, sampling)[0])


@pytest.mark.long
def test_a_process_prints_the_baselines_text_then_the_counts(
    folders: PairFolders, habitual_target: Target
) -> None:
    # Of one row and so deep: XLA would take hours for the chain that a walk along the parents is.
    deep = arguments_of(folders, "--beam-width", "6", "--draft-rounds", "20", "--num-nodes", "12")
    finished = run_module("redrafter_jax", *deep, optimized=True)
    assert (finished.returncode, finished.stdout) == (0, plain_text(habitual_target) + "\n")
    counts, cost = finished.stderr.splitlines()
    assert re.fullmatch(rf"{NEW_TOKENS} tokens, .* tokens/s, acceptance length .*prefill", counts)
    assert cost.startswith("a call takes ")


def test_the_text_needs_no_drafter_and_its_prompt_may_come_from_stdin_as_it_stands(
    run_redrafter: Any,
    folders: PairFolders,
    habitual_target: Target,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("wvu\n"))
    arguments = arguments_of(folders, prompt="-")
    at = arguments.index("--drafter")
    arguments[at : at + 2] = ["--no-drafter"]
    code, out, err = run_redrafter(*arguments)
    assert (code, out) == (0, plain_text(habitual_target, "wvu\n") + "\n")
    assert f"acceptance length 1.00, {NEW_TOKENS - 1} target calls" in err
    assert run_redrafter(*arguments, "--prompt", PROMPT, "--num-nodes", "8")[2] == (
        "error: Only a drafter's trees use --num-nodes; give --drafter, or leave --num-nodes out.\n"
    )


@pytest.mark.long
def test_penalties_and_biases_are_options(
    run_redrafter: Any, folders: PairFolders, habitual_target: Target
) -> None:
    options = [
        "--presence-penalty",
        "1.5",
        "--repetition-penalty",
        "1.2",
        "--logit-bias",
        "{3: 4.0}",
    ]
    sampling = SamplingConfig(presence_penalty=1.5, repetition_penalty=1.2, logit_bias={3: 4.0})
    code, out, err = run_redrafter(*arguments_of(folders, *options, "--ignore-eos"))
    assert (code, out) == (0, plain_text(habitual_target, sampling=sampling) + "\n"), err


@pytest.mark.parametrize(
    "drafter",
    [
        "",
        "self:layers=1",
        "self:int8",
    ],
)
@pytest.mark.long
def test_a_model_drafts_by_its_name(
    run_redrafter: Any, folders: PairFolders, habitual_target: Target, drafter: str
) -> None:
    """The target's own folder is a model, too; its chain of 4 comes true."""
    named = PairFolders(folders.target, drafter or folders.target)
    code, out, err = run_redrafter(*arguments_of(named, "--adaptive", "off"))
    assert (code, out) == (0, plain_text(habitual_target) + "\n"), err
    told = re.search(r"acceptance length ([\d.]+), ", err)
    assert told, err
    assert float(told[1]) > (1.5 if drafter else 4.7)
    if drafter == "self:layers=1":
        code, out, err = run_redrafter(*arguments_of(named, "--mirror-layer", "1"))
        assert (code, out) == (0, plain_text(habitual_target) + "\n"), err
    code, out, err = run_redrafter(*arguments_of(named, "--draft-rounds", "600"))
    assert (code, out) == (2, "")
    assert "draft_rounds is 600" in err


@pytest.mark.parametrize(
    ("drafter", "words"),
    [
        ("self:int3", ["'self:int3'", "such as self:int4"]),
        ("self:layers=9", ["2 layers", "from 1 to 1"]),
        ("self:int4", ["48 inputs", "use int8 or fp8"]),
    ],
)
@pytest.mark.usefixtures("nothing_compiles")
def test_what_is_no_part_of_the_target_is_one_sentence(
    run_redrafter: Any, folders: PairFolders, drafter: str, words: list[str]
) -> None:
    code, out, err = run_redrafter(*arguments_of(PairFolders(folders.target, drafter)))
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert all(word in err for word in words), err


def test_a_terminal_is_told_one_short_line(
    run_redrafter: Any, folders: PairFolders, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    _, _, told = run_redrafter(*arguments_of(folders))
    _, counts = told.split("Compiling ...\n")  # before it a bar tells of the weights
    short = rf"{NEW_TOKENS} tokens(, [\d.]+ tokens/s)?(, [\d.]+ times the baseline's speed)?\n"
    assert re.fullmatch(short, counts)


@pytest.mark.long
def test_sampled_text_is_the_seeds_whatever_the_tree_and_the_devices(
    run_redrafter: Any,
    folders: PairFolders,
    habitual_target: Target,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    choice = ["--temperature", "0.8", "--top-p", "0.95", "--top-k", "20", "--min-p", "0.01"]
    sampling = SamplingConfig(temperature=0.8, top_p=0.95, top_k=20, min_p=0.01)
    expected = plain_text(habitual_target, seed=5, sampling=sampling)
    tree = ["--beam-width", "3", "--num-nodes", "6", "--sharpness", "2", "--lookup-tokens", "4"]
    arguments = arguments_of(folders, *choice, "--seed", "5", *tree, "--mesh-model", "2", "-v")
    code, out, err = run_redrafter(*arguments)
    assert (code, out) == (0, expected + "\n")
    # A terminal is told that it compiles; the counts, which tokens are of which drafter.
    _, counts = err.split("Compiling ...\n")
    told = re.search(r"length ([\d.]+) \(([\d.]+) of recurrent, ([\d.]+) of lookup\), ", counts)
    assert told
    length, own, lookup = map(float, told.groups())
    assert 1 + own + lookup == pytest.approx(length, abs=0.02)


@pytest.mark.parametrize("special", [True, False])
def test_a_message_is_written_as_the_template_does_and_its_answer_ends_with_its_token(
    run_redrafter: Any, folders: PairFolders, habitual_target: Target, tmp_path: Path, special: bool
) -> None:
    target = Path(add_template(Path(folders.target), tmp_path))
    (target / "chat_template.jinja").write_text(
        "{% for turn in messages %}{{ turn.content }}w{% endfor %}"
    )
    tokenizer = character_tokenizer()
    # The last one is beyond the target's vocabulary, and does no harm there.
    tokenizer.add_tokens([AddedToken("w", special=special), AddedToken("[PAD]", special=True)])
    tokenizer.save(str(target / "tokenizer.json"))
    texts = [plain_text(habitual_target, "subwabcw", i, WARM) for i in range(20)]
    # A text that goes on after the token if it is let to.
    seed, whole = next(
        (i, text) for i, text in enumerate(texts) if 0 < text.find("w") < NEW_TOKENS - 1
    )
    moved = PairFolders(str(target), folders.drafter)
    choice = ["--temperature", "1", "--seed", str(seed)]
    # A target that brings a template is asked in it.
    system = ["--system", "sub"]
    code, out, err = run_redrafter(*arguments_of(moved, *choice, *system, prompt="abc"))
    assert (code, out) == (0, whole.partition("w")[0] + "\n"), err
    padded = arguments_of(moved, *choice, prompt="[PAD]")
    assert "token 24, outside the vocabulary of 24 tokens" in run_redrafter(*padded)[2]
    # A special token has no text, and ends one all the same.
    raw = ["--chat-template", "none", "--stop", "w"]
    stopped = arguments_of(moved, *choice, *raw, prompt="subwabcw")
    assert run_redrafter(*stopped)[:2] == (code, out)


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        (["--system", "be brief"], "--system needs a chat template, but the prompt is continued a"),
        (["--chat"], "has no chat template; save one beside it as chat_template.jinja, or give"),
        (["--chat", "--chat-template", "vicuna_v1.1"], "has no such token"),
        (
            ["--chat", "--chat-template", "none"],
            "--chat-template is none, but a conversation needs",
        ),
        (["--template-arguments", "{x: 1}"], "'x' is an argument of a chat template, but no "),
        (["--template-arguments", "!!int ''"], "is given; it must be a mapping such as {enable"),
        (["--template-arguments", "[x]"], "is given; it must be a mapping such as {enable"),
        (["--template-arguments", "{x: 1, x: 2}"], "} (the key 'x' appears twice at line 1, col"),
        (
            ["--chat-template", "vicunna"],
            "give a Jinja file, tokenizer for the tokenizer's own template, or a built-in format (",
        ),
        (["--mesh-model", "9"], "--mesh-model is 9; it must be from 1 to 8, the number of"),
        (["--mesh-model", "4"], "model=4, which does not divide the target's num_key"),
        (["--temperature", "-1"], "--temperature is -1.0; it must be 0 or more"),
        (
            ["--top-k", "5", "--min-p", "0"],
            "whatever the filter, so leave --top-k and --min-p out",
        ),
        (["--presence-penalty", "3"], "--presence-penalty is 3.0; it must be -2 or more and at"),
        (["--logit-bias", "[3]"], "is given; it must be a mapping such as {42: -100}"),
        (["--logit-bias", "{24: 3.0}"], "logit_bias holds token 24, outside the vocabulary of 24"),
        (["--min-tokens", "101"], "min_tokens is 101, but the limit on new tokens is 100; give"),
        (["--json-schema", "nowhere.json"], "--json-schema nowhere.json: [Errno 2] No such file"),
        (["--regex", "a", "--ignore-eos"], "--ignore-eos: not allowed with argument --regex"),
        (["--stop", ""], "argument --stop: the text is empty; leave it out"),
        (["--max-new-tokens", "9999"], "512 positions; ask for 505 new ones at most, or shorten"),
        (["--beam-width", "25"], "more than the 24 tokens that the drafter can draft"),
        (
            ["--output", "texts.jsonl"],
            "--output is for --prompts; give both, or leave --output",
        ),
        (["--prompts", "texts.jsonl"], "--prompts: not allowed with argument --prompt"),
        (["--prompt", ""], "The prompt is empty"),
        (["--prompt", os.fsdecode(b"ab\xff")], r"holds '\udcff' at character 2, a lone surrogate"),
        (["--target", "DRAFTER"], "model_type 'recurrent_drafting_drafter'; this version reads"),
        (["--target", "configs"], "holds no config.json; did you mean 'configs/demo_target'?"),
        (["--temprature=1"], "argument: --temprature=1; did you mean --temperature?"),
        (["--", "--temprature"], "unrecognized arguments: -- --temprature; see"),
        (["--prompt", "--no such option", "--seed=-1"], "The seed is -1"),
    ],
)
def test_a_bad_value_is_one_sentence_and_exit_code_2(
    run_redrafter: Any, folders: PairFolders, more: list[str], reason: str
) -> None:
    more = [folders.drafter if word == "DRAFTER" else word for word in more]
    code, out, err = run_redrafter(*arguments_of(folders, *more))
    assert (code, out) == (2, "")
    assert reason in err
    assert err.startswith("error: ")
    assert err.count("\n") == 1


def test_without_a_target_the_fetched_one_decodes_as_the_baseline_or_its_command_is_told(
    run_redrafter: Any,
    habitual_target: Target,
    folders: PairFolders,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    code, out, err = run_redrafter("generate", "--prompt", PROMPT)
    assert (code, out) == (2, "")
    assert f"is not in {tmp_path / 'redrafter-jax'}; fetch it with `" in err
    # Another model under the same name: a folder is read as what it is.
    monkeypatch.setattr("redrafter_jax.commands.parser.find_cached", lambda: Path(folders.target))
    words = ["generate", "--prompt", PROMPT, "--max-new-tokens", str(NEW_TOKENS)]
    code, out, err = run_redrafter(*words)
    assert (code, out) == (0, plain_text(habitual_target) + "\n")
    assert "acceptance length 1.00" in err
    drafted = run_redrafter(*words, "--drafter", folders.drafter, "--adaptive", "off")
    assert drafted[:2] == (0, out)
    assert "acceptance length 1.00" not in drafted[2]


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_keeps_what_was_printed(
    run_redrafter: Any, folders: PairFolders, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = options.stream

    def interrupted(*arguments: Any, **options: Any) -> Any:
        results = whole(*arguments, **options)
        for _ in range(4):
            yield next(results)
        raise KeyboardInterrupt

    monkeypatch.setattr(options, "stream", interrupted)
    monkeypatch.setattr("os._exit", sys.exit)
    code, out, err = run_redrafter(*arguments_of(folders))
    assert code == 130
    assert 3 < len(out) < NEW_TOKENS
    assert err == "\ninterrupted\n"
