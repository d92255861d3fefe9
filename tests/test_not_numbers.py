"""A target whose scores are NaN or infinite says so, wherever it decodes, and from which file."""

import json
import re
from collections.abc import Generator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from engine_runs import run
from safetensors.numpy import load_file
from servers import body, outcomes, post, serving, streamed
from tiny_folders import PairFolders, add_template, character_tokenizer, damaged, decode

from redrafter_jax import (
    InputError,
    PromptLookup,
    SamplingConfig,
    generate,
    load_target,
    make_mesh,
    stream,
)
from redrafter_jax.engine.engine import Engine
from redrafter_jax.engine.messages import Request
from redrafter_jax.models.target import Target
from train.regenerate.session import run_sessions

pytestmark = pytest.mark.usefixtures("quick_compilation")

EMBEDDING = "model.embed_tokens.weight"
# Of the tokens, the one whose embedding is damaged; the text after the other prompt has none.
BAD, WELL, LIMIT = 5, [1, 2, 3], 6
SENTENCE = r"/damaged: the target's scores are NaN or infinite, because its weight {} holds such"


def damage(folders: PairFolders, folder: Path, name: str, index: Any, value: float) -> Path:
    """A copy of the target with numbers in one of its weights."""
    source = Path(folders.target)
    weight = load_file(source / "model.safetensors")[name].copy()
    weight[index] = value
    path = damaged(folder / "damaged", source, {name: weight})
    character_tokenizer().save(str(path / "tokenizer.json"))
    return path


