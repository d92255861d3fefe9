import inspect
import re
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import chex
import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from cached import layers_of
from engine_runs import read_batch
from flax import nnx
from small_batch import DRAFT, MIXED, PROMPTS
from tiny_models import PARITY_CONFIG, imitating_drafter, tiny_config
from trees import tree_of

from redrafter_jax import (
    SamplingConfig,
    TreeConfig,
    generate,
    generate_autoregressive,
)
from redrafter_jax.decoding.step import finish
from redrafter_jax.drafters.base import LoadedHead, RootOnly, bind_drafter
from redrafter_jax.engine import runner
from redrafter_jax.engine.device import decode_rows
from redrafter_jax.engine.requests import Batch, slots_for
from redrafter_jax.engine.state import row_shapes
from redrafter_jax.models.projection import Lender
from redrafter_jax.models.target import Target
from redrafter_jax.parallel.model import Model
from redrafter_jax.sampling import draw_noise
from redrafter_jax.types import DecodeState, StepTrace, Verified

pytestmark = pytest.mark.usefixtures("quick_compilation")

V = PARITY_CONFIG.vocab_size


@jax.jit
def forward(target: Target, text: Any) -> tuple[jax.Array, jax.Array]:
    decoder = target.merge()
    hidden, _, _ = decoder.forward(text)
    return hidden, decoder.logits(hidden)


def whole_pass(
    target: Target, prompt: Sequence[int], tokens: list[int]
) -> tuple[np.ndarray, np.ndarray]:
    """Hidden states and scores behind each new token: one pass over the text, without a cache."""
    text = np.zeros((1, 256), np.int32)  # one shape for all; nothing sees the padding
    text[0, : len(prompt) + len(tokens)] = [*prompt, *tokens]
    before = len(prompt) - 1 + np.arange(len(tokens))
    hidden, logits = (np.asarray(values[0], np.float64) for values in forward(target, text))
    return hidden[before], logits[before]


def test_plain_decoding_chooses_by_a_whole_pass_and_the_noise_of_seed_and_position(
    target: Target,
) -> None:
    seeds = [0, 7, 7, 123456789]
    plain = generate_autoregressive(target, PROMPTS, max_new_tokens=12, sampling=MIXED, seeds=seeds)
    sampling = oracles.sampling_arrays(MIXED, seeds, V)
    noise = np.asarray(draw_noise(sampling, jnp.asarray([len(row) for row in PROMPTS]), 12, V))
    for row, prompt in enumerate(PROMPTS):
        _, logits = whole_pass(target, prompt, plain.tokens[row])
        scores = np.stack([oracles.filtered_scores(each, MIXED[row]) for each in logits])
        assert plain.tokens[row] == (scores + noise[row]).argmax(axis=-1).tolist()


ALL_ROWS = jnp.arange(len(PROMPTS))


def test_the_context_holds_the_layers_that_the_drafter_reads(habitual_target: Target) -> None:
    head = imitating_drafter(habitual_target, context_layers=(0,))
    drafter, tree = bind_drafter(head, DRAFT)
    state = read_batch(habitual_target, drafter, Batch(PROMPTS, [24] * 4), tree)
    state, (gains, _) = decode_rows(
        habitual_target, drafter, state, ALL_ROWS, 3, tree=tree, steps=3
    )
    assert int(gains.counts.max()) > 1, "some drafts came true"
    # The first layer's hidden states are the last ones of the target that ends there.
    decoder = habitual_target.merge()
    decoder.layers = nnx.List([decoder.layers[0]])
    shallow = Model.split(tiny_config(num_hidden_layers=1), decoder)
    D = PARITY_CONFIG.hidden_size
    for row, length in enumerate(state.cache.lengths.tolist()):
        decided = state.tokens[row, : length + 1].tolist()
        for part, target in ((slice(0, D), shallow), (slice(D, 2 * D), habitual_target)):
            hidden, _ = whole_pass(target, decided[:1], decided[1:])
            np.testing.assert_allclose(state.own[row, part], hidden[-1], rtol=0, atol=2e-5)


def shapes_in_loops(jaxpr: jax.extend.core.Jaxpr, *, within: bool = False) -> Iterator[Any]:
    """Shapes of all arrays that are made inside of loops."""
    for equation in jaxpr.eqns:
        if within:
            yield from (getattr(one.aval, "shape", ()) for one in equation.outvars)
        inside = within or equation.primitive.name == "while"
        for parameter in jax.tree.leaves(equation.params):
            inner = getattr(parameter, "jaxpr", parameter)
            if isinstance(inner, jax.extend.core.Jaxpr):
                yield from shapes_in_loops(inner, within=inside)


