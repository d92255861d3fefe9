"""The two sides: our decoder in this process, Apple's in one of its own."""

import argparse
import contextlib
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

from redrafter_jax.errors import InputError

Mode = Literal["speculative", "autoregressive"]
# What Apple's `warp_logits` keeps of a beam's scores.
APPLE_CANDIDATES = 50
# Both models are folders. PyTorch's threads wait for each other without spinning: beside other
# processes spinning takes the cores from whoever is waited for.
_ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "OMP_WAIT_POLICY": "PASSIVE"}
MODES: tuple[Mode, ...] = ("speculative", "autoregressive")


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


class Apple:
    """Apple's code in its own process, idle except while it answers."""

    def __init__(self, arguments: argparse.Namespace, threads: int) -> None:
        self._arguments = arguments
        # transformers warns at length on stderr; kept aside for the case that the worker dies
        self._stderr: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (closed by close)
        worker = Path(__file__).with_name("worker.py")
        command = [arguments.torch_python, str(worker), "--threads", str(threads)]
        for name in ("repository", "target", "drafter"):
            command += [f"--{name}", str(getattr(arguments, name))]
        if arguments.full_vocabulary:
            command.append("--full-vocabulary")
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._stderr,
                env=os.environ | _ENVIRONMENT,
                text=True,
            )
        except OSError as error:
            self._stderr.close()
            raise InputError(
                f"cannot start --torch-python {arguments.torch_python}: {error.strerror}."
            ) from error
        try:
            self.about = self._read()
        except InputError:
            self.close()
            raise

    def __call__(self, mode: Mode, prompt: list[int]) -> Run:
        """Decode one prompt."""
        request = {
            "mode": mode,
            "prompt": prompt,
            "max_new_tokens": self._arguments.max_new_tokens,
            "beam_width": self._arguments.beam_width,
            "beam_length": self._arguments.draft_rounds + 1,  # Apple counts the root
        }
        reply = self.ask(request)
        return Run(reply["tokens"], reply["target_calls"], reply["seconds"])

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Its answer to a request that worker.py knows."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise InputError(self._last_words()) from error
        return self._read()

    def close(self) -> None:
        """End the worker: it leaves when its input does."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._stderr.close()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise InputError(self._last_words())
        try:
            reply = json.loads(line)
        except ValueError as error:
            raise InputError(f"Apple's worker wrote {line.strip()!r}, not JSON.") from error
        if "error" in reply:
            raise InputError(f"Apple's side: {reply['error']}.")
        return reply

    def _last_words(self) -> str:
        self._process.wait()
        self._stderr.seek(0)
        lines = self._stderr.read().decode(errors="replace").strip().splitlines()
        reason = lines[-1] if lines else "it wrote nothing"
        return f"Apple's worker ended with code {self._process.returncode}: {reason}"


def load_ours(arguments: argparse.Namespace) -> Side:
    """Our two models in float32 on the CPU, as a function that decodes one prompt."""
    import jax

    jax.config.update("jax_platforms", "cpu")  # Apple's worker runs there as well
    from redrafter_jax import (
        DraftConfig,
        generate,
        generate_autoregressive,
        load_drafter,
        load_target,
    )

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
