"""The files of recurrent heads: Apple's layout, and fields that extend it."""

from collections.abc import Mapping
from typing import Any

from redrafter_jax.config.limits import FieldError
from redrafter_jax.drafters.recurrent_head import RecurrentConfig

MODEL_TYPE = "recurrent_drafting_drafter"


def to_files(config: RecurrentConfig) -> dict[str, Any]:
    """Return the fields of `config.json` as in Apple's code (`configuration_drafter.py`).

    The fields of `RecurrentConfig.beyond_apple`, which Apple's layout lacks, come last.
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
    """Return the configuration field `cell`, derived from the field `rnn` of Apple's layout.

    In this layout, true stands for the cell "simple", and false for "sum". If `config.json` also
    states `cell`, which this library adds to the layout, the result is empty.

    Raises:
      FieldError: `rnn` and `cell` contradict each other.
    """
    del shapes
    has_cell, cell = stated["rnn"], stated.get("cell")
    if cell is None:
        return {"cell": "simple" if has_cell else "sum"}
    if has_cell == (cell == "sum"):
        problem = f"is {cell!r}, but rnn is {has_cell}; for this cell, rnn must be {not has_cell}."
        raise FieldError(RecurrentConfig, "cell", problem)
    return {}


def stored_name(config: RecurrentConfig, name: str) -> str:
    """Map a parameter's name to Apple's name in the files.

    For example, blocks.0.kernel becomes lm_head.0.linear.weight.
    """
    name = name.replace("kernel", "weight")
    if name == "lm_head.weight":
        return f"lm_head.{config.num_draft_layers}.weight"
    first, *rest = name.split(".")
    if first == "attention":
        return f"{name}.weight"
    return f"lm_head.{rest[0]}.linear.{rest[1]}" if first == "blocks" else name
