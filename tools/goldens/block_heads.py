r"""Make tests/goldens/block: the outputs of the authors' code for DFlash and DSpark heads.

The authors' code is imported from clones at the given paths, never copied. The target and the text
are those of tests/goldens/eagle. Run this in the environment that tests/goldens/README.md
describes, with clones of the commits that it names:

    torchenv/bin/python tools/goldens/block_heads.py \
        --dflash dflash --deepspec DeepSpec --speculators speculators
"""

import argparse
import importlib.metadata
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

# Run the functions that the authors compile for GPUs uncompiled.
os.environ["TORCHDYNAMO_DISABLE"] = "1"

import numpy as np
import torch
from beams import Follow, beam_search
from eagle_heads import LAYERS, LENGTHS, SIZES, D, U, V, draw, hidden_of, tables
from safetensors.torch import save_file
from transformers import DynamicCache, LlamaForCausalLM, Qwen3Config

GOLDENS = Path(__file__).parents[2] / "tests/goldens"
FOLDER = GOLDENS / "block"
MASK = 7
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@dataclass
class Golden:
    """A head in one file layout: its files, and the outputs of its authors' code.

    Attributes:
      name: name of the folder.
      config: fields of `config.json`.
      weights: weights by their names in the file.
      follow: function from the tokens of a text and of a chain after it, which begins with the
        root, to the scores after each token of the chain, and to the logits of the confidence head;
        None without a confidence head.
    """

    name: str
    config: dict[str, Any]
    weights: dict[str, torch.Tensor]
    follow: Follow


def draw_head(model: torch.nn.Module) -> None:
    """Draw random weights; those of the sequential head have the same scale as the layers'."""
    draw(model, 0.25)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "markov" in name or "confidence" in name:
                weight.mul_(4)


def layers_config(count: int, **more: Any) -> Qwen3Config:
    """Return the configuration of a head's decoder layers; `more` overrides fields."""
    fields = {
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        "head_dim": 8,
        "num_hidden_layers": count,
        "layer_types": ["full_attention"] * count,
        "tie_word_embeddings": False,
        "attn_implementation": "eager",
        **SIZES,
        **more,
    }
    return Qwen3Config(**fields)


def features(target: LlamaForCausalLM, text: list[int], outputs: list[int]) -> torch.Tensor:
    """Return the concatenated outputs of the target layers `outputs` at the text."""
    states = hidden_of(target, text)
    return torch.cat([states[layer + 1] for layer in outputs], dim=-1)


def block_of(root: int, size: int) -> list[int]:
    """Return a block of `size` tokens: the root followed by mask tokens."""
    return [root] + [MASK] * (size - 1)


def zlab(target: LlamaForCausalLM) -> Golden:
    """Make a DFlash head of z-lab's code: a block of six tokens, with five predictions."""
    from dflash.model import DFlashDraftModel, build_target_layer_ids, extract_context_feature

    outputs = build_target_layer_ids(LAYERS, 2)
    config = layers_config(2, rope_parameters=LLAMA3, architectures=["DFlashDraftModel"])
    config.dflash_config = {"mask_token_id": MASK, "target_layer_ids": outputs}
    config.block_size, config.num_target_layers = 6, LAYERS
    torch.manual_seed(11)
    model = DFlashDraftModel(config).eval()
    draw_head(model)

    @torch.no_grad()
    def follow(text: list[int], chain: list[int]) -> tuple[torch.Tensor, None]:
        end = len(text) + config.block_size
        hidden = model(
            target_hidden=extract_context_feature(hidden_of(target, text), outputs),
            noise_embedding=target.model.embed_tokens(
                torch.tensor([block_of(chain[0], config.block_size)])
            ),
            position_ids=torch.arange(end)[None],
            past_key_values=DynamicCache(),
            use_cache=True,
            is_causal=False,
        )
        return target.lm_head(hidden[:, 1 - config.block_size :])[0, : len(chain)], None

    stated = json.loads(config.to_json_string(use_diff=True))
    stated |= {"architectures": ["DFlashDraftModel"], "auto_map": {"AutoModel": "dflash.Model"}}
    # In the form of transformers 4.
    parameters = stated.pop("rope_parameters")
    stated["rope_theta"] = parameters.pop("rope_theta")
    stated["rope_scaling"] = parameters
    return Golden("zlab", stated, weights_of(model), follow)


