"""Make tiny checkpoints of every model family, with outputs of Hugging Face's models.

This needs PyTorch and transformers, which the project itself does not need; tests/goldens/README.md
names the versions. The commands, from the root of the repository:

    torchenv/bin/python tools/goldens/checkpoints.py families
    transformers4env/bin/python tools/goldens/checkpoints.py configs

`families` makes every family and variation. `configs` makes no model. It adds a second
configuration file to the folder of each family, written by the installed transformers and named
after its major version.
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
# Minimum number of distinct tokens in the text: a loop of three tokens would test little.
FEWEST_TOKENS = 9
# Minimum relative change of the largest logit if the variation of a checkpoint is left out.
SMALLEST_CHANGE = 0.05


class Family(NamedTuple):
    """A checkpoint to make; `families.json` holds all of them.

    Attributes:
      name: name of the checkpoint and of its folder.
      model_type: type of the model in transformers.
      changes: fields of the configuration that differ from `SHAPE`.
      without: fields that undo the variation under test; with them, the logits must change.
      dtype: dtype of the stored weights.
    """

    name: str
    model_type: str
    changes: dict[str, Any]
    without: dict[str, Any]
    dtype: str


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


def make_config(model_type: str, values: dict[str, Any]) -> Any:
    """Make a configuration from `SHAPE` and `values`, in a form for transformers 4 and 5."""
    return transformers.AutoConfig.for_model(
        model_type,
        **json.loads(json.dumps(SHAPE | values)),
        architectures=[MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]],
    )


def save_model(folder: str, config: Any, seed: int, dtype: str) -> None:
    """Save a model with random weights; they make peaked logits that depend on the position."""
    import torch

    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config)
    # transformers starts norms at ones and biases at zeros, which would hide a missing one.
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
        if name.endswith(".bias"):
            torch.nn.init.normal_(parameter, std=0.5)
    model.to(getattr(torch, dtype)).save_pretrained(folder)


def load_model(folder: str, config: Any = None) -> Any:
    """Load a stored model in float32."""
    import torch

    load = transformers.AutoModelForCausalLM.from_pretrained
    options = {"torch_dtype" if MAJOR == "4" else "dtype": torch.float32}
    return load(folder, config=config, **options).eval()


def greedy(model: Any, prompt: Any, count: int) -> tuple[Any, Any, float]:
    """Continue a prompt [1, P] by `count` greedy tokens.

    Returns:
      The text with its prompt [1, P + count], the logits at its tokens, and the smallest lead of a
      chosen token's logit over the next best.
    """
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
    """Replace the folder of a golden by `scratch`, without generation settings."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(scratch, folder, ignore=shutil.ignore_patterns("generation_config.json"))


def ids(tokens: Any) -> np.ndarray:
    """Return a tensor's token ids as int32."""
    return tokens.numpy().astype(np.int32)


def make_family(family: Family) -> None:
    """Make a folder with `answers.npz`, from the first seed with a clear and varied text."""
    import torch

    for seed in range(1000):
        # Each seed needs its own configuration, because a model changes the one it is made from.
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
    """Make all checkpoints, or all second configuration files, as the argument says."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    what = sys.argv[1]
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
