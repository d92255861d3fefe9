"""Make the Hugging Face Llama goldens that the target's tests compare against.

Needs PyTorch and transformers, which the project itself does not: tests/goldens/README.md
names the versions and the command.
"""

# pyright: reportMissingImports=false

import dataclasses
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from common import (
    FOLDER,
    SMALLEST_LEAD,
    greedy,
    ids,
    randomize_norms_and_biases,
    save_checkpoint,
)
from transformers import LlamaConfig, LlamaForCausalLM

PROMPT_LENGTHS = (13, 7)
NUM_GREEDY_TOKENS = 24


@dataclasses.dataclass(frozen=True)
class Golden:
    """One checkpoint to build: its shape, how it is stored, and how its config spells RoPE."""

    name: str
    seed: int
    config: dict[str, Any]
    stored_dtype: torch.dtype
    max_shard_size: str
    config_style: int  # major transformers version whose config.json fields are written


GOLDENS = (
    Golden(
        name="llama_gqa_untied",
        seed=29,
        config={
            "vocab_size": 97,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "tie_word_embeddings": False,
            "rope_theta": 10000.0,
            "rms_norm_eps": 1e-6,
        },
        stored_dtype=torch.float32,
        max_shard_size="5GB",
        config_style=4,
    ),
    Golden(
        name="llama_tied_sharded",
        seed=22,
        config={
            "vocab_size": 97,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "head_dim": 8,
            "tie_word_embeddings": True,
            "rope_theta": 500000.0,
            "rms_norm_eps": 1e-5,
        },
        stored_dtype=torch.bfloat16,
        max_shard_size="20KB",
        config_style=5,
    ),
)


def build_model(golden: Golden) -> LlamaForCausalLM:
    """A random Llama with weights large enough for peaked, position-dependent logits."""
    torch.manual_seed(golden.seed)
    config = LlamaConfig(
        **golden.config,
        hidden_act="silu",
        max_position_embeddings=256,
        initializer_range=0.25,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    model = LlamaForCausalLM(config)
    randomize_norms_and_biases(model)
    return model.to(golden.stored_dtype)


def rewrite_config(folder: Path, golden: Golden) -> None:
    """Spell config.json the way the golden's transformers major version does.

    The two generations differ in where RoPE's base lives and in the name of the stored dtype, and
    a loader has to understand both.
    """
    path = folder / "config.json"
    config = json.loads(path.read_text())
    for field in ("rope_theta", "rope_scaling", "rope_parameters", "torch_dtype", "dtype"):
        config.pop(field, None)
    config.pop("_name_or_path", None)
    dtype = str(golden.stored_dtype).removeprefix("torch.")
    if golden.config_style == 4:
        config.pop("head_dim", None)  # folders of that age leave it to hidden_size / heads
        config |= {"rope_theta": golden.config["rope_theta"], "rope_scaling": None}
        config |= {"torch_dtype": dtype, "transformers_version": "4.47.1"}
    else:
        rope = {"rope_theta": golden.config["rope_theta"], "rope_type": "default"}
        config |= {"rope_parameters": rope, "dtype": dtype, "transformers_version": "5.0.0"}
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


@torch.inference_mode()
def record(model: LlamaForCausalLM, golden: Golden) -> dict[str, np.ndarray]:
    """What the tests compare, of prompts that are not padded: `prompt_i`, `logits_i`, ..."""
    generator = torch.Generator().manual_seed(1000 + golden.seed)
    vocab_size = golden.config["vocab_size"]
    prompts = [torch.randint(vocab_size, (1, n), generator=generator) for n in PROMPT_LENGTHS]
    arrays: dict[str, np.ndarray] = {}
    for i, prompt in enumerate(prompts):
        output = model(prompt, output_hidden_states=True)
        arrays[f"prompt_{i}"] = ids(prompt[0])
        arrays[f"logits_{i}"] = output.logits[0].numpy()
        # transformers applies the final norm before it appends the last hidden state
        arrays[f"hidden_{i}"] = output.hidden_states[-1][0].numpy()
        assert torch.equal(model.lm_head(output.hidden_states[-1]), output.logits)
        text, _, lead = greedy(model, prompt, NUM_GREEDY_TOKENS)
        assert lead > SMALLEST_LEAD, f"a greedy choice leads by only {lead:.4f}: change the seed"
        arrays[f"greedy_{i}"] = ids(text[0, prompt.shape[1] :])
    return arrays


def main() -> None:
    """Write each checkpoint folder and the `.npz` beside it."""
    for golden in GOLDENS:
        with tempfile.TemporaryDirectory() as scratch:
            build_model(golden).save_pretrained(scratch, max_shard_size=golden.max_shard_size)
            # record what the *stored* weights say, computed in float32
            model = LlamaForCausalLM.from_pretrained(scratch, torch_dtype=torch.float32).eval()
            arrays = record(model, golden)
            save_checkpoint(scratch, FOLDER / golden.name)
        rewrite_config(FOLDER / golden.name, golden)
        np.savez_compressed(FOLDER / f"{golden.name}.npz", allow_pickle=False, **arrays)
    print(f"torch {torch.__version__}, transformers {transformers.__version__}")


main()
