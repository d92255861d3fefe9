"""A layer's launches, as what programs of more layers and of fewer differ by."""

from typing import Any, cast

import pytest

from eval import launches
from eval.launches import Both, compile_both, count_step
from pallas_kernels.aot import Compilation
from pallas_kernels.launches import Launch


def test_few_layers_are_compiled_but_those_that_a_drafter_reads() -> None:
    def layers_of(both: Both) -> tuple[Any, ...]:
        return both.whole, both.layers, both.other, both.other_layers

    def compiled(layers: int) -> Any:
        return layers

    assert layers_of(compile_both(32, compiled)) == (32, 32, 2, 2)
    assert layers_of(compile_both(32, compiled, (9, 19))) == (32, 32, 20, 20)
    assert layers_of(compile_both(2, compiled)) == (2, 2, 3, 3)


def test_a_step_is_counted_for_rows_of_every_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    def step_launches(hlo: str, taken: tuple[str, ...], blocks: int) -> list[Launch]:
        assert blocks == 3
        layers = [Launch("layer", "", 5, 60, 40)] * int(hlo)
        asked = [Launch(scope, "", 7, 900, 100) for scope in taken]
        return [*layers, Launch("rounds", "", 3, 1000, 0), *asked]

    def compiled(layers: int) -> Compilation:
        return cast(Any, Compilation)(None, str(layers), "", ())

    monkeypatch.setattr(launches, "step_launches", step_launches)
    counts = count_step(compile_both(32, compiled), 20_000, 1e9, 2.0, slots=600)
    assert list(counts) == ["greedy", "sampled", "filtered"]
    moved = 32 * 500 + 3000
    assert counts["greedy"] == {
        "launches": 163,
        "launches_in_a_layer": 5,
        "launches_outside": 3,
        "moved_bytes": moved,
        "moved_bytes_in_a_layer": 500,
        "moved_over_least": moved / 20_000,
        "milliseconds": pytest.approx(moved / 1e6 + 163 * 0.002),
    }
    assert counts["filtered"]["launches_outside"] == 3 + 2 * 7
    assert counts["sampled"]["moved_bytes"] == moved + 7000