@pytest.mark.parametrize("prepared", [True, False])
def test_a_smaller_head_of_the_targets_is_gathered_once_and_not_in_every_step(
    habitual_target: Target, prepared: bool
) -> None:
    head = imitating_drafter(habitual_target, head="target", draft_tokens=tuple(range(1, V)))
    drafter, tree = bind_drafter(head, DRAFT)
    drafter = drafter.prepare(Lender(habitual_target)) if prepared else drafter
    state = row_shapes(habitual_target, drafter, 4, 256, 8)
    decode = partial(decode_rows, tree=tree, steps=3)
    loop = jax.make_jaxpr(decode)(habitual_target, drafter, state, ALL_ROWS, 3)
    gathered = PARITY_CONFIG.hidden_size, V - 1
    assert (gathered in set(shapes_in_loops(loop.jaxpr))) != prepared


@pytest.mark.parametrize(
    "draft",
    [
        None,
        DRAFT,
        pytest.param(TreeConfig(2, 2, lookup_tokens=3), marks=pytest.mark.long),
    ],
    ids=["baseline", "speculative", "with prompt lookup"],
)
def test_no_step_copies_the_cache(
    habitual_target: Target, good_drafter: LoadedHead, draft: TreeConfig | None
) -> None:
    drafter, tree = bind_drafter(good_drafter if draft else None, draft)
    state = row_shapes(habitual_target, drafter, 4, 256, 8)
    program = decode_rows.lower(
        habitual_target, drafter, state, ALL_ROWS, jnp.int32(3), tree=tree, steps=3
    )
    program = str(program.compile().as_text())
    cache = ",".join(map(str, state.cache.keys[0].shape))
    assert f"f32[{cache}]" in program
    assert not re.search(rf"= f32\[{cache}\]\S* copy\(", program)


def test_a_done_row_never_changes_again(habitual_target: Target, good_drafter: LoadedHead) -> None:
    drafter, tree = bind_drafter(good_drafter, DRAFT)
    state = read_batch(habitual_target, drafter, Batch(PROMPTS, [1, 24, 24, 24]), tree)
    # A copy, for a state is donated.
    start = jax.tree.map(np.array, state)
    assert start.done.tolist() == [True, False, False, False]
    state, (gains, done) = decode_rows(
        habitual_target, drafter, state, ALL_ROWS, 3, tree=tree, steps=3
    )
    length = int(start.cache.lengths[0])
    assert int(state.cache.lengths[0]) == length
    assert state.tokens[0, : length + 1].tolist() == start.tokens[0, : length + 1].tolist()
    for before, after in zip(layers_of(start.cache), layers_of(state.cache), strict=True):
        np.testing.assert_array_equal(before[0, :, :length], after[0, :, :length])
    assert int(state.root[0]) == int(start.root[0])
    np.testing.assert_array_equal(state.own[0], start.own[0])
    assert done.tolist() == [True, False, False, False]
    assert (gains.counts > 0).sum(axis=1).tolist() == [0, 3, 3, 3]


def test_log_probabilities_are_the_targets_before_filters_and_statistics_add_up(
    habitual_target: Target, good_drafter: LoadedHead
) -> None:
    limits = [5, 1, 24, 17]
    options: dict[str, Any] = {"max_new_tokens": limits, "sampling": MIXED, "log_probs": True}
    plain = generate_autoregressive(habitual_target, PROMPTS, **options)
    speculative = generate(habitual_target, good_drafter, PROMPTS, tree=DRAFT, **options)
    assert speculative.tokens == plain.tokens
    assert plain.log_probs is not None
    assert speculative.log_probs is not None
    for row, prompt in enumerate(PROMPTS):
        tokens = plain.tokens[row]
        _, logits = whole_pass(habitual_target, prompt, tokens)
        expected = oracles.log_softmax(logits)[np.arange(len(tokens)), tokens]
        np.testing.assert_allclose(plain.log_probs[row], expected, atol=2e-5)
        np.testing.assert_allclose(speculative.log_probs[row], expected, atol=2e-5)
    counts = speculative.accept_counts
    assert counts.shape == (4, DRAFT.max_path)
    assert counts.sum(axis=1).tolist() == speculative.steps
    # The first token of each row is prefill's, so a row of one token needs no call.
    gained = counts @ np.arange(1, 5)
    assert gained.tolist() == [limit - 1 for limit in limits]
    assert speculative.acceptance_length == pytest.approx(gained.sum() / sum(speculative.steps))


