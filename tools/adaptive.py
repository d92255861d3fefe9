"""Measures `generate` with adaptive trees, one prompt at a time.

python -m tools.adaptive TARGET DRAFTER --prompts configs/smollm2_135m/translation_prompts.jsonl

Each prompt is decoded without a drafter, with the adaptive trees of the drafter's table, and with
the table's tree alone, in turns whose order changes. Times include prefill. The texts of the three
ways are compared.
"""

import argparse
import time
from itertools import product
from pathlib import Path
from statistics import quantiles
from typing import Any

from redrafter_jax import generate, load_drafter, load_target, load_tokenizer, load_tree_table
from redrafter_jax.files.tree_table import load_tree
from redrafter_jax.progress import track
from redrafter_jax.text.prompts import read_prompts


def main() -> None:
    """Measure, and print the speed-up over the baseline of each way."""
    arguments = _arguments()
    target = load_target(arguments.target, dtype="float32")
    drafter = load_drafter(arguments.drafter, target=target)
    tokenizer = load_tokenizer(arguments.target)
    tree = load_tree(arguments.drafter, batch_size=1, temperature=0.0)
    if tree is None:
        raise SystemExit(
            f"error: the table in {arguments.drafter} has no tree for one prompt, greedy; run "
            "`eval tune` first, or name another drafter."
        )
    trees = {"baseline": None, "adaptive": load_tree_table(arguments.drafter), "the tree": tree}

    def decode(way: str, text: str) -> tuple[float, list[int]]:
        options: dict[str, Any] = {"tree": trees[way]} if way != "baseline" else {}
        began = time.perf_counter()
        result = generate(
            target,
            drafter if options else None,
            [[{"role": "user", "content": text}]],
            tokenizer=tokenizer,
            max_new_tokens=arguments.tokens,
            eos_token_ids=(),
            **options,
        )
        return time.perf_counter() - began, result.tokens[0]

    texts = [prompt.turns[0] for prompt in read_prompts(arguments.prompts, arguments.count)]
    for way in trees:  # compiles
        decode(way, texts[0])
    seconds: dict[str, list[float]] = {way: [] for way in trees}
    turns = list(product(range(arguments.turns), range(len(texts))))
    for turn, row in track(turns, len(turns), "prompts"):
        written = []
        for way in list(trees) if (turn + row) % 2 else reversed(trees):
            taken, tokens = decode(way, texts[row])
            seconds[way].append(taken)
            written.append(tokens)
        if any(tokens != written[0] for tokens in written):
            raise SystemExit(f"error: the texts of prompt {row} differ.")
    for way, over in (("adaptive", "baseline"), ("the tree", "baseline"), ("adaptive", "the tree")):
        pairs = zip(seconds[over], seconds[way], strict=True)
        low, middle, high = quantiles([one / other for one, other in pairs], n=4)
        print(f"{way} over {over}: {middle:.3f} (quartiles {low:.3f} to {high:.3f})", flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", help="folder or GGUF file of the target")
    parser.add_argument("drafter", help="folder of a head with a tree table")
    parser.add_argument("--prompts", type=Path, required=True, help="JSON lines")
    parser.add_argument("--count", type=int, default=24, help="number of prompts (%(default)s)")
    parser.add_argument("--tokens", type=int, default=64, help="per answer (%(default)s)")
    parser.add_argument("--turns", type=int, default=2, help="runs of each prompt (%(default)s)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
