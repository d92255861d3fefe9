"""Models from files and to files.

A file format states three things about a model before any weight is read: where it lies, its
configuration, and its weights by their names in Hugging Face's layout (`stored.Stored`). There are
two formats, folders of the Hugging Face hub and GGUF files; another is a module that returns these
three, and a line in `found._describe`. Another kind of drafter is a line of `found.DRAFTERS`, by
the `model_type` of its `config.json`.
"""
