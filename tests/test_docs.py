"""The documentation as a site: no warning, no dead link, and what its pages name."""

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml
from places import ROOT

import redrafter_jax
from eval.config import CompareSettings
from redrafter_jax.settings.files import load_settings
from train.config import TrainSettings

DOCS = ROOT / "docs"


@pytest.mark.long
@pytest.mark.skipif(find_spec("mkdocs") is None, reason="the extra docs is not installed")
def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stderr
    assert "WARNING" not in built.stderr
    assert "trace_step" in (tmp_path / "api" / "index.html").read_text(encoding="utf-8")


def test_the_reference_has_all_that_is_public() -> None:
    named = re.findall(r"^::: [\w.]+\.(\w+)$", (DOCS / "api.md").read_text(), re.MULTILINE)
    assert sorted(named) == sorted(redrafter_jax.__all__)


def test_every_page_is_in_the_order_of_the_site() -> None:
    nav = re.findall(r": ([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    pages = {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")}
    assert pages == set(nav) - {"contributing.md", "benchmarks/smollm2-head.md"}


def test_the_settings_of_the_start_page_are_valid(tmp_path: Path) -> None:
    blocks = re.findall(
        r"```yaml\n# ([\w.]+)\n(.*?)```", (DOCS / "index.md").read_text(), re.DOTALL
    )
    files = dict(blocks)
    for name, kind in (("mine.yaml", TrainSettings), ("compare.yaml", CompareSettings)):
        (tmp_path / name).write_text(files[name])
        assert load_settings(kind, tmp_path / name)
        assert yaml.safe_load(files[name])["target"] == "path/or/hub-id"
