"""Tokenizers, chat templates, prompts, grammars, and incremental detokenization."""
