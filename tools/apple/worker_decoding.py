"""Apple's decoders on one prompt.

Part of worker.py, under a Python that has PyTorch: nothing of this project is imported.
"""

# pyright: reportMissingImports=false

import time
from types import SimpleNamespace
from typing import Any

from worker_trace import recorded

# Apple's code compares the prompt with the padding id to find left padding, and never embeds that
# id while the batch has one row. No token is negative, so with -1 every prompt token counts,
# whatever the checkpoint calls its padding.
NO_PAD = -1
# Apple's autoregressive decoder compares with the stop id unconditionally, so it must be a number.
NO_STOP = -1


def decode_speculatively(model: Any, request: dict[str, Any]) -> dict[str, Any]:
    """Apple's greedy ReDrafter on one prompt."""
    import torch
    from recurrent_drafting.modeling_drafter import BeamShape
    from recurrent_drafting.recurrent_drafting import SamplingArgs, SpecialTokens

    ledger = SimpleNamespace(post=lambda record: None)  # Apple's writes times to a file
    start = time.perf_counter()
    prompt = torch.tensor([request["prompt"]], dtype=torch.long)
    # each item is the text after one more target call; Apple's length limit counts the prompt,
    # and the last item is already cut to it
    texts = list(
        model.generate(
            ledger,
            prompt,
            max_length=prompt.shape[1] + request["max_new_tokens"],
            beam_shape=BeamShape(request["beam_width"], request["draft_rounds"] + 1),
            sampling_args=SamplingArgs(temperature=1.0, greedy=True),
            special_tokens=SpecialTokens(pad=NO_PAD, eos=None),
        )
    )
    return answer(texts[-1], request, len(texts), start) | {
        "lengths": [prompt.shape[1] + 1, *(text.shape[1] for text in texts[:-1])]
    }


def decode_and_trace(model: Any, request: dict[str, Any]) -> dict[str, Any]:
    """The same with every step's beams and tree."""
    with recorded(model.drafter) as steps:
        reply = decode_speculatively(model, request)
    pairs = zip(steps, reply["lengths"], strict=True)
    return reply | {"steps": [step | {"length": length} for step, length in pairs]}


def decode_autoregressively(model: Any, request: dict[str, Any]) -> dict[str, Any]:
    """Apple's greedy autoregressive decoding on one prompt; its first item is the prefill's."""
    import torch
    from recurrent_drafting import autoregressive
    from recurrent_drafting.recurrent_drafting import SpecialTokens

    start = time.perf_counter()
    prompt = torch.tensor([request["prompt"]], dtype=torch.long)
    texts = list(
        autoregressive.generate(
            model,
            prompt,
            max_length=prompt.shape[1] + request["max_new_tokens"],
            special_tokens=SpecialTokens(pad=NO_PAD, eos=NO_STOP),
        )
    )
    return answer(texts[-1], request, len(texts) - 1, start)


def answer(text: Any, request: dict[str, Any], target_calls: int, start: float) -> dict[str, Any]:
    """Of a `[1, T]` text: what is new in it, no longer than was asked for."""
    tokens = text[0, len(request["prompt"]) :][: request["max_new_tokens"]].tolist()
    seconds = time.perf_counter() - start
    return {"tokens": tokens, "target_calls": target_calls, "seconds": seconds}


DECODERS = {
    "speculative": decode_speculatively,
    "trace": decode_and_trace,
    "autoregressive": decode_autoregressively,
}
