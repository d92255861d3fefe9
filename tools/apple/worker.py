"""Apple's PyTorch ReDrafter, a line of JSON for a line of JSON: `decode` prompts or `train` a case.

`python -m tools.apple` starts this script under *another* Python, one that has PyTorch, a
transformers that Apple's code can use (4.47.1 can, 5 cannot) and the packages its code imports
(jsonlines, tabulate). It therefore imports nothing of this project. Apple's code itself comes,
unmodified, from a clone of https://github.com/apple/ml-recurrent-drafter.

    python worker.py REPOSITORY decode TARGET DRAFTER
    python worker.py REPOSITORY train CASE

After loading it writes one line about itself: versions and memory. Then every line on stdin is a
request and every line on stdout its answer. Of `decode`, each on one line:

    {"prompt": [1, 2], "max_new_tokens": 64, "beam_width": 4, "draft_rounds": 4, "trace": false}
    {"tokens": [...], "target_calls": 17, "seconds": 0.52, "steps": []}

Batch 1, greedy, float32, no token stops the text; `beam_width` 0 is autoregressive decoding.
`tokens` are the new ones alone, `target_calls` those after prefill, `seconds` the wall time with
prefill. A trace has a step for each target call: `length` of the text before it, root included,
and what `recorded` describes. Of `train`, with the processor seconds of all cores:

    {"first": 0, "steps": 2}
    {"losses": [39.1, 38.7], "seconds": [0.9, 0.8], "processor_seconds": 3.1, "peak_bytes": 10000}
"""

# pyright: reportMissingImports=false

import contextlib
import json
import os
import platform
import sys
import time
import types
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any
from unittest import mock

# Apple's code compares the prompt with the padding id to find left padding, and never embeds that
# id while the batch has one row. No token is negative, so with -1 every prompt token counts,
# whatever the checkpoint calls its padding.
NO_PAD = -1
# Apple's autoregressive decoder compares with the stop id unconditionally, so it must be a number.
NO_STOP = -1


def serve(load: Callable[[], tuple[dict[str, str], Callable[[Any], dict[str, Any]]]]) -> None:
    """Load versions and the function that answers; answer requests until stdin closes."""
    # Whatever else is printed goes to stderr.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    versions, answer = load()
    about = {"versions": versions, "loaded_bytes": peak_bytes()}
    print(json.dumps(about), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), file=answers, flush=True)


def take_steps(
    take_step: Callable[[int], tuple[float, float]], request: dict[str, int]
) -> dict[str, Any]:
    """The answer to a request for training steps; `take_step` returns a step's loss and seconds."""
    started = time.process_time()
    taken = [take_step(request["first"] + step) for step in range(request["steps"])]
    losses, seconds = zip(*taken, strict=True)
    return {
        "losses": losses,
        "seconds": seconds,
        "processor_seconds": time.process_time() - started,
        "peak_bytes": peak_bytes(),
    }


def peak_bytes() -> int:
    """The most memory that was resident at once, libraries and weights included.

    Not `getrusage`: on Linux its figure starts from what the parent process had.
    """
    status = Path("/proc/self/status").read_text()
    (line,) = (line for line in status.splitlines() if line.startswith("VmHWM:"))
    return 1024 * int(line.split()[1])


