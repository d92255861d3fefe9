"""`python -m pallas_kernels.bench` and `bench_matmul`: what they count and what they write."""

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from mosaic_kernels import Device
from needs import needs_compiler

from pallas_kernels import bench, bench_matmul, bench_report, dispatch
from pallas_kernels.aot import compile_on, gpu_mesh
from pallas_kernels.bench import tree_attention


def test_the_cache_is_counted_once() -> None:
    # Llama-3.1-8B: keys and values of 1024 tokens, 8 heads of 128, two bytes each: 4 MiB.
    llama = bench.Case(32, 8, 128, batch=1, slots=1024, nodes=7, dtype="bfloat16")
    assert llama.cache_bytes == 4 * 2**20
    # Vicuna-7B has four times the key heads; eight rows.
    assert llama._replace(key_heads=32, batch=8).cache_bytes == 128 * 2**20


def test_weights_are_counted_with_their_scales() -> None:
    # 2 x 4096 x 14336 codes of half a byte, and 4 bytes for each 128 of them.
    assert bench_matmul.Case(4096, 14336, 1, 128).weight_bytes == 58720256 + 3670016


def attend(*arrays: jax.Array, scale: float, implementation: Any) -> jax.Array:
    """A kernel that computes no numbers has no number in the report."""
    factor = jnp.nan if implementation == "broken" else 1
    name = "reference" if implementation == "broken" else implementation
    return factor * tree_attention(*arrays, scale=scale, implementation=name)


@pytest.mark.long
@pytest.mark.parametrize(
    ("module", "words", "shapes", "candidates", "read"),
    [
        (
            bench,
            ["--nodes", "3", "--slots", "64", "--batch", "2"],
            [("llama-3.1-8b", 2, 64, 3), ("vicuna-7b", 2, 64, 3)],
            ("mosaic_gpu", "reference", "broken"),
            "cache_bytes",
        ),
        (
            bench_matmul,
            ["--weights", "small", "--nodes", "1", "3"],
            [("small", 1), ("small", 3)],
            bench_matmul.CANDIDATES,
            "weight_bytes",
        ),
    ],
)
def test_the_report_has_every_combination(
    module: ModuleType,
    words: list[str],
    shapes: list[tuple[Any, ...]],
    candidates: tuple[str, ...],
    read: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(bench, "tree_attention", attend)
    monkeypatch.setattr(bench_matmul, "WIDTHS", {"small": (128, 256)})
    monkeypatch.setattr(module, "CANDIDATES", candidates)
    for size in ("READ", "COPIED", "RUN"):
        monkeypatch.setattr(bench_report, size, 10**5)
    path = tmp_path / "report.json"
    module.main([*words, "--repeats", "2", "--output", str(path)])
    report, table = json.loads(path.read_text()), capsys.readouterr().out
    assert [tuple(row[name] for name in module.COLUMNS) for row in report["rows"]] == shapes
    for row in report["rows"]:
        assert tuple(row["candidates"]) == candidates
        one = row["candidates"]["reference"]
        low, middle, high = one["microseconds"]
        assert low <= middle <= high
        # Bytes per nanosecond are gigabytes per second.
        assert one["gigabytes_per_second"] == pytest.approx(row[read] / (1000 * middle))
        assert one["difference"] == 0
        assert row["candidates"].get("broken", {"difference": None})["difference"] is None
        assert "difference" not in row["candidates"].get("bfloat16", {})
        if report["platform"] == "cpu":
            kernel = row["candidates"]["mosaic_gpu"]
            assert list(kernel) == ["not_run"]
            assert "it needs a Hopper GPU" in kernel["not_run"]
            assert kernel["not_run"] in table
    assert ("not finite" in table) == ("broken" in candidates)
    # Where nothing was compared the column is empty.
    assert "nan" not in table
    assert ", medians of 2 repeats" in table


@pytest.mark.parametrize(
    ("command", "arguments", "sentence"),
    [
        (bench.main, ["--slots", "0"], "--slots is 0, but must be 1 or more"),
        (bench.main, ["--nodes", "65", "--slots", "64"], "--nodes 65 is more than --slots 64"),
        (bench.main, ["--heads", "llama"], "invalid choice: 'llama'"),
        (bench.main, ["--output", "no/such/folder.json"], "create the folder no/such first"),
        (bench.main, ["--output", "/"], "--output / is a folder; give a file in it."),
        (bench_matmul.main, ["--nodes", "0"], "--nodes is 0, but must be 1 or more"),
        (bench_matmul.main, ["--group", "48"], "invalid choice: 48"),
        pytest.param(
            bench.main,
            [],
            "This benchmark needs an NVIDIA GPU, but JAX runs on cpu",
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


VICUNA = bench.Case(32, 32, 128, batch=1, slots=1024, nodes=32, dtype="bfloat16")
PAIR = bench_matmul.Case(512, 1024, 32, 128)


@needs_compiler
@pytest.mark.parametrize(
    ("program", "inputs", "calls"),
    [
        # Attention and its merge, over three caches.
        (bench.attention_program("mosaic_gpu", 50), lambda: [bench.draw_inputs(VICUNA, 3)], 6),
        (bench.attention_program("reference", 50), lambda: [bench.draw_inputs(VICUNA, 3)], 0),
        (
            bench_matmul.pair_program("mosaic_gpu", 50),
            lambda: list(bench_matmul.draw_inputs(PAIR, 2, plain=False)),
            4,
        ),
    ],
    ids=["attention", "its reference", "products"],
)
def test_compiled_for_a_gpu_every_call_stays_in_the_loop(
    program: Any, inputs: Callable[[], list[Any]], calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "current_device", Device)
    zero = jax.ShapeDtypeStruct((), jnp.int32)
    compiled = compile_on(gpu_mesh("h200"), program, *jax.eval_shape(inputs), zero)
    assert '"known_trip_count":{"n":"50"}' in compiled.hlo
    # Of three caches: their values alone, copied before the loop, would be as much.
    assert compiled.memory.temp_size_in_bytes < 1.5 * VICUNA.cache_bytes
    entry = compiled.hlo[compiled.hlo.index("\nENTRY") :]
    assert "mosaic_gpu" not in entry
    assert compiled.hlo.count('custom_call_target="mosaic_gpu_v2"') == calls
