"""The files of recurrent heads: Apple's layout, and the fields that it does not know."""

from collections.abc import Mapping
from typing import Any

from redrafter_jax.config.limits import FieldError
from redrafter_jax.drafters.recurrent_head import RecurrentConfig

MODEL_TYPE = "recurrent_drafting_drafter"


def to_files(config: RecurrentConfig) -> dict[str, Any]:
    """What Apple's code states of a drafter in `config.json` (`configuration_drafter.py`).

    And what it does not know, where the drafter has it: `RecurrentConfig.beyond_apple`.
    """
    return {
        "architectures": ["Drafter"],
        "model_type": MODEL_TYPE,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "exit_dim": config.exit_dim,
        "num_draft_layers": config.num_draft_layers,
        "num_lookback_tokens": -1,
        "rnn": config.cell != "sum",
        **config.beyond_apple,
    }


def from_files(stated: Mapping[str, Any], shapes: Mapping[str, Any]) -> dict[str, Any]:
    """The field `cell` as `config.json` means it; nothing where it states the cell by name.

    Apple's layout has `rnn` alone: true is the cell "simple", false is "sum". Ours adds `cell`.

    Raises:
      FieldError: `rnn` and `cell` contradict each other.
    """
    del shapes
    has_cell, cell = stated["rnn"], stated.get("cell")
    if cell is None:
        return {"cell": "simple" if has_cell else "sum"}
    if has_cell == (cell == "sum"):
        problem = f"is {cell!r} and rnn is {has_cell}, which contradict each other."
        raise FieldError(RecurrentConfig, "cell", problem)
    return {}


def stored_name(config: RecurrentConfig, name: str) -> str:
    """Ours: blocks.0.kernel, lm_head.kernel ... Apple's: one `lm_head` list holds them all."""
    name = name.replace("kernel", "weight")
    if name == "lm_head.weight":
        return f"lm_head.{config.num_draft_layers}.weight"
    first, *rest = name.split(".")
    if first == "attention":
        return f"{name}.weight"
    return f"lm_head.{rest[0]}.linear.{rest[1]}" if first == "blocks" else name
