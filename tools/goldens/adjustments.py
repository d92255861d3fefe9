"""Make `adjustments.json`: scores after Hugging Face's logits processors, case by case.

This needs PyTorch and transformers, which the project itself does not need; tests/goldens/README.md
names the versions. The command, from the root of the repository:

    torchenv/bin/python tools/goldens/adjustments.py

A case has a `text`, whose first `prompt` tokens are the prompt, and settings: `bias`
(SequenceBiasLogitsProcessor, for single tokens), `repetition` (RepetitionPenaltyLogitsProcessor)
and `min_tokens` (MinNewTokensLengthLogitsProcessor, for the tokens `stops`). The processors run in
transformers' order. `logits` are their input and `scores` their output; null is minus infinity.
"""

# pyright: reportMissingImports=false

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

OUTPUT = Path(__file__).resolve().parents[2] / "tests" / "goldens" / "adjustments.json"
CASES, V, LONGEST = 1000, 7, 9


def make_case(random: np.random.Generator) -> dict[str, Any]:
    """Make a random request, and the scores that the processors make from random logits."""
    length = int(random.integers(1, LONGEST + 1))
    text = random.integers(V, size=length).tolist()
    prompt = int(random.integers(1, length + 1))
    biased = random.choice(V, size=random.integers(0, 4), replace=False).tolist()
    bias = {token: round(float(random.uniform(-5, 5)), 2) for token in biased}
    repetition = round(float(random.uniform(0.5, 2)), 2) if random.random() < 0.7 else 1.0
    stops = sorted(random.choice(V, size=random.integers(1, 3), replace=False).tolist())
    min_tokens = int(random.integers(0, 6))
    logits = random.normal(scale=3, size=V).round(3).tolist()
    processors = LogitsProcessorList()
    if bias:
        processors.append(
            SequenceBiasLogitsProcessor([[[token], one] for token, one in bias.items()])
        )
    if repetition != 1:
        processors.append(RepetitionPenaltyLogitsProcessor(repetition))
    processors.append(MinNewTokensLengthLogitsProcessor(prompt, min_tokens, stops, device="cpu"))
    scores = processors(torch.tensor([text]), torch.tensor([logits], dtype=torch.float32))
    told = [None if math.isinf(one) else round(one, 5) for one in scores[0].tolist()]
    asked = {"bias": list(bias.items()), "repetition": repetition, "stops": stops}
    asked |= {"min_tokens": min_tokens}
    return {"text": text, "prompt": prompt, **asked, "logits": logits, "scores": told}


def main() -> None:
    """Write `adjustments.json`."""
    random = np.random.default_rng(47)
    cases = [make_case(random) for _ in range(CASES)]
    lines = ",\n".join(json.dumps(case, separators=(",", ":")) for case in cases)
    OUTPUT.write_text(f"[\n{lines}\n]\n")


if __name__ == "__main__":
    main()
