r"""Make tests/goldens/eagle: the outputs of the authors' code for EAGLE heads of every layout.

The authors' code is imported from clones at the given paths, never copied. Run this in the
environment that tests/goldens/README.md describes, with clones of the commits that it names:

    torchenv/bin/python tools/goldens/eagle_heads.py \
        --safeailab EAGLE --specforge SpecForge --speculators speculators --deepspec DeepSpec
"""

import argparse
import importlib.metadata
import json
import os
import sys
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

# Run the functions that the authors compile for GPUs uncompiled.
os.environ["TORCHDYNAMO_DISABLE"] = "1"

import numpy as np
import torch
from beams import beam_search
from safetensors.torch import save_file
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, Qwen3Config

FOLDER = Path(__file__).parents[2] / "tests/goldens/eagle"
V, U, D, LAYERS = 60, 40, 16, 8
LENGTHS = (1, 63, 64, 65, 300)
# EAGLE-2's tree: `top_k`, `depth` and `total_tokens` of SafeAILab's code.
# The limit on a node's children equals the number of nodes below the root, so it has no effect.
TREE = {"top_k": 10, "depth": 3, "total_tokens": 11}
SIZES = {
    "vocab_size": V,
    "hidden_size": D,
    "intermediate_size": 24,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "rms_norm_eps": 1e-5,
}
Logits = Callable[[list[int], list[int]], np.ndarray]


@dataclass
class Golden:
    """A head in one file layout: its files, and the outputs of its authors' code.

    Attributes:
      name: name of the folder.
      config: fields of `config.json`.
      weights: weights by their names in the file.
      logits: function from the tokens of a text and of a chain after it, which begins with the
        root, to the scores after each token of the chain.
      tree: function from a text and its root to the tokens and parents of the tree; None if the
        authors' code grows no tree, and a beam search over its scores stands in for it.
      torch_file: whether the weights are written as `pytorch_model.bin`.
    """

    name: str
    config: dict[str, Any]
    weights: dict[str, torch.Tensor]
    logits: Logits
    tree: Callable[[list[int], int], tuple[np.ndarray, np.ndarray]] | None = None
    torch_file: bool = False


def make_target() -> LlamaForCausalLM:
    """Make a target with random weights that bfloat16 represents exactly."""
    torch.manual_seed(0)
    config = LlamaConfig(
        **SIZES,
        num_hidden_layers=LAYERS,
        head_dim=8,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        eos_token_id=V - 1,
        bos_token_id=0,
        pad_token_id=None,
        attn_implementation="eager",
    )
    model = LlamaForCausalLM(config).eval()
    draw(model, 0.15)
    return model


def draw(model: torch.nn.Module, scale: float) -> None:
    """Draw random weights and norms around 1; with a larger scale, scores differ more."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            drawn = torch.randn(weight.shape) * scale
            drawn = 1 + drawn if "norm" in name else drawn
            weight.copy_((drawn * (6 if "lm_head" in name else 1)).bfloat16().float())


@torch.no_grad()
def hidden_of(target: LlamaForCausalLM, tokens: list[int]) -> tuple[torch.Tensor, ...]:
    """Return the inputs of the target's layers, followed by the output of the final norm."""
    return target.model(torch.tensor([tokens]), output_hidden_states=True).hidden_states


def fused(states: tuple[torch.Tensor, ...], inputs: tuple[int, ...]) -> torch.Tensor:
    """Return the concatenated hidden states that EAGLE-3 fuses: the inputs of these layers."""
    return torch.cat([states[layer] for layer in inputs], dim=-1)


