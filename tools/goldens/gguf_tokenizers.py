"""Make `gguf/tokenizers.json`: small vocabularies, and other libraries' token ids of test lines.

With the file of SmolLM2 as an argument, also make `gguf/smollm2_tokens.json` for its vocabulary.
tests/goldens/README.md names the versions and describes the fields. The command, from the root of
the repository:

    torchenv/bin/python tools/goldens/gguf_tokenizers.py SmolLM2-135M-Instruct.Q4_1.gguf
"""

# pyright: reportMissingImports=false

import io
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import regex
import sentencepiece
import tiktoken
from gguf import GGUFReader
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import AddedToken, GPT2Tokenizer, Qwen2Tokenizer

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "helpers"))
from mixed_lines import digests, mixed_lines

FOLDER = Path(__file__).resolve().parents[2] / "tests" / "goldens" / "gguf"
SPECIAL = ["<|im_start|>", "<|im_end|>"]
USER_DEFINED = ["<div>", "\n\n"]
# https://github.com/meta-llama/llama3/blob/main/llama/tokenizer.py
LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
Encode = Callable[[str], Sequence[int]]


class SmolTokenizer(GPT2Tokenizer):
    """A tokenizer that splits off every digit, before it applies GPT-2's pattern."""

    def _tokenize(self, text: str) -> list[str]:
        parts = regex.findall(r"\p{N}|\P{N}+", text)
        return [token for part in parts for token in super(SmolTokenizer, self)._tokenize(part)]


def encoded(encode: Encode) -> list[int]:
    """Return checksums of the token ids of the test lines."""
    return digests(map(encode, mixed_lines()))


def byte_level(tokens: list[str], merges: list[str], special: list[str]) -> dict[str, Encode]:
    """Make transformers' slow tokenizers and OpenAI's tokenizer, by name of the pre-tokenizer."""
    encoders = {"llama-bpe": openai(tokens, merges, special)}
    with tempfile.TemporaryDirectory() as folder:
        vocabulary, listed = Path(folder) / "vocab.json", Path(folder) / "merges.txt"
        vocabulary.write_text(json.dumps({token: i for i, token in enumerate(tokens)}))
        listed.write_text("\n".join(["#version: 0.2", *merges]) + "\n")
        added = [AddedToken(token, normalized=False, special=True) for token in special]
        for name, kind in (
            ("smollm", SmolTokenizer),
            ("gpt-2", GPT2Tokenizer),
            ("qwen2", Qwen2Tokenizer),
        ):
            tokenizer = kind(
                str(vocabulary),
                str(listed),
                **dict.fromkeys(("unk_token", "bos_token", "eos_token", "pad_token"), special[0]),
                additional_special_tokens=added,
            )
            assert tokenizer.unk_token_id == tokens.index(special[0])
            encoders[name] = lambda line, tokenizer=tokenizer: tokenizer(line).input_ids
    return encoders


def openai(tokens: list[str], merges: list[str], special: list[str]) -> Encode:
    """Build OpenAI's tokenizer, in which the rank of a token is its id.

    Tokens are numbered by their merges, and renumbered at the end.
    """
    characters = {chr(c): b for b, c in byte_characters().items()}
    ordered = [*characters, *(merge.replace(" ", "") for merge in merges)]
    ranks = {bytes(characters[c] for c in token): rank for rank, token in enumerate(ordered)}
    names = {token: len(ranks) + i for i, token in enumerate(special)}
    encoding = tiktoken.Encoding(
        "golden", pat_str=LLAMA_3, mergeable_ranks=ranks, special_tokens=names
    )
    numbers = {token: i for i, token in enumerate(tokens)}
    final = [numbers.get(token, -1) for token in [*ordered, *special]]

    def encode(line: str) -> list[int]:
        ids = [final[rank] for rank in encoding.encode(line, allowed_special="all")]
        assert -1 not in ids
        return ids

    return encode


