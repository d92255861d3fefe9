"""Tokenizers, chat templates, prompts, and text from tokens as they are decided."""
