"""The example of docs/serving.md: YAML whose command this version takes."""

import re
from typing import Any

import yaml
from places import ROOT

from redrafter_jax.commands.arguments import read_arguments


def test_the_example_is_read_and_its_command_is_taken() -> None:
    text = (ROOT / "docs" / "serving.md").read_text()
    (block,) = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    deployment, service = yaml.safe_load_all(block)
    pod = deployment["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    assert service["spec"]["selector"] == pod["metadata"]["labels"]
    program, *words = [*container["command"], *container["args"]]
    arguments: Any = read_arguments(words)
    assert (program, arguments.command) == ("redrafter", "serve")
    assert arguments.drain < pod["spec"]["terminationGracePeriodSeconds"]
    assert arguments.port == service["spec"]["ports"][0]["port"]
