"""`python -m pallas_kernels.bench_matmul`: what it counts and what it writes."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from needs import needs_compiler

from pallas_kernels import bench_matmul, bench_report, timing
from pallas_kernels.aot import compile_on, gpu_mesh
from pallas_kernels.bench_matmul import Case, draw_inputs, main, pair_program


def test_weights_are_counted_with_their_scales() -> None:
    # 2 x 4096 x 14336 codes of half a byte, and 4 bytes for each 128 of them.
    assert Case(4096, 14336, 1, 128).weight_bytes == 58720256 + 3670016


@pytest.mark.long
def test_the_report_has_every_combination(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(bench_matmul, "WIDTHS", {"small": (128, 256)})
    for module, size in ((bench_report, "READ"), (timing, "COPIED"), (timing, "RUN")):
        monkeypatch.setattr(module, size, 10**5)
    path = tmp_path / "products.json"
    chosen = ["--weights", "small", "--nodes", "1", "3", "--repeats", "2", "--output", str(path)]
    main(chosen)
    report = json.loads(path.read_text())
    assert [(row["weights"], row["nodes"]) for row in report["rows"]] == [
        ("small", 1),
        ("small", 3),
    ]
    for row in report["rows"]:
        assert list(row["candidates"]) == ["mosaic_gpu", "reference", "bfloat16"]
        one = row["candidates"]["reference"]
        low, middle, high = one["microseconds"]
        assert low <= middle <= high
        # Bytes per nanosecond are gigabytes per second.
        assert one["gigabytes_per_second"] == pytest.approx(row["weight_bytes"] / (1000 * middle))
        assert one["difference"] == 0
        assert "difference" not in row["candidates"]["bfloat16"]
        if report["platform"] == "cpu":
            assert "it needs a Hopper GPU" in row["candidates"]["mosaic_gpu"]["not_run"]
    table = capsys.readouterr().out
    assert "not run" in table
    # Where nothing was compared the column is empty.
    assert "nan" not in table


@needs_compiler
def test_compiled_for_a_gpu_every_product_stays_in_the_loop() -> None:
    x, pairs = jax.eval_shape(lambda: draw_inputs(Case(512, 1024, 32, 128), 2, plain=False))
    zero = jax.ShapeDtypeStruct((), jnp.int32)
    compiled = compile_on(gpu_mesh("h200"), pair_program("mosaic_gpu", 50), x, pairs, zero)
    assert '"known_trip_count":{"n":"50"}' in compiled.hlo
    entry = compiled.hlo[compiled.hlo.index("\nENTRY") :]
    assert "mosaic_gpu" not in entry
    assert compiled.hlo.count('custom_call_target="mosaic_gpu_v2"') == 4
