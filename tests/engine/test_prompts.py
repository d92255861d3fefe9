import dataclasses
from collections import UserDict
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import random_drafter, random_target, tiny_config

from redrafter_jax import (
    InputError,
    KeptCache,
    RecurrentConfig,
    SamplingConfig,
    TreeConfig,
    generate,
    stream,
)
from redrafter_jax.config import DynamicScaling
from redrafter_jax.drafters.base import RootOnly, check_pair
from redrafter_jax.engine.messages import Request
from redrafter_jax.engine.requests import Batch, check_batch, row_arrays, slots_for, token_lists
from redrafter_jax.files.tree_table import TreeTable, TunedTree
from redrafter_jax.models.target import Target
from redrafter_jax.types import Requests

SHAPE = RecurrentConfig(vocab_size=24, hidden_size=32, exit_dim=8, num_draft_layers=0)
DRAFTER = random_drafter(SHAPE)
TABLE = TreeTable("cpu", "float32", (TunedTree(1, 0.0, TreeConfig(2, 2), 2.0, 2.0),))
CONFIG = tiny_config(max_position_embeddings=64, eos_token_ids=(3, 5))
TARGET = random_target(CONFIG)


def checked(**changes: Any) -> list[Request]:
    return check_batch(CONFIG, Batch([[1, 2, 3], [4]], 10)._replace(**changes))


def prepared(**changes: Any) -> Requests:
    """The arrays of both rows, which have room for as many stop tokens."""
    rows = [row_arrays(CONFIG, request, 16) for request in checked(**changes)]
    return jax.tree.map(lambda *one: np.concatenate(one), *rows)


def test_prompts_are_as_long_as_they_are_and_rows_have_limits_of_their_own() -> None:
    assert [request.prompt for request in checked()] == [[1, 2, 3], [4]]
    assert prepared().lengths.tolist() == [3, 1]
    assert prepared().limits.tolist() == [13, 11]
    # A row may fill every position of the target.
    assert prepared(max_new_tokens=[2, 63]).limits.tolist() == [5, 64]


def test_dynamic_scaling_says_why_it_ends() -> None:
    dynamic = dataclasses.replace(CONFIG, rope_scaling=DynamicScaling(4.0))
    with pytest.raises(InputError, match=r"64 positions \(past them, dynamic rotary scaling"):
        check_batch(dynamic, Batch([[1] * 64], 1))


@pytest.mark.parametrize(
    ("given", "stops"),
    [
        (None, [[3, 5], [3, 5]]),
        ([7], [[7], [7]]),
        ((), [[], []]),
        ([[7, 8], []], [[7, 8], []]),
        ([list(range(9)), (6,)], [list(range(9)), [6]]),
    ],
)
def test_stop_tokens_are_the_targets_the_callers_or_none_and_may_differ_row_by_row(
    given: Any, stops: list[list[int]]
) -> None:
    for request, own in zip(checked(eos_token_ids=given), stops, strict=True):
        assert request.stop_tokens == tuple(own)
        # -1 is no token: it stops no row.
        width = 16 if len(own) > 8 else 8
        assert row_arrays(CONFIG, request).stop_tokens.tolist() == [own + [-1] * (width - len(own))]
        assert row_arrays(CONFIG, request, 24).stop_tokens.shape == (1, 24)


@pytest.mark.usefixtures("unchecked_shapes")
def test_seeds_count_the_rows_unless_given_and_may_be_equal_and_arrays() -> None:
    assert prepared().sampling.seeds.tolist() == [0, 1]
    assert prepared(seeds=[2**31 - 1] * 2).sampling.seeds.tolist() == [2**31 - 1] * 2
    requests = prepared(max_new_tokens=np.array([3, 4]), seeds=np.array([5, 6]))
    assert (requests.limits - requests.lengths).tolist() == [3, 4]
    assert requests.sampling.seeds.tolist() == [5, 6]
    requests = prepared(seeds=jnp.array([5, 6]), eos_token_ids=jnp.array([7]))
    assert requests.sampling.seeds.tolist() == [5, 6]
    assert requests.stop_tokens[:, 0].tolist() == [7, 7]


# What a tokenizer of transformers returns for one text, and for two.
ONE: Any = UserDict(input_ids=[1, 2], attention_mask=[1, 1])
TWO: Any = {"input_ids": [[1, 2], [3]], "attention_mask": [[1, 1], [1]]}
MATRIX = np.array([[1, 2], [3, 4]])


