"""Where the repository's own files lie."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "configs"
GOLDENS = ROOT / "tests" / "goldens"
