"""Prompts as conversations or texts in the Python API, and their detokenization."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from tokenizers import Tokenizer

from redrafter_jax.config import TargetConfig
from redrafter_jax.errors import InputError
from redrafter_jax.text.chat_template import end_tokens, template_of


class Written(NamedTuple):
    """Tokenized prompts.

    Attributes:
      prompts: the prompts: conversations and texts as token ids, other prompts as they were given.
      end_tokens: ids of the tokens that end an answer.
      decode: the function from token ids to text.
    """

    prompts: Any
    end_tokens: tuple[int, ...]
    decode: Callable[[list[int]], str]


def is_written(prompts: Any) -> bool:
    """Whether prompts are a text, a conversation, or a list that holds at least one of these."""
    return _is_one(prompts) or (_is_list(prompts) and any(map(_is_one, prompts)))


def read_written(prompts: Any, tokenizer: Any, config: TargetConfig) -> Written:
    """Tokenize prompts with a tokenizer and its chat template.

    Args:
      prompts: prompts in the forms that `generate` takes.
      tokenizer: the tokenizer of `load_tokenizer`, or another fast tokenizer of transformers.
      config: the target's configuration; end tokens outside its vocabulary are left out.

    Raises:
      InputError: the tokenizer has the wrong type, or its chat template refuses a conversation.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if not isinstance(backend, Tokenizer):
        raise InputError(f"tokenizer is {tokenizer!r:.40}; give what load_tokenizer returns.")
    if _is_one(prompts):
        prompts = [prompts]
    written = is_written(prompts)
    own = tokenizer.eos_token_id
    ends = (*config.eos_token_ids, *([] if own is None else [own]))
    conversations = [prompt for prompt in prompts if _is_conversation(prompt)] if written else []
    if conversations:
        if tokenizer.chat_template is None:
            raise InputError(
                "tokenizer has no chat template; set tokenizer.chat_template to a Jinja template, "
                "or give texts or token ids."
            )
        ends = end_tokens(template_of(tokenizer), backend, ends, conversations)
    if written:
        prompts = [_read(prompt, tokenizer) if _is_one(prompt) else prompt for prompt in prompts]
    kept = (end for end in ends if end < config.vocab_size or end in config.eos_token_ids)
    return Written(prompts, tuple(dict.fromkeys(kept)), backend.decode)


def _read(prompt: Any, tokenizer: Any) -> list[int]:
    if isinstance(prompt, str):
        return tokenizer(prompt)["input_ids"]
    try:
        return tokenizer.apply_chat_template(
            list(prompt), add_generation_prompt=True, return_dict=False
        )
    except Exception as error:  # a template is a program and may raise anything
        raise InputError(
            f"The tokenizer's chat template refuses the turns: {' '.join(str(error).split())}"
        ) from None


def _is_one(prompt: Any) -> bool:
    return isinstance(prompt, str) or _is_conversation(prompt)


def _is_conversation(prompt: Any) -> bool:
    return _is_list(prompt) and isinstance(prompt[0], Mapping) and "role" in prompt[0]


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes) and len(value) > 0
