"""Every published layout, by its path alone: the text is the target's own."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
from published_heads import BEAMS, GOLDENS, TEXT, heads_in
from small_batch import MIXED
from tiny_folders import copy_with_tokenizer

from redrafter_jax import (
    Generation,
    SamplingConfig,
    generate,
    generate_autoregressive,
    load_drafter,
    load_target,
    make_mesh,
    stream,
)
from redrafter_jax.engine.engine import Engine
from redrafter_jax.engine.messages import Request
from redrafter_jax.models.target import Target
from redrafter_jax.parallel.mesh import place

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("quick_compilation")]

HEADS = [f"{kind}/{name}" for kind in ("block", "eagle", "hydra") for name in heads_in(kind)]
# At least one of each kind; the others are further cases.
IN_CI = ("block/deepspec_rnn", "eagle/safeailab_1", "eagle/specforge", "hydra/prefix")
assert {*IN_CI} <= {*HEADS}
PROMPTS = [TEXT[:1], TEXT[:5], TEXT[:64], TEXT[:70]]
OPTIONS: dict[str, Any] = {"max_new_tokens": 24, "sampling": MIXED}


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=() if name in IN_CI else pytest.mark.further) for name in HEADS
    ],
)
def folder(request: pytest.FixtureRequest) -> Path:
    return GOLDENS / request.param


@cache
def the_target() -> Target:
    return load_target(GOLDENS / "eagle/target", "float32")


@cache
def expected() -> Generation:
    return generate_autoregressive(the_target(), PROMPTS, **OPTIONS)


def test_batches_and_streams(folder: Path) -> None:
    head = load_drafter(folder, "float32")
    *_, last = stream(the_target(), head, PROMPTS, tree=BEAMS, steps_per_yield=3, **OPTIONS)
    assert last.generation.tokens == expected().tokens
    assert last.generation.acceptance_length > 1, "some drafts came true"


def test_an_engine_that_reuses_beginnings(folder: Path) -> None:
    head = load_drafter(folder, "float32")
    engine = Engine(
        the_target(),
        head,
        tree=BEAMS,
        slots=2,
        context_length=160,
        stop_tokens=the_target().config.eos_token_ids,
        steps_per_call=2,
        prefill_chunk=16,
    )
    for seed, more in enumerate(([], [5, 6], [1])):
        prompt, sampling = [*TEXT[:70], *more], SamplingConfig(float(seed % 2))
        engine.submit(Request(prompt, 12, seed, sampling))
        told: list[int] = []
        while engine.busy:
            told += [token for event in engine.advance() for token in event.tokens]
        (own,) = generate_autoregressive(
            the_target(), [prompt], max_new_tokens=12, sampling=sampling, seeds=[seed]
        ).tokens
        assert told == own
    assert engine.counters.reused_tokens > 0


@pytest.mark.parametrize(
    "name",
    [
        "block/deepspec_rnn",
        "block/speculators_bonus",
        "eagle/safeailab_3_width",
        "eagle/speculators_llama",
        "hydra/prefix_ungrounded",
    ],
)
def test_a_mesh(name: str) -> None:
    mesh = make_mesh(2, 1)
    target, head = place(the_target(), mesh), place(load_drafter(GOLDENS / name, "float32"), mesh)
    assert generate(target, head, PROMPTS, tree=BEAMS, **OPTIONS).tokens == expected().tokens


def test_the_command_line(folder: Path, run_redrafter: Any, tmp_path: Path) -> None:
    target = copy_with_tokenizer(GOLDENS / "eagle/target", tmp_path / "target")
    words = ["generate", "--target", str(target), "--prompt", "abc", "--max-new-tokens", "12"]
    words += ["--dtype", "float32", "--temperature", "1"]
    tree = ["--beam-width", "3", "--draft-rounds", "4", "--num-nodes", "9"]
    code, ours, counts = run_redrafter(*words, "--drafter", str(folder), *tree)
    assert (code, "acceptance length" in counts) == (0, True), counts
    assert (code, ours) == run_redrafter(*words, "--no-drafter")[:2]
