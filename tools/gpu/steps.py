"""Measures the time of a decode step with a tree and of a baseline step, with random weights.

With `--whole`, only the two whole steps are timed. Otherwise their parts are timed too, as in `eval
steps`.
"""

import argparse
from typing import Any, get_args

import numpy as np

from eval.abstract import bytes_of
from eval.step_parts import Timing, slots_needed, time_parts
from redrafter_jax.command_line import run
from tools.gpu.measured import run_piece
from tools.gpu.shapes import FULL, OTHER_TREES, SAMPLINGS, SMALL, TREE, make_pair


def measure(settings: argparse.Namespace) -> dict[str, Any]:
    """Measure, for each tree and sampling, the sorted milliseconds of every part."""
    shape, size = ("small", SMALL) if settings.small else (settings.shape, FULL)
    target, drafter = make_pair(shape)
    parts: tuple[Timing, ...] = ("step", "baseline") if settings.whole else get_args(Timing)
    turns: dict[Timing, int] = {
        part: size.short_turns if part in ("finish", "noise") else size.steps for part in parts
    }
    rows = []
    for tree in OTHER_TREES if settings.trees else (TREE,):
        timed = time_parts(
            target,
            drafter,
            tree,
            list(SAMPLINGS.values()),
            settings.rows,
            size.slots,
            turns=turns,
            cached=size.slots - slots_needed(size.steps, tree.max_path),
            repeats=size.repeats,
        )
        for name, own in zip(SAMPLINGS, timed, strict=True):
            rows.append(
                {
                    "beam_width": tree.beam_width,
                    "draft_rounds": tree.draft_rounds,
                    "num_nodes": tree.budget,
                    "batch_size": settings.rows,
                    "sampling": name,
                    "milliseconds": {part: sorted(1000 * own[part]) for part in own},
                    "in_baseline_steps": float(np.median(own["step"] / own["baseline"])),
                }
            )
    weights = {"target": bytes_of(target), "drafter": bytes_of(drafter)}
    return {"shape": shape, "slots": size.slots, "weight_bytes": weights, "rows": rows}


def main() -> None:
    """Measure, and write the rows."""
    parser = argparse.ArgumentParser(prog="python -m tools.gpu.steps")
    parser.add_argument("--shape", default="llama_3_1_8b", choices=("llama_3_1_8b", "vicuna_7b"))
    parser.add_argument("--rows", type=int, default=1, help="B, rows decoded together")
    parser.add_argument("--trees", action="store_true", help="use trees other than W=8 R=4 N=32")
    parser.add_argument("--whole", action="store_true", help="time only the two whole steps")
    run_piece(parser, measure)


if __name__ == "__main__":
    run(main)
