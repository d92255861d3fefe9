"""Builds the tokenizer of a GGUF model from the header: byte-level BPE or SentencePiece BPE.

A header only names a pre-tokenizer, and does not state its pattern. The patterns here are from the
`tokenizer.json` of the models after which the pre-tokenizers are named.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from redrafter_jax.errors import InputError
from redrafter_jax.files.gguf_header import Header


class _PreTokenizer(NamedTuple):
    """A named pre-tokenizer.

    Attributes:
      parts: pre-tokenizers that split a text before it becomes bytes.
      gpt2_pattern: whether GPT-2's pattern also splits the text.
      nfc: whether the text is first normalised to Unicode's normal form C.
      ignore_merges: whether a word that is a token stays one token regardless of the merges.
      adds_bos: whether a BOS token is added if the header does not say so.
    """

    parts: tuple[Any, ...] = ()
    gpt2_pattern: bool = False
    nfc: bool = False
    ignore_merges: bool = False
    adds_bos: bool = False


def _split(digits: str) -> Any:
    """The pattern of GPT-4 and its successors; `digits` is the part that matches numbers."""
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
        + digits
        + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    return pre_tokenizers.Split(Regex(pattern), behavior="isolated")


_PRE_TOKENIZERS = {
    "gpt-2": _PreTokenizer(gpt2_pattern=True),
    "smollm": _PreTokenizer((pre_tokenizers.Digits(individual_digits=True),), gpt2_pattern=True),
    "llama-bpe": _PreTokenizer((_split(r"\p{N}{1,3}"),), ignore_merges=True, adds_bos=True),
    "qwen2": _PreTokenizer((_split(r"\p{N}"),), nfc=True),
    "dbrx": _PreTokenizer((_split(r"\p{N}{1,3}"),)),
}
# Other names of these patterns in llama.cpp (`src/llama-vocab.cpp`).
_ALIASES = {
    "gpt-2": "phi-2 gigachat a.x-4.0 mellum exaone4 jina-es jina-de jina-v2-es jina-v2-de "
    "modern-bert mpt olmo jais trillion granite-docling",
    "smollm": "starcoder refact command-r codeshell exaone minerva-7b mellum2",
    "llama-bpe": "llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano",
    "qwen2": "deepseek-r1-qwen kormo f2llmv2 megrez",
    "dbrx": "smaug-bpe",
}
_PATTERN_OF = {name: name for name in _PRE_TOKENIZERS} | {
    alias: name for name, aliases in _ALIASES.items() for alias in aliases.split()
}
# GGUF's types of tokens.
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # SentencePiece's symbol for a space
_ROLES = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}


def gguf_tokenizer(header: Header) -> Tokenizer:
    """The tokenizer that the header describes, with the BOS and EOS tokens that it asks for.

    Raises:
      InputError: the tokenizer or its pre-tokenizer is not supported, or the header is damaged.
    """
    tokens, types = _entries(header, "tokens", str), _entries(header, "token_type", int)
    vocabulary = {token: number for number, token in enumerate(tokens)}
    if len(types) != len(tokens) or len(vocabulary) != len(tokens):
        raise InputError(
            f"{header.path} states {len(tokens)} tokens, {len(vocabulary)} of them distinct, and "
            f"{len(types)} types of tokens; the three numbers must be equal, so the file is "
            "damaged."
        )
    model = header.get("tokenizer.ggml.model", str)
    if model not in ("gpt2", "llama"):
        raise InputError(
            f"{header.path} holds a tokenizer of the kind {model!r}; supported are 'gpt2' and "
            "'llama'."
        )
    try:
        if model == "gpt2":
            tokenizer, adds_bos = _byte_level(header, vocabulary)
        else:
            tokenizer, adds_bos = _sentencepiece(header, vocabulary, types)
    except (KeyboardInterrupt, SystemExit, InputError):
        raise
    # tokenizers raises plain Exception, and panics of its Rust code are only BaseExceptions.
    except BaseException as error:
        reason = " ".join(str(error).split())
        raise InputError(f"{header.path} holds a damaged tokenizer: {reason}.") from None
    tokenizer.add_tokens(
        [
            AddedToken(token, special=kind != _USER_DEFINED, normalized=False)
            for token, kind in zip(tokens, types, strict=True)
            if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED) and token
        ]
    )
    _add_ends(tokenizer, header, tokens, adds_bos)
    return tokenizer


def token_strings(header: Header) -> list[str]:
    """The tokens by id, as the file spells them; empty if the file does not list them."""
    return header.get("tokenizer.ggml.tokens", list, [])


def tokenizer_fields(header: Header) -> dict[str, Any]:
    """The fields of a `tokenizer_config.json`: special tokens by role, and the chat template.

    Raises:
      InputError: a special token is not in the vocabulary.
    """
    tokens = _entries(header, "tokens", str)
    fields: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    for role, name in _ROLES.items():
        if (token := _token(header, name, tokens)) is not None:
            fields[f"{role}_token"] = token
    if template := header.get("tokenizer.chat_template", str, ""):
        fields["chat_template"] = template
    # Decode tokens exactly, without removing spaces before commas.
    return {**fields, "clean_up_tokenization_spaces": False}


def _byte_level(header: Header, vocabulary: dict[str, int]) -> tuple[Tokenizer, bool]:
    name = header.get("tokenizer.ggml.pre", str)
    if name not in _PATTERN_OF:
        raise InputError(
            f"{header.path} names the pre-tokenizer {name!r}; supported are "
            f"{', '.join(map(repr, _PRE_TOKENIZERS))} and their other names in llama.cpp."
        )
    pre = _PRE_TOKENIZERS[_PATTERN_OF[name]]
    merges = [tuple(merge.split(" ", 1)) for merge in _entries(header, "merges", str)]
    model = models.BPE(vocab=vocabulary, merges=merges, ignore_merges=pre.ignore_merges)
    tokenizer = Tokenizer(model)
    if pre.nfc:
        tokenizer.normalizer = normalizers.NFC()
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre.gpt2_pattern)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*pre.parts, as_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, pre.adds_bos


def _sentencepiece(
    header: Header, vocabulary: dict[str, int], types: Sequence[int]
) -> tuple[Tokenizer, bool]:
    """Build the tokenizer with merges that follow from the scores of tokens.

    SentencePiece joins the pair of tokens whose result has the highest score.
    """
    scores = _entries(header, "scores", float)
    if len(scores) != len(vocabulary):
        raise InputError(
            f"{header.path} states {len(vocabulary)} tokens, but {len(scores)} scores; the file is "
            "damaged."
        )
    pieces = [
        piece
        for piece, number in vocabulary.items()
        if types[number] in (_NORMAL, _USER_DEFINED, _UNUSED)
    ]
    pieces.sort(key=lambda piece: -scores[vocabulary[piece]])
    merges = [
        (piece[:cut], piece[cut:])
        for piece in pieces
        for cut in range(1, len(piece))
        if piece[:cut] in vocabulary and piece[cut:] in vocabulary
    ]
    unknown = next(
        (token for token, number in vocabulary.items() if types[number] == _UNKNOWN), None
    )
    model = models.BPE(
        vocab=vocabulary,
        merges=merges,
        unk_token=unknown,
        fuse_unk=True,
        byte_fallback=_BYTE in types,
    )
    tokenizer = Tokenizer(model)
    prefixed = header.get("tokenizer.ggml.add_space_prefix", bool, True)
    opening: list[Any] = [normalizers.Prepend(_SPACE)] if prefixed else []
    stripped: list[Any] = [decoders.Strip(" ", 1, 0)] if prefixed else []
    tokenizer.normalizer = normalizers.Sequence([*opening, normalizers.Replace(" ", _SPACE)])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *stripped]
    )
    return tokenizer, True


def _add_ends(tokenizer: Tokenizer, header: Header, tokens: list[str], adds_bos: bool) -> None:
    """Make the tokenizer add the BOS and EOS tokens that the header asks for."""
    added = []
    for name, default in (("bos", adds_bos), ("eos", False)):
        token = _token(header, name, tokens)
        asked = header.get(f"tokenizer.ggml.add_{name}_token", bool, default)
        if asked and token is None:
            raise InputError(
                f"{header.path} asks for {name} tokens, but does not state "
                f"tokenizer.ggml.{name}_token_id; the file is damaged."
            )
        added.append(token if asked else None)
    if not any(added):
        return
    first, last = added
    order = [*([first] if first else []), "$A", *([last] if last else [])]
    special = [(token, tokens.index(token)) for token in dict.fromkeys(filter(None, added))]
    tokenizer.post_processor = processors.TemplateProcessing(single=order, special_tokens=special)


def _token(header: Header, name: str, tokens: list[str]) -> str | None:
    """The token that has a role, such as "bos"; None if the header names no token for it."""
    number = header.get(f"tokenizer.ggml.{name}_token_id", int, -1)
    if number == -1:
        return None
    if not 0 <= number < len(tokens):
        raise InputError(
            f"{header.path} states tokenizer.ggml.{name}_token_id={number}, outside its "
            f"{len(tokens)} tokens; the file is damaged."
        )
    return tokens[number]


def _entries(header: Header, name: str, kind: type) -> list[Any]:
    """A list field of the tokenizer, whose entries must have type `kind`."""
    entries = header.get(f"tokenizer.ggml.{name}", list)
    if not all(type(entry) is kind for entry in entries):
        raise InputError(
            f"{header.path} holds entries in tokenizer.ggml.{name} that are not of type "
            f"{kind.__name__}; the file is damaged."
        )
    return entries
