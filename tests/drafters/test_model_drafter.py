"""A model as the drafter of another, against its own passes over whole texts."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from tiny_models import cast, random_target, tiny_config
from trees import live_paths

from redrafter_jax import (
    InputError,
    KeptCache,
    SamplingConfig,
    TreeConfig,
    generate,
    generate_autoregressive,
    make_mesh,
    stream,
)
from redrafter_jax.config import Llama3Scaling, TargetConfig
from redrafter_jax.config.quantization import Quantization
from redrafter_jax.decoding.step import propose
from redrafter_jax.drafters.base import Drafter
from redrafter_jax.drafters.model_drafter import ModelDrafter
from redrafter_jax.drafters.self_drafter import parse_self
from redrafter_jax.engine.requests import Batch, check_batch
from redrafter_jax.generation import engine_of
from redrafter_jax.models.quantize import quantize_model
from redrafter_jax.models.target import Target
from redrafter_jax.parallel.mesh import place
from redrafter_jax.parallel.model import Model
from redrafter_jax.types import DecodeState, TokenTree

pytestmark = pytest.mark.usefixtures("quick_compilation")

# Of other widths and depths than the target's, and of every variation that attention knows.
DRAFTERS: dict[str, TargetConfig] = {
    "Llama": tiny_config(
        hidden_size=16,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=4,
        rope_scaling=Llama3Scaling(4.0, 1.0, 4.0, 128),
        tie_word_embeddings=True,
    ),
    "Qwen": tiny_config(num_hidden_layers=1, attention_bias=True, qk_norm=True),
    "Gemma": tiny_config(
        sliding_window=3,
        windowed_layers=(0,),
        rope_local_base_freq=300.0,
        query_pre_attn_scalar=5.0,
        hidden_act="gelu_pytorch_tanh",
        output_norms=True,
        zero_centered_norms=True,
        scaled_embeddings=True,
    ),
}
V = tiny_config().vocab_size
TEXT: list[int] = np.random.default_rng(4).integers(0, V, 310).tolist()
# One token, a chunk of prefill but one, a whole one, one more, and several with a tail.
LENGTHS = [1, 63, 64, 65, 300]
PROMPTS = [TEXT[row : row + length] for row, length in enumerate(LENGTHS)]
SAMPLINGS = [
    SamplingConfig(),
    SamplingConfig(temperature=0.7),
    SamplingConfig(temperature=1.3, top_k=7, top_p=0.9, min_p=0.02),
    SamplingConfig(),
    SamplingConfig(temperature=1.0),
]
CHAIN = TreeConfig(beam_width=1, draft_rounds=4)
TREE = TreeConfig(beam_width=3, draft_rounds=3)


@pytest.fixture(
    scope="module", params=["Llama", pytest.param("Qwen", marks=pytest.mark.long), "Gemma"]
)
def model(request: pytest.FixtureRequest) -> Target:
    return random_target(DRAFTERS[request.param], seed=2)


@jax.jit
def _scores(model: Target, text: Any) -> jax.Array:
    decoder = model.merge()
    hidden, _, _ = decoder.forward(text)
    return decoder.logits(hidden)


# The scores after a path from the root on.
LogitsAfter = Callable[[tuple[int, ...]], np.ndarray]


def logits_after(model: Target, text: list[int]) -> LogitsAfter:
    """The model's scores after a text and a path below it: one pass over all, without a cache."""

    def after(path: tuple[int, ...]) -> np.ndarray:
        whole = [*text, *path]
        # One shape for all; nothing sees the padding.
        padded = np.asarray([whole + [0] * (320 - len(whole))], np.int32)
        return np.asarray(_scores(model, padded)[0, len(whole) - 1], np.float64)

    return after


def state_after(
    target: Target, drafter: Drafter, prompts: list[list[int]], tree: TreeConfig
) -> DecodeState:
    """The state of an engine that has read the prompts, and has decoded nothing."""
    requests = check_batch(target.config, Batch(prompts, [8] * len(prompts), SAMPLINGS))
    reader = engine_of(target, drafter, requests, tree, None, False)
    for request in requests:
        reader.submit(request)
    reader.advance(passes=None, steps=0)
    return reader.state