def load_pair(target: Path, drafter: Path) -> Any:
    """Apple's decoder for two folders, refused where it would compute something else."""
    import torch
    import transformers
    from recurrent_drafting import modeling_drafter, modeling_llama, recurrent_drafting

    raw = json.loads((target / "config.json").read_text())
    width = raw["hidden_size"] // raw["num_attention_heads"]
    if raw["model_type"] != "llama" or (raw.get("head_dim") or width) != width:
        sys.exit("Apple's code knows only Llamas whose head_dim is hidden_size over the heads.")
    # transformers 4 does not know `rope_parameters` and would quietly fall back to 10000.
    rotary_settings = raw.get("rope_parameters")
    scaling = rotary_settings or raw.get("rope_scaling") or {}
    if scaling.get("rope_type", scaling.get("type", "default")) != "default":
        sys.exit("The target scales RoPE, which Apple's Llama does not do.")
    config = transformers.LlamaConfig.from_pretrained(target)
    config.rope_theta = float((rotary_settings or raw)["rope_theta"])
    options: dict[str, Any] = {"torch_dtype": torch.float32, "output_loading_info": True}
    llm, of_target = modeling_llama.LlamaForCausalLM.from_pretrained(
        target, config=config, **options
    )
    head, of_drafter = modeling_drafter.Drafter.from_pretrained(drafter, **options)
    # The rotary tables are computed rather than stored; a tied head is the embedding.
    computed = {name for name, _ in llm.named_buffers()}
    computed |= {"lm_head.weight"} if config.tie_word_embeddings else set()
    for info in (of_target, of_drafter):
        # transformers only warns when names do not match.
        if wrong := {*info["missing_keys"], *info["unexpected_keys"]} - computed:
            sys.exit(f"The weights do not fit Apple's model: {', '.join(sorted(wrong))}.")
    # A release that builds models on the meta device throws away the rotary tables, which Apple's
    # module fills in its constructor.
    rotary = llm.model.layers[0].self_attn.rotary_emb
    exponents = torch.arange(0, rotary.dim, 2).float() / rotary.dim
    if not torch.allclose(rotary.inv_freq, 1.0 / config.rope_theta**exponents):
        sys.exit("This transformers release spoils the rotary tables; install 4.47.1.")
    return recurrent_drafting.RecurrentDrafting(llm=llm.eval(), drafter=head.eval())


def decode(model: Any, request: dict[str, Any]) -> dict[str, Any]:
    """Apple's greedy decoding of one prompt."""
    import torch
    from recurrent_drafting import autoregressive
    from recurrent_drafting.modeling_drafter import BeamShape
    from recurrent_drafting.recurrent_drafting import SamplingArgs, SpecialTokens

    started = time.perf_counter()
    prompt = torch.tensor([request["prompt"]], dtype=torch.long)
    length = prompt.shape[1]
    max_length = length + request["max_new_tokens"]
    ledger = types.SimpleNamespace(post=lambda record: None)  # Apple's writes times to a file
    tracing = recorded(model.drafter) if request["trace"] else contextlib.nullcontext([])
    with tracing as steps:
        # Each item is the text after one more target call; the last is already cut to the limit.
        if request["beam_width"]:
            items = model.generate(
                ledger,
                prompt,
                max_length=max_length,
                beam_shape=BeamShape(request["beam_width"], request["draft_rounds"] + 1),
                sampling_args=SamplingArgs(temperature=1.0, greedy=True),
                special_tokens=SpecialTokens(pad=NO_PAD, eos=None),
            )
            texts = [prompt, *items]
        else:  # the first item is the prefill's
            tokens = SpecialTokens(pad=NO_PAD, eos=NO_STOP)
            texts = list(autoregressive.generate(model, prompt, max_length, special_tokens=tokens))
    seconds = time.perf_counter() - started
    lengths = [length + 1, *(text.shape[1] for text in texts[1:-1])]
    return {
        "tokens": texts[-1][0, length:max_length].tolist(),
        "target_calls": len(texts) - 1,
        "seconds": seconds,
        "steps": [step | {"length": before} for step, before in zip(steps, lengths, strict=False)],
    }


