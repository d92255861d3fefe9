"""Make tiny checkpoints of every model family, and what Hugging Face says about them.

Needs PyTorch and transformers, which the project itself does not: tests/goldens/README.md names the
versions. The commands, from the root of the repository:

    torchenv/bin/python tools/goldens/checkpoints.py llama
    torchenv/bin/python tools/goldens/checkpoints.py families
    transformers4env/bin/python tools/goldens/checkpoints.py configs

`llama` are two layouts of Llama, with hidden states; `families` is every family and variation. With
`configs` no model is made: each family's folder gets the `config.json` of the installed
transformers beside its own, named after the major version.
"""

# pyright: reportMissingImports=false

import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

FOLDER = Path(__file__).resolve().parents[2] / "tests" / "goldens"
MAJOR = transformers.__version__.partition(".")[0]
# Every greedy choice leads its runner-up by this many logits, so that rounding cannot flip one.
SMALLEST_LEAD = 0.03
# The text has this many different tokens: a loop of three would say little.
FEWEST_TOKENS = 9
# Without the variation that a checkpoint is for, the largest logit changes by this share.
SMALLEST_CHANGE = 0.05


class Family(NamedTuple):
    """A checkpoint of a family: what differs from `SHAPE`, and what its variations replace.

    `families.json` holds them all.
    """

    name: str
    model_type: str
    changes: dict[str, Any]
    without: dict[str, Any]
    dtype: str


class Layout(NamedTuple):
    """A Llama: its shape, how it is stored, and how its `config.json` is spelt.

    The spelling is that of transformers `major`, whatever is installed. The two generations differ
    in where RoPE's base lives and in the name of the stored dtype.
    """

    name: str
    seed: int
    changes: dict[str, Any]
    dtype: str
    shard_size: str
    major: int


SHAPE = {
    "vocab_size": 24,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100.0,
    "tie_word_embeddings": False,
    "initializer_range": 0.25,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}

FAMILIES = [
    Family(**entry) for entry in json.loads(Path(__file__).with_name("families.json").read_text())
]
LAYOUTS = (
    Layout(
        "llama_gqa_untied",
        29,
        {
            "vocab_size": 97,
            "intermediate_size": 64,
            "num_key_value_heads": 2,
            "tie_word_embeddings": False,
            "rope_theta": 10000.0,
            "rms_norm_eps": 1e-6,
            "max_position_embeddings": 256,
        },
        "float32",
        "5GB",
        4,
    ),
    Layout(
        "llama_tied_sharded",
        22,
        {
            "vocab_size": 97,
            "intermediate_size": 48,
            "num_hidden_layers": 3,
            "num_key_value_heads": 4,
            "head_dim": 8,
            "tie_word_embeddings": True,
            "rope_theta": 500000.0,
            "max_position_embeddings": 256,
        },
        "bfloat16",
        "20KB",
        5,
    ),
)


def make_config(model_type: str, values: dict[str, Any]) -> Any:
    """The configuration, in the spelling that transformers 4 and 5 both take."""
    return transformers.AutoConfig.for_model(
        model_type,
        **json.loads(json.dumps(SHAPE | values)),
        architectures=[MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]],
    )


def save_model(folder: str, config: Any, seed: int, dtype: str, shard_size: str = "5GB") -> None:
    """A model of random weights, large enough for peaked logits that depend on the position."""
    import torch

    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config)
    # transformers starts norms at ones and biases at zeros, which hides one never applied.
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
        if name.endswith(".bias"):
            torch.nn.init.normal_(parameter, std=0.5)
    model.to(getattr(torch, dtype)).save_pretrained(folder, max_shard_size=shard_size)


def load_model(folder: str, config: Any = None) -> Any:
    """The stored weights, in float32."""
    import torch

    load = transformers.AutoModelForCausalLM.from_pretrained
    options = {"torch_dtype" if MAJOR == "4" else "dtype": torch.float32}
    return load(folder, config=config, **options).eval()


def greedy(model: Any, prompt: Any, count: int) -> tuple[Any, Any, float]:
    """Greedy `text` with the prompt [1, P + count], the logits after it, and the smallest lead."""
    import torch

    text = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=count
    )
    length = prompt.shape[1]
    assert text.shape[1] == length + count
    logits = model(text).logits[0]
    choices = logits[length - 1 : -1]
    best, second = choices.topk(2).values.unbind(-1)
    lead = (best - second).min().item()
    if lead >= SMALLEST_LEAD:
        assert torch.equal(choices.argmax(-1), text[0, length:]), "generate and one pass disagree"
    return text, logits, lead


