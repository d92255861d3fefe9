"""The decoding engine: it gives requests rows of a decode state, reads prompts and decodes."""
