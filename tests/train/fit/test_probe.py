"""What `redrafter fit` measures before it plans."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from redrafter_jax import load_target
from redrafter_jax.files.target_files import open_target
from train.config import TrainSettings
from train.fit import probe
from train.fit.plan import FitRequest
from train.fit.probe import Rates, measure_rates
from train.fit.settings import train_settings


@pytest.mark.long
@pytest.mark.usefixtures("quick_compilation")
def test_rates_are_tokens_by_the_clock(
    target_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a clock by which every timed call takes a quarter of a second."""
    config = open_target(target_folder).config
    asked = FitRequest(str(target_folder), "float32", 1.0)
    values = train_settings(asked, tmp_path, config, 1)
    settings = TrainSettings.model_validate(values)
    times = iter(range(1000))
    clock = SimpleNamespace(perf_counter=lambda: next(times) / 4)
    monkeypatch.setattr(probe, "time", clock)
    monkeypatch.setattr(probe, "_SECONDS", 0.5)
    rates = measure_rates(lambda: load_target(target_folder, "float32"), settings, rows=3, top_k=8)
    positions = 2 * 64 / 0.25
    assert rates == Rates(
        alone=16 / 0.25,
        written=3 * 16 / 0.25,
        read=positions,
        trained=positions,
        # The target, and the first call of each.
        starting=5 * 0.25,
    )
