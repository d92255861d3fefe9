"""Models from files and to files.

A file format states three things about a model before any weight is read: its folder, its
configuration, and its weights by their names in Hugging Face's layout (`stored.Stored`). There is
one format, folders of the Hugging Face hub; another is a module that returns these three, and a
line in `huggingface._describe`. Another kind of drafter is a line of `huggingface.DRAFTERS`, by
the `model_type` of its `config.json`.
"""
