"""Compares texts and speed of a real target, decoded with and without its drafter.

In float32, products have full precision. Texts must then be equal, unless two tokens tie to six
digits. In bfloat16, texts may diverge at ties.
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from redrafter_jax import (
    Generation,
    SamplingConfig,
    TreeConfig,
    generate,
    generate_autoregressive,
    load_drafter,
    load_target,
    load_tokenizer,
)
from redrafter_jax.command_line import run
from redrafter_jax.drafters.lookup import PromptLookup
from redrafter_jax.errors import InputError
from redrafter_jax.files.real_models import find_cached
from tools.gpu.measured import run_piece

_CONFIGS = Path(__file__).parents[2] / "configs"
_PAIR = _CONFIGS / "smollm2_135m"
_SAMPLINGS = {"greedy": SamplingConfig(), "T 1, top_p 0.95": SamplingConfig(1.0, top_p=0.95)}
_PRECISIONS = {"float32": "highest", "bfloat16": None}
# Number of timed runs; all prompts are one batch, and an untimed run compiles first.
_TIMED = 3


def measure(settings: argparse.Namespace) -> dict[str, Any]:
    """Measure, for each dtype and sampling, identical texts, acceptance length and speed."""
    count, most, repeats = (2, 8, 1) if settings.small else (16, 128, _TIMED)
    model = _CONFIGS / "demo_target" if settings.small else settings.model or find_cached()
    if model is None:
        raise InputError(
            "SmolLM2-135M-Instruct is not in the cache; get it with `redrafter fetch`, or give "
            "--model PATH."
        )
    tokenizer = load_tokenizer(model)
    lines = (_PAIR / "prompts.jsonl").read_text(encoding="utf-8").splitlines()[:count]
    prompts: list[Any] = [json.loads(line)["prompt"] for line in lines]
    tree = TreeConfig(beam_width=1, draft_rounds=3)
    if not settings.small:
        prompts, tree = [[{"role": "user", "content": text}] for text in prompts], TreeConfig()
    rows = []
    for dtype, precision in _PRECISIONS.items():
        target = load_target(model, dtype)
        drafter: Any = PromptLookup()
        if not settings.small:
            drafter = load_drafter(_PAIR / "drafter", dtype, target=target)
        for name, sampling in _SAMPLINGS.items():
            asked: dict[str, Any] = {
                "max_new_tokens": most,
                "sampling": sampling,
                "tokenizer": tokenizer,
            }
            with jax.default_matmul_precision(precision):
                alone, slow = _timed(
                    lambda asked=asked, target=target: generate_autoregressive(
                        target, prompts, **asked
                    ),
                    repeats,
                )
                ours, fast = _timed(
                    lambda asked=asked, target=target, drafter=drafter: generate(
                        target, drafter, prompts, tree=tree, **asked
                    ),
                    repeats,
                )
            rows.append({"dtype": dtype, "sampling": name, **_compare(alone, slow, ours, fast)})
    return {"model": Path(model).name, "prompts": count, "max_new_tokens": most, "rows": rows}


def _timed(decode: Callable[[], Generation], repeats: int) -> tuple[Generation, list[float]]:
    result, seconds = decode(), []
    for _ in range(repeats):
        started = time.perf_counter()
        result = decode()
        seconds.append(time.perf_counter() - started)
    return result, sorted(seconds)


def _compare(
    alone: Generation, slow: list[float], ours: Generation, fast: list[float]
) -> dict[str, Any]:
    tokens = sum(map(len, ours.tokens))
    parted = [
        next((at for at, pair in enumerate(zip(*texts, strict=False)) if pair[0] != pair[1]), None)
        for texts in zip(alone.tokens, ours.tokens, strict=True)
        if texts[0] != texts[1]
    ]
    return {
        "texts": len(ours.tokens),
        "identical": len(ours.tokens) - len(parted),
        # None if one text is a prefix of the other.
        "parted_at": parted,
        "acceptance_length": ours.acceptance_length,
        "tokens_per_second": tokens / float(np.median(fast)),
        "speedup": float(np.median(slow) / np.median(fast)),
        "seconds": {"baseline": slow, "tree": fast},
    }


def main() -> None:
    """Measure, and write the rows."""
    parser = argparse.ArgumentParser(prog="python -m tools.gpu.texts")
    parser.add_argument("--model", type=Path, help="SmolLM2-135M-Instruct, a folder or GGUF file")
    run_piece(parser, measure)


if __name__ == "__main__":
    run(main)
