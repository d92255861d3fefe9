"""`python -m pallas_kernels.bench`: what it counts, that all compute the same, what it writes."""

import json
from itertools import product
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import aot
from pallas_kernels import tree_attention as dispatch
from pallas_kernels.aot import compile_on, gpu_mesh
from pallas_kernels.bench import SIZES, Sizes, main
from pallas_kernels.candidates import (
    CANDIDATES,
    Candidate,
    Case,
    attention_program,
    draw_tree_inputs,
)

UNAVAILABLE = aot.why_unavailable()
RUNNING = ["reference", "dot_product xla"]  # on any platform


def test_the_cache_is_counted_once() -> None:
    # Llama-3.1-8B: keys and values of 1024 tokens, 8 heads of 128, two bytes each: 4 MiB.
    llama = Case(32, 8, 128, batch=1, slots=1024, nodes=7, dtype="bfloat16")
    assert llama.cache_bytes == 4 * 2**20
    # Vicuna-7B has four times the key heads; eight rows.
    vicuna = Case(32, 32, 128, batch=8, slots=1024, nodes=64, dtype="bfloat16")
    assert vicuna.cache_bytes == 128 * 2**20


def test_the_report_has_every_combination(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    prepare, attend = CANDIDATES["reference"]
    candidates = {name: CANDIDATES[name] for name in ("mosaic_gpu", "reference", "dot_product xla")}
    # A kernel that computes no numbers has no number in the report.
    candidates["broken"] = Candidate(prepare, lambda *arrays: attend(*arrays) * jnp.nan)
    monkeypatch.setattr("pallas_kernels.bench.CANDIDATES", candidates)
    monkeypatch.setattr(
        "pallas_kernels.bench.SIZES", dict.fromkeys(SIZES, Sizes(10**5, 10**5, 10**5))
    )
    path = tmp_path / "kernel.json"
    main(["--nodes", "3", "--slots", "64", "--batch", "2", "--repeats", "2", "--output", str(path)])
    report = json.loads(path.read_text())
    shapes = [(row["heads"], row["batch"], row["slots"], row["nodes"]) for row in report["rows"]]
    assert shapes == list(product(["llama-3.1-8b", "vicuna-7b"], [2], [64], [3]))
    for row in report["rows"]:
        assert list(row["candidates"]) == list(candidates)
        assert row["candidates"]["broken"]["difference"] is None
        for name in RUNNING:
            one = row["candidates"][name]
            low, middle, high = one["microseconds"]
            assert low <= middle <= high
            # Bytes per nanosecond are gigabytes per second.
            rate = row["cache_bytes"] / (1000 * middle)
            assert one["gigabytes_per_second"] == pytest.approx(rate)
            assert one["difference"] < 2e-2
    table = capsys.readouterr().out
    assert "not finite" in table
    if report["platform"] == "cpu":
        kernel = report["rows"][0]["candidates"]["mosaic_gpu"]
        assert list(kernel) == ["not_run"]
        assert "it needs a Hopper GPU" in kernel["not_run"]
        assert f"mosaic_gpu: not run: {kernel['not_run']}" in table


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--slots", "0"], "0 must be 1 or more"),
        (["--nodes", "65", "--slots", "64"], "--nodes 65 is more than --slots 64"),
        (["--heads", "llama"], "invalid choice: 'llama'"),
        (["--output", "no/such/folder.json"], "there is no folder no/such"),
    ],
)
def test_bad_arguments_are_one_sentence(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as refused:
        main(arguments)
    assert refused.value.code == 2
    assert sentence in capsys.readouterr().err


class Hopper:
    """As much as the dispatch asks of a device."""

    platform = "gpu"
    device_kind = "NVIDIA H200"
    num_cores = 132
    compute_capability = "9.0"


@pytest.mark.skipif(UNAVAILABLE is not None, reason=UNAVAILABLE or "")
@pytest.mark.parametrize("name", ["mosaic_gpu", *RUNNING])
def test_compiled_for_a_gpu_every_call_stays_in_the_loop(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "_device", Hopper)
    case = Case(32, 32, 128, batch=1, slots=1024, nodes=32, dtype="bfloat16")
    prepare, attend = CANDIDATES[name]
    inputs = jax.eval_shape(lambda: prepare(draw_tree_inputs(case, 3)))
    zero = jax.ShapeDtypeStruct((), jnp.int32)
    compiled = compile_on(gpu_mesh("h200"), attention_program(attend, 50), inputs, zero)
    assert '"known_trip_count":{"n":"50"}' in compiled.hlo
    # Three caches of keys and values, of which no copy is made.
    assert compiled.memory.temporaries < case.cache_bytes
    if name == "mosaic_gpu":
        entry = compiled.hlo[compiled.hlo.index("\nENTRY") :]
        assert "mosaic_gpu" not in entry
        assert compiled.hlo.count('custom_call_target="mosaic_gpu_v2"') == 3
