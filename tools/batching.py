"""Measures the throughput of batched requests, relative to one request at a time, without HTTP.

python -m tools.batching
"""

import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from redrafter_jax.engine.engine import Engine
from redrafter_jax.engine.messages import Request
from redrafter_jax.files.target_files import open_target
from redrafter_jax.progress import track
from redrafter_jax.text.prompts import read_prompts

_CONFIGS = Path(__file__).parents[1] / "configs"
_SLOTS, _NEW_TOKENS, _TURNS = 8, 48, 5


def measure() -> list[float]:
    """Time 16 prompts without drafting; return the speed-up of batching in every turn."""
    files = open_target(_CONFIGS / "demo_target")
    target, tokenizer = files.load("float32"), files.tokenizer
    requests = [
        Request(tokenizer.encode(prompt.turns[0]).ids, _NEW_TOKENS, seed, stop_tokens=())
        for seed, prompt in enumerate(read_prompts(_CONFIGS / "demo_prompts.jsonl", 16))
    ]
    engine = Engine(target, None, slots=_SLOTS, context_length=256)
    engine.warm_up()

    def seconds(groups: Sequence[Sequence[Request]]) -> float:
        began = time.perf_counter()
        for group in groups:
            for request in group:
                engine.submit(request)
            while engine.busy:
                engine.advance()
        return time.perf_counter() - began

    alone = [[request] for request in requests]
    return [seconds(alone) / seconds([requests]) for _ in track(range(_TURNS), _TURNS, "measure")]


def main() -> None:
    """Measure, and print the median speed-up and the speed-up of each turn."""
    ratios = measure()
    turns = ", ".join(f"{ratio:.2f}" for ratio in ratios)
    print(f"{_SLOTS} slots over one: {median(ratios):.2f} ({turns})")


if __name__ == "__main__":
    main()
