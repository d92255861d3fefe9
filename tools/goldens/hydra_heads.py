"""Make tests/goldens/hydra: the outputs of the authors' code for Hydra heads."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from beams import beam_search
from eagle_heads import LENGTHS, draw, hidden_of
from transformers import LlamaForCausalLM

GOLDENS = Path(__file__).parents[2] / "tests/goldens"
FOLDER = GOLDENS / "hydra"
HEADS = 5
VARIANTS: dict[str, dict[str, Any]] = {
    "mlp": {"hydra_num_layers": 1, "grounded_heads": True},
    "mlp_deep": {"hydra_num_layers": 3, "grounded_heads": True, "hidden_state_offset": 2},
    "mlp_ungrounded": {"hydra_num_layers": 2, "grounded_heads": False},
    # Hydra++.
    "prefix": {"hydra_num_layers": 4, "grounded_heads": True, "hydra_head_arch": "prefix-mlp"},
    "prefix_ungrounded": {
        "hydra_num_layers": 1,
        "grounded_heads": False,
        "hydra_head_arch": "prefix-mlp",
        "hidden_state_offset": 1,
    },
}


def write(name: str, target: LlamaForCausalLM, text: list[int], chain: list[int]) -> None:
    """Write a folder with the files of the head `name`, as published, and the answers."""
    from hydra.model.hydra_heads.mlp_head import HydraMLP
    from hydra.model.hydra_heads.prefix_mlp_head import HydraPrefixMLP

    stated = {
        "hydra_num_heads": HEADS,
        "hydra_head_arch": "mlp",
        "base_model_name_or_path": "target",
        "hidden_state_offset": 0,
        "transformers_version": "4.36.2",
        # Published heads are for the first Llama models, which have another epsilon.
        "rms_norm_eps": target.config.rms_norm_eps,
        **VARIANTS[name],
    }
    torch.manual_seed(19)
    config = target.config
    # Fields of the configuration that the authors' code reads, in the form of transformers 4.
    config.rope_scaling, config.pretraining_tp = None, 1
    config.output_attentions = config.output_hidden_states = False
    kind = HydraMLP if stated["hydra_head_arch"] == "mlp" else HydraPrefixMLP
    head = kind(
        hydra_num_layers=stated["hydra_num_layers"],
        hydra_num_heads=HEADS,
        grounded_heads=stated["grounded_heads"],
        input_embed_fn=target.model.embed_tokens,
        base_config=config,
    ).eval()
    embedding = target.model.embed_tokens.weight.clone()
    draw(head, 0.15)
    with torch.no_grad():
        target.model.embed_tokens.weight.copy_(embedding)

    @torch.no_grad()
    def follow(text: list[int], chain: list[int]) -> tuple[torch.Tensor, None]:
        """Run the authors' training pass; return each head's scores at the text's last token."""
        whole = [*text, *chain]
        hidden = hidden_of(target, whole)[-(stated["hidden_state_offset"] + 1)]
        logits, _ = head(base_hidden_states=hidden, input_ids=torch.tensor([whole]))
        return torch.stack([scores[0, len(text) - 1] for scores in logits[: len(chain)]]), None

    folder = FOLDER / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(stated, indent=2) + "\n")
    shared: dict[int, torch.Tensor] = {}
    weights = {}
    for key, value in head.state_dict().items():
        # In the authors' files, too, several names of a weight share its storage.
        cast = value if "inv_freq" in key else shared.setdefault(value.data_ptr(), value.bfloat16())
        weights[key] = cast
    torch.save(weights, folder / "hydra_lm_head.pt")
    answers = {
        f"after_{length}": follow(text[:length], chain)[0].numpy().astype(np.float32)
        for length in LENGTHS
    }
    answers |= beam_search(follow, list(range(config.vocab_size)), text[:63], chain[0])
    np.savez_compressed(folder / "answers.npz", **answers)
    size = sum(path.stat().st_size for path in folder.iterdir())
    print(name, f"{size:,} bytes", {key: one.shape for key, one in weights.items()})


def main() -> None:
    """Write all heads with their answers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hydra", type=Path, required=True, help="a clone of the authors'")
    sys.path.append(str(parser.parse_args().hydra))
    target = LlamaForCausalLM.from_pretrained(
        GOLDENS / "eagle/target", dtype=torch.float32, attn_implementation="eager"
    ).eval()
    stored = np.load(GOLDENS / "eagle/text.npz")
    for name in VARIANTS:
        write(name, target, stored["text"].tolist(), stored["chain"].tolist())


if __name__ == "__main__":
    main()
