"""Make `rotary.json`: the rotary frequencies that transformers computes from fields of config.json.

This needs PyTorch and transformers, which the project itself does not need; tests/goldens/README.md
names the versions and describes the fields. The command, from the root of the repository:

    torchenv/bin/python tools/goldens/rotary.py
"""

# pyright: reportMissingImports=false

import json
from pathlib import Path
from typing import Any

from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

PATH = Path(__file__).resolve().parents[2] / "tests" / "goldens" / "rotary.json"
WIDTH, CONTEXT = 16, 256
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
# The divisors are the same for short and long texts, so that there is only one answer.
DIVISORS = [1.0, 1.1, 1.3, 1.8, 2.5, 3.0, 3.5, 4.0]
LONGROPE = {"rope_type": "longrope", "short_factor": DIVISORS, "long_factor": DIVISORS}
ORIGINAL = {"original_max_position_embeddings": 64}
CASES: list[dict[str, Any]] = [
    {"rope_scaling": {"rope_type": "default", "factor": 1.0}},
    {"rope_scaling": {"type": "linear", "factor": 4.0, **ORIGINAL}},
    {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0, **ORIGINAL}},
    {"rope_scaling": LLAMA3},
    {"rope_scaling": {**LLAMA3, "attention_factor": 1.0}},
    {"rope_scaling": YARN},
    {"rope_scaling": {"type": "yarn", "factor": 4.0}},
    {"rope_scaling": {**YARN, "finetuned": True}},
    {"rope_scaling": {**YARN, "truncate": False}},
    {"rope_scaling": {**YARN, "truncate": True, "extrapolation_factor": 1, "attn_factor": 1}},
    {"rope_scaling": {**YARN, "truncate": False, "beta_fast": 4.0, "beta_slow": 2}},
    {"rope_scaling": {**YARN, "attention_factor": 0.5}},
    {"rope_scaling": {**YARN, "mscale": 0.707, "mscale_all_dim": 1.0}},
    {"rope_scaling": {**YARN, "mscale": 0.707}},
    {"rope_scaling": {**YARN, "mscale": 2.0, "mscale_all_dim": 1.0, "attention_factor": 1.5}},
    {"rope_scaling": {**YARN, "factor": None}},
    {
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0},
        "original_max_position_embeddings": 32,
    },
    {"rope_scaling": {**LONGROPE, **ORIGINAL}},
    {"rope_scaling": {**LONGROPE, **ORIGINAL, "factor": 16.0}},
    {"rope_scaling": {**LONGROPE, **ORIGINAL, "factor": 16.0, "attention_factor": 1.25}},
    {"rope_scaling": {**LONGROPE, "original_max_position_embeddings": CONTEXT}},
    {"rope_scaling": LONGROPE, "original_max_position_embeddings": 32},
]


def answer(stated: dict[str, Any]) -> dict[str, Any]:
    """Return the fields, and the frequencies that `LlamaRotaryEmbedding` computes from them."""
    base = {"rope_theta": 5000.0, "max_position_embeddings": CONTEXT}
    values = json.loads(json.dumps(base | stated))  # transformers changes its arguments
    rotary = LlamaRotaryEmbedding(
        LlamaConfig(hidden_size=2 * WIDTH, num_attention_heads=2, num_hidden_layers=1, **values)
    )
    return {
        "stated": base | stated,
        "frequencies": rotary.inv_freq.double().tolist(),
        "gain": rotary.attention_scaling,
    }


if __name__ == "__main__":
    lines = ",\n".join(json.dumps(answer(stated)) for stated in CASES)
    PATH.write_text(f"[\n{lines}\n]\n")
