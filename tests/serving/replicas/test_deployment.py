"""What Ray Serve is asked to run, with a stand-in for the cluster."""

from typing import Any

import pytest

pytest.importorskip("ray", reason="the extra ray is not installed")

from tiny_folders import PairFolders

from redrafter_jax.commands.serve_replicas import application
from redrafter_jax.errors import InputError


def deployments(
    monkeypatch: pytest.MonkeyPatch, free: dict[str, float], **options: Any
) -> tuple[Any, Any]:
    """The deployments of the front and of the engines, where this much of a cluster is free."""
    monkeypatch.setattr("ray.cluster_resources", lambda: {"CPU": 8.0, "GPU": 4.0})
    monkeypatch.setattr("ray.available_resources", lambda: free)
    front = application(options)._bound_deployment
    return front, front.init_args[0]._bound_deployment


def test_options_of_the_command_make_an_application_of_ray_serve(
    folders: PairFolders, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"target": folders.target, "drafter": folders.drafter}
    options |= {"slots": 3, "queue-limit": 5, "replicas": 2, "max-replicas": 4, "log-prompts": True}
    front, engines = deployments(monkeypatch, {}, **options)
    assert (front.name, front.num_replicas, engines.name) == ("front", 1, "engine")
    assert (engines.max_ongoing_requests, engines.max_queued_requests) == (8, 5)
    scaling = engines._deployment_config.autoscaling_config
    assert (scaling.min_replicas, scaling.max_replicas) == (2, 4)
    assert scaling.target_ongoing_requests == 3
    load, limits, logs_prompts = engines.init_args
    assert (limits.slots, logs_prompts) == (3, True)


@pytest.mark.parametrize(
    ("free", "is_room"),
    [
        ({"CPU": 2.0, "GPU": 1.0}, True),
        ({"CPU": 0.5, "GPU": 1.0}, False),
        ({"CPU": 2.0, "GPU": 0.5}, False),
        ({"CPU": 2.0}, False),
    ],
)
def test_an_update_starts_one_replica_more_where_there_is_room(
    folders: PairFolders, monkeypatch: pytest.MonkeyPatch, free: dict[str, float], is_room: bool
) -> None:
    options: dict[str, Any] = {"target": folders.target, "drafter": folders.drafter}
    front, engines = deployments(monkeypatch, free, **options, replicas=4)
    # Percent of the replicas, of which Ray Serve rounds any up to a whole one.
    assert (engines._deployment_config.max_surge_percent > 0) == is_room
    assert front._deployment_config.max_surge_percent > 0, "it reserves nothing"


def test_a_wrong_option_in_a_file_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="--plots"):
        deployments(monkeypatch, {}, **{"no-drafter": True, "plots": 4})
