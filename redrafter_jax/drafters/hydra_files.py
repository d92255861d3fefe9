"""The files of Hydra heads: the layout of the authors, and the layout written by this library.

The authors' layout is taken from their code (zankner/Hydra, `hydra/model`): `config.json` states
the architecture but no sizes, and `hydra_lm_head.pt` holds the weights. Every block of a head but
the first is the same module, which is stored several times under different names. The authors' code
uses the last of these copies. Heads of the architectures "cross-attn" and "eagle-attn" are not
supported.
"""

import re
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from redrafter_jax.drafters.hydra_head import HydraConfig, PrefixLayer
from redrafter_jax.drafters.published import DESCRIBING, Reader, Shapes, first_stated

MODEL_TYPE = "hydra"
READER = Reader(HydraConfig, "Hydra heads")
STATED = {"hydra_num_heads": int, "hydra_num_layers": int, "hydra_head_arch": str}
_ARCHITECTURES = {"mlp": False, "prefix-mlp": True}
_KNOWN = {
    *DESCRIBING,
    *STATED,
    *("base_model_name_or_path", "grounded_heads", "hidden_state_offset", "dropout_rate"),
    *("vocab_size", "hidden_size", "draft_tokens", "head", "prefix"),
    *("num_attention_heads", "head_dim", "rms_norm_eps", "rope_scaling"),
}
# The authors' spelling.
_PREFIX = "prefix_embeding_layer."
_ROTARY = f"{_PREFIX}layers.0.self_attn.rotary_emb.inv_freq"
# Copies of the target's embedding, and of the last block of each head.
IGNORED = (
    r"input_embed_fn\.weight",
    rf"{re.escape(_PREFIX)}embed_tokens\.weight",
    re.escape(_ROTARY),
    r"copies\..*",
)
_BLOCK = re.compile(r"hydra_mlp\.(\d+)\.(\d+)\.(linear|res_connection)\.(?:weight|bias)")
# The head width of all Vicunas; a target with another width is refused before decoding.
_PUBLISHED_HEAD_DIM = 128
_NORMS = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}


def is_published(stated: Mapping[str, Any]) -> bool:
    """Whether `config.json` comes from Hydra's authors, whose files state no `model_type`."""
    return not stated.get("model_type") and "hydra_num_heads" in stated


def rename[T](stored: Mapping[str, T]) -> dict[str, T]:
    """Rename all but the last copy of each repeated weight to a name that starts with "copies."."""
    places = {name: found.groups() for name in stored if (found := _BLOCK.fullmatch(name))}
    last: dict[str, int] = {}
    for head, block, _ in places.values():
        last[head] = max(last.get(head, 0), int(block))
    # The block that reads embeddings is not a copy.
    kept = {(head, str(block)) for head, block in last.items()}
    kept |= {(head, block) for head, block, part in places.values() if part == "res_connection"}

    def called(name: str) -> str:
        return f"copies.{name}" if name in places and places[name][:2] not in kept else name

    return {called(name): weight for name, weight in stored.items()}


def from_files(stated: Mapping[str, Any], shapes: Shapes) -> dict[str, Any]:
    """Return the configuration fields; for published heads the sizes come from the weights.

    Args:
      stated: fields of `config.json`.
      shapes: shapes of the weights, by the names of `rename`.

    Raises:
      FieldError: the architecture is not supported, a field is unknown, or the weights have another
        number of blocks.
    """
    READER.refuse_unknown(stated, _KNOWN)
    kind, layers = stated["hydra_head_arch"], stated["hydra_num_layers"]
    if kind not in _ARCHITECTURES:
        known = " and ".join(map(repr, _ARCHITECTURES))
        READER.refuse("hydra_head_arch", f"is {kind!r:.80}; {known} are supported.")
    prefix = _ARCHITECTURES[kind]
    blocks = [int(found[2]) for name in shapes if (found := _BLOCK.fullmatch(name))]
    held = _count(max(blocks, default=-1), prefix)
    if held != layers:
        READER.refuse(
            "hydra_num_layers",
            f"is {layers}, but the files hold {held} blocks per head; use matching files.",
        )
    values: dict[str, Any] = {
        "num_heads": stated["hydra_num_heads"],
        "num_draft_layers": layers,
        "grounded": stated.get("grounded_heads") or False,
        "hidden_state_offset": stated.get("hidden_state_offset") or 0,
    }
    if stated.get("model_type"):  # written here
        if prefix != (stated.get("prefix") is not None):
            READER.refuse(
                "prefix",
                "is required for hydra_head_arch='prefix-mlp' and must be left out for 'mlp', but "
                f"hydra_head_arch is {kind!r}.",
            )
        return values
    V, D = shapes.get(f"hydra_lm_head.0{'.1' if prefix else ''}.weight", (0, 0))
    values |= {"vocab_size": V, "hidden_size": D}
    return values | {"prefix": _read_prefix(stated, shapes) if prefix else None}


