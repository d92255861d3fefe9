"""Targets in files: each file read once, as Hugging Face stores them, and unusable folders."""

import io
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from places import GOLDENS
from safetensors.flax import load_file as load_arrays
from safetensors.numpy import load_file, save_file
from tiny_folders import damaged, write_index
from tiny_gguf import CONFIG as GGUF_CONFIG
from tiny_gguf import tokenizer_fields, write_random
from tiny_models import assert_same, cast, random_target, stored_shapes, tiny_config
from transformers import AutoTokenizer

from redrafter_jax import InputError, load_target, save_target
from redrafter_jax.files import folder, gguf
from redrafter_jax.files.convert import convert
from redrafter_jax.serving.server import Server

GOLDEN_FOLDERS = sorted((GOLDENS / "families").iterdir())
CONFIG = tiny_config(head_dim=6)


@pytest.fixture
def target_folder(tmp_path: Path) -> Path:
    save_target(random_target(CONFIG), tmp_path / "target")
    return tmp_path / "target"


@pytest.mark.parametrize("golden", GOLDEN_FOLDERS, ids=lambda golden: golden.name)
def test_targets_are_stored_as_hugging_face_stores_them(tmp_path: Path, golden: Path) -> None:
    """Loaded from files that transformers wrote and saved again, they are the same."""
    target = load_target(golden)
    save_target(target, tmp_path)
    ours, theirs = (load_arrays(folder / "model.safetensors") for folder in (tmp_path, golden))
    assert ours.keys() == theirs.keys()
    for name, weight in theirs.items():
        np.testing.assert_array_equal(ours[name], weight.astype(jnp.bfloat16), name)
    written, stated = (
        json.loads((folder / "config.json").read_text()) for folder in (tmp_path, golden)
    )
    assert written["torch_dtype"] == "bfloat16"
    for name in ("model_type", "architectures"):
        assert written[name] == stated[name]
    shapes = {name: weight.shape for name, weight in theirs.items()}
    assert stored_shapes(target.config) == shapes
    assert load_target(tmp_path).config == target.config


