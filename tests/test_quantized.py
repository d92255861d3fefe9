"""Speculation over a quantized target: its own text, with every drafter and on a mesh."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
from small_batch import MIXED, PROMPTS
from tiny_gguf import CONFIG as WIDE
from tiny_models import (
    forgetful_target,
    imitating_drafter,
    imitating_medusa,
    logits_error,
    random_target,
    tiny_config,
)

from redrafter_jax import (
    InputError,
    TreeConfig,
    generate,
    generate_autoregressive,
    load_target,
    save_target,
)
from redrafter_jax.config.quantization import Quantization
from redrafter_jax.drafters.lookup import PromptLookup
from redrafter_jax.models.quantize import quantize_model
from redrafter_jax.models.target import Target
from redrafter_jax.parallel.mesh import make_mesh, place

pytestmark = pytest.mark.usefixtures("quick_compilation")

V = 24
KINDS = ["recurrent", "recurrent, the target's head", "Medusa", "lookup", "with lookup"]
TREE = TreeConfig(beam_width=4, draft_rounds=3, num_nodes=8)
REQUESTS: dict[str, Any] = {
    "prompts": PROMPTS,
    "max_new_tokens": 30,
    "sampling": MIXED,
    "eos_token_ids": (),
}


@cache
def plain_target() -> Target:
    # 64 is a group of int4, 48 is none.
    return forgetful_target(memory=0.15, config=tiny_config(intermediate_size=64))


@cache
def drafters() -> dict[str, Any]:
    """Every kind, with its heads quantized where it has one."""
    eight, target = Quantization.of("int8"), plain_target()
    recurrent = quantize_model(imitating_drafter(target), eight)
    borrowing = imitating_drafter(target, head="target", draft_tokens=tuple(range(1, V)))
    return {
        "recurrent": (recurrent, TREE),
        "recurrent, the target's head": (quantize_model(borrowing, eight), TREE),
        "Medusa": (quantize_model(imitating_medusa(target), eight), TREE),
        "lookup": (PromptLookup(), TreeConfig(beam_width=1, draft_rounds=3)),
        "with lookup": (recurrent, TreeConfig(4, 3, num_nodes=10, lookup_tokens=3)),
    }


@pytest.mark.parametrize(
    ("form", "kinds"),
    [
        ("int8", KINDS),
        ("int4", KINDS),
        ("fp8", KINDS),
    ],
)
@pytest.mark.long
def test_the_text_is_the_quantized_targets_own(form: Any, kinds: Any) -> None:
    target = quantize_model(plain_target(), Quantization.of(form))
    assert logits_error(target, plain_target()) > 1e-4, "the numbers did change"
    expected = generate_autoregressive(target, **REQUESTS).tokens
    for kind in kinds:
        drafter, tree = drafters()[kind]
        result = generate(target, drafter, tree=tree, **REQUESTS)
        assert result.tokens == expected, kind
        assert result.acceptance_length > (1.0 if kind == "lookup" else 1.5), kind


@pytest.mark.long
@pytest.mark.parametrize("form", ["int8", "int4"])
def test_scales_are_split_with_their_weights(tmp_path: Path, form: Any) -> None:
    target = quantize_model(random_target(WIDE), Quantization.of(form))
    save_target(target, tmp_path)
    mesh = make_mesh(data=2, model=2)
    split: Any = load_target(tmp_path, "float32", mesh)
    layer = split.params["layers"][0]
    # Two groups of 128 inputs, or one of all 256.
    groups = 2 if form == "int4" else 1
    for name, codes, scale in (
        ("o_proj", (128, 256), (1, 256)),
        ("qkv_proj", (256, 256), (groups, 256)),
    ):
        weight = layer["self_attn"][name].get_value()
        assert {shard.data.shape for shard in weight.codes.addressable_shards} == {codes}
        assert {shard.data.shape for shard in weight.scale.addressable_shards} == {scale}
    requests: dict[str, Any] = REQUESTS | {"max_new_tokens": 12}
    drafter = quantize_model(imitating_drafter(random_target(WIDE)), Quantization.of(form))
    expected = generate_autoregressive(target, **requests).tokens
    assert generate(split, place(drafter, mesh), tree=TREE, **requests).tokens == expected


def test_a_mesh_that_would_split_a_group_is_refused(tmp_path: Path) -> None:
    # Three groups of 32.
    config = tiny_config(intermediate_size=96)
    target = quantize_model(random_target(config), Quantization.of("int4"))
    save_target(target, tmp_path)
    mesh = make_mesh(model=2)
    sentence = r"model=2, which does not divide the 3 groups of .*down_proj'; give model=1"
    with pytest.raises(InputError, match=sentence):
        load_target(tmp_path, mesh=mesh)
    with pytest.raises(InputError, match=sentence):
        place(target, mesh)