def drafted(
    target: Target, drafter: Drafter, state: DecodeState, noise: np.ndarray, tree: TreeConfig
) -> TokenTree:
    run = jax.jit(
        lambda target, drafter, state, noise: propose(target.merge(), drafter, state, noise, tree)
    )
    return jax.tree.map(np.asarray, run(target, drafter, state, jnp.asarray(noise)))


def assert_best(
    target: Target,
    drafter: Drafter,
    after: Callable[[list[int]], LogitsAfter],
    tree: TreeConfig,
) -> None:
    """The trees are those of a search that sorts all extensions, scored by passes of `after`."""
    state = state_after(target, drafter, PROMPTS, tree)
    noise = np.random.default_rng(6).gumbel(size=(len(PROMPTS), tree.max_path, V))
    noise[[one.temperature == 0 for one in SAMPLINGS]] = 0
    noise = noise.astype(np.float32)
    grown = drafted(target, drafter, state, noise, tree)
    for row, prompt in enumerate(PROMPTS):
        root = int(state.root[row])
        trace = oracles.beam_search(
            after(prompt), range(V), root, noise[row], SAMPLINGS[row], tree, tree.extensions
        )
        expected = {one.path: one.log_prob for found in trace for one in found}
        best = sorted(expected, key=lambda path: -expected[path])[: tree.budget - 1]
        paths = live_paths(grown, row)
        likely = {(root,), *(path for path in best if expected[path] > -np.inf)}
        assert set(paths) == likely
        live = grown.log_probs[row, grown.tokens[row] >= 0]
        scores = dict(zip(paths, live, strict=True))
        for path in likely - {(root,)}:
            assert scores[path] == pytest.approx(expected[path], rel=1e-4, abs=1e-4)


@pytest.mark.parametrize(
    "tree",
    [
        pytest.param(CHAIN, marks=pytest.mark.long),
        pytest.param(TREE, marks=pytest.mark.long),
        pytest.param(TreeConfig(1, 1), marks=pytest.mark.long),
        TreeConfig(3, 4, num_nodes=8, sharpness=1.5, candidates=9),
        pytest.param(TreeConfig(2, 3, num_nodes=9, rerank=True), marks=pytest.mark.long),
    ],
    ids=str,
)
def test_a_tree_is_that_of_passes_over_whole_texts(
    target: Target, model: Target, tree: TreeConfig
) -> None:
    assert_best(target, ModelDrafter(model), partial(logits_after, model), tree)


def own_part(name: str, target: Target) -> ModelDrafter:
    part = parse_self(name)
    assert part is not None
    return part.of(target)


@pytest.mark.parametrize("tree", [pytest.param(CHAIN, marks=pytest.mark.long), TREE], ids=str)
def test_the_first_layers_draft_as_the_model_that_they_are(
    target: Target, tree: TreeConfig
) -> None:
    drafter = own_part("self:layers=1", target)
    assert drafter.model.config.num_hidden_layers == 1
    assert drafter.cache is None
    assert_best(target, drafter, partial(logits_after, drafter.model), tree)