USUAL = (2, LAYERS // 2, LAYERS - 3)


def tables(count: int = U) -> dict[str, torch.Tensor]:
    """Make the tables that map between `count` draftable tokens and the vocabulary."""
    chosen = torch.randperm(V, generator=torch.Generator().manual_seed(1))[:count].sort().values
    marked = torch.zeros(V, dtype=torch.bool)
    marked[chosen] = True
    return {"d2t": chosen - torch.arange(count), "t2d": marked}


def safeailab(target: LlamaForCausalLM, version: int, variant: str) -> Golden:
    """Make a head of SafeAILab's code: EAGLE and EAGLE-2 (version 1), or EAGLE-3 (version 3)."""
    if version == 3:
        from eagle.model.cnets import Model
    else:
        from eagle.model.cnets1 import Model

    stated: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "num_hidden_layers": 1,
        "max_position_embeddings": 2048,
        "pad_token_id": 0,
        "pretraining_tp": 1,
        "tie_word_embeddings": False,
        "torch_dtype": "float16",
        "transformers_version": "4.28.1",
        **SIZES,
    }
    if version == 3:
        # Its Llama head of 3.1 states no rope_theta.
        stated["draft_vocab_size"] = U
    elif variant == "":
        stated |= {"rope_theta": 500000.0, "bias": False}
    if variant == "qkv_bias":
        stated["qkv_bias"] = True
    if variant == "width":
        stated |= {"hidden_size": 24, "target_hidden_size": D, "num_attention_heads": 3}
        stated |= {"num_key_value_heads": 3}
    config = SimpleNamespace(rope_scaling=None, **stated)
    torch.manual_seed(version)
    model = Model(config, bias=stated.get("bias", True), **TREE).eval()
    draw(model, 0.2)
    table = tables() if version == 3 else {}
    for name, value in table.items():
        getattr(model, name).copy_(value)
    if variant != "width":
        with torch.no_grad():
            model.embed_tokens.weight.copy_(target.model.embed_tokens.weight)
    model.init_tree()

    def read(tokens: list[int]) -> torch.Tensor:
        states = hidden_of(target, tokens)
        return fused(states, USUAL) if version == 3 else states[-1]

    def score(output: torch.Tensor) -> torch.Tensor:
        return model.lm_head(model.norm(output)) if version == 3 else target.lm_head(output)

    @torch.no_grad()
    def logits(text: list[int], chain: list[int]) -> np.ndarray:
        model.reset()
        ids = torch.tensor([[*text[1:], chain[0]]])
        output, past = model(read(text), input_ids=ids, use_cache=True)
        output, scores = output[:, -1:], []
        scores.append(score(output)[0, 0])
        for place, token in enumerate(chain[1:]):
            output, past = model(
                output,
                input_ids=torch.tensor([[token]]),
                past_key_values=past,
                position_ids=torch.tensor([len(text) + place]),
                use_cache=True,
            )
            scores.append(score(output)[0, 0])
        return torch.stack(scores).numpy()

    @torch.no_grad()
    def tree(text: list[int], root: int) -> tuple[np.ndarray, np.ndarray]:
        model.reset_kv()
        ids = torch.tensor([[*text, root]])
        tokens, _, mask, _ = model.topK_genrate(read(text), ids, target.lm_head, None)
        above = mask[0, 0].numpy().astype(bool) & ~np.eye(len(tokens[0]), dtype=bool)
        # The parent of a node is the last of its ancestors.
        parents = [np.flatnonzero(row)[-1] if row.any() else 0 for row in above]
        return tokens[0].numpy(), np.asarray(parents)

    weights = {name: value for name, value in model.state_dict().items() if "rotary" not in name}
    if variant != "width":
        weights.pop("embed_tokens.weight")
    name = f"safeailab_{version}" + (f"_{variant}" if variant else "")
    return Golden(name, stated, weights, logits, tree, torch_file=variant != "width")