@pytest.mark.parametrize(
    ("prompts", "expected"),
    [
        ([[1, 2], (3,)], [[1, 2], [3]]),
        ([np.array([1, 2]), jnp.array([3])], [[1, 2], [3]]),
        ([MATRIX[:1], MATRIX[1]], [[1, 2], [3, 4]]),
        (MATRIX, [[1, 2], [3, 4]]),
        (ONE, [[1, 2]]),
        (TWO, [[1, 2], [3]]),
        ([ONE, ONE], [[1, 2], [1, 2]]),
        ({"input_ids": MATRIX, "attention_mask": np.ones((2, 2))}, [[1, 2], [3, 4]]),
        ([[]], [[]]),  # for `check_batch` to refuse, and so is no prompt
        ([], []),
        ({"input_ids": [1, 2], "attention_mask": None}, [[1, 2]]),
    ],
)
def test_prompts_are_lists_arrays_or_what_a_tokenizer_returns(
    prompts: Any, expected: list[list[int]]
) -> None:
    lists = token_lists(prompts)
    assert lists == expected
    assert all(type(token) is int for row in lists for token in row)


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize(
    ("prompts", "sentence"),
    [
        ([7, 8], r"^Prompt 0 is 7; prompts are lists of token ids, one list per prompt\.$"),
        ([[1], "hello"], r"^Prompt 1 is 'hello'; prompts are lists of token ids"),
        ([MATRIX], r"^Prompt 0 is array.*; prompts are lists"),
        ([b"hello"], r"^Prompt 0 is b'hello'; prompts are lists of token ids"),
        ("hello", r"^prompts is 'hello'; give a list of token ids per prompt, or an array of"),
        (np.array([1, 2]), r"^prompts is array\(\[1, 2\]\); give a list of token ids per prompt"),
        ({"ids": [1]}, r"without 'input_ids'; .*apply_chat_template\(\.\.\.\)\[\"input_ids\"\]\.$"),
        (
            {"input_ids": MATRIX, "attention_mask": np.array([[1, 1], [0, 1]])},
            r"^prompts is padded: its attention_mask holds zeros; call the tokenizer without",
        ),
    ],
)
def test_other_prompts_are_refused(prompts: Any, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        token_lists(prompts)


def test_sampling_is_one_for_all_or_one_per_row() -> None:
    rows = [SamplingConfig(), SamplingConfig(0.5, top_k=100, top_p=0.25, min_p=0.125)]
    sampling = prepared(sampling=rows).sampling
    assert sampling.temperature.tolist() == [0.0, 0.5]
    # Absent filters keep everything; no more than the vocabulary can be kept.
    assert sampling.top_k.tolist() == [24, 24]
    assert sampling.top_p.tolist() == [1.0, 0.25]
    assert sampling.min_p.tolist() == [0.0, 0.125]
    sampling = prepared(sampling=SamplingConfig(2.0, top_k=4)).sampling
    assert sampling.temperature.tolist() == [2.0, 2.0]
    assert sampling.top_k.tolist() == [4, 4]


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"prompts": []}, "There are no prompts; "),
        ({"prompts": [[1], []]}, "Prompt 1 is empty; .* at least one token"),
        ({"prompts": [[1], [2, 24]]}, "Prompt 1 holds token 24, outside the vocabulary of 24 tok"),
        ({"prompts": [[1, 2], [1.5]]}, r"Prompt 1 holds 1\.5, which is not a token id; "),
        ({"max_new_tokens": [4, 0]}, "max_new_tokens of row 1 is 0; it must be 1 or more"),
        ({"max_new_tokens": "ab"}, "max_new_tokens of row 0 is 'ab'; .* whole number"),
        ({"max_new_tokens": 3.9}, r"max_new_tokens of row 0 is 3\.9; .* whole number"),
        (
            {"max_new_tokens": [4, 64]},
            "Row 1 asks for 64 new tokens after a prompt of 1, but .* 64 posit",
        ),
        (
            {"max_new_tokens": np.array(0)},
            r"max_new_tokens of row 0 is array\(0\); .* whole number",
        ),
        ({"max_new_tokens": [4]}, "max_new_tokens has 1 entries for 2 prompts; "),
        ({"seeds": [5]}, "seeds has 1 entries for 2 prompts; give one per prompt"),
        ({"seeds": 5}, "seeds is 5; give a list with one whole number per prompt"),
        ({"seeds": [0, 1.9]}, r"The seed of row 1 is 1\.9; .* whole number"),
        (
            {"seeds": [2**31, 0]},
            r"The seed of row 0 is 2147483648; it must be from 0 to 2",
        ),
        ({"sampling": [SamplingConfig(), None]}, "sampling of row 1 is None; give a SamplingConf"),
        ({"eos_token_ids": np.array(5)}, r"eos_token_ids is array\(5\); give a list of token ids"),
        ({"eos_token_ids": 5}, "eos_token_ids is 5; give a list of token ids, or such a list per"),
        (
            {"eos_token_ids": [True]},
            "eos_token_ids holds True, which is not a token id; give lists",
        ),
        (
            {"eos_token_ids": [[1], 2]},
            "eos_token_ids of row 1 is 2, but another row has a list; give",
        ),
        ({"eos_token_ids": [[1], [24]]}, "eos_token_ids of row 1 holds token 24, outside the voc"),
        # A row that is alone is not counted.
        ({"prompts": [[]]}, "The prompt is empty; "),
        (
            {"prompts": [[1]], "max_new_tokens": 64},
            "The request is for 64 new tokens after a prompt of 1",
        ),
        ({"prompts": [[1]], "sampling": 0.7}, r"sampling is 0\.7; give a SamplingConfig"),
    ],
)
def test_bad_requests_get_one_sentence(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InputError, match=rf"^{sentence}[^\n]*\.$"):
        checked(**changes)


