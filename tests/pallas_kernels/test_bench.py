"""`python -m pallas_kernels.bench`: what it counts and what it writes."""

import json
from collections.abc import Callable
from itertools import product
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from needs import needs_compiler

from pallas_kernels import bench, bench_matmul, bench_report, dispatch, timing
from pallas_kernels.aot import compile_on, gpu_mesh
from pallas_kernels.bench import Case, attention_program, draw_inputs, main, tree_attention


def test_the_cache_is_counted_once() -> None:
    # Llama-3.1-8B: keys and values of 1024 tokens, 8 heads of 128, two bytes each: 4 MiB.
    llama = Case(32, 8, 128, batch=1, slots=1024, nodes=7, dtype="bfloat16")
    assert llama.cache_bytes == 4 * 2**20
    # Vicuna-7B has four times the key heads; eight rows.
    assert llama._replace(key_heads=32, batch=8).cache_bytes == 128 * 2**20


@pytest.mark.long
def test_the_report_has_every_combination(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def attend(*arrays: jax.Array, scale: float, implementation: str) -> jax.Array:
        # A kernel that computes no numbers has no number in the report.
        factor = jnp.nan if implementation == "broken" else 1
        name = "reference" if implementation == "broken" else implementation
        return factor * tree_attention(*arrays, scale=scale, implementation=name)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(bench, "CANDIDATES", ("mosaic_gpu", "reference", "broken"))
    monkeypatch.setattr(bench, "tree_attention", attend)
    for module, size in ((bench_report, "READ"), (timing, "COPIED"), (timing, "RUN")):
        monkeypatch.setattr(module, size, 10**5)
    path = tmp_path / "kernel.json"
    main(["--nodes", "3", "--slots", "64", "--batch", "2", "--repeats", "2", "--output", str(path)])
    report = json.loads(path.read_text())
    shapes = [(row["heads"], row["batch"], row["slots"], row["nodes"]) for row in report["rows"]]
    assert shapes == list(product(["llama-3.1-8b", "vicuna-7b"], [2], [64], [3]))
    for row in report["rows"]:
        assert list(row["candidates"]) == ["mosaic_gpu", "reference", "broken"]
        assert row["candidates"]["broken"]["difference"] is None
        one = row["candidates"]["reference"]
        low, middle, high = one["microseconds"]
        assert low <= middle <= high
        # Bytes per nanosecond are gigabytes per second.
        rate = row["cache_bytes"] / (1000 * middle)
        assert one["gigabytes_per_second"] == pytest.approx(rate)
        assert one["difference"] == 0
    table = capsys.readouterr().out
    assert "not finite" in table
    assert "; bfloat16, medians of 2 repeats" in table
    if report["platform"] == "cpu":
        kernel = report["rows"][0]["candidates"]["mosaic_gpu"]
        assert list(kernel) == ["not_run"]
        assert "it needs a Hopper GPU" in kernel["not_run"]
        assert kernel["not_run"] in table


@pytest.mark.parametrize(
    ("command", "arguments", "sentence"),
    [
        (main, ["--slots", "0"], "--slots 0 must be 1 or more"),
        (main, ["--nodes", "65", "--slots", "64"], "--nodes 65 is more than --slots 64"),
        (main, ["--heads", "llama"], "invalid choice: 'llama'"),
        (main, ["--output", "no/such/folder.json"], "there is no folder no/such"),
        (main, ["--output", "/"], "--output / is a folder; name a file in it."),
        (bench_matmul.main, ["--nodes", "0"], "--nodes 0 must be 1 or more"),
        (bench_matmul.main, ["--group", "48"], "invalid choice: 48"),
        pytest.param(
            main,
            [],
            "It measures an NVIDIA GPU, and JAX runs on cpu here",
            marks=pytest.mark.skipif(jax.default_backend() == "gpu", reason="there is one"),
        ),
    ],
)
def test_bad_arguments_are_one_sentence(
    command: Callable[[list[str]], None],
    arguments: list[str],
    sentence: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as refused:
        command(arguments)
    assert refused.value.code == 2
    assert sentence in capsys.readouterr().err


class Hopper:
    """As much as the dispatch asks of a device."""

    platform = "gpu"
    device_kind = "NVIDIA H200"
    num_cores = 132
    compute_capability = "9.0"


@needs_compiler
@pytest.mark.parametrize("name", ["mosaic_gpu", "reference"])
def test_compiled_for_a_gpu_every_call_stays_in_the_loop(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "current_device", Hopper)
    case = Case(32, 32, 128, batch=1, slots=1024, nodes=32, dtype="bfloat16")
    inputs = jax.eval_shape(lambda: draw_inputs(case, 3))
    zero = jax.ShapeDtypeStruct((), jnp.int32)
    compiled = compile_on(gpu_mesh("h200"), attention_program(name, 50), inputs, zero)
    assert '"known_trip_count":{"n":"50"}' in compiled.hlo
    # Of three caches: their values alone, copied before the loop, would be as much.
    assert compiled.memory.temp_size_in_bytes < 1.5 * case.cache_bytes
    if name == "mosaic_gpu":
        entry = compiled.hlo[compiled.hlo.index("\nENTRY") :]
        assert "mosaic_gpu" not in entry
        assert compiled.hlo.count('custom_call_target="mosaic_gpu_v2"') == 3