def specforge(target: LlamaForCausalLM, variant: str) -> Golden:
    """Make a head of SpecForge's code; "fc_norm" has further norms and only U draftable tokens."""
    from specforge.modeling.draft.llama3_eagle import (
        LlamaForCausalLMEagle3,
        prepare_decoder_attention_mask,
    )

    stated: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 0,
        "eos_token_id": V - 1,
        "head_dim": 12,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "max_position_embeddings": 2048,
        "max_window_layers": 36,
        "model_type": "llama",
        "num_hidden_layers": 1,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.51.0",
        "use_cache": True,
        "use_sliding_window": False,
        "draft_vocab_size": U if variant == "fc_norm" else V,
        **SIZES,
    }
    inputs = USUAL
    if variant == "fc_norm":
        stated["fc_norm"] = True
        # The numbers are those of layer outputs; SGLang, for which the layout is made, adds 1.
        stated["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [0, 2, 5]}
        inputs = (1, 3, 6)
        stated["rope_scaling"] = {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    torch.manual_seed(5)
    own = {name: value for name, value in stated.items() if not name.startswith("rope")}
    config = LlamaConfig(**own, pad_token_id=0)
    # In the form of transformers 4, which the code reads if the form of 5 is absent.
    config.rope_parameters = None
    config.rope_theta, config.rope_scaling = stated["rope_theta"], stated["rope_scaling"]
    model = LlamaForCausalLMEagle3(config).eval()
    draw(model, 0.2)
    if variant == "fc_norm":
        for name, value in tables().items():
            getattr(model, name).copy_(value)
    with torch.no_grad():
        model.embed_tokens.weight.copy_(target.model.embed_tokens.weight)

    @torch.no_grad()
    def logits(text: list[int], chain: list[int]) -> np.ndarray:
        """Run the authors' training forward pass; a round reads the previous round's outputs."""
        hidden = model.project_hidden_states(fused(hidden_of(target, text), inputs))
        whole, count, cache = [*text, *chain], len(text), [[], []]
        places = torch.arange(count)[None]
        mask = prepare_decoder_attention_mask(
            torch.ones(1, count, dtype=torch.bool), (1, count), hidden, 0
        )
        mask = torch.zeros(1, 1, 1, 1) if mask is None else mask
        scores = []
        for done in range(len(chain)):
            ids = torch.tensor([whole[1 + done : 1 + done + count]])
            hidden = model.backbone(model.embed_input_ids(ids), hidden, cache, mask, places)
            scores.append(model.compute_logits(hidden)[0, -1])
        return torch.stack(scores).numpy()

    return Golden(
        f"specforge_{variant}" if variant else "specforge", stated, weights_of(model), logits
    )


def speculators(target: LlamaForCausalLM, variant: str) -> Golden:
    """Make a head of the code of vLLM's speculators; each variant has other flags."""
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.models.eagle3.config import Eagle3SpeculatorConfig
    from speculators.models.eagle3.core import Eagle3DraftModel
    from speculators.proposals.greedy import GreedyTokenProposalConfig

    sizes = {**SIZES, "head_dim": 8, "num_hidden_layers": 1, "hidden_act": "silu"}
    sizes |= {"attention_bias": variant == "llama"}
    kind = LlamaConfig if variant == "llama" else Qwen3Config
    layer = kind(**sizes, rope_parameters={"rope_type": "default", "rope_theta": 10000.0})
    # With "eager", the masks of the later rounds would hide nothing, because they are booleans.
    layer._attn_implementation = "sdpa"
    flags = {
        # The same as in RedHat's heads for Qwen3.
        "qwen3": {"norm_before_residual": True, "norm_before_fc": True},
        "llama": {"norm_before_residual": False, "eagle_aux_hidden_state_layer_ids": [1, 3, 5, 6]},
        "norms": {"norm_before_residual": False, "fc_norm": True, "norm_output": True},
    }[variant]
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layer,
        draft_vocab_size=U,
        **flags,
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=3)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path="target", architectures=["LlamaForCausalLM"]),
        ),
    )
    torch.manual_seed(7)
    model = Eagle3DraftModel(config).eval()
    draw(model, 0.2)
    for name, value in tables().items():
        getattr(model, name).copy_(value)
    with torch.no_grad():
        model.embed_tokens.weight.copy_(target.model.embed_tokens.weight)
    inputs = tuple(flags.get("eagle_aux_hidden_state_layer_ids", USUAL))
    heard: list[torch.Tensor] = []
    model.lm_head.register_forward_hook(lambda module, given, made: heard.append(made))

    @torch.no_grad()
    def logits(text: list[int], chain: list[int]) -> np.ndarray:
        """Run the authors' training forward pass; the scores are the outputs of `lm_head`."""
        heard.clear()
        whole, count = [*text, *chain], len(text)
        # Tokens of later rounds are taken from after the text.
        more = len(chain) - 1
        states = fused(hidden_of(target, text), inputs)
        states = torch.cat([states, torch.zeros(1, more, states.shape[-1])], dim=1)
        ids = torch.tensor([whole[1 : 1 + count + more]])
        model(states, ids, torch.zeros_like(ids), ttt_steps=len(chain))
        return torch.stack([scores[0, count - 1] for scores in heard]).numpy()

    stated = json.loads(config.to_json_string())
    weights = {
        name: value for name, value in weights_of(model).items() if not name.startswith("verifier")
    }
    return Golden(f"speculators_{variant}", stated, weights, logits)


