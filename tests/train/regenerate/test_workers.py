"""Regeneration by several workers writes the bytes that one process writes."""

from pathlib import Path

import pytest
import yaml
from ray_processes import train_with_two_workers
from regenerated import Regeneration, settings

pytest.importorskip("ray", reason="the extra ray is not installed")

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("quick_compilation")]


def written_by_two(run: Regeneration, output: Path, *, kill: bool = False) -> str:
    """What the command prints; with `kill` a worker is killed once something is written."""
    path = output.with_suffix(".yaml")
    path.write_text(yaml.safe_dump(settings(run.target, output, **run.values)))
    kill_when = (lambda: output.exists() and output.stat().st_size > 0) if kill else None
    return train_with_two_workers("regenerate", "--config", str(path), kill_when=kill_when)


def test_when_a_worker_is_killed_another_writes_the_rest(
    inventing: Regeneration, tmp_path: Path
) -> None:
    # Which rows are kept depends on the questions of all earlier ones.
    values = inventing.values | {"count": 120}
    one = Regeneration(inventing.target, tmp_path, **values)
    told = written_by_two(one, tmp_path / "two.jsonl", kill=True)
    assert "a new worker replaces it" in told
    assert (tmp_path / "two.jsonl").read_bytes() == one.finished.read_bytes()


def test_an_output_is_resumed_where_it_was_cut(rewriting: Regeneration, tmp_path: Path) -> None:
    output, whole = tmp_path / "rows.jsonl", rewriting.finished.read_bytes()
    output.write_bytes(whole[: whole.index(b"\n") + 100])
    written_by_two(rewriting, output)
    assert output.read_bytes() == whole
