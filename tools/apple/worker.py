"""Apple's PyTorch ReDrafter, one JSON request at a time: `decode` prompts or `train` a case.

`python -m tools.apple` starts this script under *another* Python, one that has PyTorch, a
transformers that Apple's code can use (4.47.1 can, 5 cannot) and the packages its code imports
(jsonlines, tabulate). It therefore imports nothing of this project. Apple's code itself comes,
unmodified, from a clone of https://github.com/apple/ml-recurrent-drafter.

After loading it writes one line about itself (versions, threads, wait policy, memory), or one line
`{"error": sentence}` and leaves. Then every line on stdin is a request and every line on stdout its
answer, or `{"error": "IndexError: ..."}`. Of `decode`, each on one line:

    {"mode": "speculative", "prompt": [1, 2], "max_new_tokens": 64,
     "beam_width": 4, "beam_length": 5}
    {"mode": "trace", ...}                                          (else as speculative)
    {"mode": "autoregressive", "prompt": [1, 2], "max_new_tokens": 64}

    {"tokens": [...], "target_calls": 17, "seconds": 0.52, "seconds_decode": 0.51}

`tokens` are the new ones alone. `target_calls` counts passes of the target after prefill.
`seconds` is the wall time of the whole generation, prefill included; `seconds_decode` leaves the
prefill out. Batch 1, greedy, float32, and no token stops the text. A trace also has `steps`, one
for each target call, as worker_trace.py describes them; `length` is that of the text before it,
root included.

Of `train`:

    {"first": 0, "steps": 2}
    {"losses": [39.1, 38.7], "seconds": [0.9, 0.8], "processor_seconds": 3.1,
     "peak_bytes": 1000000000}

`processor_seconds` is what all steps together took of all cores; `peak_bytes` is the most memory
that this process has had, its libraries and weights included.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import argparse
import os
import platform
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

# From this script's own folder, which Python puts first on the path and `load` takes off it.
from worker_decoding import DECODERS
from worker_models import UnusableError, load_pair, rank_full_vocabulary
from worker_protocol import answer_steps, peak_bytes, say, serve, take_stdout
from worker_training import load_case

if TYPE_CHECKING:
    from collections.abc import Callable


def parse_arguments() -> argparse.Namespace:
    """The task, and where Apple's code, the models or the case are."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    tasks = parser.add_subparsers(dest="task", required=True)
    decode, train = tasks.add_parser("decode"), tasks.add_parser("train")
    for task in (decode, train):
        task.add_argument("--repository", type=Path, required=True, help="clone of Apple's code")
    decode.add_argument("--target", type=Path, required=True, help="Llama, Hugging Face layout")
    decode.add_argument("--drafter", type=Path, required=True, help="drafter in Apple's layout")
    decode.add_argument("--full-vocabulary", action="store_true", help="drop the top-50 cut")
    decode.add_argument("--threads", type=int, required=True, help="CPU threads for PyTorch")
    train.add_argument("--case", type=Path, required=True, help="folder of the case")
    return parser.parse_args()


def load(arguments: argparse.Namespace) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """What answers the task's requests."""
    folders = {
        name: value.resolve() for name, value in vars(arguments).items() if isinstance(value, Path)
    }
    # This folder's module names must not shadow what Apple's code imports.
    sys.path[0] = str(folders["repository"])
    if arguments.task == "train":
        return answer_steps(load_case(folders["case"]))
    model = load_pair(folders["target"], folders["drafter"], arguments.threads)
    if arguments.full_vocabulary:
        rank_full_vocabulary()
    return lambda request: DECODERS[request["mode"]](model, request)


def main() -> int:
    """Load, say who is there, serve."""
    arguments, answers = parse_arguments(), take_stdout()
    try:
        answer = load(arguments)
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
    about = {
        "versions": versions,
        "threads": torch.get_num_threads(),
        "wait_policy": os.environ.get("OMP_WAIT_POLICY"),
        "loaded_bytes": peak_bytes(),
    }
    serve(about, answer, sys.stdin, answers)
    return 0


if __name__ == "__main__":
    sys.exit(main())
