"""`python -m eval steps`: every combination is timed, and what is timed is a decode step."""

import json
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from needs import needs_compiler
from tiny_folders import write_yaml
from tiny_models import tiny_config
from tiny_shapes import TARGET

from eval.abstract import (
    abstract_drafter,
    abstract_state,
    abstract_target,
    bytes_of,
    random_state,
    random_weights,
)
from eval.commands import evaluate
from eval.row_sampling import stack_sampling
from eval.shapes import StepsSettings
from eval.step_parts import StepPart, StepTimer, begin_step, reset_state, run_part, time_parts
from pallas_kernels.aot import compile_on, gpu_mesh
from pallas_kernels.timing import empty_like, take_turns
from redrafter_jax import InputError, SamplingConfig, TreeConfig
from redrafter_jax.decoding.step import decode_step
from redrafter_jax.drafters.base import LoadedHead, as_drafter
from redrafter_jax.drafters.recurrent_head import RecurrentConfig
from redrafter_jax.engine.messages import Counters
from redrafter_jax.engine.requests import Batch, check_batch
from redrafter_jax.models.target import Target

pytestmark = pytest.mark.usefixtures("quick_compilation")

PARTS = ["propose", "verify", "finish", "noise", "step", "baseline"]
VALUES: dict[str, Any] = {
    "target": TARGET | {"num_hidden_layers": 2},
    "drafter": {"exit_dim": 16, "context_layers": [0]},
    "dtype": "float32",
    "trees": [{"beam_width": [2], "draft_rounds": [2], "lookup_tokens": [1]}],
    "batch_sizes": [2],
    "slots": [32],
    "samplings": [{"temperature": 0.0}, {"temperature": 0.7, "top_k": 5, "min_p": 0.1}],
    "steps": 2,
    "short_turns": 1,
    "repeats": 2,
}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return write_yaml(tmp_path / "steps.yaml", VALUES | {"report_dir": str(tmp_path / "report")})


def random_pair() -> tuple[Target, LoadedHead]:
    settings = StepsSettings.model_validate(VALUES | {"report_dir": "unused"})
    target = abstract_target(settings.target.build(), jnp.float32)
    drafter = abstract_drafter(settings.drafter_config(4), jnp.float32)
    return random_weights(target), random_weights(drafter)


# Both tests of real programs have the same shapes, so that the second finds them compiled.
@pytest.mark.long
def test_the_parts_in_a_row_are_a_decode_step() -> None:
    target, drafter = random_pair()
    bound = as_drafter(drafter)
    tree = TreeConfig(beam_width=2, draft_rounds=2, lookup_tokens=1)
    rows = check_batch(target.config, Batch([[0]] * 2, 1, SamplingConfig(0.8, top_k=5)))
    sampling = stack_sampling(target.config, rows)
    filled = random_state(target, bound, 2, 32)
    state = reset_state(filled, 9, sampling, done=False)
    expected, trace = jax.jit(partial(decode_step, tree=tree))(target, bound, state)
    assert (trace.gained >= 1).all()
    assert expected.cache.lengths.tolist() == (9 + trace.gained).tolist()

    run = partial(run_part, target, bound, tree=tree)
    between = empty_like(partial(begin_step, tree=tree), target, bound, state)
    zero = jnp.int32(0)
    # A turn does the same again, whatever their number; finish alone changes the state.
    parts: list[tuple[StepPart, int]] = [
        ("noise", 1),
        ("propose", 2),
        ("verify", 2),
        ("finish", 1),
    ]
    for part, turns in parts:
        state, between = run(state, between, zero, part=part, turns=turns)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), state, expected
    )

    # Rows that are done take no slot, so any number of turns may follow.
    state = reset_state(state, 9, sampling, done=True)
    ended, _ = run(state, between, zero, part="finish", turns=1)
    assert ended.cache.lengths.tolist() == [9, 9]