@pytest.fixture(scope="module")
def folder(folders: PairFolders, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return damage(folders, tmp_path_factory.mktemp("models"), EMBEDDING, BAD, np.nan)


@pytest.fixture(scope="module")
def target(folder: Path) -> Target:
    return load_target(folder, dtype="float32")


@pytest.fixture(scope="module")
def engine(target: Target) -> Engine:
    return Engine(target, None, slots=2, context_length=64, stop_tokens=(), row_counts=())


@pytest.mark.parametrize(
    ("name", "shown", "value"),
    [
        ("model.norm.weight", "norm", np.nan),
        ("model.norm.weight", "norm", np.inf),
        ("model.layers.1.mlp.up_proj.weight", r"layers\.1\.mlp\.up_proj", np.nan),
    ],
)
@pytest.mark.parametrize(
    "sampling", [SamplingConfig(), SamplingConfig(0.8, top_k=5, top_p=0.9, min_p=0.01)]
)
def test_generate_names_the_folder_and_the_weight(
    folders: PairFolders,
    tmp_path: Path,
    name: str,
    shown: str,
    value: float,
    sampling: SamplingConfig,
) -> None:
    target = load_target(damage(folders, tmp_path, name, 0, value), dtype="float32")
    for drafter in (None, PromptLookup()):
        with pytest.raises(InputError, match=SENTENCE.format(shown)):
            generate(target, drafter, [WELL], max_new_tokens=LIMIT, sampling=sampling)


def test_numbers_that_overflow_on_the_way_are_told_apart(
    folders: PairFolders, tmp_path: Path
) -> None:
    path = damage(folders, tmp_path, "model.layers.0.input_layernorm.weight", ..., 3e38)
    target = load_target(path, dtype="float32")
    with pytest.raises(InputError, match="but its weights are finite, so its activations overflow"):
        generate(target, None, [WELL], max_new_tokens=LIMIT)


@pytest.mark.long
@pytest.mark.parametrize("token", [0, 11, 12, 23])
def test_one_score_of_all_is_enough_also_on_a_mesh(
    folders: PairFolders, tmp_path: Path, token: int
) -> None:
    """Whatever its place, and whichever device of two has it."""
    path = damage(folders, tmp_path, "lm_head.weight", token, np.nan)
    for mesh in (None, make_mesh(1, 2)):
        target = load_target(path, dtype="float32", mesh=mesh)
        with pytest.raises(InputError, match=SENTENCE.format("lm_head")):
            generate(target, None, [WELL], max_new_tokens=1)


def test_a_stream_ends_there(target: Target) -> None:
    """With what was decided before: the damaged token comes late."""
    text = generate(target, None, [WELL], max_new_tokens=LIMIT).tokens[0]
    assert BAD not in text
    with pytest.raises(InputError, match=SENTENCE.format("embed_tokens")):
        list(stream(target, None, [[*WELL, BAD]], max_new_tokens=LIMIT))
    updates = list(stream(target, None, [WELL], max_new_tokens=LIMIT))
    assert [token for update in updates for token in update.tokens[0]] == text


def test_an_engine_ends_the_request_and_no_other(target: Target, engine: Engine) -> None:
    text = generate(target, None, [WELL], max_new_tokens=LIMIT, eos_token_ids=()).tokens[0]
    good, bad = (
        engine.submit(Request(prompt, LIMIT, 0, stop_tokens=())) for prompt in (WELL, [0, BAD, 1])
    )
    told = run(engine)
    assert (told[good].tokens, told[good].ended) == (text, "length")
    assert (told[bad].tokens, told[bad].ended) == ([], "not numbers")


def test_writing_data_ends(engine: Engine) -> None:
    def session() -> Generator[Request, list[int], list[int]]:
        return (yield Request([BAD, 1], LIMIT, 0))

    with pytest.raises(InputError, match=SENTENCE.format("embed_tokens")):
        list(run_sessions(engine, iter([session()])))


def test_a_server_answers_500_and_goes_on(target: Target, caplog: pytest.LogCaptureFixture) -> None:
    engine = Engine(target, None, slots=2, context_length=64, stop_tokens=(), row_counts=())
    well = body(decode(WELL), LIMIT, temperature=0)
    with serving(engine, tokenizer=character_tokenizer()) as base:
        answers = [post(base, json=body(decode([BAD, 1]), LIMIT)) for _ in range(2)]
        assert [answer.status_code for answer in answers] == [500, 500]
        said, again = (answer.json()["error"]["message"] for answer in answers)
        assert said == again
        assert said.startswith("The target's scores are NaN or infinite")
        with streamed(base, prompt=decode([BAD, 1])) as events:
            *_, last = events
        assert last["error"]["message"] == said
        expected = generate(target, None, [WELL], max_new_tokens=LIMIT, eos_token_ids=()).tokens[0]
        assert post(base, json=well).json()["choices"][0]["text"] == decode(expected)
        assert outcomes(base) == {"failed": 3, "finished": 1}
    told = [one.getMessage() for one in caplog.records if "scores" in one.getMessage()]
    assert len(told) == 1
    assert re.search(SENTENCE.format("embed_tokens"), told[0])


def test_commands_say_it_in_one_sentence(folder: Path, tmp_path: Path, run_redrafter: Any) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": decode([BAD, 1])}) + "\n")
    output = str(tmp_path / "texts.jsonl")
    chatty = add_template(folder, tmp_path)
    for words in (
        ["generate", "--target", str(folder), "--prompt", decode([BAD, 1])],
        ["generate", "--target", str(folder), "--prompts", str(prompts), "--output", output],
        ["generate", "--target", chatty, "--prompt", decode([BAD, 1]), "--chat"],
    ):
        code, _, err = run_redrafter(*words, "--no-drafter", "--max-new-tokens", "4")
        assert (code, err.count("error: ")) == (2, 1)
        assert re.search(r"the target's scores are NaN or infinite, because .* again\.\n$", err)


def test_targets_of_two_folders_share_their_programs(folders: PairFolders, target: Target) -> None:
    other = load_target(folders.target, dtype="float32")
    assert str(other.source) != str(target.source)
    assert other.source == target.source
    assert (other.source != target.source) is False
    traced = []

    @jax.jit
    def scale(model: Target) -> Any:
        traced.append(model.source)
        return model.merge().norm.get_value().sum()

    scale(target)
    scale(other)
    assert len(traced) == 1
