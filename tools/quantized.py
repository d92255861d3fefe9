"""Measures decoding without a drafter in each weight format, relative to float32.

python -m tools.quantized "$(python -m redrafter_jax fetch)"
"""

import argparse
import time
from statistics import median

from redrafter_jax import load_target, load_tokenizer
from redrafter_jax.config import SamplingConfig
from redrafter_jax.config.quantization import Quantization
from redrafter_jax.engine.engine import Engine
from redrafter_jax.engine.messages import Request
from redrafter_jax.engine.requests import tokenize
from redrafter_jax.models.quantize import quantize_model
from redrafter_jax.progress import track

_QUESTION = "Tell me about the sea."
_CONTEXT_LENGTH = 256


def main() -> None:
    """Measure the formats in turns, and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", help="GGUF file whose quantized blocks `load_target` can keep")
    parser.add_argument("--tokens", type=int, default=64, help="new tokens per run (%(default)s)")
    parser.add_argument("--turns", type=int, default=4, help="runs of each format (%(default)s)")
    arguments = parser.parse_args()
    plain = load_target(arguments.target, "float32")
    targets = {
        "float32": plain,
        "bfloat16": load_target(arguments.target, "bfloat16"),
        "the file's blocks": load_target(arguments.target, "float32", keep_quantized=True),
    }
    for form in ("int8", "int4", "fp8"):
        targets[form] = quantize_model(plain, Quantization(form))
    asked = [[{"role": "user", "content": _QUESTION}]]
    (prompt,) = tokenize(plain.config, asked, load_tokenizer(arguments.target), None).prompts
    engines = {
        name: Engine(
            target, None, tree=None, slots=1, context_length=_CONTEXT_LENGTH, row_counts=()
        )
        for name, target in targets.items()
    }
    for engine in engines.values():
        engine.warm_up()
        _rate(engine, prompt, arguments.tokens)
    rates: dict[str, list[float]] = {name: [] for name in engines}
    for _ in track(range(arguments.turns), arguments.turns, "turns"):
        for name, engine in engines.items():
            rates[name].append(_rate(engine, prompt, arguments.tokens))
    for name, own in rates.items():
        ratios = [one / base for one, base in zip(own, rates["float32"], strict=True)]
        print(f"{name}: {median(own):.1f} tokens/s, {median(ratios):.2f} of float32")


def _rate(engine: Engine, prompt: list[int], tokens: int) -> float:
    """Return the tokens per second of one answer, prefill included."""
    engine.submit(Request(prompt, tokens, 0, SamplingConfig(), stop_tokens=()))
    count, began = 0, time.perf_counter()
    while engine.busy:
        count += sum(len(event.decided) for event in engine.advance())
    return count / (time.perf_counter() - began)


if __name__ == "__main__":
    main()
