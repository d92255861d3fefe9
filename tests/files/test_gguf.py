"""GGUF targets: what is loaded from them, on one device and several, and written again."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from gguf import GGMLQuantizationType, dequantize
from places import GOLDENS
from safetensors.flax import load_file  # it knows bfloat16
from tiny_folders import change_json
from tiny_gguf import (
    CONFIG,
    config_fields,
    plain_tensors,
    random_tensors,
    tokenizer_fields,
    write_gguf,
    write_random,
)
from tiny_models import assert_same, stored_shapes

from redrafter_jax import InputError, load_target
from redrafter_jax.config import LongRopeScaling
from redrafter_jax.files.convert import convert
from redrafter_jax.files.gguf import SUPPORTED_KINDS
from redrafter_jax.files.target_files import open_target
from redrafter_jax.models.rotary import rotary_frequencies
from redrafter_jax.models.target import Target
from redrafter_jax.parallel.mesh import make_mesh
from redrafter_jax.text.chat_template import encode_turns, find_template

FAMILIES = GOLDENS / "families"
FIELDS = config_fields(CONFIG, "llama")
Q4_K = random_tensors(stored_shapes(CONFIG), "Q4_K")


def golden_file(folder: Path, path: Path, **changes: Any) -> None:
    """A golden of transformers as llama.cpp's converter would write it."""
    config = open_target(folder).config
    model_type = json.loads((folder / "config.json").read_text())["model_type"]
    architecture = model_type.removesuffix("_text")
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    weights = load_file(folder / "model.safetensors")
    arrays = {name: np.asarray(weight) for name, weight in weights.items()}
    tensors = plain_tensors(arrays, architecture, heads if architecture == "llama" else {})
    fields = config_fields(config, architecture)
    fields |= {f"{architecture}.{name}": value for name, value in changes.items()}
    write_gguf(path, fields, tensors, architecture)


@pytest.mark.parametrize(
    ("name", "scaling"),
    [
        ("llama_bias", {}),
        ("llama_linear", {"type": "linear", "factor": 4.0}),
        (
            "llama_yarn",
            {
                "type": "yarn",
                "factor": 4.0,
                "original_context_length": 16,
                "yarn_beta_fast": 2.0,
                "yarn_beta_slow": 0.05,
            },
        ),
        ("qwen2", {}),
        ("qwen3", {}),
        ("gemma3", {"type": "linear", "factor": 4.0}),
    ],
)
def test_a_model_of_transformers_comes_back(
    tmp_path: Path, name: str, scaling: dict[str, Any]
) -> None:
    folder, path = tmp_path / "folder", tmp_path / "model.gguf"
    shutil.copytree(FAMILIES / name, folder)
    fields: dict[str, Any] = {f"rope.scaling.{key}": value for key, value in scaling.items()}
    if name == "gemma3":  # no header states what scores are divided by
        change_json(folder / "config.json", query_pre_attn_scalar=8)
        fields["rope.freq_base_swa"] = 20.0
    golden_file(folder, path, **fields)
    assert_same(load_target(path, "float32"), load_target(folder, "float32"))


def check_loaded(target: Target, folder: Path, tensors: dict[str, Any]) -> None:
    """It is the target of the numbers that the `gguf` package makes of the tensors."""
    numbers = {
        name: (dequantize(content, GGMLQuantizationType[kind]), "F32")
        for name, (content, kind) in tensors.items()
    }
    path = folder / "numbers.gguf"
    write_gguf(path, FIELDS, numbers)
    dtype = jax.tree.leaves(target.params)[0].dtype
    assert_same(target, load_target(path, dtype))


@pytest.mark.parametrize("kind", SUPPORTED_KINDS)
def test_numbers_of_every_quantization(tmp_path: Path, kind: str) -> None:
    tensors = random_tensors(stored_shapes(CONFIG), kind)
    write_gguf(tmp_path / "model.gguf", FIELDS, tensors)
    target = load_target(tmp_path / "model.gguf", "float32")
    assert target.config == CONFIG
    check_loaded(target, tmp_path, tensors)