@pytest.mark.parametrize(
    "name",
    [
        "self:int8",
        pytest.param("self:fp8", marks=pytest.mark.long),
        pytest.param("self:layers=1,int8", marks=pytest.mark.long),
    ],
)
@pytest.mark.long
def test_a_quantized_copy_attends_to_the_targets_own_keys_and_values(
    target: Target, name: str
) -> None:
    drafter = own_part(name, target)

    @jax.jit
    def scores(text: Any, path: Any, length: Any) -> jax.Array:
        """After each token of a path below a text whose keys and values are the target's."""
        decoder = drafter.model.merge()
        _, keys, values = target.merge().forward(text)
        read = jnp.arange(text.shape[1]) < length
        T = path.shape[1]
        before = jnp.broadcast_to(read, (T, len(read)))
        seen = jnp.concatenate([before, jnp.tri(T, dtype=bool)], axis=1)

        def attend_in(layer: int) -> Any:
            def attend(q: Any, k: Any, v: Any) -> Any:
                k, v = (
                    jnp.repeat(jnp.concatenate([above[layer], own], axis=1), 2, axis=2)
                    for above, own in ((keys, k), (values, v))
                )
                raw = jnp.einsum("BTQH,BSQH->BQTS", q, k) * drafter.model.config.attention_scale
                weights = jax.nn.softmax(jnp.where(seen, raw, -jnp.inf), axis=-1)
                return jnp.einsum("BQTS,BSQH->BTQH", weights, v)

            return attend

        hidden, _, _ = decoder.run(path, length + jnp.arange(T)[None], attend_in)
        return decoder.logits(hidden)

    def after(text: list[int]) -> LogitsAfter:
        padded = jnp.asarray([text + [0] * (310 - len(text))], jnp.int32)

        def after_path(path: tuple[int, ...]) -> np.ndarray:
            below = jnp.asarray([[*path, *[0] * (4 - len(path))]], jnp.int32)
            return np.asarray(scores(padded, below, len(text))[0, len(path) - 1], np.float64)

        return after_path

    assert_best(target, drafter, after, TREE)


@pytest.mark.parametrize("sampling", [SamplingConfig(), SamplingConfig(temperature=1.0)], ids=str)
def test_a_model_that_drafts_for_itself_is_right(target: Target, sampling: SamplingConfig) -> None:
    """Its noise is the target's, too: so a chain comes true at every temperature."""
    prompts = [prompt[:70] for prompt in PROMPTS]
    options: dict[str, Any] = {"max_new_tokens": 21, "sampling": sampling}
    result = generate(target, target, prompts, tree=CHAIN, **options)
    assert result.tokens == generate_autoregressive(target, prompts, **options).tokens
    assert result.acceptance_length == CHAIN.draft_rounds + 1
    assert result.steps == [4] * len(prompts)


def test_a_model_of_another_dtype_drafts_too(target: Target) -> None:
    rounded = cast(target, jnp.bfloat16)
    drafter = random_target(DRAFTERS["Llama"], 5)
    run = partial(generate, rounded, prompts=[[1, 2, 3], [4]], max_new_tokens=12)
    assert run(drafter).tokens == run(None).tokens


@pytest.mark.long
def test_past_its_context_it_drafts_nothing(target: Target) -> None:
    decoder, config = target.merge(), tiny_config(max_position_embeddings=24)
    decoder.config = config
    short = Model.split(config, decoder)
    prompt = TEXT[:10]
    result = generate(target, short, [prompt], max_new_tokens=30, tree=CHAIN)
    assert result.tokens == generate_autoregressive(target, [prompt], max_new_tokens=30).tokens
    # The first new token is prefill's. Roots at positions 10 and 15 draft up to 14 and 19; of the
    # one at 20, the last draft would stand at 24.
    assert result.accept_counts[0].tolist() == [30 - 1 - 2 * 5, 0, 0, 0, 2]


OTHER = tiny_config(vocab_size=25)


