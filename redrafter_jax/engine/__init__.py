"""The decoding engine: requests take rows of a decode state, read their prompts and decode."""