def test_every_device_of_a_mesh_gets_its_part(tmp_path: Path) -> None:
    """Parts of columns begin within a row of blocks, in bfloat16 all the way."""
    path = tmp_path / "model.gguf"
    write_gguf(path, FIELDS, Q4_K)
    target = load_target(path, mesh=make_mesh(data=2, model=2))
    check_loaded(target, tmp_path, Q4_K)
    kernel = target.params["layers"][0]["self_attn"]["o_proj"][...]
    assert {shard.data.shape for shard in kernel.addressable_shards} == {(128, 256)}


def test_any_part_stands_for_the_whole_model(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", FIELDS, Q4_K, tensors_per_part=5)
    parts = sorted(tmp_path.iterdir())
    assert [part.name for part in parts] == [f"model-0000{n}-of-00003.gguf" for n in (1, 2, 3)]
    for part in parts:
        check_loaded(load_target(part), tmp_path, Q4_K)


def test_a_digest_tells_of_a_header_in_a_part_of_its_own(tmp_path: Path) -> None:
    digests = []
    for theta in (1e4, 2e4):
        path = tmp_path / f"{theta:g}" / "model.gguf"
        path.parent.mkdir()
        fields = FIELDS | {"llama.rope.freq_base": theta}
        write_gguf(path, fields, Q4_K, tensors_per_part=99, header_apart=True)
        first, second = sorted(path.parent.iterdir())
        digests.append(open_target(first).digest())
        assert open_target(second).digest() == digests[-1]
    assert digests[0] != digests[1]


def test_factors_of_llama_3_are_those_of_its_configuration(tmp_path: Path) -> None:
    """The converter writes quotients of the frequencies, in `rope_freqs.weight`."""
    config = open_target(FAMILIES / "llama_llama3").config
    plain, scaled = (
        rotary_frequencies(config.head_dim, config.rope_theta, scaling)
        for scaling in (None, config.rope_scaling)
    )
    path = tmp_path / "model.gguf"
    fields = config_fields(config, "llama")
    tensors = random_tensors(stored_shapes(config), "F32")
    write_gguf(path, fields, {**tensors, "rope_freqs.weight": (plain / scaled, "F32")})
    found = open_target(path).config
    assert found.position_limit == config.max_position_embeddings
    assert isinstance(found.rope_scaling, LongRopeScaling)
    again = rotary_frequencies(found.head_dim, found.rope_theta, found.rope_scaling)
    np.testing.assert_allclose(again, scaled, rtol=1e-6)


def test_factors_for_short_texts_hold_up_to_the_original_context(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    short, long = (np.linspace(1, last, 32, dtype=np.float32) for last in (2, 8))
    fields = {
        "llama.rope.scaling.type": "longrope",
        "llama.rope.scaling.original_context_length": 16,
        "llama.rope.scaling.attn_factor": 1.25,
    }
    factors = {
        "rope_factors_short.weight": (short, "F32"),
        "rope_factors_long.weight": (long, "F32"),
    }
    write_gguf(path, FIELDS | fields, Q4_K | factors)
    config = open_target(path).config
    assert config.position_limit == 16
    scaling = config.rope_scaling
    assert isinstance(scaling, LongRopeScaling)
    assert scaling.attention_factor == 1.25
    np.testing.assert_allclose(
        rotary_frequencies(64, 1e4, scaling), 1e4 ** (-np.arange(0, 64, 2) / 64) / short, rtol=1e-6
    )
    convert(path, tmp_path / "folder")
    assert open_target(tmp_path / "folder").config == config


TEMPLATE = "{{ bos_token }}{% for turn in messages %}{{ turn.content }}{% endfor %}"


def test_a_converted_file_is_the_same_model_with_its_tokenizer_and_template(
    tmp_path: Path,
) -> None:
    config = dataclasses.replace(CONFIG, vocab_size=900, eos_token_ids=(1,))
    own = {"tokenizer.ggml.bos_token_id": 0, "tokenizer.chat_template": TEMPLATE}
    path, folder = tmp_path / "chat.gguf", tmp_path / "folder"
    write_random(path, "Q8_0", config, **tokenizer_fields("smollm"), **own)
    told, written = convert(path, folder)
    assert f"bytes, F32; it loads the same as {path}" in told
    assert written == (
        "Written: model.safetensors, config.json, tokenizer.json, tokenizer_config.json"
    )
    assert_same(load_target(folder, "float32"), load_target(path, "float32"))
    own_tokenizer = open_target(path).tokenizer
    for source in (path, folder):
        files = open_target(source)
        tokenizer = files.tokenizer
        assert tokenizer.get_vocab() == own_tokenizer.get_vocab()
        assert tokenizer.encode("the house").ids == own_tokenizer.encode("the house").ids
        template = find_template("tokenizer", files, "--chat-template ")
        assert template.end == "<|im_end|>"
        ids = encode_turns(template, tokenizer, [{"role": "user", "content": "the house"}])
        assert ids == [0, *tokenizer.encode("the house").ids]


def ones(*shape: int) -> tuple[np.ndarray, str]:
    """A tensor."""
    return np.ones(shape, np.float32), "F32"


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"llama.block_count": ...}, "does not state 'llama.block_count', which has no default"),
        ({"llama.block_count": 4000}, "states num_hidden_layers=4000, but the files hold only 12"),
        ({"llama.attention.head_count": [4, 4]}, r"head_count=\[4, 4\]; it must be a whole numb"),
        ({"llama.expert_count": 8}, "states llama.expert_count=8, which is not supported"),
        ({"llama.rope.dimension_count": 32}, "dimension_count=32, but heads are 64 wide"),
        ({"llama.rope.scaling.type": "su"}, "scaling of type 'su'; supported are 'none'"),
        ({"llama.rope.scaling.type": "longrope"}, "holds no tensor 'rope_factors_short"),
        ({"llama.rope.scaling.attn_factor": 2.0}, "only with scaling of type 'longrope'"),
        ({"token_embd.weight": ...}, "holds no tensor 'token_embd.weight'"),
        ({"blk.0.attn_q.weight": ...}, "holds no weight 'model.layers.0.self_attn.q_proj"),
        ({"blk.0.ffn_gate_inp.weight": ones(2, 32)}, "models of this architecture do not have"),
        ({"attn_q.weight": ones(2, 32)}, "models of this architecture do not have"),
        ({"output_norm.weight": ones(32)}, r"shape \(32,\), but the configuration asks for"),
        (
            {"blk.0.ffn_up.weight": (np.ones((256, 256), np.int8), "I8")},
            "is stored as I8; the supported",
        ),
        ({"rope_factors_long.weight": ones(32)}, "must be 'longrope', but it is 'none'"),
        (
            {"llama.rope.scaling.type": "linear", "rope_freqs.weight": ones(32)},
            "rotary factors and states scaling of type 'linear'",
        ),
        ({"rope_freqs.weight": ones(16)}, "rope_scaling has 16 factors; head_dim=64 needs 32"),
    ],
)
def test_files_that_hold_no_supported_model(
    tmp_path: Path, changes: dict[str, Any], sentence: str
) -> None:
    path = tmp_path / "model.gguf"
    fields, tensors = dict(FIELDS), dict(Q4_K)
    for name, value in changes.items():
        (tensors if name.endswith(".weight") else fields)[name] = value
    write_gguf(path, fields, tensors)
    with pytest.raises(InputError, match=sentence):
        load_target(path)


def test_other_architectures_are_refused_by_name(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", {}, {}, "mamba")
    with pytest.raises(InputError, match="has the architecture 'mamba'; supported are 'llama', "):
        load_target(tmp_path / "model.gguf")


def test_files_that_are_not_where_they_should_be(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"none\.gguf is missing; give the path of a GGUF file"):
        load_target(tmp_path / "none.gguf")
    path = tmp_path / "model.gguf"
    write_gguf(path, FIELDS, Q4_K)
    with pytest.raises(InputError, match=r"holds no config\.json; did you mean '.*model\.gguf'\?"):
        load_target(tmp_path)
    # Stores of other programs name files by their digests.
    path.rename(tmp_path / "sha256-12ab")
    assert open_target(tmp_path / "sha256-12ab").config == CONFIG
