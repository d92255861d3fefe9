"""`python -m redrafter_jax serve`: its options, and what it refuses before anything is loaded."""

import argparse
import re
import socket
import sys
from typing import Any
from unittest.mock import Mock

import jax
import pytest
import yaml
from places import ROOT
from servers import LINES
from tiny_folders import byte_tokenizer
from tiny_models import random_target, tiny_config

from redrafter_jax import InputError, load_target, save_target
from redrafter_jax.commands.parser import read_arguments
from redrafter_jax.commands.serve_alone import make_server
from redrafter_jax.commands.serve_together import _check_same
from redrafter_jax.commands.served import fingerprint, load_served
from redrafter_jax.config.quantization import Quantization
from redrafter_jax.config.serving import ServeConfig
from redrafter_jax.engine.engine import Engine
from redrafter_jax.files.convert import convert
from redrafter_jax.parallel.links import Follower, Leader
from redrafter_jax.serving.server import Server, listen
from redrafter_jax.serving.service import ServedModel
from redrafter_jax.text.chat_template import NO_TEMPLATE, ChatTemplate, PromptFormat

WORDS = ["serve", "--target", "t", "--no-drafter"]


def test_by_default_this_machine_alone_may_ask_without_a_key_or_with_the_environments(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert read_arguments(WORDS).host == "127.0.0.1"
    assert read_arguments(WORDS).api_key is None
    monkeypatch.setenv("REDRAFTER_API_KEY", "s3cret")
    assert read_arguments(WORDS).api_key == "s3cret"
    assert read_arguments([*WORDS, "--api-key", "other"]).api_key == "other"
    monkeypatch.setenv("REDRAFTER_API_KEY", "")
    with pytest.raises(InputError, match="the key is empty"):
        read_arguments(WORDS)


def test_the_example_for_kubernetes_is_read_and_its_command_is_taken() -> None:
    text = (ROOT / "docs" / "serving.md").read_text()
    blocks = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    (block,) = (one for one in blocks if "kind: Deployment" in one)
    deployment, service = yaml.safe_load_all(block)
    pod = deployment["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    assert service["spec"]["selector"] == pod["metadata"]["labels"]
    program, *words = [*container["command"], *container["args"]]
    arguments: Any = read_arguments(words)
    assert (program, arguments.command) == ("redrafter", "serve")
    assert arguments.drain < pod["spec"]["terminationGracePeriodSeconds"]
    assert arguments.port == service["spec"]["ports"][0]["port"]


@pytest.mark.parametrize(
    ("option", "value", "problem"),
    [
        ("--drain", "soon", "invalid float value: 'soon'"),
        ("--deadline", "0", "--deadline is 0.0; it must be greater than 0."),
        ("--replicas", "0", "--replicas is 0; it must be greater than 0."),
        ("--replica-gpus", "-1", "--replica-gpus is -1.0; it must be 0 or more."),
        ("--tool-parser", "xml", "invalid choice: 'xml'"),
    ],
)
def test_a_value_that_is_none_is_told(
    run_redrafter: Any, option: str, value: str, problem: str
) -> None:
    code, _, err = run_redrafter(*WORDS, option, value)
    assert (code, problem in err) == (2, True)


def test_fewer_replicas_at_most_than_at_first_are_refused(run_redrafter: Any) -> None:
    code, _, err = run_redrafter(*WORDS, "--replicas", "3", "--max-replicas", "2")
    assert (code, "--max-replicas is 2; it must be at least the number of replicas, 3." in err) == (
        2,
        True,
    )


@pytest.mark.parametrize(
    ("given", "option", "value"),
    [
        ("--replicas", "--num-processes", "2"),
        ("--replicas", "--coordinator-address", "first:1234"),
        ("--max-replicas", "--process-id", "0"),
    ],
)
def test_replicas_and_several_processes_are_refused_together(
    run_redrafter: Any, given: str, option: str, value: str
) -> None:
    code, _, err = run_redrafter(*WORDS, given, "2", option, value)
    assert (code, f"{given} and {option} are both given" in err) == (2, True)


@pytest.mark.parametrize("package", ["jax", "llguidance"])
def test_other_releases_than_those_of_process_0_are_refused(package: str) -> None:
    first, second = socket.socketpair()
    with first, second:
        Leader({1: first}).tell({package: "0.0.1"})
        with pytest.raises(InputError, match=rf"{package} is .* in this process and 0\.0\.1 in pr"):
            _check_same(argparse.Namespace(), Follower(second))
        second.shutdown(socket.SHUT_RDWR)


def test_a_mesh_of_several_processes_takes_all_their_devices(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    demo = str(ROOT / "configs" / "demo_target")
    arguments = read_arguments(["serve", "--target", demo, "--no-drafter", "--mesh-model", "2"])
    with pytest.raises(InputError, match="is 2, but the 2 processes of this job have 8 devices"):
        load_served(arguments)


def test_the_address_of_replicas_needs_a_port(run_redrafter: Any) -> None:
    pytest.importorskip("ray", reason="the extra ray is not installed")
    code, _, err = run_redrafter(*WORDS, "--replicas", "2", "--port", "0")
    assert (code, "--port is 0, but replicas need a fixed port" in err) == (2, True)


def test_a_parser_of_calls_without_a_template_that_writes_tools_is_refused() -> None:
    words = ["serve", "--target", str(ROOT / "configs" / "demo_target"), "--no-drafter"]
    arguments = read_arguments([*words, "--tool-parser", "hermes"])
    with pytest.raises(InputError, match="of none does not support tools; leave"):
        load_served(arguments)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (
            ["--mirror-candidates", "4", "--mirror-branches", "9"],
            "--mirror-candidates and --mirror-branches are for drafting while the target verifies; "
            "give --mirror-layer too, or leave them out.",
        ),
        (["--mirror-layer", "0"], "--mirror-layer is 0; it must be greater than 0."),
        (
            ["--mirror-layer", "12"],
            "MirrorConfig.layer is 12; the target has 12 layers, so give a layer from 1 to 11.",
        ),
        (
            ["--mirror-layer", "6", "--mirror-drafter-devices", "8"],
            "MirrorConfig.drafter_devices is 8, but the target leaves 7 devices free; give 7 or "
            "fewer.",
        ),
        (
            ["--mirror-layer", "6", "--adaptive", "on"],
            "adaptive is True, but mirror drafts in every step; leave adaptive out.",
        ),
        (
            ["--mirror-layer", "6", "--mean-nodes", "2"],
            "TreeConfig.mean_nodes is 2, but mirror does not share nodes between rows; leave "
            "mean_nodes out.",
        ),
        (
            ["--mirror-layer", "6", "--no-drafter"],
            "mirror is given, but there is no drafter; leave mirror out.",
        ),
    ],
)
def test_what_cannot_be_mirrored_is_refused_at_the_start(options: list[str], problem: str) -> None:
    drafter = [] if "--no-drafter" in options else ["--drafter", "self:layers=2"]
    words = ["serve", "--target", str(ROOT / "configs" / "demo_target"), *drafter, *options]
    with pytest.raises(InputError, match=f"^{re.escape(problem)}$"):
        load_served(read_arguments(words))


def test_an_engine_drafts_ahead_as_the_options_say() -> None:
    words = ["--drafter", "self:layers=2", "--mirror-layer", "6", "--mirror-candidates", "2"]
    target = ["--target", str(ROOT / "configs" / "demo_target")]
    engine, _ = load_served(read_arguments(["serve", *target, *words, "--context-length", "200"]))
    assert engine.mirror is not None
    assert not engine.adaptive


def test_an_address_in_use_is_told_before_the_target_is_looked_for(run_redrafter: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        code, _, err = run_redrafter(*WORDS, "--port", port)
    assert code == 2
    assert f"--host 127.0.0.1 --port {port}: Address already in use" in err


def test_a_package_that_is_missing_is_named(
    run_redrafter: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # They alone are imported anew: other modules would be two from then on.
    for name in ("commands.serve_alone", "commands.served", "serving.server"):
        monkeypatch.delitem(sys.modules, f"redrafter_jax.{name}", raising=False)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    code, _, err = run_redrafter(*WORDS)
    assert code == 2
    assert "redrafter serve needs the package uvicorn, which is not installed" in err


def test_a_missing_ray_is_named_with_its_extra(
    run_redrafter: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "redrafter_jax.commands.serve_replicas", raising=False)
    monkeypatch.delitem(sys.modules, "redrafter_jax.serving.replicas.deployment", raising=False)
    monkeypatch.setitem(sys.modules, "ray", None)
    code, _, err = run_redrafter(*WORDS, "--replicas", "2")
    assert (code, "install all of its packages: pip install '.[serve,ray]'." in err) == (2, True)


def test_the_fingerprint_of_a_quantized_target_tells_its_formats(tmp_path: Any) -> None:
    save_target(random_target(tiny_config()), tmp_path / "plain")
    forms = {
        "int8": Quantization.of("int8"),
        "head": Quantization("int8", "int8", "fp8"),
        "embedding": Quantization("int8", "fp8", "int8"),
    }
    for folder, form in forms.items():
        convert(tmp_path / "plain", tmp_path / folder, quantization=form)

    def told(folder: str, dtype: str) -> str:
        return fingerprint(load_target(tmp_path / folder, dtype))

    dtypes = ("float32", "bfloat16")
    kinds = [(folder, dtype) for folder in ("plain", *forms) for dtype in dtypes]
    assert len({told(*kind) for kind in kinds}) == 8
    assert told("int8", "float32") == told("int8", "float32")


@pytest.mark.parametrize(("template", "lines"), [(NO_TEMPLATE, 2), (LINES, 1)])
def test_a_model_without_a_chat_template_is_told_at_the_start(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    template: ChatTemplate,
    lines: int,
) -> None:
    monkeypatch.setattr(
        "redrafter_jax.commands.serve_alone.Server", Mock(return_value=Mock(spec=Server))
    )
    monkeypatch.setattr("redrafter_jax.commands.serve_alone.signal.signal", Mock())
    arguments = argparse.Namespace(
        host="127.0.0.1", api_key=None, log_prompts=False, chat_template=None
    )
    form = PromptFormat(byte_tokenizer(), template, [], (), [])
    model = ServedModel("tiny", "fp_tiny", form, 120)
    with listen("127.0.0.1", 0) as listening:
        make_server(arguments, ServeConfig(), listening, Mock(spec=Engine), model)
    told = capsys.readouterr().err.splitlines()
    assert len(told) == lines
    assert ("no chat template" in told[-1]) == (lines == 2)
