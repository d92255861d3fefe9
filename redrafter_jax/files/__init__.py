"""Models from files and to files.

`huggingface` loads and saves; `found` is what is known of a model before its weights are loaded;
`stored` reads a weight, whatever its format, to a device or to each device of a mesh.

A file format states three things about a model before any weight is loaded: where it lies, its
configuration, and its weights (`stored.StoredWeight`) by their names in Hugging Face's layout.
There are two formats, folders of the Hugging Face hub and GGUF files. To add one, write a module
that returns these three, and a line in `found._describe`. To add a kind of drafter, write a line
in `found.DRAFTERS`, by the `model_type` of its `config.json`, and a reader of its configuration,
such as `medusa`.
"""
