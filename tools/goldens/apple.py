"""Make apple.json: what Apple's own code drafts, packs and decodes with a tiny pair.

    TORCHENV/bin/python tools/goldens/apple.py ml-recurrent-drafter

The argument is a clone of https://github.com/apple/ml-recurrent-drafter; the versions are in
tests/goldens/README.md.
Both models are saved by Apple's classes with `torch.save`, and their files stand in the golden as
base64: so it also holds what PyTorch writes.
"""

import base64
import itertools
import json
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools" / "apple"))
sys.path.insert(1, sys.argv[1])

import torch  # noqa: E402
import transformers  # noqa: E402
import worker  # noqa: E402
from recurrent_drafting import (  # noqa: E402
    attention,
    kv_cache,
    modeling_drafter,
    modeling_llama,
    recurrent_drafting,
)
from recurrent_drafting.configuration_drafter import DrafterConfig  # noqa: E402

VOCABULARY, WIDTH = 48, 8
# Beam width, draft rounds, new tokens.
CASES = [(1, 3, 12), (16, 4, 8), (45, 7, 6)]
PROMPTS = [[3, 17, 42, 5, 30], [11, 0, 47]]
# Between two beams of a round, and between the target's two best tokens.
BEAM_GAP, CHOICE_GAP = 3e-4, 2e-2
# Tokens per call: a golden in which nothing is ever accepted would say little.
GAINED = 1.1


def randomize(model, scale, seed):
    """Random weights, wide enough apart that scores are no ties; norms around one."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        width = parameter.shape[-1] ** 0.5
        # A recurrence with larger weights is chaotic: it amplifies rounding round by round.
        by = 1.0 if name.startswith("rnn") else scale
        parameter.data = 1 + 0.2 * noise if "norm" in name else by * noise / width
    return model.eval()


def make_pair(seed):
    """A target of one layer with a head of its own, and a drafter of two blocks."""
    target = modeling_llama.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=WIDTH,
            intermediate_size=12,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=64,
            rope_theta=10000.0,
            rms_norm_eps=1e-5,
            tie_word_embeddings=False,
            attention_bias=False,
            mlp_bias=False,
        )
    )
    drafter = modeling_drafter.Drafter(
        DrafterConfig(
            vocab_size=VOCABULARY, hidden_size=WIDTH, exit_dim=12, num_draft_layers=2, rnn=True
        )
    )
    return randomize(target, 3.0, seed), randomize(drafter, 3.0, seed + 1)


def files_of(model):
    """`config.json` and `pytorch_model.bin` in base64, as Apple's classes save them."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder, safe_serialization=False)
        weights = (Path(folder) / "pytorch_model.bin").read_bytes()
        config = json.loads((Path(folder) / "config.json").read_text())
    return {"config": config, "pytorch_model.bin": base64.b64encode(weights).decode()}


def decode(model, prompt, beam_width, draft_rounds, max_new_tokens):
    """One case, the last round's beams of every step alone; and its smallest gap."""
    request = {
        "prompt": prompt,
        "max_new_tokens": max_new_tokens,
        "beam_width": beam_width,
        "draft_rounds": draft_rounds,
        "trace": True,
    }
    reply = worker.decode(model, request)
    gaps = [
        first - second
        for step in reply["steps"]
        for beams in step["rounds"]
        for first, second in itertools.pairwise(beams["log_probs"])
    ]
    steps = [
        {
            "length": step["length"],
            "sequences": step["rounds"][-1]["sequences"],
            "log_probs": [round(value, 6) for value in step["rounds"][-1]["log_probs"]],
            "tree": step["tree"],
        }
        for step in reply["steps"]
    ]
    case = {
        "prompt": prompt,
        "beam_width": beam_width,
        "draft_rounds": draft_rounds,
        "max_new_tokens": max_new_tokens,
        "tokens": reply["tokens"],
        "target_calls": reply["target_calls"],
        "steps": steps,
    }
    return case, min(gaps, default=1.0)


def choice_gap(model, text):
    """By how much, at least, the target's best token leads the second after every prefix."""
    cache = kv_cache.Cache(
        batch_size=1,
        max_length=len(text),
        n_layers=1,
        n_heads=1,
        head_dim=WIDTH // 2,
        dtype=torch.float32,
        device="cpu",
    )
    tokens = torch.tensor([text])
    output = model.llm(
        tokens,
        past_key_values=cache.sliced,
        attention_mask=attention.causal_mask(tokens >= 0, len(text), tokens.device),
        position_ids=torch.arange(len(text))[None],
    )
    best = output.logits[0].topk(2, dim=-1).values
    return (best[:, 0] - best[:, 1]).min().item()


def main():
    """Draw pairs until none of its choices hangs on rounding; write the golden."""
    with torch.no_grad():
        for seed in range(0, 1000, 2):
            target, drafter = make_pair(seed)
            model = recurrent_drafting.RecurrentDrafting(llm=target, drafter=drafter)
            cases = [decode(model, prompt, *case) for case in CASES for prompt in PROMPTS]
            beam_gap = min(gap for _, gap in cases)
            lead = min(choice_gap(model, case["prompt"] + case["tokens"]) for case, _ in cases)
            calls = sum(case["target_calls"] for case, _ in cases)
            gained = sum(len(case["tokens"]) - 1 for case, _ in cases) / calls
            print(f"seed {seed}: beams {beam_gap:.1e}, choices {lead:.1e}, {gained:.2f} a call")
            if beam_gap >= BEAM_GAP and lead >= CHOICE_GAP and gained >= GAINED:
                break
        else:
            sys.exit("no seed is good enough")
    commit = subprocess.run(
        ["git", "-C", sys.argv[1], "rev-parse", "HEAD"], capture_output=True, text=True, check=True
    ).stdout.strip()
    golden = {
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "ml-recurrent-drafter": commit,
        },
        "target": files_of(target),
        "drafter": files_of(drafter),
        "cases": [case for case, _ in cases],
    }
    (ROOT / "tests" / "goldens" / "apple.json").write_text(
        json.dumps(golden, separators=(",", ":")) + "\n"
    )


main()
