"""EAGLE heads in decoding; what they compute is held to the authors' code in test_eagle_golden."""

import re
from typing import Any, Literal

import jax.numpy as jnp
import pytest
from small_batch import MIXED, PROMPTS
from tiny_models import cast, imitating_eagle, random_drafter

from redrafter_jax import InputError, TreeConfig, generate, generate_autoregressive, make_mesh
from redrafter_jax.drafters.base import as_drafter
from redrafter_jax.drafters.eagle_head import EagleConfig
from redrafter_jax.models.target import Target
from redrafter_jax.parallel.mesh import place

pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.mark.parametrize(
    ("version", "tree"),
    [
        pytest.param("3", TreeConfig(beam_width=1, draft_rounds=1), marks=pytest.mark.long),
        pytest.param(
            "3",
            TreeConfig(beam_width=5, draft_rounds=4, num_nodes=9, final_beams_only=True),
            marks=pytest.mark.long,
        ),
        pytest.param(
            "1",
            TreeConfig(beam_width=2, draft_rounds=2, candidates=6, sharpness=2.0),
            marks=pytest.mark.long,
        ),
        ("1", TreeConfig(beam_width=3, draft_rounds=2, num_nodes=20, rerank=True, lookup_tokens=2)),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.long)])
def test_texts_are_the_targets_own_with_every_tree(
    habitual_target: Target, version: Literal["1", "3"], tree: TreeConfig, dtype: str
) -> None:
    """Also with a head of another dtype than the target's, in whose dtype the cache is."""
    head = cast(imitating_eagle(habitual_target, version), dtype)
    options: dict[str, Any] = {"max_new_tokens": 16, "sampling": MIXED}
    result = generate(habitual_target, head, PROMPTS, tree=tree, **options)
    expected = generate_autoregressive(habitual_target, PROMPTS, **options)
    assert result.tokens == expected.tokens
    assert result.acceptance_length > 1.3


def test_the_tree_of_the_authors_is_the_default() -> None:
    shape = EagleConfig(100, 8, "3", 8, 12, 2, 1, 4)
    tree = as_drafter(random_drafter(shape)).default_tree
    assert tree == TreeConfig(beam_width=10, draft_rounds=8, num_nodes=60, rerank=True)
    few = as_drafter(random_drafter(EagleConfig(9, 8, "3", 8, 12, 2, 1, 4)))
    tree = few.default_tree
    assert tree is not None
    few.check_tree(tree)


def test_a_mesh_that_does_not_divide_the_heads_is_refused(habitual_target: Target) -> None:
    shape = EagleConfig(24, 32, "3", 32, 48, 3, 3, 8, context_layers=(0,))
    mesh = make_mesh(model=2)
    head = place(random_drafter(shape), mesh)
    words = "model=2, which does not divide the EAGLE head's num_attention_heads of 3; give model=1"
    with pytest.raises(InputError, match=re.escape(words)):
        generate(place(habitual_target, mesh), head, PROMPTS, max_new_tokens=2)


def test_a_head_keeps_one_layer_in_the_cache(habitual_target: Target) -> None:
    drafter = as_drafter(imitating_eagle(habitual_target, "3"))
    assert drafter.cache == (1, 4, 8)
    own = drafter.empty(habitual_target.merge(), 3)
    assert (own.shape, own.dtype) == ((3, 32), jnp.float32)