def deepspec(target: LlamaForCausalLM, variant: str) -> Golden:
    """Make a head of DeepSpec's code for Qwen3: a block of five tokens, with five predictions."""
    from deepspec.modeling.dspark.qwen3.modeling import Qwen3DSparkModel

    outputs = [0, 3, 6]
    more: dict[str, Any] = {
        "num_target_layers": LAYERS,
        "target_layer_ids": outputs,
        "mask_token_id": MASK,
        "block_size": 5,
        "num_anchors": 512,
        "enable_confidence_head": variant != "dflash",
        "markov_rank": 0 if variant == "dflash" else 4,
    }
    if variant != "dflash":
        more["markov_head_type"] = "vanilla" if variant == "dspark" else variant
        more["confidence_head_with_markov"] = variant != "gated"
    config = layers_config(
        1 if variant == "rnn" else 2,
        architectures=["Qwen3DSparkModel"],
        attention_bias=variant == "gated",
    )
    for name, value in more.items():
        setattr(config, name, value)
    torch.manual_seed(13)
    model = Qwen3DSparkModel(config).eval()
    draw_head(model)
    model.initialize_embeddings_and_head(
        embed_tokens=target.model.embed_tokens, lm_head=target.lm_head
    )

    @torch.no_grad()
    def follow(text: list[int], chain: list[int]) -> tuple[torch.Tensor, torch.Tensor | None]:
        # The call inside `forward_dspark_draft_block`, which then cuts the cache by a method that
        # transformers no longer has.
        hidden = model._forward_backbone(
            target_hidden_states=features(target, text, outputs),
            noise_embedding=model.embed_tokens(
                torch.tensor([block_of(chain[0], config.block_size)])
            ),
            position_ids=torch.arange(len(text) + config.block_size)[None],
            past_key_values=DynamicCache(),
            use_cache=True,
            is_causal=False,
        )[:, : len(chain)]
        scores, tokens = model.compute_logits(hidden), torch.tensor([chain])
        if model.markov_head is not None:
            scores = model.markov_head.apply_block_logits(
                scores[:, None], token_ids=tokens[:, None], hidden_states=hidden[:, None]
            )[:, 0]
        confidence = model.predict_confidence_step(hidden, prev_token_ids=tokens)
        return scores[0], None if confidence is None else confidence[0]

    stated = json.loads(config.to_json_string(use_diff=True))
    stated |= {"architectures": ["Qwen3DSparkModel"]}
    return Golden(f"deepspec_{variant}", stated, weights_of(model), follow)


def speculators(target: LlamaForCausalLM, variant: str) -> Golden:
    """Make a head of the code of vLLM's speculators, with 40 draftable tokens.

    In the variant "dspark", the position of the root predicts a token. In "bonus" and "dflash", it
    predicts none.
    """
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.models.dflash import core
    from speculators.models.dflash.config import DFlashSpeculatorConfig
    from speculators.models.dspark.config import DSparkSpeculatorConfig
    from speculators.models.dspark.core import DSparkDraftModel
    from speculators.proposals.greedy import GreedyTokenProposalConfig

    from_anchor, inputs = variant == "dspark", [1, 4, 5]
    block = 5 if from_anchor else 6
    flags: dict[str, Any] = {"sample_from_anchor": from_anchor}
    kind, model_kind = DFlashSpeculatorConfig, core.DFlashDraftModel
    if variant != "dflash":
        kind, model_kind = DSparkSpeculatorConfig, DSparkDraftModel
        flags |= {"markov_rank": 4, "markov_head_type": "rnn" if from_anchor else "gated"}
        flags |= {"confidence_head_with_markov": from_anchor}
    config = kind(
        transformer_layer_config=layers_config(2),
        draft_vocab_size=U,
        block_size=block,
        aux_hidden_state_layer_ids=inputs,
        mask_token_id=MASK,
        speculators_config=SpeculatorsConfig(
            algorithm="dspark",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=5)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path="target", architectures=["LlamaForCausalLM"]),
        ),
        **flags,
    )
    torch.manual_seed(17)
    model = model_kind(config).eval()
    draw_head(model)
    table = tables()
    model.load_vocab_mappings(table["t2d"], table["d2t"])
    with torch.no_grad():
        model.embed_tokens.weight.copy_(target.model.embed_tokens.weight)
        for head in (model.lm_head, model.verifier_lm_head):
            head.weight.copy_(target.lm_head.weight[table["t2d"]])

    @torch.no_grad()
    def follow(text: list[int], chain: list[int]) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run the authors' training forward pass for the block after the text."""
        count, padded = len(text), [*text, *chain, *[0] * 8]
        states = features(target, text, [layer - 1 for layer in inputs])
        states = torch.cat([states, torch.zeros(1, len(padded) - count, states.shape[-1])], dim=1)
        loss_mask = torch.zeros(1, len(padded))
        loss_mask[0, count] = 1
        hidden, scores, *_ = model._backbone_forward(
            states,
            torch.tensor([padded]),
            loss_mask,
            torch.zeros(1, len(padded), D),
            torch.zeros(1, len(padded), dtype=torch.long),
            max_anchors=1,
        )
        first = 0 if from_anchor else 1
        hidden = hidden.view(1, block, -1)[:, first : first + len(chain)]
        scores = scores.view(1, block, -1)[:, first : first + len(chain)]
        if variant == "dflash":
            return scores[0], None
        tokens = torch.tensor([chain])
        scores = scores + model.markov_head.block_bias(prev_token_ids=tokens, hidden_states=hidden)
        read = hidden
        if from_anchor:
            read = torch.cat([hidden, model.markov_head.prev_embeddings(tokens)], dim=-1)
        return scores[0], model.confidence_head(read)[0]

    stated = json.loads(config.to_json_string())
    weights = {
        name: value for name, value in weights_of(model).items() if not name.startswith("verifier")
    }
    return Golden(f"speculators_{variant}", stated, weights, follow)


