"""What Ray Serve is asked to run, with a stand-in for the cluster."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray", reason="the extra ray is not installed")

from tiny_folders import PairFolders

from redrafter_jax.commands.serve_replicas import application
from redrafter_jax.errors import InputError


def deployments(
    monkeypatch: pytest.MonkeyPatch, *free: dict[str, float], **options: Any
) -> tuple[Any, Any]:
    """The deployments of the front and of the engines, where this much of each machine is free."""
    monkeypatch.setattr("ray.cluster_resources", lambda: {"CPU": 8.0, "GPU": 4.0})
    machines = dict(enumerate(free))
    place = "redrafter_jax.serving.replicas.deployment.available_resources_per_node"
    monkeypatch.setattr(place, lambda: machines)
    front = application({"host": "0.0.0.0"} | options)._bound_deployment
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
        ([{"CPU": 2.0, "GPU": 1.0}], True),
        ([{"CPU": 0.5, "GPU": 1.0}], False),
        ([{"CPU": 2.0, "GPU": 0.5}], False),
        ([{"CPU": 2.0}], False),
        ([{"CPU": 2.0}, {"CPU": 0.5, "GPU": 1.0}], False),
        ([{"CPU": 2.0}, {"CPU": 1.0, "GPU": 1.0}], True),
    ],
)
def test_an_update_starts_one_replica_more_where_there_is_room(
    folders: PairFolders,
    monkeypatch: pytest.MonkeyPatch,
    free: list[dict[str, float]],
    is_room: bool,
) -> None:
    options: dict[str, Any] = {"target": folders.target, "drafter": folders.drafter}
    front, engines = deployments(monkeypatch, *free, **options, replicas=4)
    # Percent of the replicas, of which Ray Serve rounds any up to a whole one.
    assert (engines._deployment_config.max_surge_percent > 0) == is_room
    assert front._deployment_config.max_surge_percent > 0, "it reserves nothing"


def test_without_a_host_that_the_guard_goes_by_a_file_is_refused(folders: PairFolders) -> None:
    options: dict[str, Any] = {"target": folders.target, "drafter": folders.drafter, "host": None}
    with pytest.raises(InputError, match=r"args has no host, .*; give the host of http_options"):
        application(options)


def test_a_file_for_everyone_without_a_key_gets_a_warning(
    folders: PairFolders, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("REDRAFTER_API_KEY", raising=False)
    options: dict[str, Any] = {"target": folders.target, "drafter": folders.drafter}
    front, _ = deployments(monkeypatch, {}, **options)
    assert front.init_args[1].host == "0.0.0.0"
    assert "Anyone who can reach 0.0.0.0 may send requests" in capsys.readouterr().err


def test_false_and_null_in_a_file_leave_an_option_out_and_lists_are_refused(
    folders: PairFolders, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"target": folders.target, "drafter": folders.drafter}
    options |= {"no-drafter": False, "log-prompts": False, "api-key": None, "slots": None}
    _, engines = deployments(monkeypatch, {}, **options)
    _, limits, logs_prompts = engines.init_args
    assert (limits.slots, logs_prompts) == (8, False)
    with pytest.raises(InputError, match=r"slots in args is \[2, 4\]; it must be a single value"):
        deployments(monkeypatch, {}, **options | {"slots": [2, 4]})


def test_replicas_get_absolute_paths(
    folders: PairFolders, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("target", "drafter"):
        (tmp_path / name).symlink_to(getattr(folders, name))
    (tmp_path / "chat.jinja").write_text("{% for turn in messages %}{{ turn.content }}{% endfor %}")
    (tmp_path / "none").mkdir()
    options: dict[str, Any] = {"target": "target", "drafter": "drafter"}
    _, engines = deployments(monkeypatch, {}, **options | {"chat-template": "chat.jinja"})
    (arguments,) = engines.init_args[0].args
    assert arguments.target == str(Path(folders.target).resolve())
    assert arguments.drafter == str(Path(folders.drafter).resolve())
    assert arguments.chat_template == str(tmp_path / "chat.jinja")
    _, engines = deployments(monkeypatch, {}, **options | {"chat-template": "none"})
    assert engines.init_args[0].args[0].chat_template == "none"


def test_a_wrong_option_in_a_file_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="--plots"):
        deployments(monkeypatch, {}, **{"no-drafter": True, "plots": 4})
