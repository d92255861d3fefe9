"""Apple's decoders on one prompt.

Part of worker.py, under a Python that has PyTorch: nothing of this project is imported.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import time
from typing import Any

from worker_trace import recorded

# Apple's code compares the prompt with the padding id to find left padding, and never embeds that
# id while the batch has one row. No token is negative, so with -1 every prompt token counts,
# whatever the checkpoint calls its padding.
NO_PAD = -1
# Apple's autoregressive decoder compares with the stop id unconditionally, so it must be a number.
NO_STOP = -1

_DECODE_TIMERS = ("generate_candidates", "verify_candidates", "accept_candidate_tokens")


class StepTimes:
    """Takes the place of Apple's ledger, which would write the same record to a file."""

    def __init__(self) -> None:
        self.record: dict[str, Any] = {}

    def post(self, record: dict[str, Any]) -> None:
        """Called by Apple's `generate` once, when the text is complete."""
        self.record = record

    @property
    def seconds(self) -> float:
        """Time inside the decoding steps, the prefill left out."""
        return sum(sum(self.record["wall_times"][name]) for name in _DECODE_TIMERS)


def decode_speculatively(model: Any, request: dict[str, Any]) -> dict[str, Any]:
    """Apple's greedy ReDrafter on one prompt."""
    import torch
    from recurrent_drafting.modeling_drafter import BeamShape
    from recurrent_drafting.recurrent_drafting import SamplingArgs, SpecialTokens

    times = StepTimes()
    start = time.perf_counter()
    prompt = torch.tensor([request["prompt"]], dtype=torch.long)
    # each item is the text after one more target call; Apple's length limit counts the prompt,
    # and the last item is already cut to it
    texts = list(
        model.generate(
            times,
            prompt,
            max_length=prompt.shape[1] + request["max_new_tokens"],
            beam_shape=BeamShape(request["beam_width"], request["beam_length"]),
            sampling_args=SamplingArgs(temperature=1.0, greedy=True),
            special_tokens=SpecialTokens(pad=NO_PAD, eos=None),
        )
    )
    tokens = new_tokens(texts[-1], request)
    seconds = time.perf_counter() - start
    return answer(tokens, len(texts), seconds, times.seconds) | {
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
    texts = autoregressive.generate(
        model,
        prompt,
        max_length=prompt.shape[1] + request["max_new_tokens"],
        special_tokens=SpecialTokens(pad=NO_PAD, eos=NO_STOP),
    )
    first = next(texts)
    prefilled = time.perf_counter()
    later = list(texts)
    tokens = new_tokens([first, *later][-1], request)
    end = time.perf_counter()
    return answer(tokens, len(later), end - start, end - prefilled)


def new_tokens(text: Any, request: dict[str, Any]) -> list[int]:
    """The generated part of a `[1, T]` text, no longer than was asked for."""
    return text[0, len(request["prompt"]) :][: request["max_new_tokens"]].tolist()


def answer(tokens: list[int], calls: int, seconds: float, seconds_decode: float) -> dict[str, Any]:
    """One answer of the protocol."""
    return {
        "tokens": tokens,
        "target_calls": calls,
        "seconds": seconds,
        "seconds_decode": seconds_decode,
    }


DECODERS = {
    "speculative": decode_speculatively,
    "trace": decode_and_trace,
    "autoregressive": decode_autoregressively,
}
