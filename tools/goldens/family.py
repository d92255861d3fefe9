"""Make tiny checkpoints of every model family, and what Hugging Face says about them.

Needs PyTorch and transformers, which the project itself does not: tests/goldens/README.md
names the versions and the commands. With `--config-only` no model is made: each folder gets the
`config.json` of the installed transformers beside its own, named after the major version.
"""

# pyright: reportMissingImports=false

import argparse
import dataclasses
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import transformers
from common import (
    FOLDER,
    SMALLEST_LEAD,
    greedy,
    ids,
    randomize_norms_and_biases,
    save_checkpoint,
)
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

PROMPT_LENGTH = 20
NUM_GREEDY_TOKENS = 44
# The text has this many different tokens: a loop of three would say little.
FEWEST_TOKENS = 9
# Without the variation that a checkpoint is for, the largest logit changes by this share.
SMALLEST_CHANGE = 0.05

SHAPE = {
    "vocab_size": 24,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100.0,
    "tie_word_embeddings": False,
    "initializer_range": 0.25,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


@dataclasses.dataclass(frozen=True)
class Golden:
    """One checkpoint: its family, what differs from `SHAPE`, and what its variations replace."""

    name: str
    model_type: str
    changes: dict[str, Any]
    without: dict[str, Any]
    dtype: str = "bfloat16"


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 0.5,
    "high_freq_factor": 2.0,
    "original_max_position_embeddings": 16,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
PLAIN = {"rope_scaling": None}

GOLDENS = (
    Golden(
        "llama_linear",
        "llama",
        {
            "num_key_value_heads": 4,
            "max_position_embeddings": 16,
            "rope_scaling": {"type": "linear", "factor": 4.0},
        },
        PLAIN,
        dtype="float16",
    ),
    Golden("llama_llama3", "llama", {"tie_word_embeddings": True, "rope_scaling": LLAMA3}, PLAIN),
    Golden(
        "llama_yarn",
        "llama",
        {"rope_scaling": YARN | {"beta_fast": 2.0, "beta_slow": 0.05}},
        PLAIN,
    ),
    Golden("llama_dynamic", "llama", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, {}),
    Golden("llama_bias", "llama", {"attention_bias": True}, {"attention_bias": False}),
    Golden("mistral", "mistral", {"head_dim": 12, "sliding_window": 8}, {"sliding_window": None}),
    Golden("qwen2", "qwen2", {"tie_word_embeddings": True}, {}),
    Golden(
        "qwen2_window_yarn",
        "qwen2",
        {
            "use_sliding_window": True,
            "sliding_window": 6,
            "max_window_layers": 1,
            "max_position_embeddings": 16,
            "rope_scaling": YARN,
        },
        {"use_sliding_window": False},
    ),
    Golden("qwen3", "qwen3", {"head_dim": 12, "tie_word_embeddings": True}, {}),
    Golden(
        "qwen3_window_bias",
        "qwen3",
        {
            "head_dim": 8,
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 5,
            "max_window_layers": 1,
        },
        {"use_sliding_window": False},
    ),
    Golden(
        "gemma3",
        "gemma3_text",
        {
            "hidden_size": 16,
            "num_hidden_layers": 7,
            "head_dim": 8,
            "query_pre_attn_scalar": 5,
            "tie_word_embeddings": True,
            "sliding_window": 6,
            "rope_local_base_freq": 20.0,
            "rope_scaling": {"rope_type": "linear", "factor": 4.0},
        },
        {"sliding_window": 64},
    ),
)


def make_config(golden: Golden, changes: dict[str, Any] | None = None) -> Any:
    """The configuration, in the spelling that transformers 4 and 5 both take."""
    values = SHAPE | golden.changes | (changes or {})
    return AutoConfig.for_model(
        golden.model_type,
        **json.loads(json.dumps(values)),
        architectures=[MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[golden.model_type]],
    )


def build_model(golden: Golden, seed: int) -> Any:
    """Random weights, large enough for peaked logits; biases and norms are random too."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(make_config(golden))
    randomize_norms_and_biases(model)
    return model.to(getattr(torch, golden.dtype))


def record(folder: Path, golden: Golden, seed: int) -> dict[str, np.ndarray] | None:
    """What the stored weights say in float32; None where rounding could change the text."""
    import torch
    from transformers import AutoModelForCausalLM

    def load(config: Any) -> Any:
        return AutoModelForCausalLM.from_pretrained(
            folder, config=config, dtype=torch.float32
        ).eval()

    model = load(None)
    generator = torch.Generator().manual_seed(1000 + seed)
    prompt = torch.randint(SHAPE["vocab_size"], (1, PROMPT_LENGTH), generator=generator)
    with torch.inference_mode():
        text, logits, lead = greedy(model, prompt, NUM_GREEDY_TOKENS)
        changed = load(make_config(golden, golden.without))(text).logits[0]
    new_tokens = text[0, PROMPT_LENGTH:]
    change = ((changed - logits).abs().max() / logits.abs().max()).item()
    variety = len(set(new_tokens.tolist()))
    if lead < SMALLEST_LEAD or variety < FEWEST_TOKENS:
        return None
    assert not golden.without or change > SMALLEST_CHANGE, f"{golden.name} changes by {change}"
    print(f"{golden.name}: seed {seed}, lead {lead:.3f}, {variety} tokens, change {change:.2f}")
    return {"prompt": ids(prompt[0]), "greedy": ids(new_tokens), "logits": logits.numpy()}


def make_golden(golden: Golden, folder: Path) -> None:
    """Write one checkpoint folder, with its answers in `answers.npz`."""
    for seed in range(1000):
        with tempfile.TemporaryDirectory() as scratch:
            build_model(golden, seed).save_pretrained(scratch)
            arrays = record(Path(scratch), golden, seed)
            if arrays is None:
                continue
            save_checkpoint(scratch, folder)
            np.savez_compressed(folder / "answers.npz", allow_pickle=False, **arrays)
            return
    raise SystemExit(f"{golden.name}: no seed gives a text that rounding cannot change")


def main() -> None:
    """Make every golden, or spell every configuration as the installed transformers does."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config-only", action="store_true")
    arguments = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    major = transformers.__version__.split(".")[0]
    for golden in GOLDENS:
        folder = FOLDER / "families" / golden.name
        if not arguments.config_only:
            make_golden(golden, folder)
            continue
        with tempfile.TemporaryDirectory() as scratch:
            make_config(golden).save_pretrained(scratch)
            target = folder / f"config.transformers{major}.json"
            shutil.copyfile(Path(scratch) / "config.json", target)
    print(f"transformers {transformers.__version__}")


main()
