"""`python -m train` in this process."""

from pathlib import Path

import pytest
from train_runs import Said, Start, run_train


@pytest.fixture
def start(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Start:
    """`run_train`, which must end with this exit code; what it printed."""

    def run(values: dict[str, object], *words: str, code: object = 0) -> Said:
        ended = run_train(tmp_path, values, *words)
        printed = capfd.readouterr()
        said = Said(printed.out, printed.err)
        assert ended == code, said
        return said

    return run