def byte_characters() -> dict[int, int]:
    """Return GPT-2's character codes for bytes; printable characters stand for themselves."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: byte for byte in printable} | {byte: 256 + i for i, byte in enumerate(others)}


def small_byte_level() -> tuple[list[str], list[str]]:
    """Train a byte-level vocabulary on some of the lines; return its tokens and merges."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=900, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(mixed_lines(1000), trainer)
    model = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    return tokens, [" ".join(merge) for merge in model["merges"]]


def small_sentencepiece(prefixed: bool) -> tuple[dict[str, Any], Encode]:
    """Train a small BPE vocabulary with single digits, and with bytes for unknown characters.

    If `prefixed`, every text gets a leading space, as with Llama 2. Otherwise it gets none, as with
    Gemma, and the vocabulary also has symbols that are never divided.
    """
    symbols = [] if prefixed else USER_DEFINED
    content = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=(line for text in mixed_lines(1000) for line in text.split("\n")),
        model_writer=content,
        model_type="bpe",
        vocab_size=900,
        character_coverage=0.98,
        byte_fallback=True,
        split_digits=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        add_dummy_prefix=prefixed,
        user_defined_symbols=symbols,
        minloglevel=2,
    )
    processor = sentencepiece.SentencePieceProcessor(model_proto=content.getvalue())
    ids = range(processor.get_piece_size())
    pieces = [processor.id_to_piece(i) for i in ids]

    def type_of(i: int) -> int:
        if pieces[i] in symbols:
            return 4
        kinds = processor.is_unknown, processor.is_control, processor.is_unused, processor.is_byte
        return next(
            (kind for kind, is_one in zip((2, 3, 5, 6), kinds, strict=True) if is_one(i)), 1
        )

    stored = {
        "tokens": pieces,
        "scores": [processor.get_score(i) for i in ids],
        "types": [type_of(i) for i in ids],
        "prefixed": prefixed,
    }

    return stored, sentencepiece_encode(processor, "<s>|</s>")


def sentencepiece_encode(processor: sentencepiece.SentencePieceProcessor, control: str) -> Encode:
    """Return an encoder of texts that may contain control tokens.

    SentencePiece does not recognise control tokens in a text, so the parts between them are encoded
    separately. `control` is a regular expression that matches the control tokens.
    """

    def encode(line: str) -> list[int]:
        ids = []
        for part in regex.split(f"({control})", line):
            own = processor.piece_to_id(part)
            ids += [own] if processor.is_control(own) else processor.encode(part)
        return ids

    return encode


def main() -> None:
    """Write `tokenizers.json`, and also `smollm2_tokens.json` if a model file is given."""
    FOLDER.mkdir(exist_ok=True)
    tokens, merges = small_byte_level()
    llama, encode_llama = small_sentencepiece(prefixed=True)
    gemma, encode_gemma = small_sentencepiece(prefixed=False)
    encoders = byte_level(tokens, merges, SPECIAL)
    encoders |= {"llama": encode_llama, "gemma": encode_gemma}
    stored = {
        "byte_level": {"tokens": tokens, "merges": merges, "special": SPECIAL},
        "sentencepiece": {"llama": llama, "gemma": gemma},
        "digests": {name: encoded(encode) for name, encode in encoders.items()},
    }
    (FOLDER / "tokenizers.json").write_text(json.dumps(stored, ensure_ascii=False) + "\n")
    for path in sys.argv[1:]:
        fields = GGUFReader(path).fields
        tokens, merges, types = (
            fields[f"tokenizer.ggml.{name}"].contents()
            for name in ("tokens", "merges", "token_type")
        )
        special = [token for token, kind in zip(tokens, types, strict=True) if kind == 3]
        real = {name: encoded(one) for name, one in byte_level(tokens, merges, special).items()}
        (FOLDER / "smollm2_tokens.json").write_text(json.dumps(real) + "\n")


if __name__ == "__main__":
    main()
