"""Decode with Apple's PyTorch ReDrafter, one JSON request at a time.

`python -m tools.apple_decoding` starts this script under *another* Python, one that has PyTorch, a
transformers that Apple's code can use (4.47.1 and 4.57.1 do, 5 does not) and the packages its code
imports (jsonlines, tabulate). It therefore imports nothing of this project. Apple's code itself
comes, unmodified, from a clone of https://github.com/apple/ml-recurrent-drafter.

After loading it writes one line of versions, or one line `{"error": sentence}` and leaves. Then
every line on stdin is a request and every line on stdout its answer:

    {"mode": "speculative", "prompt": [1, 2], "max_new_tokens": 64,
     "beam_width": 4, "beam_length": 5}                              (on one line)
    {"mode": "trace", ...}                                          (else as speculative)
    {"mode": "autoregressive", "prompt": [1, 2], "max_new_tokens": 64}

    {"tokens": [...], "target_calls": 17, "seconds": 0.52, "seconds_decode": 0.51}
    {"error": "IndexError: ..."}

`tokens` are the new ones alone. `target_calls` counts passes of the target after prefill.
`seconds` is the wall time of the whole generation, prefill included; `seconds_decode` leaves the
prefill out. Batch 1, greedy, float32, and no token stops the text. A trace also has `steps`, one
for each target call, as worker_trace.py describes them; `length` is that of the text before it,
root included.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any, TextIO

# From this script's own folder, which Python puts first on the path and `load` takes off it.
from worker_models import UnusableError, load, rank_full_vocabulary
from worker_trace import recorded

# Apple's code compares the prompt with the padding id to find left padding, and never embeds that
# id while the batch has one row. No token is negative, so with -1 every prompt token counts,
# whatever the checkpoint calls its padding.
NO_PAD = -1
# Apple's plain decoder compares with the stop id unconditionally, so None is not possible there.
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


def decode_plainly(model: Any, request: dict[str, Any]) -> dict[str, Any]:
    """Apple's plain greedy decoding on one prompt; its first item is the prefill's."""
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


def serve(model: Any, requests: TextIO, answers: TextIO) -> None:
    """Answer requests until stdin closes; a failed one is answered too, so the driver goes on."""
    decoders = {
        "speculative": decode_speculatively,
        "trace": decode_and_trace,
        "autoregressive": decode_plainly,
    }
    for line in requests:
        request = json.loads(line)
        try:
            reply = decoders[request["mode"]](model, request)
        except Exception as error:
            reply = {"error": f"{type(error).__name__}: {error}"}
        say(answers, reply)


def say(answers: TextIO, reply: dict[str, Any]) -> None:
    """Write one line at once: the driver waits for it."""
    answers.write(json.dumps(reply) + "\n")
    answers.flush()


def take_stdout() -> TextIO:
    """The protocol's channel; whatever else prints from here on goes to stderr instead."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return answers


def parse_arguments() -> argparse.Namespace:
    """Where Apple's code and the two models are."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--repository", type=Path, required=True, help="clone of Apple's code")
    parser.add_argument("--target", type=Path, required=True, help="Llama in Hugging Face layout")
    parser.add_argument("--drafter", type=Path, required=True, help="drafter in Apple's layout")
    parser.add_argument("--full-vocabulary", action="store_true", help="drop the top-50 cut")
    parser.add_argument("--threads", type=int, required=True, help="CPU threads for PyTorch")
    return parser.parse_args()


def main() -> int:
    """Load, announce the versions, serve."""
    arguments, answers = parse_arguments(), take_stdout()
    try:
        model = load(
            arguments.repository.resolve(),
            arguments.target.resolve(),
            arguments.drafter.resolve(),
            arguments.threads,
        )
        if arguments.full_vocabulary:
            rank_full_vocabulary()
    except UnusableError as error:
        say(answers, {"error": str(error)})
        return 2
    except Exception as error:
        say(answers, {"error": f"loading failed: {type(error).__name__}: {error}"})
        return 2
    import torch
    import transformers

    versions = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    say(answers, {"versions": versions, "threads": torch.get_num_threads()})
    serve(model, sys.stdin, answers)
    return 0


if __name__ == "__main__":
    sys.exit(main())
