"""Make the Hugging Face Llama goldens that the target's tests compare against.

Needs PyTorch and transformers, which the project itself does not: README.md beside this file
names the versions and the command. Everything lands next to this script unless told otherwise.
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
import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM

PROMPT_LENGTHS = (13, 7)
NUM_GREEDY_TOKENS = 24
# Greedy goldens only mean something when rounding cannot flip a choice: every chosen logit must
# lead the runner-up by at least this much.
SMALLEST_LEAD = 0.03


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
    # transformers starts every norm at ones, which would hide a norm weight that is never applied
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
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


def make_prompts(golden: Golden) -> list[torch.Tensor]:
    """Ragged prompts, one tensor each: nothing is padded."""
    generator = torch.Generator().manual_seed(1000 + golden.seed)
    vocab_size = golden.config["vocab_size"]
    return [torch.randint(vocab_size, (1, n), generator=generator) for n in PROMPT_LENGTHS]


def greedy_tokens(model: LlamaForCausalLM, prompt: torch.Tensor) -> np.ndarray:
    """Transformers' own greedy continuation, refused where a choice is too close to call."""
    text = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        do_sample=False,
        max_new_tokens=NUM_GREEDY_TOKENS,
    )
    logits = model(text[:, :-1]).logits[0, prompt.shape[1] - 1 :]
    best, second = logits.topk(2).values.unbind(-1)
    lead = (best - second).min().item()
    new_tokens = text[0, prompt.shape[1] :]
    assert new_tokens.shape == (NUM_GREEDY_TOKENS,), new_tokens.shape
    assert torch.equal(logits.argmax(-1), new_tokens), "generate and one full pass disagree"
    assert lead > SMALLEST_LEAD, f"a greedy choice leads by only {lead:.4f}: change the seed"
    return new_tokens.numpy().astype(np.int32)


@torch.inference_mode()
def record(model: LlamaForCausalLM, prompts: list[torch.Tensor]) -> dict[str, np.ndarray]:
    """What the tests compare: per prompt i, `prompt_i`, `logits_i`, `hidden_i`, `greedy_i`."""
    arrays: dict[str, np.ndarray] = {}
    for i, prompt in enumerate(prompts):
        output = model(prompt, output_hidden_states=True)
        arrays[f"prompt_{i}"] = prompt[0].numpy().astype(np.int32)
        arrays[f"logits_{i}"] = output.logits[0].numpy()
        # transformers applies the final norm before it appends the last hidden state
        arrays[f"hidden_{i}"] = output.hidden_states[-1][0].numpy()
        assert torch.equal(model.lm_head(output.hidden_states[-1]), output.logits)
        arrays[f"greedy_{i}"] = greedy_tokens(model, prompt)
        assert all(value.dtype in (np.int32, np.float32) for value in arrays.values())
    return arrays


def make_golden(golden: Golden, folder: Path) -> None:
    """Write one checkpoint folder and the `.npz` beside it."""
    checkpoint = folder / golden.name
    shutil.rmtree(checkpoint, ignore_errors=True)
    with tempfile.TemporaryDirectory() as scratch:
        build_model(golden).save_pretrained(scratch, max_shard_size=golden.max_shard_size)
        # record what the *stored* weights say, computed in float32
        model = LlamaForCausalLM.from_pretrained(scratch, torch_dtype=torch.float32).eval()
        arrays = record(model, make_prompts(golden))
        shutil.copytree(scratch, checkpoint)
    # the checkpoint has no generation settings of its own to carry
    (checkpoint / "generation_config.json").unlink(missing_ok=True)
    rewrite_config(checkpoint, golden)
    np.savez_compressed(folder / f"{golden.name}.npz", allow_pickle=False, **arrays)


def main() -> None:
    """Make every golden, then say what was written."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--folder", type=Path, default=Path(__file__).resolve().parents[2] / "tests" / "goldens"
    )
    folder: Path = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    for golden in GOLDENS:
        make_golden(golden, folder)
        files = sorted(path.name for path in (folder / golden.name).iterdir())
        print(f"{golden.name}: {', '.join(files)}")
    print(f"torch {torch.__version__}, transformers {transformers.__version__}")


if __name__ == "__main__":
    main()
