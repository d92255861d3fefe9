"""Lines of every kind of text that tokenizers treat apart; the same wherever they are made."""

import random
import zlib
from collections.abc import Iterable, Sequence

import numpy as np

LINES_PER_DIGEST = 10

_WORDS = (
    *("the", "The", "it's", "IT'S", "we'll", "don't", "they'd", "I'm", "house", "running"),
    *("naïve", "café", "cafe\u0301", "Größe", "straße", "Привет", "мир", "Ελλάδα", "שלום"),
    *("مرحبا", "नमस्ते", "สวัสดี", "こんにちは", "世界", "漢字かな交じり文", "안녕하세요", "你好,世界"),
    *("😀", "👩‍👩‍👧", "🇫🇷", "❤️", "👍🏽", "½", "²", "Ⅷ", "٣٤", "१२३", "ﬁ", "Å", "A\u030a"),
    *("def", "return", "self.x", "x_1", "!=", "->", "{}", "();", "//", "/*", "#include", "<div>"),
    *("0", "7", "42", "365", "2024", "65536", "3.14159", "1,000,000", "0x1F", "1e-5", "12:30"),
    *("...", "—", "“quoted”", "«oui»", "?!", "@user", "a@b.org", "https://example.org/a?b=1"),
    *("$5", "€10", "100%", "§3", "©", "™", "∀x∈S", "\u200b", "\u00a0", "\ufeff", "\u3000"),
)
_JOINTS = (" ", " ", " ", " ", " ", "", "  ", "   ", "\t", "\n", "\n\n", " \n", "\r\n", "    ")
_SPECIAL = ("<|im_start|>", "<|im_end|>", "<s>", "</s>")


def mixed_lines(count: int = 10_000) -> list[str]:
    """So many texts of one word to about thirty; a few hold special tokens of some vocabularies."""
    draw = random.Random(20260101)
    lines = []
    for _ in range(count):
        parts = []
        for _ in range(draw.choice((1, 2, 3, 5, 8, 13, 30))):
            if draw.random() < 0.01:
                word = draw.choice(_SPECIAL)
            elif draw.random() < 0.1:
                word = "".join(draw.choice("abcXYZ 019_'.\n") for _ in range(draw.randrange(1, 12)))
            else:
                word = draw.choice(_WORDS)
            parts += [word, draw.choice(_JOINTS)]
        # Half of them end in a word, half in what joins words.
        lines.append("".join(parts[:-1] if draw.random() < 0.5 else parts))
    return lines


def digests(ids: Iterable[Sequence[int]]) -> list[int]:
    """Checksums of the token ids of the lines, ten lines each."""
    ended = [np.asarray([*line, -1], "<i4").tobytes() for line in ids]
    starts = range(0, len(ended), LINES_PER_DIGEST)
    return [zlib.crc32(b"".join(ended[start : start + LINES_PER_DIGEST])) for start in starts]
