"""Workers that share a command's work: features, and what is refused."""

# The extra `ray` may be missing.
# pyright: reportMissingImports=false

import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import jax
import pytest
import yaml
from ray_processes import train_with_two_workers
from regenerated import Regeneration
from train_runs import Start, run_train, settings

from redrafter_jax import InputError
from redrafter_jax.settings.sections import MeshSettings
from train.config import WorkerSettings
from train.workers import OneProcess, prepare

needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason="the extra ray is not installed")


def test_one_process_works_on_what_it_has_loaded() -> None:
    alone = OneProcess(lambda: [10])
    assert alone.ask(len) == 1
    added = alone.share(lambda loaded, items: (loaded[0] + item for item in items), range(3))
    assert list(added) == [10, 11, 12]


def test_a_missing_ray_is_named_before_the_target_is_looked_for(
    tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    nowhere = tmp_path / "nowhere"
    values = settings(nowhere, tmp_path / "run", features=str(tmp_path / "features"))
    sentence = "workers is 2, which needs the package ray, which is not installed; in a checkout"
    assert sentence in start(values, "features", "workers=2", code=2).err
    regeneration = Regeneration(nowhere, tmp_path, data=values["data"], workers=2)
    with pytest.raises(InputError, match=sentence):
        regeneration(tmp_path / "rows.jsonl")


def test_workers_of_a_job_of_several_processes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    with pytest.raises(InputError, match="workers is 3 in a job of several processes"):
        prepare(WorkerSettings(workers=3))


def test_workers_are_refused_where_jax_already_uses_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", ModuleType("ray"))
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    before = jax.config.jax_platforms
    with pytest.raises(InputError, match="workers is 3, but JAX already uses the GPU in this proc"):
        prepare(WorkerSettings(workers=3))
    assert jax.config.jax_platforms == before


class Cluster:
    """Stands in for Ray: how often actors were made, and what each of them reserves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, resources: dict[str, float]) -> None:
        self.made, self.reserved = 0, {}
        monkeypatch.setenv("RAY_ADDRESS", "auto")
        monkeypatch.setattr("train.ray_workers.join_cluster", lambda: None)
        monkeypatch.setattr("ray.cluster_resources", lambda: resources)
        monkeypatch.setattr("ray.put", lambda value: value)
        monkeypatch.setattr("ray.remote", self._remote)
        monkeypatch.setattr("ray.kill", lambda actor: None)

    def _remote(self, **reserved: float) -> Any:
        self.reserved = reserved
        return lambda kind: SimpleNamespace(remote=self._make)

    def _make(self, load: Any) -> Any:
        self.made += 1
        return SimpleNamespace(ask=SimpleNamespace(remote=lambda question: question))


@needs_ray
@pytest.mark.parametrize(
    ("resources", "given", "gpus"),
    [({}, None, 0), ({}, 1, 1), ({"GPU": 8.0}, None, 2), ({"GPU": 8.0}, 0.5, 0.5)],
)
def test_each_worker_reserves_the_gpus_that_are_asked_for(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    resources: dict[str, float],
    given: float | None,
    gpus: float,
) -> None:
    from train.ray_workers import RayWorkers

    cluster = Cluster(monkeypatch, resources)
    RayWorkers(WorkerSettings(workers=3, worker_gpus=given), MeshSettings(model=2), list, 1)
    assert (cluster.made, cluster.reserved) == (3, {"num_cpus": 1, "num_gpus": gpus})
    told = f"3 workers, each of which reserves 1 CPUs and {gpus} GPUs"
    assert told in capsys.readouterr().err


@needs_ray
def test_only_a_lost_worker_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    from ray.exceptions import OutOfDiskError, OutOfMemoryError, WorkerCrashedError

    from train.ray_workers import RayWorkers

    cluster = Cluster(monkeypatch, {})
    workers = RayWorkers(WorkerSettings(workers=1), MeshSettings(), list, 1)
    errors = [WorkerCrashedError(), OutOfMemoryError("full"), OutOfDiskError()]

    def fail(question: Any) -> None:
        raise errors.pop(0)

    monkeypatch.setattr("ray.get", fail)
    with pytest.raises(OutOfDiskError):
        workers.ask(len)
    assert cluster.made == 3


@needs_ray
def test_more_workers_than_the_machine_has_room_for_are_refused() -> None:
    from train.ray_workers import check_room

    machine = {"CPU": 2.0, "GPU": 4.0}
    check_room(WorkerSettings(workers=4, worker_cpus=0.5), 1, machine)
    with pytest.raises(InputError, match="each takes 1 CPUs, but this machine has 2; lower worke"):
        check_room(WorkerSettings(workers=4), 1, machine)
    with pytest.raises(InputError, match="each takes 2 GPUs, but this machine has 4; lower worke"):
        check_room(WorkerSettings(workers=4, worker_cpus=0.5), 2, machine)


@pytest.mark.long
@needs_ray
def test_when_a_worker_is_killed_another_reads_the_rest(
    target_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("train.features._SHARD_BYTES", 1)  # one pass in each shard
    two = tmp_path / "two"
    values = settings(target_folder, tmp_path / "run", features=str(two))
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(values))
    words = ["features", "--config", str(path), "top_k=5"]
    told = train_with_two_workers(
        *words,
        kill_when=lambda: any(two.glob("*.safetensors")),
        program="import train.features as written; written._SHARD_BYTES = 1\n"
        "from train.__main__ import main; main()",
    )
    assert "a new worker replaces it" in told
    run_train(tmp_path, values | {"features": str(tmp_path / "one")}, "features", "top_k=5")
    expected = {one.name: one.read_bytes() for one in (tmp_path / "one").iterdir()}
    assert {one.name: one.read_bytes() for one in two.iterdir()} == expected
