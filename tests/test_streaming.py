"""Decoding as it happens: what is new, its text, and the strings that end a row."""

import gc
from itertools import islice
from typing import Any

import jax
import numpy as np
import pytest
from small_batch import DRAFT, MIXED, PROMPTS
from tiny_folders import decode, encode
from tiny_models import random_target

from redrafter_jax import InputError, KeptCache, generate, generate_autoregressive, stream
from redrafter_jax.drafters.base import LoadedHead
from redrafter_jax.models.attention import PAGE
from redrafter_jax.models.target import Target
from redrafter_jax.parallel.mesh import to_host

pytestmark = pytest.mark.usefixtures("quick_compilation")

# The same in nearly all tests, so that they share what is compiled.
OPTIONS: dict[str, Any] = {
    "max_new_tokens": [5, 1, 24, 17],
    "sampling": MIXED,
    "log_probs": True,
}
TEXTS: dict[str, Any] = {"max_new_tokens": 24, "eos_token_ids": (), "log_probs": True}


@pytest.mark.parametrize("steps", [pytest.param(1, marks=pytest.mark.long), 3])
def test_the_updates_together_are_what_generate_returns(
    habitual_target: Target, good_drafter: LoadedHead, steps: int
) -> None:
    models = habitual_target, good_drafter
    whole = generate(*models, PROMPTS, tree=DRAFT, **OPTIONS)
    updates = list(stream(*models, PROMPTS, tree=DRAFT, steps_per_yield=steps, **OPTIONS))
    assert [len(row) for row in updates[0].tokens] == [1, 1, 1, 1], "prefill decides the first"
    assert len(updates) == 1 + -(-max(whole.steps) // steps)
    # Old updates are whole after the stream has ended: the state is donated, they are not.
    so_far: list[list[int]] = [[] for _ in PROMPTS]
    for update in updates:
        assert any(update.tokens)
        so_far = [old + new for old, new in zip(so_far, update.tokens, strict=True)]
        assert update.generation.tokens == so_far
    last = updates[-1].generation
    assert last.tokens == whole.tokens
    assert last.steps == whole.steps
    assert last.acceptance_length == whole.acceptance_length
    assert last.log_probs is not None
    for ours, theirs in zip(last.log_probs, whole.log_probs or [], strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-6)


def test_an_update_brings_what_is_new_to_the_host_and_not_the_whole_text(
    habitual_target: Target, good_drafter: LoadedHead, monkeypatch: pytest.MonkeyPatch
) -> None:
    brought: list[int] = []

    def count(values: Any) -> Any:
        brought.append(sum(leaf.size for leaf in jax.tree.leaves(values)))
        return to_host(values)

    monkeypatch.setattr("redrafter_jax.engine.engine.to_host", count)
    options: dict[str, Any] = OPTIONS | {"max_new_tokens": [200, 1, 24, 17]}
    whole = list(stream(habitual_target, good_drafter, PROMPTS, tree=DRAFT, **options))
    assert len(brought) == len(whole)
    # Of four rows of 200 tokens and more.
    assert max(brought) < 200


def test_pieces_are_the_text_by_tokens(habitual_target: Target, good_drafter: LoadedHead) -> None:
    options: dict[str, Any] = TEXTS | {"detokenize": decode}
    for update in stream(habitual_target, good_drafter, PROMPTS, tree=DRAFT, **options):
        for tokens, text, pieces in zip(update.tokens, update.texts, update.pieces, strict=True):
            assert [piece.id for piece in pieces] == tokens
            assert "".join(piece.text for piece in pieces) == text
            # Of a target call the last token is the target's own.
            last = {piece.call: piece.origin for piece in pieces}
            assert set(last.values()) <= {None}


def test_what_ends_a_row_is_no_part_of_its_text(habitual_target: Target) -> None:
    # No token of this tokenizer is special, so that decoding shows them all.
    (whole,) = generate_autoregressive(
        habitual_target, PROMPTS[:1], max_new_tokens=24, eos_token_ids=()
    ).tokens
    end = whole[7]
    (*_, last) = updates = list(
        stream(
            habitual_target,
            None,
            PROMPTS[:1],
            max_new_tokens=24,
            eos_token_ids=[end],
            detokenize=decode,
        )
    )
    said = whole[: whole.index(end)]
    assert "".join(update.texts[0] for update in updates) == decode(said)
    assert last.generation.texts == [decode(said)]
    assert last.generation.tokens == [[*said, end]]


def test_closing_a_stream_frees_its_state(
    habitual_target: Target, good_drafter: LoadedHead
) -> None:
    def run(count: int) -> Any:
        updates = stream(habitual_target, good_drafter, PROMPTS, tree=DRAFT, **OPTIONS)
        for _ in range(count):
            next(updates)
        return updates

    run(3).close()
    gc.collect()
    before = len(jax.live_arrays())
    updates = run(1)
    assert len(jax.live_arrays()) > before
    updates.close()
    gc.collect()
    assert len(jax.live_arrays()) == before


def test_a_kept_cache_never_changes_what_is_said(
    habitual_target: Target, good_drafter: LoadedHead
) -> None:
    kept = KeptCache(context_length=150)
    options: dict[str, Any] = {"sampling": MIXED[1], "tree": DRAFT}

    def say(prompt: list[int], limit: int = 12, updates: int = 99) -> list[int]:
        said = stream(
            habitual_target,
            good_drafter,
            [prompt],
            max_new_tokens=limit,
            kept_cache=kept,
            **options,
        )
        tokens = [token for update in islice(said, updates) for token in update.tokens[0]]
        said.close()
        return tokens

    def alone(prompt: list[int]) -> list[int]:
        plain = generate_autoregressive(
            habitual_target, [prompt], max_new_tokens=12, sampling=MIXED[1]
        )
        return plain.tokens[0]

    first = (PROMPTS[2] * PAGE)[: PAGE + 5]
    answer = say(first)
    assert answer == alone(first)
    # The next turn goes on from all of it; then from a stream that was closed early; then from
    # half a text; then from nothing.
    second = [*first, *answer, 4, 4]
    part = say(second, updates=3)
    assert part == alone(second)[: len(part)]
    for prompt in ([*second, *part, 1], [*second[: PAGE + 2], 2, 7], [8, 1]):
        assert say(prompt) == alone(prompt)
    # What a step that was interrupted left behind is gone, and is read again.
    assert kept._engine is not None
    kept._engine.state.root.delete()
    assert say(second) == alone(second)
    with pytest.raises(InputError, match="but kept_cache has room for 150"):
        say(second, limit=250)
    assert say(first) == answer


def test_rows_stop_each_at_its_own_string_and_the_others_go_on(
    habitual_target: Target, good_drafter: LoadedHead
) -> None:
    prompts = [encode(text) for text in ("abc", "wv", "b\ncd", "d")]
    plain = generate_autoregressive(habitual_target, prompts, **TEXTS)
    texts = [decode(row) for row in plain.tokens]
    stops = [[texts[0][7:10]], ["not in it"], ["nor this", texts[2][20:22]], []]
    options: dict[str, Any] = {"tree": DRAFT, "detokenize": decode, "stop_strings": stops}
    updates = list(stream(habitual_target, good_drafter, prompts, **options, **TEXTS))
    last = updates[-1].generation
    assert last.log_probs is not None
    for row, (text, own) in enumerate(zip(texts, stops, strict=True)):
        stop = next((stop for stop in own if stop in text), "")
        end = text.index(stop) if stop else len(text)
        assert "".join(update.texts[row] for update in updates) == text[:end]
        # A token a character: up to the last character of the stop string.
        tokens = [token for update in updates for token in update.tokens[row]]
        assert tokens == last.tokens[row] == plain.tokens[row][: end + len(stop)]
        assert len(last.log_probs[row]) == len(tokens)
    assert last.steps[0] < last.steps[1], "a stopped row takes no more steps"


@pytest.mark.usefixtures("unchecked_shapes", "nothing_compiles")
@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"steps_per_yield": 0}, r"^steps_per_yield is 0; it must be 1 or more\.$"),
        (
            {"stop_strings": ["x"], "detokenize": None},
            r"^stop_strings is given without detokenize, .*; give tokenizer=load_tokenizer",
        ),
        ({"stop_strings": [["x"], [""]]}, r"^stop_strings of row 1 holds an empty string"),
        ({"stop_strings": [["x"]]}, r"^stop_strings has 1 entries for 2 prompts; give one value"),
        (
            {"stop_strings": [["x"], "y"]},
            r"^stop_strings of row 1 is 'y', but another row has a list; give",
        ),
        ({"stop_strings": [[1], [2]]}, r"^stop_strings of row 0 is \[1\]; it must hold strings"),
        ({"stop_strings": "x"}, r"^stop_strings is 'x'; give a list of strings"),
        ({"kept_cache": 60}, r"^kept_cache is 60; give a KeptCache"),
    ],
)
def test_bad_values_are_one_sentence(
    target: Target, changes: dict[str, Any], sentence: str
) -> None:
    options: dict[str, Any] = {"max_new_tokens": 4, "detokenize": decode}
    with pytest.raises(InputError, match=sentence):
        next(stream(target, None, [[1], [2]], **(options | changes)))


def test_a_kept_cache_has_room_for_a_text_and_is_of_one_target(target: Target) -> None:
    with pytest.raises(InputError, match=r"^context_length is 0; it must be 1 or more"):
        KeptCache(context_length=0)
    kept = KeptCache(context_length=60)
    next(stream(target, None, [[1]], max_new_tokens=4, kept_cache=kept))
    with pytest.raises(InputError, match=r"^kept_cache belongs to another target; make a new"):
        next(stream(random_target(target.config), None, [[1]], max_new_tokens=4, kept_cache=kept))
