"""Apple's steps on a case, a request at a time.

`python -m tools.apple_training` starts this script under *another* Python, one that has PyTorch and
a transformers that Apple's code can use (4.47.1 can, 5 cannot). It therefore imports nothing of
this project. Apple's code itself comes, unmodified, from a clone of
https://github.com/apple/ml-recurrent-drafter: `train.model.ReDrafter` and
`train.loss.drafter_loss`, called as `cmd/train.py` calls them. Backward pass, clipping and AdamW
are what the Trainer of transformers does with their loss; its own overhead is left out.

After loading it writes one line about itself, or one line `{"error": sentence}` and leaves. Then
every line on stdin asks for steps and every line on stdout answers:

    {"first": 0, "steps": 2}
    {"losses": [39.1, 38.7], "seconds": [0.9, 0.8], "processor_seconds": 3.1,
     "peak_bytes": 1000000000}                                     (on one line)

`processor_seconds` is what all steps together took of all cores; `peak_bytes` is the most memory
that this process has had, its libraries and weights included.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import json
import os
import sys
import time
import types
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


def peak_bytes() -> int:
    """The most memory that was resident at once.

    Not `getrusage`: on Linux its figure starts from what the parent process had.
    """
    status = Path("/proc/self/status").read_text()
    (line,) = (line for line in status.splitlines() if line.startswith("VmHWM:"))
    return 1024 * int(line.split()[1])


def take_stdout() -> IO[str]:
    """The protocol's channel; whatever else prints from here on goes to stderr instead."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return answers


def serve(
    about: dict[str, Any],
    take_step: Callable[[int], tuple[float, float]],
    requests: IO[str],
    answers: IO[str],
) -> int:
    """Say who is there, then answer requests until stdin closes."""
    say(answers, about)
    for line in requests:
        asked = json.loads(line)
        started = time.process_time()
        taken = [take_step(asked["first"] + step) for step in range(asked["steps"])]
        losses, seconds = zip(*taken, strict=True)
        reply = {
            "losses": losses,
            "seconds": seconds,
            "processor_seconds": time.process_time() - started,
            "peak_bytes": peak_bytes(),
        }
        say(answers, reply)
    return 0


def say(answers: IO[str], reply: dict[str, Any]) -> None:
    """Write one line at once: the driver waits for it."""
    answers.write(json.dumps(reply) + "\n")
    answers.flush()


def stand_in_for_fastchat() -> None:
    """Let Apple's loss be imported without fastchat.

    It takes one constant from their data.py, which needs fastchat's templates for conversations.
    """
    chat, conversation = types.ModuleType("fastchat"), types.ModuleType("fastchat.conversation")
    model = types.ModuleType("fastchat.model")
    vars(conversation)["Conversation"] = object  # named in an annotation
    vars(chat).update(conversation=conversation, model=model)
    for module in (chat, conversation, model):
        sys.modules.setdefault(module.__name__, module)


def load(case: Path, repository: Path) -> Callable[[int], tuple[float, float]]:
    """The function that takes one step of the case: its number to loss and seconds."""
    # this folder's module names must not shadow what Apple's code imports
    sys.path[0] = str(repository)
    stand_in_for_fastchat()
    import numpy as np
    import torch
    from recurrent_drafting.train.data import IGNORE_TOKEN_ID
    from recurrent_drafting.train.loss import drafter_loss
    from recurrent_drafting.train.model import ReDrafter

    numbers = json.loads((case / "case.json").read_text())
    torch.set_num_threads(numbers["threads"])
    arrays = np.load(case / "batches.npz")
    tokens = torch.tensor(arrays["tokens"], dtype=torch.long)
    labels = tokens.masked_fill(~torch.tensor(arrays["loss_mask"]), IGNORE_TOKEN_ID)
    # padding stands behind the text and is seen by nothing that is learnt
    attended = torch.ones_like(tokens[0])
    model = ReDrafter.from_pretrained(
        str(case / "target"), str(case / "drafter"), torch_dtype=torch.float32
    ).train()
    if hasattr(model.drafter, "input_proj"):
        raise ValueError("the drafter has an input_proj, which Apple's trainer skips")
    for parameter in model.llm.parameters():
        parameter.requires_grad = False
    trained = list(model.drafter.parameters())
    rule = numbers["optimizer"]
    optimizer = torch.optim.AdamW(
        trained, lr=0.0, betas=(rule["beta1"], rule["beta2"]), weight_decay=rule["weight_decay"]
    )

    def take_step(number: int) -> tuple[float, float]:
        started = time.perf_counter()
        rounds = numbers["rounds"]
        logits = model(input_ids=tokens[number], attention_mask=attended, next_n=rounds)
        loss, _, _ = drafter_loss(logits, labels[number], rounds, numbers["accuracies"])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, rule["clip_norm"])
        for group in optimizer.param_groups:
            group["lr"] = numbers["learning_rates"][number]
        optimizer.step()
        optimizer.zero_grad()
        return loss.item(), time.perf_counter() - started

    return take_step


def main() -> int:
    """Load, announce the versions, serve."""
    answers = take_stdout()
    case, repository = Path(sys.argv[1]), Path(sys.argv[2]).resolve()
    try:
        take_step = load(case, repository)
    except Exception as error:
        say(answers, {"error": f"loading failed: {type(error).__name__}: {error}"})
        return 2
    import torch
    import transformers

    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    about = {"versions": versions, "loaded_bytes": peak_bytes()}
    return serve(about, take_step, sys.stdin, answers)


if __name__ == "__main__":
    sys.exit(main())
