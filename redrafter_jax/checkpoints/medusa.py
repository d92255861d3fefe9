"""The `config.json` of Medusa heads: as Medusa's authors publish them, and as they are saved here.

Both call the numbers of heads and of blocks the same (https://github.com/FasterDecoding/Medusa).
Published files state no model_type and no sizes, and some of them fewer heads than there are; the
weights beside them, in `medusa_lm_head.pt`, tell.
"""

from pathlib import Path
from typing import Any

from redrafter_jax.checkpoints.config_files import field, read_json
from redrafter_jax.checkpoints.weights import find_weights
from redrafter_jax.config import MedusaConfig
from redrafter_jax.config.limits import read_config
from redrafter_jax.errors import InputError

MEDUSA_MODEL_TYPE = "medusa"


def read_medusa_config(folder: Path) -> MedusaConfig:
    """The `MedusaConfig` that `config.json` states; of published heads, with the weights' sizes.

    Raises:
      InputError: a file is missing, or `config.json` lacks a field, or states one of another type
        or range or that the weights contradict.
    """
    path, weights = folder / "config.json", find_weights(folder)
    values = read_json(path)
    heads = field(values, "medusa_num_heads", path, int)
    layers = field(values, "medusa_num_layers", path, int)
    if not values.get("model_type"):
        last = f".{layers}.weight"
        projection = weights.get(f"0{last}")
        if projection is None or len(projection.shape) != 2:
            raise InputError(
                f"{folder} holds no matrix '0{last}', the vocabulary projection that its first "
                f"head has if medusa_num_layers={layers}; they do not belong together."
            )
        V, D = projection.shape
        values = {"vocab_size": V, "hidden_size": D}
        heads = max(heads, sum(name.removesuffix(last).isdecimal() for name in weights))
    if heads * max(layers, 1) > len(weights):  # before so many are made
        raise InputError(
            f"{path} states medusa_num_heads={heads} and medusa_num_layers={layers}, but the files "
            f"hold {len(weights)} weights; they do not belong together."
        )
    known = {"num_heads": heads, "num_draft_layers": layers}
    return read_config(MedusaConfig, values, path, foreign=True, **known)


def medusa_fields(config: MedusaConfig) -> dict[str, Any]:
    """What is stated in `config.json`; the last two only where the published layout lacks them."""
    fields: dict[str, Any] = {
        "architectures": ["Medusa"],
        "model_type": MEDUSA_MODEL_TYPE,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "medusa_num_heads": config.num_heads,
        "medusa_num_layers": config.num_draft_layers,
    }
    if config.draft_tokens is not None:
        fields["draft_tokens"] = config.draft_tokens
    if config.head != "own":
        fields["head"] = config.head
    return fields
