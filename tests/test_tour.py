"""The notebook docs/tour.ipynb, run from its first cell to its last on the tiny target."""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from places import ROOT

TOUR = ROOT / "docs" / "tour.ipynb"
# In a process of its own: the client's packages warn of what is not ours.
RUN = """
import sys, nbformat
from nbclient import NotebookClient
notebook = nbformat.read(sys.argv[1], as_version=4)
NotebookClient(notebook, timeout=900, resources={"metadata": {"path": sys.argv[2]}}).execute()
nbformat.write(notebook, sys.argv[3])
"""


def test_it_is_kept_without_outputs() -> None:
    cells = json.loads(TOUR.read_text(encoding="utf-8"))["cells"]
    assert [cell for cell in cells if cell.get("outputs") or cell.get("execution_count")] == []


@pytest.mark.long
@pytest.mark.skipif(find_spec("nbclient") is None, reason="the extra docs is not installed")
def test_it_runs_and_every_way_has_the_baselines_texts(tmp_path: Path) -> None:
    out = tmp_path / "out.ipynb"
    ended = subprocess.run(
        [sys.executable, "-c", RUN, str(TOUR), str(ROOT), str(out)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    cells = json.loads(out.read_text(encoding="utf-8"))["cells"]
    kinds = {
        kind for cell in cells for one in cell.get("outputs", []) for kind in one.get("data", {})
    }
    assert {"image/svg+xml", "image/png"} <= kinds