@pytest.mark.usefixtures("unchecked_shapes", "nothing_compiles")
@pytest.mark.parametrize(
    ("model", "tree", "words"),
    [
        (
            OTHER,
            None,
            ["drafter's vocabulary has 25 tokens", "target's has 24", "target's vocabulary"],
        ),
        (None, TreeConfig(25, 2), ["beam_width is 25, more than the 24 tokens"]),
        (None, TreeConfig(2, 2, candidates=25), ["candidates is 25, more than the 24 tokens"]),
        (None, TreeConfig(2, 2, num_nodes=30, rerank=True), ["num_nodes is 30", "at most 25"]),
        (
            None,
            TreeConfig(2, 2, static_tree=True),
            ["by rank (Medusa heads), not for a model", "leave static_tree"],
        ),
        (
            tiny_config(max_position_embeddings=4),
            TreeConfig(1, 4),
            ["draft_rounds is 4", "drafter has 4 positions", "draft fewer"],
        ),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused(
    target: Target, model: TargetConfig | None, tree: TreeConfig | None, words: list[str]
) -> None:
    drafter = target if model is None else random_target(model)
    with pytest.raises(InputError) as refused:
        generate(target, drafter, [[1]], max_new_tokens=2, tree=tree)
    assert all(word in str(refused.value) for word in words), refused.value


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("self:", ["'self:'", "a format (int8, int4, fp8), layers=N, or both", "self:int4"]),
        ("self:int5", ["'self:int5'", "such as self:int4 or self:layers=8,int4"]),
        ("self:layers=", ["'self:layers='", "layers=N"]),
        ("self:layers=-1", ["'self:layers=-1'", "layers=N"]),
        ("self:int4,int8", ["or both"]),
        ("self:layers=0", ["'self:layers=0'", "2 layers", "from 1 to 1"]),
        ("self:layers=2", ["2 layers", "layers=N with N from 1 to 1"]),
        ("self:layers=3,int8", ["2 layers", "layers=N with N from 1 to 2"]),
        ("self:int4", ["48 inputs", "use int8 or fp8"]),
    ],
)
def test_parts_that_the_target_does_not_have_are_refused(
    target: Target, name: str, words: list[str]
) -> None:
    with pytest.raises(InputError) as refused:
        own_part(name, target)
    assert all(word in str(refused.value) for word in words), refused.value


@pytest.mark.long
def test_what_is_quantized_already_is_not_quantized_again(target: Target) -> None:
    quantized = quantize_model(target, Quantization.of("int8"))
    with pytest.raises(InputError, match=r"'self:int8', but .* already quantized; .*self:layers=N"):
        own_part("self:int8", quantized)
    part = own_part("self:layers=1", quantized)
    options: dict[str, Any] = {"max_new_tokens": 12}
    result = generate(quantized, part, PROMPTS[:2], **options)
    assert result.tokens == generate_autoregressive(quantized, PROMPTS[:2], **options).tokens


@pytest.mark.long
@pytest.mark.parametrize("name", ["self:int4", "self:int8", "self:layers=1,int4"])
def test_a_quantized_copy_changes_no_text(name: str) -> None:
    """In a batch, on a mesh, and in a conversation whose beginning is kept."""
    target = random_target(tiny_config(hidden_size=64, intermediate_size=128, head_dim=16))
    options: dict[str, Any] = {"max_new_tokens": 16, "sampling": SAMPLINGS}
    expected = generate_autoregressive(target, PROMPTS, **options).tokens
    result = generate(target, own_part(name, target), PROMPTS, tree=TREE, **options)
    assert result.tokens == expected
    assert result.acceptance_length > 1
    placed = place(target, make_mesh(model=2))
    parted = generate(placed, own_part(name, placed), PROMPTS, tree=TREE, **options)
    assert parted.tokens == expected
    kept, prompt = KeptCache(200), PROMPTS[3]
    for more in ([], [5, 6], [1]):
        prompt = [*prompt, *more]
        asked: dict[str, Any] = {"max_new_tokens": 12, "sampling": SamplingConfig(1.0)}
        part = own_part(name, target)
        *_, last = stream(target, part, [prompt], tree=TREE, kept_cache=kept, **asked)
        (own,) = generate_autoregressive(target, [prompt], **asked).tokens
        assert last.generation.tokens == [own]
        prompt = [*prompt, *own[:7]]


@pytest.mark.long
@pytest.mark.parametrize("name", ["self:layers=1", "self:int8"])
def test_a_part_of_a_target_on_a_mesh_drafts_as_on_one_device(target: Target, name: str) -> None:
    options: dict[str, Any] = {"max_new_tokens": 12, "tree": CHAIN}
    placed = place(target, make_mesh(model=2))
    alone, ours = (
        generate(one, own_part(name, one), PROMPTS[:2], **options) for one in (target, placed)
    )
    assert ours.tokens == alone.tokens
    assert ours.steps == alone.steps


def test_the_first_layers_share_the_targets_weights(target: Target) -> None:
    own = {id(leaf) for leaf in jax.tree.leaves(target)}
    part = own_part("self:layers=1", target)
    assert {id(leaf) for leaf in jax.tree.leaves(part)} < own