@contextlib.contextmanager
def recorded(drafter: Any) -> Generator[list[dict[str, Any]]]:
    """A list that gets an entry for every step decoded within the block.

    `rounds`: the beams after each round, best first: `sequences` of the tokens after the root, and
    their `log_probs`. Apple's search returns the last round's alone; those of the others are what
    it gathers from in the round that follows.
    `tree`: `tokens` of the packed nodes, the root first, and `parents`, their indices.
    """
    from recurrent_drafting import modeling_drafter, tree_attention

    steps: list[dict[str, Any]] = []
    search, pack = drafter.beam_search_candidates, tree_attention.pack
    gather = modeling_drafter._gather_beams
    gathered: list[Any] = []

    def traced_gather(values: Any, beams: Any) -> Any:
        gathered.append(values)
        return gather(values, beams)

    def traced_search(*arguments: Any) -> Any:
        gathered.clear()
        found = search(*arguments)
        # Of each round: the beams before it, their states, log-probabilities of their tokens, and
        # those of the tokens to come. Before the first round there is the root alone.
        before = zip(gathered[4::4], gathered[6::4], strict=True)
        steps.append({"rounds": [describe_beams(*beams) for beams in (*before, found)]})
        return found

    def traced_pack(beams: Any, padding_mask: Any) -> Any:
        packed = pack(beams, padding_mask)
        tokens, _, mask, depths = packed
        steps[-1]["tree"] = describe_tree(tokens, mask, depths)
        return packed

    with (
        mock.patch.object(drafter, "beam_search_candidates", traced_search),
        mock.patch.object(tree_attention, "pack", traced_pack),
        mock.patch.object(modeling_drafter, "_gather_beams", traced_gather),
    ):
        yield steps


def describe_beams(beams: Any, log_probs: Any) -> dict[str, Any]:
    """The beams of row 0; scores are summed from the root on in float32, as in the search."""
    drafted = beams[0, :, 1:]
    scores = log_probs[0].gather(-1, drafted[..., None])[..., 0]
    total = scores[:, 0]
    for score in scores.T[1:]:
        total = score + total
    return {"sequences": drafted.tolist(), "log_probs": total.tolist()}


def describe_tree(packed: Any, mask: Any, depths: Any) -> dict[str, list[int]]:
    """The tree of row 0; a node's parent is what it sees one step higher, the root's the root."""
    count = packed.shape[1]
    depth = depths[0]
    above = mask[0, :, -count:].bool() & (depth[None, :] == depth[:, None] - 1)
    parents = above.int().argmax(dim=1)
    return {"tokens": packed[0].tolist(), "parents": parents.tolist()}


def load_case(case: Path) -> Callable[[int], tuple[float, float]]:
    """The function that takes one step of the case: its number to loss and seconds.

    `train.model.ReDrafter` and `train.loss.drafter_loss` are called as Apple's `cmd/train.py` calls
    them. Backward pass, clipping and AdamW are what the Trainer of transformers does with their
    loss; its own overhead is left out.
    """
    # Their loss imports one constant from their data.py, which imports fastchat.
    for name in ("fastchat", "fastchat.conversation", "fastchat.model"):
        sys.modules.setdefault(name, mock.MagicMock())
    import numpy as np
    import torch
    from recurrent_drafting.train.data import IGNORE_TOKEN_ID
    from recurrent_drafting.train.loss import drafter_loss
    from recurrent_drafting.train.model import ReDrafter

    numbers = json.loads((case / "case.json").read_text())
    arrays = np.load(case / "batches.npz")
    tokens = torch.tensor(arrays["tokens"], dtype=torch.long)
    labels = tokens.masked_fill(~torch.tensor(arrays["loss_mask"]), IGNORE_TOKEN_ID)
    # Padding stands behind the text, so nothing that carries loss sees it.
    attended = torch.ones_like(tokens[0])
    model = ReDrafter.from_pretrained(
        str(case / "target"), str(case / "drafter"), torch_dtype=torch.float32
    ).train()
    model.llm.requires_grad_(False)
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


def main() -> None:
    """Serve Apple's side."""
    repository, task, *folders = sys.argv[1:]
    # Names of this folder's modules must not shadow what Apple's code imports.
    sys.path[0] = str(Path(repository).resolve())

    def load() -> tuple[dict[str, str], Callable[[Any], dict[str, Any]]]:
        import torch
        import transformers

        torch.set_num_threads(len(os.sched_getaffinity(0)))
        versions = {"torch": torch.__version__, "transformers": transformers.__version__}
        versions["python"] = platform.python_version()
        if task == "train":
            take_step = load_case(Path(*folders))
            return versions, lambda request: take_steps(take_step, request)
        model = load_pair(*map(Path, folders))
        return versions, lambda request: decode(model, request)

    serve(load)


if __name__ == "__main__":
    main()
