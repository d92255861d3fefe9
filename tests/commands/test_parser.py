"""Options of decoding are the fields of the configurations."""

from typing import Any

import pytest

from redrafter_jax import SamplingConfig, TreeConfig
from redrafter_jax.commands.option_groups import config_of
from redrafter_jax.commands.parser import read_arguments

GENERATE = ["generate", "--target", "t", "--no-drafter", "--prompt", "p"]
CHAT = ["chat", "--target", "t", "--drafter", "d"]


@pytest.mark.parametrize("words", [GENERATE, CHAT])
def test_options_have_the_fields_defaults_and_types(words: list[str]) -> None:
    arguments = read_arguments(words)
    assert config_of(TreeConfig, arguments) == TreeConfig()
    assert config_of(SamplingConfig, arguments) == SamplingConfig()
    tree = ["--beam-width", "3", "--draft-rounds", "2", "--num-nodes", "5", "--sharpness", "2"]
    tree += ["--candidates", "50", "--final-beams-only", "--lookup-tokens", "1"]
    tree += ["--static-tree"]
    choice = ["--temperature", "1", "--top-k", "4", "--top-p", "0.5", "--min-p", "0.25"]
    arguments = read_arguments([*words, *tree, *choice])
    assert config_of(TreeConfig, arguments) == TreeConfig(3, 2, 5, True, 2.0, 50, 1, True)
    assert config_of(SamplingConfig, arguments) == SamplingConfig(1.0, 4, 0.5, 0.25)


def test_template_arguments_are_read_as_settings_are() -> None:
    given = ["--template-arguments", "{scale: 3e-4, date_string: 2024-01-31, tools: [1]}"]
    read = read_arguments([*GENERATE, *given]).template_arguments
    assert read == {"scale": 0.0003, "date_string": "2024-01-31", "tools": [1]}


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            "",
            "no command is given; known commands: generate, chat, serve, fit, fetch, "
            "convert, push.\n",
        ),
        ("gnerate", "'gnerate' is not a command; did you mean 'generate'?"),
        ("--verson", "unrecognized argument: --verson; did you mean --version?\n"),
        ("-verson", "unrecognized argument: -verson; did you mean --version?\n"),
        ("-v", "unrecognized argument: -v; did you mean --version?\n"),
        ("-x", "unrecognized argument: -x; see"),
        ("generate -drafter d", "unrecognized argument: -drafter; did you mean --drafter?\n"),
        ("generate --taget t", "unrecognized argument: --taget; did you mean --target?\n"),
        ("generate --widht 3", "unrecognized argument: --widht; see"),
        ("generate", "--prompt --prompts is required"),
        ("generate --target t --prompt p", "one of the arguments --drafter --no-drafter is req"),
        ("generate --max-new-tokens many", "--max-new-tokens: many is given; it must be a whole"),
        ("chat --max-new-tokens 0", "--max-new-tokens: 0 is given; it must be greater than 0"),
        ("chat --color red", "invalid choice: 'red'"),
        ("fit t o --minutes soon", "--minutes: soon is given; it must be a number"),
        ("fit t o --minutes nan", "--minutes: nan is given; it must be finite"),
    ],
)
def test_a_word_in_the_wrong_place_is_told(run_redrafter: Any, words: str, told: str) -> None:
    code, out, err = run_redrafter(*words.split())
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("error: ")
    assert told in err


def test_the_help_of_an_option_is_its_fields_documentation(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        read_arguments(["generate", "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert (
        "--beam-width BEAM_WIDTH W, number of beams kept per round; for Medusa heads, which draft"
        in shown
    )
    assert "draft by rank, the number of best tokens taken from each head (8)" in shown
    assert "--top-k TOP_K keep only the k most likely tokens; by default all" in shown