@pytest.mark.parametrize(
    ("sizes", "tree", "sentence"),
    [
        ({"hidden_size": 16}, {}, "The drafter's hidden_size is 16 and the target's is 32; "),
        ({"vocab_size": 25}, {}, "The drafter's vocab_size is 25 and the target's is 24; "),
        (
            {"context_layers": (0, 1)},
            {},
            r"context_layers holds 1; the last layer of this target is 1 and is always read",
        ),
        ({}, {"beam_width": 24, "candidates": 24}, None),
        ({}, {"beam_width": 25}, r"^TreeConfig\.beam_width is 25, more than the 24 tokens that"),
        ({}, {"candidates": 25}, r"^TreeConfig\.candidates is 25, more than .* 24 tokens"),
        ({}, {"lookup_tokens": 59}, None),
        (
            {},
            {"lookup_tokens": 60},
            r"^TreeConfig\.draft_rounds is 4 and lookup_tokens 60, .* 64 positions; draft fewer",
        ),
    ],
)
def test_a_drafter_and_a_draft_must_fit_the_target(
    sizes: dict[str, Any], tree: dict[str, Any], sentence: str | None
) -> None:
    shape: dict[str, Any] = {"vocab_size": 24, "hidden_size": 32, "exit_dim": 8}
    drafter = RecurrentConfig(**(shape | sizes), num_draft_layers=0)
    with pytest.raises(InputError, match=sentence) if sentence else nullcontext():
        check_pair(CONFIG, drafter, TreeConfig(**tree))


def test_long_rows_come_in_few_sizes() -> None:
    assert [slots_for(tokens, 5) for tokens in (1, 251, 252, 4091)] == [256, 256, 512, 4096]
    assert [slots_for(tokens, 5) for tokens in (4092, 8187, 8188, 20000)] == [
        4608,
        8192,
        9216,
        20480,
    ]
    sizes = {slots_for(tokens, 5) for tokens in range(1, 32768)}
    # 16 up to 4096, and eight from each power of two to the next.
    assert len(sizes) == 16 + 8 * 3 + 1


def test_a_kept_cache_must_hold_the_rows_and_their_tokens() -> None:
    # 4 + 5 tokens are the most.
    two, three = (
        check_batch(TARGET.config, Batch(prompts, 5))
        for prompts in ([[1] * 4, [2]], [[1], [2], [3]])
    )
    how = (None, None, False, None)
    kept = KeptCache(9)
    engine = kept.engine_for(TARGET, RootOnly(), two, *how)
    assert engine.slots == 2
    assert kept.engine_for(TARGET, RootOnly(), two, *how) is engine
    with pytest.raises(
        InputError, match="9 tokens, prompt included, but kept_cache has room for 8"
    ):
        KeptCache(8).engine_for(TARGET, RootOnly(), two, *how)
    with pytest.raises(InputError, match="kept_cache has 2 rows, but there are 3 prompts"):
        kept.engine_for(TARGET, RootOnly(), three, *how)


def first_update(*models: Any, **arguments: Any) -> None:
    next(stream(*models, **arguments))


@pytest.mark.usefixtures("nothing_compiles", "unchecked_shapes")
@pytest.mark.parametrize("entry", [generate, first_update])
@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"prompts": {"input_ids": np.array([[24]])}}, "outside the vocabulary"),
        ({"tree": TreeConfig(25, 2)}, "beam_width is 25"),
        ({"tree": 8}, r"^tree is 8; give a TreeConfig\.$"),
        ({"drafter": None, "tree": TreeConfig()}, "but there is no drafter; leave"),
        ({"drafter": None, "tree": TABLE}, "a table of trees, but there is no drafter; leave"),
        (
            {"drafter": "self:int4"},
            r"^drafter is .*; give the result of load_drafter, .* or None",
        ),
        ({"target": DRAFTER}, r"^target is Model\(.*; give the result of load_target"),
        ({"target": "x"}, r"^target is 'x'; give the result of load_target"),
    ],
)
def test_every_entry_refuses_before_it_compiles(
    target: Target, entry: Callable[..., Any], changes: dict[str, Any], sentence: str
) -> None:
    asked: dict[str, Any] = {"target": target, "drafter": DRAFTER, "prompts": [[1, 2]]}
    with pytest.raises(InputError, match=sentence):
        entry(**asked | {"max_new_tokens": 4} | changes)
