"""What readers of published heads share: fields, layer numbers, and tables of draftable tokens."""

from collections.abc import Mapping
from typing import Any, NoReturn

import numpy as np

from redrafter_jax.config.drafter import HeadConfig
from redrafter_jax.config.limits import FieldError

Shapes = Mapping[str, tuple[int, ...]]
# Field in which vLLM's speculators states the kind of a head.
SPECULATORS = "speculators_model_type"
# Fields that describe a head's origin or its target, but do not affect what it computes.
DESCRIBING = {
    *("architectures", "model_type", "auto_map", "_name_or_path", "name_or_path"),
    *("torch_dtype", "dtype", "transformers_version", "speculators_version", "speculators_config"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "initializer_range"),
    *("use_cache", "max_position_embeddings", "max_sequence_length", "max_window_layers"),
    *("attention_dropout", "hidden_dropout", "pretraining_tp", "sliding_window"),
    *("target_model_type", "target_model_name_or_path", "modal_type", "target_vocab_size"),
    *("num_target_layers", "_attn_implementation", "_attn_implementation_autoset"),
    *("quantization_config", "attn_implementation", "attention_head_dim"),
}
# Fields that the reader of the rotary embedding handles.
ROTARY = {"rope_theta", "rope_scaling", "rope_parameters"}
# Names of the tables of draftable tokens.
TABLES = ("d2t", "t2d")


class Reader:
    """Checks the fields of one kind of published head; errors name the unsupported field.

    Attributes:
      config: configuration class of the kind; its name begins an error that names no file.
      heads: name of the heads in errors.
    """

    def __init__(self, config: type[HeadConfig], heads: str) -> None:
        self.config, self.heads = config, heads

    def refuse(self, field: str, problem: str) -> NoReturn:
        """Raise a `FieldError` for a field."""
        raise FieldError(self.config, field, problem)

    def expect(self, stated: Mapping[str, Any], name: str, supported: Any) -> None:
        """Refuse a field that states another value than the supported one."""
        value = stated.get(name)
        if value is not None and value != supported:
            self.refuse(name, f"is {value!r:.80}; only {supported!r} is supported.")

    def refuse_unknown(self, stated: Mapping[str, Any], known: set[str]) -> None:
        """Refuse unknown fields, unless they are empty or false."""
        for name, value in stated.items():
            if name not in known and value not in (None, False, 0, "", [], {}):
                self.refuse(
                    name,
                    f"is {value!r:.80}, which is not a known field of {self.heads}; remove it if "
                    "it does not affect what the head computes.",
                )

    def refuse_other_layers(self, stated: Mapping[str, Any]) -> None:
        """Refuse decoder layers with a window, another activation or a bias in the MLP."""
        self.expect(stated, "hidden_act", "silu")
        self.expect(stated, "mlp_bias", False)
        for kind in stated.get("layer_types") or ():
            if kind != "full_attention":
                self.refuse(
                    "layer_types",
                    f"is {stated['layer_types']!r:.80}; only 'full_attention' is supported.",
                )
        if stated.get("use_sliding_window"):
            self.refuse("use_sliding_window", "is True; heads with a window are not supported.")

    def flatten_speculators(self, stated: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields of speculators' files as one flat mapping.

        Raises:
          FieldError: the fields of the head's layer are missing.
        """
        layer = stated.get("transformer_layer_config")
        if not isinstance(layer, Mapping):
            self.refuse(
                "transformer_layer_config", f"is {layer!r:.80}; it must be an object of fields."
            )
        return {**layer, **{name: value for name, value in stated.items() if value is not None}}

    def layers(self, field: str, numbers: Any, *, inputs: bool) -> tuple[int, ...]:
        """Return the indices of the target layers that the numbers in a field name.

        With `inputs`, number i names the input of layer i, which is the output of layer i - 1.
        Without it, number i names the output of layer i.

        Raises:
          FieldError: the numbers are not a list of whole numbers, or name the embedding.
        """
        if not isinstance(numbers, list) or any(type(one) is not int for one in numbers):
            self.refuse(field, f"is {numbers!r:.80}; layers must be a list of whole numbers.")
        first = 0 if inputs else -1
        if first in numbers:
            self.refuse(
                field, f"holds {first}, the embedding; only heads that read layers are supported."
            )
        return tuple(one - inputs for one in numbers)

    def draft_tokens(
        self, stated: Mapping[str, Any], tables: Mapping[str, np.ndarray]
    ) -> dict[str, Any]:
        """Return the configuration field `draft_tokens` from the table `d2t`.

        The result is empty if all tokens can be drafted. If score i is that of token t, entry i of
        the table is t - i.

        Args:
          stated: fields of `config.json`, as one flat mapping.
          tables: the tables in the files, by name; `TABLES` lists the possible names.

        Raises:
          FieldError: the tables contradict each other or the fields, or the token ids are not in
            increasing order.
        """
        total, count = stated["vocab_size"], stated.get("draft_vocab_size")
        if "d2t" not in tables:
            if count not in (None, total):
                self.refuse(
                    "draft_vocab_size",
                    f"is {count}, but the files hold no table 'd2t' that says which {count} of the "
                    f"{total} tokens can be drafted; add the table.",
                )
            return {}
        shifts = tables["d2t"].reshape(-1).astype(np.int64)
        if count not in (None, len(shifts)):
            self.refuse(
                "draft_vocab_size",
                f"is {count}, but the table 'd2t' has {len(shifts)} entries; make them agree.",
            )
        tokens = np.arange(len(shifts)) + shifts
        if (np.diff(tokens) <= 0).any():
            at = int(np.argmax(np.diff(tokens) <= 0))
            self.refuse(
                "draft_tokens",
                f"of the table 'd2t' hold {tokens[at + 1]} after {tokens[at]}; sort the tokens of "
                "the table, and the rows of 'lm_head.weight' in the same order.",
            )
        if len(tokens) == total:  # the table lists all tokens
            return {}
        if "t2d" in tables:
            known = tables["t2d"].reshape(-1)
            if len(known) != total or not np.array_equal(np.flatnonzero(known), tokens):
                self.refuse(
                    "draft_tokens",
                    f"differ between the table 'd2t', with {len(tokens)} of {total} tokens, and "
                    f"the table 't2d', with {np.count_nonzero(known)} of {len(known)}; give tables "
                    "of the same head.",
                )
        return {"draft_tokens": tuple(tokens.tolist())}


def architectures(stated: Mapping[str, Any]) -> list[str]:
    """Return the names in `architectures` of `config.json`."""
    names = stated.get("architectures")
    return [str(name) for name in names] if isinstance(names, list) else []


def first_stated(stated: Mapping[str, Any], names: tuple[str, ...], otherwise: Any = None) -> Any:
    """Return the value of the first of these fields that is stated; `otherwise` if none is."""
    return next((stated[name] for name in names if stated.get(name) is not None), otherwise)


def to_tables(config: HeadConfig) -> dict[str, np.ndarray]:
    """Return the tables of draftable tokens by name; empty if all V tokens can be drafted."""
    if config.draft_tokens is None:
        return {}
    tokens = np.asarray(config.draft_tokens, np.int64)
    marked = np.zeros(config.vocab_size, bool)
    marked[tokens] = True
    return {"d2t": tokens - np.arange(len(tokens)), "t2d": marked}
