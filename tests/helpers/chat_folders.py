"""A tokenizer of bytes with the special tokens of two chat formats, and records of every format."""

import json
from pathlib import Path
from typing import Any

from mixed_lines import mixed_lines
from tiny_folders import byte_tokenizer
from tokenizers import Tokenizer, processors

from redrafter_jax.config import TargetConfig
from redrafter_jax.files.folder import FolderFiles
from redrafter_jax.files.target_files import TargetFiles
from train.data.settings import DataSettings

SPECIAL = ("<s>", "</s>", "<|im_start|>", "<|im_end|>")
BEGIN, END, IM_START, IM_END = range(256, 260)
VOCABULARY = 260
CONFIG = TargetConfig(VOCABULARY, 16, 24, 1, 2, 1, 8, 1e4, 1e-5, 512, True, (END,))

CHATML = (
    "{% for turn in messages %}<|im_start|>{{ turn.role }}\n{{ turn.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

TURNS = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello"},
    {"role": "user", "content": "Bye"},
    {"role": "assistant", "content": "Ciao"},
]
RECORDS: dict[str, dict[str, Any]] = {
    "messages": {"messages": TURNS},
    "conversations": {
        "conversations": [
            {"from": "human" if turn["role"] == "user" else "gpt", "value": turn["content"]}
            for turn in TURNS
        ]
    },
    "alpaca": {"instruction": "Add.", "input": "1 2", "output": "3"},
    "text": {"text": "plain"},
    "tokens": {"input_ids": [1, 2, 3], "loss_mask": [0, 1, 1]},
}


def chat_tokenizer() -> Tokenizer:
    """A token per byte; `<s>` opens what is encoded with special tokens."""
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", BEGIN)]
    )
    return tokenizer


def write_tokenizer(folder: Path, template: str | None = CHATML) -> Path:
    """The folder of a target without a target: its tokenizer and its chat template."""
    folder.mkdir(parents=True, exist_ok=True)
    chat_tokenizer().save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"}
    if template is not None:
        settings["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def files_with(
    tokenizer: Tokenizer, folder: Path = Path("x"), config: TargetConfig = CONFIG
) -> TargetFiles:
    """A folder's files, of which the tokenizer and the configuration are these."""
    files = FolderFiles(folder, folder)
    files.tokenizer, files.config = tokenizer, config
    return files


def auto_tokenizer(folder: Path) -> Any:
    """What transformers makes of a folder."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(folder))


def write_sentencepiece(folder: Path) -> Any:
    """`tokenizer.model` as Llama 2, Vicuna and Mistral were first published; its own encoder."""
    import sentencepiece

    folder.mkdir()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(mixed_lines()[:3000]),
        model_prefix=str(folder / "tokenizer"),
        vocab_size=1200,
        model_type="bpe",
        byte_fallback=True,
        character_coverage=0.98,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    (folder / "tokenizer.vocab").unlink()
    roles = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "legacy": False}
    settings = {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True, "add_eos_token": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | roles))
    return sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))


def write_lines(path: Path, *records: object) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def data_settings(*sources: object, **changes: object) -> DataSettings:
    return DataSettings.model_validate({"sources": sources, "sequence_length": 64} | changes)
