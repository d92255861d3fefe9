"""Apple's target and drafter for two folders, refused where they would compute something else.

Part of worker.py, under a Python that has PyTorch: nothing of this project is imported.
"""

# pyright: reportMissingImports=false

import json
import sys
from pathlib import Path
from typing import Any


def rope_base(config: dict[str, Any]) -> float:
    """RoPE's base from a `config.json` of either transformers generation.

    transformers 4 does not know `rope_parameters` and would quietly fall back to 10000.
    """
    nested = config.get("rope_parameters")
    scaling = nested or config.get("rope_scaling") or {}
    if scaling.get("rope_type", scaling.get("type", "default")) != "default":
        sys.exit("The target scales RoPE, which Apple's Llama does not do.")
    return float((nested or config)["rope_theta"])


def load_target(folder: Path) -> Any:
    """Apple's Llama with the folder's weights in float32."""
    import torch
    import transformers
    from recurrent_drafting import modeling_llama

    raw = json.loads((folder / "config.json").read_text())
    width = raw["hidden_size"] // raw["num_attention_heads"]
    if raw["model_type"] != "llama" or (raw.get("head_dim") or width) != width:
        sys.exit("Apple's code knows only Llamas whose head_dim is hidden_size over the heads.")
    config = transformers.LlamaConfig.from_pretrained(folder)
    config.rope_theta = rope_base(raw)
    llm, info = modeling_llama.LlamaForCausalLM.from_pretrained(
        folder, config=config, torch_dtype=torch.float32, output_loading_info=True
    )
    # The rotary tables are computed rather than stored; a tied head is the embedding.
    computed = {name for name, _ in llm.named_buffers()}
    if config.tie_word_embeddings:
        computed.add("lm_head.weight")
    refuse_partial_load("target", set(info["missing_keys"]) - computed, info["unexpected_keys"])
    # A release that builds models on the meta device throws away the rotary tables, which Apple's
    # module fills in its constructor.
    rotary = llm.model.layers[0].self_attn.rotary_emb
    exponents = torch.arange(0, rotary.dim, 2).float() / rotary.dim
    if not torch.allclose(rotary.inv_freq, 1.0 / config.rope_theta**exponents):
        sys.exit("This transformers release spoils the rotary tables; install 4.47.1.")
    return llm.eval()


def load_pair(target: Path, drafter: Path) -> Any:
    """Apple's decoder for the two folders."""
    import torch
    from recurrent_drafting import modeling_drafter, recurrent_drafting

    llm = load_target(target)
    head, info = modeling_drafter.Drafter.from_pretrained(
        drafter, torch_dtype=torch.float32, output_loading_info=True
    )
    refuse_partial_load("drafter", set(info["missing_keys"]), info["unexpected_keys"])
    return recurrent_drafting.RecurrentDrafting(llm=llm, drafter=head.eval())


def refuse_partial_load(what: str, missing: set[str], unexpected: list[str]) -> None:
    """transformers only warns when names do not match; a comparison must not go on."""
    if missing or unexpected:
        names = ", ".join(sorted(missing | set(unexpected)))
        sys.exit(f"The {what}'s weights do not fit Apple's model: {names}.")
