"""What the golden scripts share; torch is imported late, for `family.py --config-only` has none."""

# pyright: reportMissingImports=false

import shutil
from pathlib import Path
from typing import Any

import numpy as np

FOLDER = Path(__file__).resolve().parents[2] / "tests" / "goldens"
# Every greedy choice leads its runner-up by this many logits, so that rounding cannot flip one.
SMALLEST_LEAD = 0.03


def randomize_norms_and_biases(model: Any) -> None:
    """Transformers starts norms at ones and biases at zeros, which hides one never applied."""
    import torch

    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
        if name.endswith(".bias"):
            torch.nn.init.normal_(parameter, std=0.5)


def greedy(model: Any, prompt: Any, count: int) -> tuple[Any, Any, float]:
    """Greedy `text` with the prompt [1, P + count], the logits after it, and the smallest lead."""
    import torch

    text = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=count
    )
    length = prompt.shape[1]
    assert text.shape[1] == length + count
    logits = model(text).logits[0]
    choices = logits[length - 1 : -1]
    best, second = choices.topk(2).values.unbind(-1)
    lead = (best - second).min().item()
    if lead >= SMALLEST_LEAD:
        assert torch.equal(choices.argmax(-1), text[0, length:]), "generate and one pass disagree"
    return text, logits, lead


def save_checkpoint(scratch: str, folder: Path) -> None:
    """Replace a golden's folder; it has no generation settings of its own to carry."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(scratch, folder, ignore=shutil.ignore_patterns("generation_config.json"))


def ids(tokens: Any) -> np.ndarray:
    """A tensor's token ids as int32."""
    return tokens.numpy().astype(np.int32)
