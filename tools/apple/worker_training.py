"""Apple's training steps on a case.

Part of worker.py, under a Python that has PyTorch: nothing of this project is imported.
`train.model.ReDrafter` and `train.loss.drafter_loss` are called as Apple's `cmd/train.py` calls
them. Backward pass, clipping and AdamW are what the Trainer of transformers does with their loss;
its own overhead is left out.
"""

# pyright: reportMissingImports=false

import json
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path


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


def load_case(case: Path) -> Callable[[int], tuple[float, float]]:
    """The function that takes one step of the case: its number to loss and seconds."""
    stand_in_for_fastchat()
    import numpy as np
    import torch
    from recurrent_drafting.train.data import IGNORE_TOKEN_ID
    from recurrent_drafting.train.loss import drafter_loss
    from recurrent_drafting.train.model import ReDrafter

    numbers = json.loads((case / "case.json").read_text())
    arrays = np.load(case / "batches.npz")
    tokens = torch.tensor(arrays["tokens"], dtype=torch.long)
    labels = tokens.masked_fill(~torch.tensor(arrays["loss_mask"]), IGNORE_TOKEN_ID)
    # padding stands behind the text and is seen by nothing that is learnt
    attended = torch.ones_like(tokens[0])
    model = ReDrafter.from_pretrained(
        str(case / "target"), str(case / "drafter"), torch_dtype=torch.float32
    ).train()
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
