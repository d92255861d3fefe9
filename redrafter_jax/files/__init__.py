"""Models from files and to files.

`target_files` opens a target: `open_target` returns the files of a path or hub id, of which each
is read when it is first needed and remembered. There are two formats, folders of the Hugging Face
hub (`folder`) and GGUF files (`gguf`). To add one, write a subclass of `TargetFiles` and a line in
`open_target`. `drafter_files` loads and saves drafters; how the files of a kind are laid out is
said by its record in `redrafter_jax.drafters.kinds`.

`parameters` matches the parameters of a model with the weights in files (`stored.StoredWeight`),
which have their names in Hugging Face's layout, and loads them to a device or to each device of a
mesh; `target_weights` says what a target's are called. `save` writes a model.
"""
