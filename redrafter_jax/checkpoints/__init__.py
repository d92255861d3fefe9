"""Models from files and to files.

A format of files tells three things of a model before any weight is read: the folder it lies in,
its configuration, and its weights by their names in Hugging Face's layout (`stored.Stored`). Today
there is one, folders of the Hugging Face hub. Another is a module of its own that returns these
three, and a line in `huggingface._describe`. Another kind of drafter is a line of
`huggingface.DRAFTERS`, by the `model_type` of its `config.json`.
"""
