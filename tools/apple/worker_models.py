"""Apple's target and drafter for two folders, refused where they would compute something else.

Part of worker.py, under a Python that has PyTorch: nothing of this project is imported.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


class UnusableError(Exception):
    """Apple's code cannot run here or with these folders; the message says why in one sentence."""


def rope_base(config: dict[str, Any]) -> float:
    """RoPE's base from a `config.json` of either transformers generation.

    transformers 4 does not know `rope_parameters` and would quietly fall back to 10000.
    """
    nested = config.get("rope_parameters")
    scaling = nested or config.get("rope_scaling") or {}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind != "default":
        raise UnusableError(f"the target scales RoPE ({kind}), which Apple's Llama does not do")
    base = (nested or config).get("rope_theta")
    if base is None:
        raise UnusableError("the target's config.json does not state rope_theta")
    return float(base)


def read_target_config(folder: Path) -> dict[str, Any]:
    """The target's `config.json`, refused where Apple's Llama would compute something else."""
    path = folder / "config.json"
    if not path.is_file():
        raise UnusableError(f"{folder} has no config.json")
    config = json.loads(path.read_text())
    if config.get("model_type") != "llama":
        raise UnusableError(
            f"the target's model_type is {config.get('model_type')}; Apple's code knows only llama"
        )
    width = config["hidden_size"] // config["num_attention_heads"]
    if (config.get("head_dim") or width) != width:
        raise UnusableError(
            f"the target's head_dim is {config['head_dim']}; Apple's Llama needs "
            f"hidden_size / num_attention_heads = {width}"
        )
    for bias in ("attention_bias", "mlp_bias"):
        if config.get(bias):
            raise UnusableError(f"the target has {bias}, which Apple's Llama does not")
    return config


def load_target(folder: Path) -> Any:
    """Apple's Llama with the folder's weights in float32."""
    import torch
    import transformers
    from recurrent_drafting import modeling_llama

    raw = read_target_config(folder)
    config = transformers.LlamaConfig.from_pretrained(folder)
    config.rope_theta = rope_base(raw)
    llm, info = modeling_llama.LlamaForCausalLM.from_pretrained(
        folder, config=config, torch_dtype=torch.float32, output_loading_info=True
    )
    # the rotary tables are computed rather than stored; a tied head is the embedding
    computed = {name for name, _ in llm.named_buffers()}
    if config.tie_word_embeddings:
        computed.add("lm_head.weight")
    refuse_partial_load("target", set(info["missing_keys"]) - computed, info["unexpected_keys"])
    check_rotary_tables(llm, config.rope_theta)
    return llm.eval()


def check_rotary_tables(llm: Any, base: float) -> None:
    """Refuse a transformers release that builds models on the meta device.

    Apple's rotary module fills its tables in its constructor; such a release throws them away.
    """
    import torch

    for layer in llm.model.layers:
        rotary = layer.self_attn.rotary_emb
        exponents = torch.arange(0, rotary.dim, 2).float() / rotary.dim
        intact = rotary.cos_cached.device.type == "cpu" and torch.allclose(
            rotary.inv_freq, 1.0 / base**exponents
        )
        if not intact:
            raise UnusableError(
                "this transformers release spoils the rotary tables of Apple's Llama; "
                "install transformers 4.47.1 beside PyTorch"
            )


def load_drafter(folder: Path, target: Any) -> Any:
    """Apple's drafter with the folder's weights in float32."""
    import torch
    from recurrent_drafting import modeling_drafter

    if not (folder / "config.json").is_file():
        raise UnusableError(f"{folder} has no config.json")
    drafter, info = modeling_drafter.Drafter.from_pretrained(
        folder, torch_dtype=torch.float32, output_loading_info=True
    )
    refuse_partial_load("drafter", set(info["missing_keys"]), info["unexpected_keys"])
    for field in ("hidden_size", "vocab_size"):
        ours, theirs = getattr(drafter.config, field), getattr(target.config, field)
        if ours != theirs:
            raise UnusableError(f"the drafter's {field} is {ours} and the target's is {theirs}")
    return drafter.eval()


def rank_full_vocabulary() -> None:
    """Let Apple's drafter score beams by its whole distribution, as ours does.

    Apple's keeps 50 logits per step and normalises over those, so that a beam with a flat
    distribution scores higher than its probability. The same function also trims the target's
    logits, where greedy decoding does not notice.
    """
    from recurrent_drafting import modeling_drafter

    modeling_drafter.warp_logits = lambda logits: logits


def refuse_partial_load(what: str, missing: set[str], unexpected: list[str]) -> None:
    """transformers only warns when names do not match; a comparison must not go on."""
    if missing or unexpected:
        names = ", ".join(sorted(missing | set(unexpected)))
        raise UnusableError(f"the {what}'s weights do not fit Apple's model: {names}")


def load_pair(target: Path, drafter: Path, threads: int) -> Any:
    """Apple's decoder for the two folders, on `threads` CPU threads."""
    try:
        import torch
        from recurrent_drafting import recurrent_drafting
    except ImportError as error:
        raise UnusableError(f"{sys.executable} cannot import Apple's code: {error}") from error
    torch.set_num_threads(threads)
    llm = load_target(target)
    return recurrent_drafting.RecurrentDrafting(llm=llm, drafter=load_drafter(drafter, llm))
