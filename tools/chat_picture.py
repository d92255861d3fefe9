r"""Draws an SVG picture of `redrafter chat --show`, with one question and its answer.

    python -m tools.chat_picture docs/pictures/chat.svg "Name three uses of a paper clip." \
        --drafter configs/smollm2_135m/drafter --max-new-tokens 90 --adaptive off

Options after the question are passed to `chat`.
"""

import io
import re
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

from redrafter_jax.command_line import run
from redrafter_jax.errors import InputError

_WIDTH = 88


def main() -> None:
    """Ask the question and draw the output.

    Raises:
      InputError: arguments are missing, or `chat` ends with an error.
    """
    if len(sys.argv) < 3:
        raise InputError("Give the output file and a question, then any options of `chat`.")
    path, question, *options = sys.argv[1:]
    ended = subprocess.run(
        [sys.executable, "-m", "redrafter_jax", "chat", "--show", "--color", "always", *options],
        input=question + "\n",
        capture_output=True,
        text=True,
        check=False,
    )
    if ended.returncode:
        raise InputError(ended.stderr.strip().removeprefix("error: "))
    legend = next(line for line in ended.stderr.splitlines() if line.startswith("Colours"))
    Path(path).write_text(draw(f"{legend}\n> {question}\n{ended.stdout}"), encoding="utf-8")


def draw(printed: str) -> str:
    """Render terminal output as a self-contained SVG."""
    console = Console(record=True, width=_WIDTH, file=io.StringIO(), force_terminal=True)
    console.print(Text.from_ansi(printed.rstrip()))
    picture = console.export_svg(title="redrafter chat --show")
    return re.sub(r"@font-face \{.*?\}\s*", "", picture, flags=re.DOTALL)


if __name__ == "__main__":
    run(main)