@pytest.mark.long
def test_every_part_is_timed_under_every_sampling(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    evaluate(["steps", "--config", str(config)])
    report = json.loads((config.parent / "report" / "steps.json").read_text())
    assert [row["sampling"] for row in report["rows"]] == ["greedy", "T 0.7, top_k 5, min_p 0.1"]
    for row in report["rows"]:
        assert row["cached"] == 32 - 3 * 4 - 1
        for measures in (row["milliseconds"], row["in_baseline_steps"]):
            assert list(measures) == PARTS
            assert all(low <= middle <= high for low, middle, high in measures.values())
        assert row["in_baseline_steps"]["baseline"] == [1, 1, 1]
    assert report["rows"][0]["over_first_sampling"] == [1, 1, 1]
    assert set(PARTS) < set(report["definitions"])
    assert "sum may exceed the whole step" in capsys.readouterr().out


@pytest.mark.long
def test_what_is_timed_was_compiled_before(monkeypatch: pytest.MonkeyPatch) -> None:
    target, drafter = random_pair()
    counters, owner = Counters(), lambda: None
    compiled: list[int] = []

    def counted(timers: Any, repeats: int) -> Any:
        before = counters.compiled
        yield from take_turns(timers, repeats)
        compiled.append(counters.compiled - before)

    counters.count_compilations(owner)
    monkeypatch.setattr("eval.step_parts.take_turns", counted)
    timed = time_parts(
        target,
        *(as_drafter(drafter), TreeConfig(2, 2, lookup_tokens=1)),
        [SamplingConfig(), SamplingConfig(0.7)],
        batch_size=2,
        slots=64,
        turns={"propose": 2, "step": 2, "baseline": 2},
        cached=9,
        repeats=3,
    )
    assert compiled[0] > compiled[1] == 0
    assert {seconds.shape for own in timed for seconds in own.values()} == {(3,)}


def test_every_combination_is_a_row(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def seconds(runs: StepTimer, part: str, *others: Any) -> float:
        return 0.5 if part == "baseline" else 0.125

    monkeypatch.setattr(StepTimer, "seconds", seconds)
    lookup = "{draft_rounds: [1], lookup_tokens: [0, 2]}"
    given = f"trees=[{{num_nodes: [3, null], beam_width: [2, 3]}}, {lookup}]"
    sizes = ["batch_sizes=[1, 2]", "slots=[32, 64]", "samplings=[{temperature: 0}]"]
    evaluate(["steps", "--config", str(config), given, *sizes])
    rows = json.loads((config.parent / "report" / "steps.json").read_text())["rows"]
    names = ("beam_width", "draft_rounds", "num_nodes", "lookup_tokens", "batch_size", "slots")
    trees = [(2, 4, 3, 0), (2, 4, 9, 0), (3, 4, 3, 0), (3, 4, 13, 0), (8, 1, 9, 0), (8, 1, 11, 2)]
    expected = [(*tree, *rest) for tree in trees for rest in product([1, 2], [32, 64])]
    assert [tuple(row[name] for name in names) for row in rows] == expected
    assert all(row["milliseconds"]["baseline"] == [500, 500, 500] for row in rows)
    assert all(row["in_baseline_steps"]["step"] == [0.25, 0.25, 0.25] for row in rows)


@needs_compiler
def test_compiled_for_a_gpu_every_loop_has_its_turns_and_verify_its_kernel() -> None:
    config = tiny_config(hidden_size=128, head_dim=64, num_hidden_layers=3)
    # A tree with padding nodes, over all of which there is one pass.
    tree = TreeConfig(beam_width=2, draft_rounds=2, final_beams_only=True)
    target = abstract_target(config, jnp.bfloat16)
    drafter = as_drafter(abstract_drafter(RecurrentConfig(24, 128, 128, 0), jnp.bfloat16))
    state = abstract_state(target, drafter, 2, 64)
    mesh = gpu_mesh("h200")
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):  # a GPU takes more rows at once
        between = jax.eval_shape(partial(begin_step, tree=tree), target, drafter, state)
    zero = jax.ShapeDtypeStruct((), jnp.int32)
    turns: dict[StepPart, int] = {"propose": 20, "verify": 30, "finish": 50}
    compiled = {
        part: compile_on(
            mesh,
            jax.jit(partial(run_part, tree=tree, part=part, turns=count), donate_argnums=(2, 3)),
            *(target, drafter, state, between, zero),
        )
        for part, count in turns.items()
    }
    for part, count in turns.items():
        assert f'"known_trip_count":{{"n":"{count}"}}' in compiled[part].hlo
    verify, finish = compiled["verify"].hlo, compiled["finish"].memory
    assert "mosaic_gpu" not in verify[verify.index("\nENTRY") :]
    assert verify.count('custom_call_target="mosaic_gpu_v2"') == 3
    assert finish.alias_size_in_bytes == bytes_of((state, between))
    assert finish.temp_size_in_bytes < bytes_of(state.cache.keys[0])


def test_what_does_not_fit_the_device_is_refused(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Small:
        device_kind = platform = "cpu"

        def memory_stats(self) -> dict[str, int]:
            return {"bytes_limit": 1000}

    monkeypatch.setattr("eval.steps.jax.devices", lambda: [Small()])
    with pytest.raises(
        InputError, match=r"slots=32 with batch size 2 needs 0\.0 GB .* lower slots"
    ):
        evaluate(["steps", "--config", str(config)])
