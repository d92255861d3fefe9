"""Loading models from files, and saving them.

`target_files` opens a target: `open_target` returns the files of a path or hub id. Each file is
read when it is first needed, and its content is kept. There are two formats: folders in the layout
of the Hugging Face hub (`folder`), and GGUF files (`gguf`). To add a format, write a subclass of
`TargetFiles`, and choose it in `open_target`. `drafter_files` loads and saves drafters. Each kind
of head has a record in `redrafter_jax.drafters.kinds`, which defines the layout of its files.

`parameters` matches the parameters of a model with the weights in files (`stored.StoredWeight`),
which have the names of Hugging Face, and loads them to one device or to the devices of a mesh.
`target_weights` maps the names of a target's parameters to the names in files. `save` writes a
model.
"""
