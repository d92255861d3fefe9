"""Decode with Apple's PyTorch ReDrafter, one JSON request at a time.

`python -m eval.apple` starts this script under *another* Python, one that has PyTorch, a
transformers that Apple's code can use (4.47.1 and 4.57.1 do, 5 does not) and the packages its code
imports (jsonlines, tabulate). It therefore imports nothing of this project. Apple's code itself
comes, unmodified, from a clone of https://github.com/apple/ml-recurrent-drafter.

After loading it writes one line of versions, or one line `{"error": sentence}` and leaves. Then
every line on stdin is a request and every line on stdout its answer:

    {"mode": "speculative", "prompt": [1, 2], "max_new_tokens": 64,
     "beam_width": 4, "beam_length": 5}                              (on one line)
    {"mode": "autoregressive", "prompt": [1, 2], "max_new_tokens": 64}

    {"tokens": [...], "target_calls": 17, "seconds": 0.52, "seconds_decode": 0.51}
    {"error": "IndexError: ..."}

`tokens` are the new ones alone. `target_calls` counts passes of the target after prefill.
`seconds` is the wall time of the whole generation, prefill included; `seconds_decode` leaves the
prefill out. Batch 1, greedy, float32, and no token stops the text.
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

# Apple's code compares the prompt with the padding id to find left padding, and never embeds that
# id while the batch has one row. No token is negative, so with -1 every prompt token counts,
# whatever the checkpoint calls its padding.
NO_PAD = -1
# Apple's plain decoder compares with the stop id unconditionally, so None is not possible there.
NO_STOP = -1

_DECODE_TIMERS = ("generate_candidates", "verify_candidates", "accept_candidate_tokens")


class UnusableError(Exception):
    """Apple's code cannot run here or with these folders; the message says why in one sentence."""


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


def rope_base(config: dict[str, Any]) -> float:
    """RoPE's base from a `config.json` of either transformers generation.

    transformers 4 does not know `rope_parameters` and would quietly fall back to 10000.
    """
    nested = config.get("rope_parameters")
    scaling = nested or config.get("rope_scaling") or {}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind != "default":
        raise UnusableError(f"the target scales RoPE ({kind}), which Apple's Llama does not do")
    base = (nested or config).get("rope_theta")
    if base is None:
        raise UnusableError("the target's config.json does not state rope_theta")
    return float(base)


def read_target_config(folder: Path) -> dict[str, Any]:
    """The target's `config.json`, refused where Apple's Llama would compute something else."""
    path = folder / "config.json"
    if not path.is_file():
        raise UnusableError(f"{folder} has no config.json")
    config = json.loads(path.read_text())
    if config.get("model_type") != "llama":
        raise UnusableError(
            f"the target's model_type is {config.get('model_type')}; Apple's code knows only llama"
        )
    width = config["hidden_size"] // config["num_attention_heads"]
    if (config.get("head_dim") or width) != width:
        raise UnusableError(
            f"the target's head_dim is {config['head_dim']}; Apple's Llama needs "
            f"hidden_size / num_attention_heads = {width}"
        )
    for bias in ("attention_bias", "mlp_bias"):
        if config.get(bias):
            raise UnusableError(f"the target has {bias}, which Apple's Llama does not")
    return config


def load_target(folder: Path) -> Any:
    """Apple's Llama with the folder's weights in float32."""
    import torch
    import transformers
    from recurrent_drafting import modeling_llama

    raw = read_target_config(folder)
    config = transformers.LlamaConfig.from_pretrained(folder)
    config.rope_theta = rope_base(raw)
    llm, info = modeling_llama.LlamaForCausalLM.from_pretrained(
        folder, config=config, torch_dtype=torch.float32, output_loading_info=True
    )
    # the rotary tables are computed rather than stored; a tied head is the embedding
    computed = {name for name, _ in llm.named_buffers()}
    if config.tie_word_embeddings:
        computed.add("lm_head.weight")
    refuse_partial_load("target", set(info["missing_keys"]) - computed, info["unexpected_keys"])
    check_rotary_tables(llm, config.rope_theta)
    return llm.eval()


def check_rotary_tables(llm: Any, base: float) -> None:
    """Refuse a transformers release that builds models on the meta device.

    Apple's rotary module fills its tables in its constructor; such a release throws them away.
    """
    import torch

    for layer in llm.model.layers:
        rotary = layer.self_attn.rotary_emb
        exponents = torch.arange(0, rotary.dim, 2).float() / rotary.dim
        intact = rotary.cos_cached.device.type == "cpu" and torch.allclose(
            rotary.inv_freq, 1.0 / base**exponents
        )
        if not intact:
            raise UnusableError(
                "this transformers release spoils the rotary tables of Apple's Llama; "
                "install transformers 4.47.1 beside PyTorch"
            )


def load_drafter(folder: Path, target: Any) -> Any:
    """Apple's drafter with the folder's weights in float32."""
    import torch
    from recurrent_drafting import modeling_drafter

    if not (folder / "config.json").is_file():
        raise UnusableError(f"{folder} has no config.json")
    drafter, info = modeling_drafter.Drafter.from_pretrained(
        folder, torch_dtype=torch.float32, output_loading_info=True
    )
    refuse_partial_load("drafter", set(info["missing_keys"]), info["unexpected_keys"])
    for field in ("hidden_size", "vocab_size"):
        ours, theirs = getattr(drafter.config, field), getattr(target.config, field)
        if ours != theirs:
            raise UnusableError(f"the drafter's {field} is {ours} and the target's is {theirs}")
    return drafter.eval()


def rank_full_vocabulary() -> None:
    """Let Apple's drafter score beams by its whole distribution, as ours does.

    Apple's keeps 50 logits per step and normalises over those, so that a beam with a flat
    distribution scores higher than its probability. The same function also trims the target's
    logits, where greedy decoding does not notice.
    """
    from recurrent_drafting import modeling_drafter

    modeling_drafter.warp_logits = lambda logits: logits


def refuse_partial_load(what: str, missing: set[str], unexpected: list[str]) -> None:
    """transformers only warns when names do not match; a comparison must not go on."""
    if missing or unexpected:
        names = ", ".join(sorted(missing | set(unexpected)))
        raise UnusableError(f"the {what}'s weights do not fit Apple's model: {names}")


def load(repository: Path, target: Path, drafter: Path, threads: int) -> Any:
    """Apple's decoder for the two folders, on `threads` CPU threads."""
    # this folder's module names must not shadow what Apple's code imports
    sys.path[0] = str(repository)
    try:
        import torch
        from recurrent_drafting import recurrent_drafting
    except ImportError as error:
        raise UnusableError(f"{sys.executable} cannot import Apple's code: {error}") from error
    torch.set_num_threads(threads)
    llm = load_target(target)
    return recurrent_drafting.RecurrentDrafting(llm=llm, drafter=load_drafter(drafter, llm))


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
    return answer(tokens, len(texts), seconds, times.seconds)


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
    decoders = {"speculative": decode_speculatively, "autoregressive": decode_plainly}
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
