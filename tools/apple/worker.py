"""Apple's PyTorch ReDrafter, one JSON request at a time: `decode` prompts or `train` a case.

`python -m tools.apple` starts this script under *another* Python, one that has PyTorch, a
transformers that Apple's code can use (4.47.1 can, 5 cannot) and the packages its code imports
(jsonlines, tabulate). It therefore imports nothing of this project. Apple's code itself comes,
unmodified, from a clone of https://github.com/apple/ml-recurrent-drafter.

    python worker.py REPOSITORY decode TARGET DRAFTER
    python worker.py REPOSITORY train CASE

After loading it writes one line about itself (versions, threads, memory). Then every line on stdin
is a request and every line on stdout its answer. Of `decode`, each on one line:

    {"mode": "speculative", "prompt": [1, 2], "max_new_tokens": 64,
     "beam_width": 4, "draft_rounds": 4}
    {"mode": "trace", ...}                                          (else as speculative)
    {"mode": "autoregressive", "prompt": [1, 2], "max_new_tokens": 64}

    {"tokens": [...], "target_calls": 17, "seconds": 0.52}

`tokens` are the new ones alone. `target_calls` counts passes of the target after prefill.
`seconds` is the wall time of the whole generation, prefill included. Batch 1, greedy, float32, and
no token stops the text. A trace also has `steps`, one for each target call, as worker_trace.py
describes them; `length` is that of the text before it, root included.

Of `train`:

    {"first": 0, "steps": 2}
    {"losses": [39.1, 38.7], "seconds": [0.9, 0.8], "processor_seconds": 3.1,
     "peak_bytes": 1000000000}

`processor_seconds` is what all steps together took of all cores; `peak_bytes` is the most memory
that this process has had, its libraries and weights included.
"""

# pyright: reportMissingImports=false

import os
import platform
import sys
from pathlib import Path

# From this script's own folder, which Python puts first on the path and `main` takes off it.
from worker_decoding import DECODERS
from worker_models import load_pair
from worker_protocol import answer_steps, peak_bytes, serve, take_stdout
from worker_training import load_case


def main() -> None:
    """Load, say who is there, serve."""
    answers = take_stdout()
    repository, task, *folders = sys.argv[1:]
    # This folder's module names must not shadow what Apple's code imports.
    sys.path[0] = str(Path(repository).resolve())
    import torch
    import transformers

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    if task == "train":
        answer = answer_steps(load_case(Path(*folders)))
    else:
        model = load_pair(*map(Path, folders))
        answer = lambda request: DECODERS[request["mode"]](model, request)  # noqa: E731
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
    serve(answers, about, answer)


if __name__ == "__main__":
    main()