def deepspec(target: LlamaForCausalLM) -> Golden:
    """Make a head of DeepSpec's code for Qwen3."""
    from deepspec.modeling.eagle3.qwen3.modeling import Qwen3Eagle3Model

    layers = [0, 1, 3, 4, 6]
    config = Qwen3Config(
        **{**SIZES, "head_dim": 8, "num_hidden_layers": 1, "tie_word_embeddings": False},
        rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
        layer_types=["full_attention"],
        architectures=["Qwen3Eagle3Model"],
        attn_implementation="eager",
    )
    more = {
        "num_target_layers": LAYERS,
        "target_model_name_or_path": "target",
        "target_layer_ids": layers,
        "ttt_length": 7,
        "step_loss_decay": 0.8,
        "draft_num_hidden_layers": 1,
    }
    for name, value in more.items():
        setattr(config, name, value)
    torch.manual_seed(9)
    model = Qwen3Eagle3Model(config).eval()
    draw(model, 0.2)
    with torch.no_grad():
        model.embed_tokens.weight.copy_(target.model.embed_tokens.weight)

    @torch.no_grad()
    def logits(text: list[int], chain: list[int]) -> np.ndarray:
        """Run the authors' evaluation, round by round."""
        cache, count = DynamicCache(), len(text)
        states = fused(hidden_of(target, text), tuple(layer + 1 for layer in layers))
        mask = torch.full((1, 1, count, count), -1e9).triu(1)
        output = model(
            hidden_states=states,
            input_ids=torch.tensor([[*text[1:], chain[0]]]),
            position_ids=torch.arange(count)[None],
            past_key_values=cache,
            use_cache=True,
            attention_mask=mask,
        )[:, -1:]
        scores = [model.compute_logits(output)[0, 0]]
        for place, token in enumerate(chain[1:]):
            output = model(
                hidden_states=output,
                input_ids=torch.tensor([[token]]),
                position_ids=torch.tensor([[count + place]]),
                past_key_values=cache,
                use_cache=True,
            )
            scores.append(model.compute_logits(output)[0, 0])
        return torch.stack(scores).numpy()

    stated = json.loads(config.to_json_string(use_diff=True)) | {
        "architectures": ["Qwen3Eagle3Model"]
    }
    return Golden("deepspec", stated, weights_of(model), logits)


def weights_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the published weights by name, with a copy of the target's embedding."""
    return {name: value for name, value in model.state_dict().items() if "rotary" not in name}


def write(golden: Golden, text: list[int], chain: list[int]) -> None:
    """Write a folder with the head's published files and the answers."""
    folder = FOLDER / golden.name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(golden.config, indent=2) + "\n")
    floating = torch.float32 if golden.torch_file else torch.bfloat16
    weights = {
        name: value.to(floating).contiguous() if value.is_floating_point() else value.contiguous()
        for name, value in golden.weights.items()
    }
    if golden.torch_file:
        torch.save(weights, folder / "pytorch_model.bin")
    else:
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    answers = {
        f"after_{length}": golden.logits(text[:length], chain).astype(np.float32)
        for length in LENGTHS
    }
    if golden.tree is not None:
        answers["tokens"], answers["parents"] = golden.tree(text[:63], chain[0])
    else:
        drafted = np.arange(V)
        if "d2t" in weights:
            drafted = np.arange(len(weights["d2t"])) + weights["d2t"].numpy()
        answers |= beam_search(
            lambda text, path: (torch.from_numpy(golden.logits(text, path)), None),
            drafted.tolist(),
            text[:63],
            chain[0],
        )
    np.savez_compressed(folder / "answers.npz", **answers)
    size = sum(path.stat().st_size for path in folder.iterdir())
    print(golden.name, f"{size:,} bytes", {name: one.shape for name, one in answers.items()})


def goldens(target: LlamaForCausalLM) -> Iterator[Golden]:
    """Yield all heads."""
    yield safeailab(target, 1, "")
    yield safeailab(target, 1, "qkv_bias")
    yield safeailab(target, 3, "")
    yield safeailab(target, 3, "width")
    yield specforge(target, "")
    yield specforge(target, "fc_norm")
    for variant in ("qwen3", "llama", "norms"):
        yield speculators(target, variant)
    yield deepspec(target)


def main() -> None:
    """Write the target, the text and all heads with their answers."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("safeailab", "specforge", "speculators", "deepspec"):
        parser.add_argument(f"--{name}", type=Path, required=True, help="a clone of the authors'")
    paths = parser.parse_args()
    sys.path += map(
        str, (paths.safeailab, paths.specforge, paths.speculators / "src", paths.deepspec)
    )
    # Stubs of imports that only training needs, and of the version of an absent package.
    for name in ("openai", "openai.types", "openai.types.chat", "openai.types.completion"):
        sys.modules[name] = MagicMock()
    for name in ("datasets", "hs_connectors"):
        sys.modules[name] = MagicMock()
    version = importlib.metadata.version
    importlib.metadata.version = lambda name: "0" if name == "speculators" else version(name)

    target = make_target()
    folder = FOLDER / "target"
    folder.mkdir(parents=True, exist_ok=True)
    # Round a copy, because the rotary frequencies would be rounded too.
    deepcopy(target).bfloat16().save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    draws = torch.Generator().manual_seed(3)
    text = torch.randint(0, V - 1, (max(LENGTHS),), generator=draws).tolist()
    chain = torch.randint(0, V - 1, (5,), generator=draws).tolist()
    np.savez_compressed(FOLDER / "text.npz", text=np.asarray(text), chain=np.asarray(chain))
    for golden in goldens(target):
        write(golden, text, chain)


if __name__ == "__main__":
    main()