def to_files(config: HydraConfig) -> dict[str, Any]:
    """Return the fields of `config.json`: the authors' fields, and the sizes that they omit."""
    fields: dict[str, Any] = {
        "architectures": ["Hydra"],
        "model_type": MODEL_TYPE,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "hydra_num_heads": config.num_heads,
        "hydra_num_layers": config.num_draft_layers,
        "hydra_head_arch": "mlp" if config.prefix is None else "prefix-mlp",
        "grounded_heads": config.grounded,
        "hidden_state_offset": config.hidden_state_offset,
    }
    if config.prefix is not None:
        fields["prefix"] = asdict(config.prefix)
    if config.draft_tokens is not None:
        fields["draft_tokens"] = config.draft_tokens
    if config.head != "own":
        fields["head"] = config.head
    return fields


def stored_name(config: HydraConfig, name: str) -> str:
    """Map a name such as heads.0.first.linear.kernel to the authors' name in the files.

    This example becomes hydra_mlp.0.0.linear.weight.
    """
    name = name.replace(".kernel", ".weight")
    if name == "prefix_norm":
        return f"{_PREFIX}norm.weight"
    if name.startswith("prefix."):
        own = name.removeprefix("prefix.")
        return f"{_PREFIX}layers.0.{_NORMS.get(own, own)}.weight"
    _, head, part, *rest = name.split(".")
    # In Hydra++ a dropout module precedes every layer.
    step, first = (2, 1) if config.prefix else (1, 0)
    if part == "lm_head":
        return f"hydra_lm_head.{head}.{'1.' if config.prefix else ''}{rest[0]}"
    block = first + step * (0 if part == "first" else config.num_draft_layers - 1)
    return f"hydra_mlp.{head}.{block}.{rest[0].replace('residual', 'res_connection')}.{rest[1]}"


def _count(block: int, prefix: bool) -> int:
    """Return the number of blocks up to this index of the list of modules."""
    return (block + 1) // 2 if prefix else block + 1


def _read_prefix(stated: Mapping[str, Any], shapes: Shapes) -> dict[str, Any]:
    """Return the configuration of the layer of Hydra++ from its weights and the stated fields.

    Fields that are not stated get Llama's defaults. The authors' code copies them from the target
    instead, so they are compared with the target before decoding.
    """
    within = f"{_PREFIX}layers.0."
    queries, width = shapes.get(f"{within}self_attn.q_proj.weight", (0, 0))
    keys, _ = shapes.get(f"{within}self_attn.k_proj.weight", (0, 0))
    inner, _ = shapes.get(f"{within}mlp.up_proj.weight", (0, 0))
    (pairs,) = shapes.get(_ROTARY, (0,))
    head_dim = _head_dim(stated, width, 2 * pairs)
    scaling = stated.get("rope_scaling")
    if scaling is not None and scaling.get("type", scaling.get("rope_type")) != "linear":
        READER.refuse("rope_scaling", f"is {scaling!r:.80}; only linear scaling is supported.")
    return {
        "intermediate_size": inner,
        "num_attention_heads": queries // head_dim,
        "num_key_value_heads": keys // head_dim,
        "head_dim": head_dim,
        "rms_norm_eps": first_stated(stated, ("rms_norm_eps",), PrefixLayer.rms_norm_eps),
        "rope_scaling": None if scaling is None else {"factor": scaling.get("factor")},
    }


def _head_dim(stated: Mapping[str, Any], width: int, told: int) -> int:
    """Return H: as stated, or from the rotary frequencies, or as in all published heads.

    Args:
      stated: fields of `config.json`.
      width: D.
      told: twice the number of rotary frequencies in the files; 0 if the files hold none.
    """
    heads = stated.get("num_attention_heads")
    own = stated.get("head_dim") or (width // heads if heads else told)
    if told and own != told:
        READER.refuse(
            "head_dim",
            f"is {own}, but the rotary frequencies in the files imply {told}; correct head_dim or "
            "num_attention_heads.",
        )
    if not own and width % _PUBLISHED_HEAD_DIM:
        READER.refuse(
            "num_attention_heads",
            "is not stated, and cannot be derived without rotary frequencies in the files; state "
            "the target's number.",
        )
    return own or _PUBLISHED_HEAD_DIM