def test_values_never_recompile_nor_does_another_tree_what_reads_prompts(
    monkeypatch: pytest.MonkeyPatch, target: Target, drafter: LoadedHead
) -> None:
    chex.clear_trace_counter()

    def let_be_traced_once(name: str, *static: str) -> None:
        inner = inspect.unwrap(getattr(runner, name))

        def traced(*arguments: Any, **keywords: Any) -> Any:
            return inner(*arguments, **keywords)

        # Chex counts by name.
        traced.__name__ = name
        counted = chex.assert_max_traces(traced, n=1)
        function = jax.jit(counted, donate_argnums=2, static_argnames=static)
        monkeypatch.setattr(runner, name, function)

    let_be_traced_once("read_rows", "top")
    other_tree = TreeConfig(1, 1, lookup_tokens=2)
    generate(target, drafter, PROMPTS, max_new_tokens=4, tree=other_tree)
    let_be_traced_once("decode_rows", "tree", "steps", "top")
    run = partial(generate, target, drafter, tree=DRAFT)
    run(PROMPTS, max_new_tokens=10)
    run([[1], [2, 3], [4] * 16, [5]], max_new_tokens=[1, 12, 2, 7], seeds=[9, 9, 1, 0])
    run(PROMPTS, max_new_tokens=10, sampling=MIXED, eos_token_ids=[5])
    run(PROMPTS, max_new_tokens=10, eos_token_ids=[[5, 6, 7], [], [1], [2, 3]])
    run(PROMPTS, max_new_tokens=3, sampling=SamplingConfig(0.31, 3, 0.5, 0.01))


@pytest.mark.parametrize("spare", [-1, pytest.param(0, marks=pytest.mark.long)])
def test_a_row_that_ends_at_the_edge_of_the_cache_keeps_its_text(
    habitual_target: Target, good_drafter: LoadedHead, spare: int
) -> None:
    # It is done before the others, whose steps go on. P = 4: of 256 slots a row may fill 252.
    early = [5] * (256 - 4 - 4 - spare)
    prompts = [early, *PROMPTS[1:]]
    assert slots_for(len(early) + 4, DRAFT.max_path) == (256 if spare >= 0 else 512)
    result = generate(
        habitual_target, good_drafter, prompts, max_new_tokens=[4, 20, 20, 20], tree=DRAFT
    )
    assert len(result.tokens[0]) == 4
    _, logits = whole_pass(habitual_target, early, result.tokens[0])
    assert result.tokens[0] == logits.argmax(axis=-1).tolist()


def test_accepted_nodes_are_counted_by_the_drafter_that_proposed_them(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Root, two nodes of the drafter and three of prompt lookup. Row 0 is done, row 1 has room for
    # two tokens, row 2 accepts one of the first and all of the second, row 3 the first two.
    state = read_batch(target, RootOnly(), Batch(PROMPTS, [1, 3, 9, 9]), None)
    from_root, below_first, longer = [0, 0, 0, 0, 3, 4], [0, 0, 0, 1, 3, 4], [0, 0, 1, 0, 3, 4]
    tree = tree_of([[9, 1, 2, 3, 3, 3]] * 4, [from_root, from_root, below_first, longer])
    tree = tree._replace(origin=jnp.broadcast_to(jnp.asarray([-1, 0, 0, 1, 1, 1]), (4, 6)))
    B, N = tree.tokens.shape
    choices = jnp.asarray(
        [[3, 9, 9, 3, 3, 7], [3, 9, 9, 3, 3, 7], [1, 3, 9, 3, 3, 7], [1, 2, 7, 9, 9, 9]]
    )
    _, K, _, H = state.cache.keys[0].shape
    nodes = tuple(jnp.zeros((B, N, K, H)) for _ in state.cache.keys)
    logits = jax.nn.one_hot(choices, PARITY_CONFIG.vocab_size)
    verified = Verified(logits, jnp.zeros((B, N, PARITY_CONFIG.hidden_size)), nodes, nodes)
    noise = jnp.zeros((B, 5, PARITY_CONFIG.vocab_size))

    def drawn_step(
        decoder: Any, drafter: Any, state: DecodeState, shape: Any
    ) -> tuple[DecodeState, StepTrace, Verified]:
        return *finish(decoder, state, tree, verified, noise), verified

    monkeypatch.setattr("redrafter_jax.engine.device.verified_step", drawn_step)
    # A function of its own, so that no trace of a real step is reused.
    inner = inspect.unwrap(decode_rows)
    decode = jax.jit(lambda *arguments: inner(*arguments, 1, tree=None, steps=1))
    _, (gains, _) = decode(target, RootOnly(), state, ALL_ROWS)
    assert gains.counts.tolist() == [[0], [2], [5], [3]]
    gained = np.arange(5) < np.asarray(gains.counts)
    tokens, origins = np.asarray(gains.tokens[:, 0]), np.asarray(gains.origins[:, 0])
    assert [tokens[row, gained[row]].tolist() for row in range(B)] == [
        [],
        [3, 3],
        [1, 3, 3, 3, 7],
        [1, 2, 7],
    ]
    assert [origins[row, gained[row]].tolist() for row in range(B)] == [
        [],
        [1, -1],
        [0, 1, 1, 1, -1],
        [0, 0, -1],
    ]
    assert gains.drafted.tolist() == [[[0, 0]], [[2, 3]], [[2, 3]], [[2, 3]]]