def shard(folder: Path) -> None:
    """Split the single file into two shards and an index, as transformers does."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    weight_map = {}
    for number, part in enumerate((names[::2], names[1::2]), start=1):
        file = f"model-{number:05}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, folder / file)
        weight_map |= dict.fromkeys(part, file)
    write_index(folder / "model.safetensors.index.json", weight_map)


def test_shards_are_read_through_their_index_in_the_dtype_asked_for(target_folder: Path) -> None:
    shard(target_folder)
    assert_same(load_target(target_folder, dtype="float32"), random_target(CONFIG))
    assert_same(load_target(target_folder), cast(random_target(CONFIG), jnp.bfloat16))


@pytest.mark.parametrize("watched", [True, False])
def test_a_bar_is_drawn_where_somebody_watches(
    target_folder: Path, monkeypatch: pytest.MonkeyPatch, watched: bool
) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(screen, "isatty", lambda: watched)
    monkeypatch.setattr("sys.stderr", screen)
    load_target(target_folder)
    assert ("target:" in screen.getvalue()) == watched


def test_a_folder_without_config_json_and_other_dtypes_are_refused(target_folder: Path) -> None:
    with pytest.raises(InputError, match="dtype 'float16' is not supported; use 'float32' or "):
        load_target(target_folder, dtype="float16")
    (target_folder / "config.json").unlink()
    with pytest.raises(InputError, match=r"config\.json is missing; a model folder needs it\.$"):
        load_target(target_folder)


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("kept", [None, 0, -10])
def test_a_missing_or_truncated_file(target_folder: Path, sharded: bool, kept: int | None) -> None:
    if sharded:
        shard(target_folder)
    path = target_folder / ("model-00002-of-00002" if sharded else "model")
    path = path.with_suffix(".safetensors")
    content = path.read_bytes()
    path.unlink()
    if kept is not None:
        path.write_bytes(content[:kept])
    problem = "missing; " if kept is None else "truncated or not a safetensors file"
    with pytest.raises(InputError, match=rf"{path.name} is {problem}"):
        load_target(target_folder)


QUERY, UP = "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({UP: None}, f"holds no weight '{UP}'; the model is incomplete"),
        (
            {f"{QUERY}.bias": np.zeros(24), "visual.weight": np.zeros(3)},
            f"holds the weight '{QUERY}.bias' and 1 more, which",
        ),
        # Transposed, a [24, 32] matrix must not slip through either.
        (
            {f"{QUERY}.weight": np.zeros((32, 24))},
            r"q_proj\.weight' has shape \(32, 24\), but the configuration asks for \(24, 32\);",
        ),
    ],
)
def test_weights_that_do_not_fit_the_model(
    target_folder: Path, tmp_path: Path, changes: dict[str, Any], sentence: str
) -> None:
    # The rotary frequencies of old files are no weights.
    frequencies = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(3)}
    load_target(damaged(tmp_path / "old", target_folder, frequencies))
    with pytest.raises(InputError, match=sentence):
        load_target(damaged(tmp_path / "other", target_folder, changes))


def test_a_tied_head_may_lie_in_the_file_if_it_is_the_embedding(tmp_path: Path) -> None:
    target = random_target(tiny_config(**(vars(CONFIG) | {"tie_word_embeddings": True})))
    save_target(target, tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    embedding = tensors["model.embed_tokens.weight"]
    save_file(tensors | {"lm_head.weight": embedding.copy()}, path)
    assert_same(load_target(tmp_path, dtype="float32"), target)

    # The same values in another dtype are no other head; values that were rounded are.
    short = embedding.astype(np.float16)
    exact = {"model.embed_tokens.weight": short.astype(np.float32), "lm_head.weight": short}
    save_file(tensors | exact, path)
    assert load_target(tmp_path, dtype="float32").config.tie_word_embeddings

    other = embedding.copy()
    other[-1, -1] += 1
    for head, sentence in (
        (other, r"'lm_head\.weight' differs from 'model\.embed_tokens\.weight', but"),
        (embedding.astype(np.float16), r"'lm_head\.weight' differs from"),
        (np.zeros(3, np.float32), r"'lm_head\.weight' has shape \(3,\), .* asks for \(24, 32\)"),
    ):
        save_file(tensors | {"lm_head.weight": head}, path)
        with pytest.raises(InputError, match=sentence):
            load_target(tmp_path)


ONE, TWO = (f"model-0000{number}-of-00002.safetensors" for number in (1, 2))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"lm_head.weight": ...}, r"the weight 'lm_head\.weight', which .*index"),
        ({"lm_head.weight": ..., "model.norm.weight": ...}, r"weight 'lm_head\.weight' and 1 more"),
        ({"lm_head.weight": TWO}, r"holds no weight 'lm_head\.weight', but .* names this file"),
        ({"lm_head.weight": "a\0"}, r"/a\\x00' is not a valid file name"),
        ({"lm_head.weight": "\ud800"}, r"/\\ud800' is not a valid file name"),
        ({"lm_head.weight": 1}, r"index\.json states lm_head\.weight=1; it must be a string"),
        (None, r"index\.json does not state 'weight_map'"),
        ([1], r"index\.json states weight_map=\[1\]; it must be an object"),
    ],
)
def test_an_index_that_does_not_fit_its_shards(
    target_folder: Path, changes: Any, sentence: str
) -> None:
    shard(target_folder)
    path = target_folder / "model.safetensors.index.json"
    weight_map = json.loads(path.read_text())["weight_map"]
    assert weight_map["lm_head.weight"] == ONE
    if isinstance(changes, dict):
        changes = {name: file for name, file in (weight_map | changes).items() if file is not ...}
    write_index(path, changes)
    with pytest.raises(InputError, match=sentence):
        load_target(target_folder)


TEMPLATE = "{% for turn in messages %}{{ turn.content }}{% endfor %}"


def write_gguf_chat(folder: Path) -> Path:
    config = replace(GGUF_CONFIG, vocab_size=900, max_position_embeddings=512)
    fields = tokenizer_fields("smollm") | {"tokenizer.chat_template": TEMPLATE}
    write_random(folder / "model.gguf", "F16", config, **fields)
    return folder / "model.gguf"


def write_folder_chat(folder: Path) -> Path:
    convert(write_gguf_chat(folder), folder / "model")
    (folder / "model" / "generation_config.json").write_text("{}")
    return folder / "model"


@pytest.mark.usefixtures("quick_compilation")
@pytest.mark.parametrize("command", ["generate", "serve"])
@pytest.mark.parametrize(
    ("write", "parsed"),
    [
        (write_gguf_chat, {"read_header": 1, "gguf_tokenizer": 1}),
        (
            write_folder_chat,
            {"config.json": 1, "generation_config.json": 1, "AutoTokenizer": 1},
        ),
    ],
)
def test_a_command_parses_each_file_of_its_target_once(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    run_redrafter: Any,
    write: Callable[[Path], Path],
    parsed: dict[str, int],
    command: str,
) -> None:
    counts = Counter[str]()
    path = write(tmp_path)

    def count(place: Any, name: str) -> None:
        parse = getattr(place, name)

        def counted(*given: Any, **more: Any) -> Any:
            counts[given[0].name if name == "read_json" else name] += 1
            return parse(*given, **more)

        monkeypatch.setattr(place, name, counted)

    for place, name in ((gguf, "read_header"), (gguf, "gguf_tokenizer"), (folder, "read_json")):
        count(place, name)

    def from_pretrained(*given: Any, **more: Any) -> Any:
        counts["AutoTokenizer"] += 1
        return load(*given, **more)

    load = AutoTokenizer.from_pretrained
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", from_pretrained)
    # Ready to serve, it ends.
    monkeypatch.setattr(Server, "run", lambda _, sockets: [one.close() for one in sockets])
    monkeypatch.setattr("signal.signal", lambda *_: None)
    rest = ["--prompt", "the", "--max-new-tokens", "1", "--chat"] if command == "generate" else []
    rest += ["--port", "0", "--context-length", "64"] if command == "serve" else []
    code, _, err = run_redrafter(command, "--target", str(path), "--no-drafter", *rest)
    assert code == 0, err
    assert counts == parsed
