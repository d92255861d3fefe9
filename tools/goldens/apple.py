"""Make apple.json: the beams, trees and texts of Apple's own code for a tiny target and drafter.

    TORCHENV/bin/python tools/goldens/apple.py ml-recurrent-drafter

The argument is a clone of https://github.com/apple/ml-recurrent-drafter; the versions are in
tests/goldens/README.md. Apple's classes save both models with `torch.save`. The golden holds these
files in base64, so it also tests reading PyTorch's format.
"""

import base64
import contextlib
import itertools
import json
import platform
import subprocess
import sys
import tempfile
import types
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, sys.argv[1])

import torch  # noqa: E402
import transformers  # noqa: E402
from recurrent_drafting import (  # noqa: E402
    attention,
    kv_cache,
    modeling_drafter,
    modeling_llama,
    recurrent_drafting,
    tree_attention,
)
from recurrent_drafting.configuration_drafter import DrafterConfig  # noqa: E402

VOCABULARY, WIDTH = 48, 8
# Beam width, draft rounds, new tokens.
CASES = [(1, 3, 12), (16, 4, 8), (45, 7, 6)]
PROMPTS = [[3, 17, 42, 5, 30], [11, 0, 47]]
# Smallest gaps between two beams of a round, and between the target's two best tokens.
BEAM_GAP, CHOICE_GAP = 3e-4, 2e-2
# Minimum tokens per call, since a golden without accepted tokens would test little.
GAINED = 1.1


def randomize(model, scale, seed):
    """Draw random weights with a scale that avoids ties of scores; norms are around one."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        width = parameter.shape[-1] ** 0.5
        # A recurrence with larger weights is chaotic: it amplifies rounding round by round.
        by = 1.0 if name.startswith("rnn") else scale
        parameter.data = 1 + 0.2 * noise if "norm" in name else by * noise / width
    return model.eval()


def make_pair(seed):
    """Make a target with one layer and a head that is not tied, and a drafter with two blocks."""
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


@contextlib.contextmanager
def recorded(drafter):
    """Yield a list to which every step that is decoded within the block adds an entry.

    In an entry, `rounds` holds the beams after each round, best first: `sequences` of the tokens
    after the root, and their `log_probs`. Apple's search returns only the beams of the last round;
    the beams of other rounds are taken from the gather at the start of the next round.

    `tree` holds the `tokens` of the packed nodes, the root first, and the indices of the nodes'
    `parents`.
    """
    steps, gathered = [], []
    search, pack = drafter.beam_search_candidates, tree_attention.pack
    gather = modeling_drafter._gather_beams

    def traced_gather(values, beams):
        gathered.append(values)
        return gather(values, beams)

    def traced_search(*arguments):
        gathered.clear()
        found = search(*arguments)
        # For each round: the beams before it, their states, and the log-probabilities of their
        # tokens and of the next tokens. Before the first round, the root is the only beam.
        before = zip(gathered[4::4], gathered[6::4], strict=True)
        steps.append({"rounds": [describe_beams(*beams) for beams in (*before, found)]})
        return found

    def traced_pack(beams, padding_mask):
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


def describe_beams(beams, log_probs):
    """The beams of row 0; scores are summed from the root on in float32, as in the search."""
    drafted = beams[0, :, 1:]
    scores = log_probs[0].gather(-1, drafted[..., None])[..., 0]
    total = scores[:, 0]
    for score in scores.T[1:]:
        total = score + total
    return {"sequences": drafted.tolist(), "log_probs": total.tolist()}


def describe_tree(packed, mask, depths):
    """The tree of row 0.

    The parent of a node is its ancestor one level above; the parent of the root is the root.
    """
    count = packed.shape[1]
    depth = depths[0]
    above = mask[0, :, -count:].bool() & (depth[None, :] == depth[:, None] - 1)
    parents = above.int().argmax(dim=1)
    return {"tokens": packed[0].tolist(), "parents": parents.tolist()}


def decode(model, prompt, beam_width, draft_rounds, max_new_tokens):
    """Decode one case.

    Returns:
      The case with its text, and with the last beams and the tree of every step; and the smallest
      gap between the log-probabilities of two beams.
    """
    ids = torch.tensor([prompt])
    with recorded(model.drafter) as recorded_steps:
        # Each item is the text after one more target call; the last is cut to the limit.
        texts = list(
            model.generate(
                types.SimpleNamespace(post=lambda record: None),
                ids,
                max_length=len(prompt) + max_new_tokens,
                beam_shape=modeling_drafter.BeamShape(beam_width, draft_rounds + 1),
                sampling_args=recurrent_drafting.SamplingArgs(temperature=1.0, greedy=True),
                # No token is -1, so every token of the prompt counts.
                special_tokens=recurrent_drafting.SpecialTokens(pad=-1, eos=None),
            )
        )
    gaps = [
        first - second
        for step in recorded_steps
        for beams in step["rounds"]
        for first, second in itertools.pairwise(beams["log_probs"])
    ]
    lengths = [len(prompt) + 1, *(text.shape[1] for text in texts[:-1])]
    steps = [
        {
            "length": length,
            "sequences": step["rounds"][-1]["sequences"],
            "log_probs": [round(value, 6) for value in step["rounds"][-1]["log_probs"]],
            "tree": step["tree"],
        }
        for step, length in zip(recorded_steps, lengths, strict=True)
    ]
    case = {
        "prompt": prompt,
        "beam_width": beam_width,
        "draft_rounds": draft_rounds,
        "max_new_tokens": max_new_tokens,
        "tokens": texts[-1][0, len(prompt) :].tolist(),
        "target_calls": len(texts),
        "steps": steps,
    }
    return case, min(gaps, default=1.0)


def choice_gap(model, text):
    """The smallest lead of the target's best token over the second best, over all prefixes."""
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
    """Draw pairs until no choice depends on rounding, and write the golden."""
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