def weights_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the head's weights by their names in the published file."""
    return {name: value for name, value in model.state_dict().items() if "rotary" not in name}


def write(golden: Golden, text: list[int], chain: list[int]) -> None:
    """Write a folder with the head's published files and the answers."""
    folder = FOLDER / golden.name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(golden.config, indent=2) + "\n")
    weights = {
        name: (value.bfloat16() if value.is_floating_point() else value).contiguous()
        for name, value in golden.weights.items()
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    answers = {}
    for length in LENGTHS:
        scores, confidence = golden.follow(text[:length], chain)
        answers[f"after_{length}"] = scores.numpy().astype(np.float32)
        if confidence is not None:
            answers[f"confidence_{length}"] = confidence.numpy().astype(np.float32)
    tokens = list(range(V))
    if "d2t" in golden.weights:
        tokens = (golden.weights["d2t"] + torch.arange(U)).tolist()
    answers |= beam_search(golden.follow, tokens, text[:63], chain[0])
    np.savez_compressed(folder / "answers.npz", **answers)
    size = sum(path.stat().st_size for path in folder.iterdir())
    print(golden.name, f"{size:,} bytes", {name: one.shape for name, one in answers.items()})


def goldens(target: LlamaForCausalLM) -> Iterator[Golden]:
    """Yield all heads."""
    yield zlab(target)
    for variant in ("dflash", "dspark", "gated", "rnn"):
        yield deepspec(target, variant)
    for variant in ("dflash", "dspark", "bonus"):
        yield speculators(target, variant)


def main() -> None:
    """Write all heads with their answers."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("dflash", "deepspec", "speculators"):
        parser.add_argument(f"--{name}", type=Path, required=True, help="a clone of the authors'")
    paths = parser.parse_args()
    sys.path += map(str, (paths.dflash, paths.deepspec, paths.speculators / "src"))
    # Stubs of imports that only training needs, and of the version of an absent package.
    for name in ("openai", "openai.types", "openai.types.chat", "openai.types.completion"):
        sys.modules[name] = MagicMock()
    for name in ("datasets", "hs_connectors", "tensorboard", "matplotlib"):
        sys.modules[name] = MagicMock()
    version = importlib.metadata.version
    importlib.metadata.version = lambda name: "0" if name == "speculators" else version(name)

    target = LlamaForCausalLM.from_pretrained(
        GOLDENS / "eagle/target", dtype=torch.float32, attn_implementation="eager"
    ).eval()
    stored = np.load(GOLDENS / "eagle/text.npz")
    for golden in goldens(target):
        write(golden, stored["text"].tolist(), stored["chain"].tolist())


if __name__ == "__main__":
    main()
