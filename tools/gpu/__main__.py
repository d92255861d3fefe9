"""`python -m tools.gpu`: measure kernels, decode steps and texts on a GPU.

The measurement consists of pieces of less than nine minutes, the most informative first. Each piece
runs in a separate process and writes one file. After an interruption, the same command resumes with
the interrupted piece. The command uses no network, and reports missing packages before anything
runs. After every piece it writes a page and one JSON file with all results.
"""

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from redrafter_jax.command_line import make_folder, run
from redrafter_jax.errors import InputError
from tools.gpu.page import check_one_card, markdown
from tools.gpu.pieces import LIMIT, NEEDED, PIECES, Piece, missing_packages

_ROOT = Path(__file__).parents[2]
_CODE = ("redrafter_jax", "pallas_kernels", "eval", "tools/gpu")


def measure(settings: argparse.Namespace) -> int:
    """Run the pieces that have no file yet; return the exit code: 1 if a piece failed or is wrong.

    Raises:
      InputError: packages that every piece needs are missing, or the files are from several GPUs.
    """
    started = time.monotonic()
    if missing := missing_packages(NEEDED):
        raise InputError(
            f"{sys.executable} lacks {', '.join(missing)}, which all pieces need; install them, "
            "or set another PYTHON=."
        )
    left_out = {piece.name: why for piece in PIECES if (why := _why_left_out(piece, settings))}
    for name, why in left_out.items():
        print(f"{name} is left out: {why}", flush=True)
    make_folder(settings.output, "the folder of the pieces")
    kind = _kind(small=settings.small)
    failed = False
    for piece in PIECES:
        path = settings.output / f"{piece.name}.json"
        if piece.name in left_out or _record(path, kind) is not None:
            continue
        if settings.minutes is not None and time.monotonic() - started > 60 * settings.minutes:
            print(f"time is up; the same command resumes with {piece.name}", flush=True)
            break
        if not _run(piece, path, kind, settings):
            failed = True
            left_out[piece.name] = "it failed"
        _write_page(settings, kind, left_out)
    page = _write_page(settings, kind, left_out)
    return int(failed or "**Wrong" in page)


def _why_left_out(piece: Piece, settings: argparse.Namespace) -> str | None:
    if settings.only and piece.name not in settings.only:
        return "it is not among --only"
    if settings.small and piece.small is None:
        return "it needs a GPU, and --small measures on a CPU too"
    needs = piece.needs
    if piece.takes_model and not settings.small:
        # The default model is a cached GGUF file, which needs the package gguf.
        folder = settings.model is not None and settings.model.is_dir()
        needs = needs if folder else (*needs, "gguf")
    if missing := missing_packages(needs):
        return f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not installed"
    return None


def _kind(*, small: bool) -> dict[str, Any]:
    """Return the code's digest and the kind of shapes; a file with the same two is up to date."""
    digest = hashlib.sha256()
    for path in sorted(one for part in _CODE for one in (_ROOT / part).rglob("*.py")):
        digest.update(path.read_bytes())
    return {"code": digest.hexdigest()[:16], "small": small}


def _record(path: Path, kind: dict[str, Any]) -> dict[str, Any] | None:
    """Read the record that a piece has written with this code; None if the piece must run."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None
    return record if record.get("measured_by") == kind else None


def _run(piece: Piece, path: Path, kind: dict[str, Any], settings: argparse.Namespace) -> bool:
    """Run a piece in a separate process; return whether it has written its file."""
    output = path.with_suffix(".new")
    output.unlink(missing_ok=True)
    arguments = [*((piece.small or ()) if settings.small else piece.arguments)]
    if piece.takes_model and settings.model is not None:
        arguments += ["--model", str(settings.model)]
    # The compilation cache saves work after an interruption; the interpreter of kernels needs four
    # of XLA's threads.
    environment = {
        "JAX_COMPILATION_CACHE_DIR": str((settings.output / "programs").resolve()),
        "NPROC": str(max(4, os.cpu_count() or 1)),
        **os.environ,
    }
    command = [sys.executable, "-m", piece.module, *arguments, "--output", str(output.resolve())]
    print(f"{piece.name}: {' '.join(command[1:])}", flush=True)
    began = time.monotonic()
    try:
        code = subprocess.run(command, cwd=_ROOT, env=environment, timeout=LIMIT, check=False)
        said = f"exit code {code.returncode}"
    except subprocess.TimeoutExpired:
        said = f"ended after {LIMIT} s"
    taken = time.monotonic() - began
    try:
        record = json.loads(output.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        print(f"{piece.name}: it wrote no file in {taken:.0f} s, {said}", flush=True)
        return False
    record = {"measured_by": kind, "seconds": taken} | record
    output.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    output.replace(path)
    print(f"{piece.name}: {taken:.0f} s", flush=True)
    return True


def _write_page(
    settings: argparse.Namespace, kind: dict[str, Any], left_out: dict[str, str]
) -> str:
    """Write the page and one JSON file of all records.

    Both are written to the output folder, and the page also to the documentation.
    """
    paths = {piece.name: settings.output / f"{piece.name}.json" for piece in PIECES}
    found = {name: record for name, path in paths.items() if (record := _record(path, kind))}
    if not found:
        return ""
    check_one_card(found)
    page, numbers = "\n".join(markdown(found, left_out)) + "\n", json.dumps(found, indent=2) + "\n"
    first = next(iter(found.values()))
    places = [settings.output / "page.md"]
    if not settings.small:
        make_folder(settings.docs, "the folder of the page")
        card = re.sub(r"[^a-z0-9]+", "-", first["device"].lower()).strip("-")
        places.append(settings.docs / f"{card}-{first['timestamp'].partition('T')[0]}.md")
    for place in places:
        place.write_text(page, encoding="utf-8")
        place.with_suffix(".json").write_text(numbers, encoding="utf-8")
    return page


def main() -> None:
    """Run the pieces and exit with their exit code."""
    parser = argparse.ArgumentParser(prog="python -m tools.gpu", description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("runs/gpu"), help="folder of pieces")
    parser.add_argument("--docs", type=Path, default=Path("docs/benchmarks"), help="page folder")
    parser.add_argument("--model", type=Path, help="SmolLM2-135M-Instruct, a folder or GGUF file")
    parser.add_argument("--minutes", type=float, help="minutes after which no piece is begun")
    parser.add_argument("--only", nargs="+", choices=[piece.name for piece in PIECES])
    parser.add_argument("--small", action="store_true", help="small shapes, for a CPU too")
    sys.exit(measure(parser.parse_args()))


if __name__ == "__main__":
    run(main)
