"""Both sides of decoding: ours in this process, Apple's in one of its own."""

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax

from redrafter_jax import (
    DraftConfig,
    generate,
    generate_autoregressive,
    load_drafter,
    load_target,
)
from tools.apple.process import Process, apple_command

Mode = Literal["speculative", "autoregressive"]
MODES: tuple[Mode, ...] = ("speculative", "autoregressive")
# What Apple's `warp_logits` keeps of a beam's scores.
APPLE_CANDIDATES = 50


@dataclass(frozen=True)
class Run:
    """One generation: its new tokens, target calls after prefill, wall time with prefill."""

    tokens: list[int]
    target_calls: int
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        """New tokens over the whole wall time."""
        return len(self.tokens) / self.seconds


type Side = Callable[[Mode, list[int]], Run]


def decode_command(arguments: argparse.Namespace, threads: int) -> list[str]:
    """How Apple's side is started."""
    options = ["--target", arguments.target, "--drafter", arguments.drafter, "--threads", threads]
    if arguments.full_vocabulary:
        options.append("--full-vocabulary")
    return apple_command(arguments.torch_python, arguments.repository, "decode", *options)


def apple_side(apple: Process, arguments: argparse.Namespace) -> Side:
    """Apple's decoders, as a function that decodes one prompt."""

    def run(mode: Mode, prompt: list[int]) -> Run:
        request = {
            "mode": mode,
            "prompt": prompt,
            "max_new_tokens": arguments.max_new_tokens,
            "beam_width": arguments.beam_width,
            "beam_length": arguments.draft_rounds + 1,  # Apple counts the root
        }
        reply = apple.ask(request)
        return Run(reply["tokens"], reply["target_calls"], reply["seconds"])

    return run


def load_ours(arguments: argparse.Namespace) -> Side:
    """Our two models in float32 on the CPU, as a function that decodes one prompt."""
    jax.config.update("jax_platforms", "cpu")  # Apple's side runs there as well
    target = load_target(str(arguments.target), dtype="float32")
    drafter = load_drafter(str(arguments.drafter), dtype="float32")
    draft = DraftConfig(
        beam_width=arguments.beam_width,
        draft_rounds=arguments.draft_rounds,
        num_nodes=None,
        final_beams_only=True,
        candidates=(
            None if arguments.full_vocabulary else min(APPLE_CANDIDATES, target.config.vocab_size)
        ),
    )
    limits: dict[str, Any] = {"max_new_tokens": arguments.max_new_tokens, "eos_token_ids": ()}

    def run(mode: Mode, prompt: list[int]) -> Run:
        start = time.perf_counter()
        if mode == "speculative":
            result = generate(target, drafter, [prompt], draft=draft, **limits)
        else:
            result = generate_autoregressive(target, [prompt], **limits)
        tokens = [int(token) for token in result.tokens[0]]
        return Run(tokens, int(result.steps[0]), time.perf_counter() - start)

    return run
