"""The tokenizer of the small target: no byte is lost, and transformers reads it too."""

from pathlib import Path

from transformers import AutoTokenizer

from redrafter_jax.files.target_files import open_target
from tools.tokenizer import save_tokenizer, train_tokenizer

END = 0


def test_no_byte_is_lost_and_transformers_reads_the_same_tokenizer(tmp_path: Path) -> None:
    tokenizer = train_tokenizer(["def f(x):\n    return x + 1\n" * 20], 300)
    save_tokenizer(tokenizer, tmp_path, 64)
    loaded, theirs = open_target(tmp_path).tokenizer, AutoTokenizer.from_pretrained(tmp_path)
    for text in ("def f(x):\n\n\treturn  {'é': 12345}\n", "日本 \r\n  ", ""):
        assert loaded.decode(loaded.encode(text).ids) == text
        assert theirs(text).input_ids == loaded.encode(text).ids
    assert theirs.eos_token_id == END