def keep(scratch: str, folder: Path) -> None:
    """Replace a golden's folder; it has no generation settings of its own to carry."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(scratch, folder, ignore=shutil.ignore_patterns("generation_config.json"))


def ids(tokens: Any) -> np.ndarray:
    """A tensor's token ids as int32."""
    return tokens.numpy().astype(np.int32)


def make_layout(layout: Layout) -> None:
    """A folder, and beside it what an unpadded prompt of each length is answered."""
    import torch

    generator = torch.Generator().manual_seed(1000 + layout.seed)
    config = make_config("llama", layout.changes)
    arrays: dict[str, np.ndarray] = {}
    with tempfile.TemporaryDirectory() as scratch, torch.inference_mode():
        save_model(scratch, config, layout.seed, layout.dtype, layout.shard_size)
        model = load_model(scratch)
        lengths = (13, 7)
        prompts = [torch.randint(config.vocab_size, (1, n), generator=generator) for n in lengths]
        for i, prompt in enumerate(prompts):
            output = model(prompt, output_hidden_states=True)
            # transformers applies the final norm before it appends the last hidden state
            hidden = output.hidden_states[-1]
            assert torch.equal(model.lm_head(hidden), output.logits)
            text, _, lead = greedy(model, prompt, 24)
            assert lead > SMALLEST_LEAD, f"a greedy choice leads by {lead:.4f}: change the seed"
            arrays[f"prompt_{i}"] = ids(prompt[0])
            arrays[f"logits_{i}"] = output.logits[0].numpy()
            arrays[f"hidden_{i}"] = hidden[0].numpy()
            arrays[f"greedy_{i}"] = ids(text[0, prompt.shape[1] :])
        spell(Path(scratch, "config.json"), layout)
        keep(scratch, FOLDER / layout.name)
    np.savez_compressed(FOLDER / f"{layout.name}.npz", allow_pickle=False, **arrays)


def spell(path: Path, layout: Layout) -> None:
    """Rewrite a `config.json` in the layout's spelling."""
    config = json.loads(path.read_text())
    for field in ("rope_theta", "rope_scaling", "rope_parameters", "torch_dtype", "dtype"):
        config.pop(field, None)
    config.pop("_name_or_path", None)
    theta = layout.changes["rope_theta"]
    if layout.major == 4:
        config.pop("head_dim", None)  # folders of that age leave it to hidden_size / heads
        config |= {"rope_theta": theta, "rope_scaling": None}
        config |= {"torch_dtype": layout.dtype, "transformers_version": "4.47.1"}
    else:
        rope = {"rope_theta": theta, "rope_type": "default"}
        config |= {"rope_parameters": rope, "dtype": layout.dtype, "transformers_version": "5.0.0"}
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def make_family(family: Family) -> None:
    """A folder with its answers in `answers.npz`, of the first seed with a clear, varied text."""
    import torch

    for seed in range(1000):
        # One of its own for each seed: a model changes the configuration that it is made of.
        config = make_config(family.model_type, family.changes)
        plain = make_config(family.model_type, family.changes | family.without)
        generator = torch.Generator().manual_seed(1000 + seed)
        prompt = torch.randint(SHAPE["vocab_size"], (1, 20), generator=generator)
        with tempfile.TemporaryDirectory() as scratch, torch.inference_mode():
            save_model(scratch, config, seed, family.dtype)
            text, logits, lead = greedy(load_model(scratch), prompt, 44)
            new_tokens = ids(text[0, 20:])
            if lead < SMALLEST_LEAD or len(set(new_tokens.tolist())) < FEWEST_TOKENS:
                continue
            difference = (load_model(scratch, plain)(text).logits[0] - logits).abs().max()
            change = (difference / logits.abs().max()).item()
            assert not family.without or change > SMALLEST_CHANGE, f"a change of {change}"
            print(f"{family.name}: seed {seed}, lead {lead:.3f}, change {change:.2f}")
            folder = FOLDER / "families" / family.name
            keep(scratch, folder)
            arrays = {"prompt": ids(prompt[0]), "greedy": new_tokens, "logits": logits.numpy()}
            np.savez_compressed(folder / "answers.npz", allow_pickle=False, **arrays)
            return
    raise SystemExit(f"{family.name}: no seed gives a text that rounding cannot change")


def main() -> None:
    """Make what the one argument names."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    what = sys.argv[1]
    if what == "llama":
        for layout in LAYOUTS:
            make_layout(layout)
    for family in FAMILIES:
        if what == "families":
            make_family(family)
        elif what == "configs":
            with tempfile.TemporaryDirectory() as scratch:
                make_config(family.model_type, family.changes).save_pretrained(scratch)
                name = f"config.transformers{MAJOR}.json"
                shutil.copyfile(
                    Path(scratch, "config.json"), FOLDER / "families" / family.name / name
                )
    print(f"transformers {transformers.__version__}")


if __name__ == "__main__":
    main()
