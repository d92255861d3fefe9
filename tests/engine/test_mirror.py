"""Mirror decoding: the baseline's texts, trees that are ready, and no call that is not counted."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array
from tiny_models import (
    forgetful_target,
    imitating_drafter,
    random_drafter,
    random_target,
    tiny_config,
)
from toy_drafters import BigramAttention

from redrafter_jax import (
    InputError,
    KeptCache,
    MirrorConfig,
    PromptLookup,
    SamplingConfig,
    TreeConfig,
    generate,
    generate_autoregressive,
    make_mesh,
    stream,
)
from redrafter_jax.drafters.base import Drafter, LoadedHead
from redrafter_jax.drafters.eagle_head import EagleConfig
from redrafter_jax.drafters.model_drafter import ModelDrafter
from redrafter_jax.drafters.self_drafter import SelfDrafter
from redrafter_jax.engine.engine import Engine
from redrafter_jax.engine.messages import Request
from redrafter_jax.models.target import Target
from redrafter_jax.parallel.mesh import place
from redrafter_jax.parallel.model import Model
from redrafter_jax.types import KVCache, TokenTree, View

pytestmark = pytest.mark.usefixtures("quick_compilation")

FURTHER = (pytest.mark.long, pytest.mark.further)
CHAIN = TreeConfig(beam_width=1, draft_rounds=3)
TREE = TreeConfig(beam_width=2, draft_rounds=2, num_nodes=4, rerank=True)
CONFIG = tiny_config(num_hidden_layers=4)
# Texts that pass from a page to the next while they are decoded, in a batch that mixes samplings.
BATCH: dict[str, Any] = {
    "prompts": [[1, 2, 3], [7] * 50 + [4], [9, 8]],
    "max_new_tokens": [24, 30, 9],
    "sampling": [SamplingConfig(), SamplingConfig(1.0), SamplingConfig(0.8, top_p=0.9)],
}


def target_of(seed: int) -> Target:
    return forgetful_target(memory=0.2, seed=seed, config=CONFIG)


def drafter_of(kind: str, target: Target) -> LoadedHead | Drafter:
    if kind == "head":
        return imitating_drafter(target, corruption=0.3)
    if kind == "model":
        return ModelDrafter(forgetful_target(memory=0.1, seed=0))
    if kind == "self":
        return SelfDrafter("self:layers=3", layers=3).of(target)
    if kind == "eagle":
        return random_drafter(EagleConfig(24, 32, "3", 32, 48, 4, 2, 8, context_layers=(0, 2)))
    return {"lookup": PromptLookup(), "bigram": BigramAttention(CONFIG.vocab_size)}[kind]


def both(
    target: Target,
    drafter: LoadedHead | Drafter,
    tree: TreeConfig,
    mirror: MirrorConfig,
    **how: Any,
) -> tuple[Any, Any]:
    """The baseline's answer, and that of mirror decoding."""
    arguments: dict[str, Any] = BATCH | {"eos_token_ids": ()} | how
    plain = generate_autoregressive(target, **arguments)
    return plain, generate(target, drafter, tree=tree, mirror=mirror, **arguments)


@pytest.mark.parametrize(
    ("kind", "tree", "mirror"),
    [
        pytest.param(
            *("model", CHAIN, MirrorConfig(layer=2, candidates=2, drafter_devices=1)),
            marks=pytest.mark.long,
        ),
        pytest.param("head", TREE, MirrorConfig(1, 4), marks=pytest.mark.long),
        pytest.param("head", TREE, MirrorConfig(3, 1, 2, 1), marks=FURTHER),
        pytest.param("self", TREE, MirrorConfig(2, 4, None, 1), marks=FURTHER),
        pytest.param("self", CHAIN, MirrorConfig(3, 8), marks=pytest.mark.long),
        pytest.param("model", TREE, MirrorConfig(2, 4, None, 2), marks=FURTHER),
        pytest.param("eagle", CHAIN, MirrorConfig(2, 4, None, 1), marks=pytest.mark.long),
        pytest.param("bigram", CHAIN, MirrorConfig(1, 3), marks=pytest.mark.long),
        pytest.param("lookup", CHAIN, MirrorConfig(1, 3, None, 1), marks=pytest.mark.long),
        pytest.param(
            "model",
            TreeConfig(beam_width=1, draft_rounds=2, lookup_tokens=2),
            MirrorConfig(2, 24),
            marks=pytest.mark.long,
        ),
    ],
)
def test_texts_are_the_baselines(kind: str, tree: TreeConfig, mirror: MirrorConfig) -> None:
    target = target_of(0)
    plain, ours = both(target, drafter_of(kind, target), tree, mirror)
    assert ours.tokens == plain.tokens
    assert ours.mirror.prepared <= ours.mirror.outcomes


@pytest.mark.long
@pytest.mark.further
@pytest.mark.parametrize("devices", [0, 1])
def test_texts_of_200_random_pairs_are_the_baselines(devices: int) -> None:
    mirror = MirrorConfig(layer=2, candidates=3, drafter_devices=devices)
    prepared = 0
    for seed in range(200):
        random = np.random.default_rng(seed)
        target = forgetful_target(memory=random.uniform(0, 1), seed=seed, config=CONFIG)
        drafter = ModelDrafter(forgetful_target(memory=0.1, seed=seed))
        prompts = [random.integers(24, size=length).tolist() for length in (3, 9)]
        how = {"prompts": prompts, "max_new_tokens": 12, "seeds": [seed, seed + 1]}
        sampling = [SamplingConfig(), SamplingConfig(1.0)]
        plain, ours = both(target, drafter, CHAIN, mirror, sampling=sampling, **how)
        assert ours.tokens == plain.tokens
        prepared += ours.mirror.prepared
    assert prepared > 200


@pytest.mark.long
def test_a_model_that_reads_the_paths_ahead_drafts_as_it_would_afterwards() -> None:
    # It reads tokens alone: what it drafts for a path does not depend on when.
    target = target_of(0)
    drafter = drafter_of("model", target)
    mirror = MirrorConfig(layer=2, candidates=2, drafter_devices=1)
    _, ours = both(target, drafter, CHAIN, mirror)
    plain = generate(target, drafter, tree=CHAIN, eos_token_ids=(), **BATCH)
    assert ours.mirror.prepared > ours.mirror.outcomes / 2
    assert np.array_equal(ours.accept_counts, plain.accept_counts)


calls: list[int] = []


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Counting(BigramAttention):
    """Notes each time that it drafts."""

    def propose(
        self,
        target: Any,
        own: tuple[()],
        cache: KVCache,
        view: View,
        noise: Array,
        tree: TreeConfig,
    ) -> TokenTree:
        jax.debug.callback(lambda rows: calls.append(len(rows)), view.root)
        return super().propose(target, own, cache, view, noise, tree)


def knowing_early(layer: int) -> Target:
    """A target whose layers from `layer` on add nothing: it knows early what it will choose."""
    target = target_of(0)
    decoder = target.merge()
    for one in decoder.layers[layer:]:
        one.self_attn.o_proj[...] = jnp.zeros_like(one.self_attn.o_proj[...])
        one.mlp.down_proj[...] = jnp.zeros_like(one.mlp.down_proj[...])
    return Model.split(target.config, decoder)


@pytest.mark.long
def test_a_tree_that_was_prepared_is_used_without_another_call_of_the_drafter() -> None:
    calls.clear()
    mirror = MirrorConfig(layer=2, candidates=1)
    plain, ours = both(knowing_early(2), Counting(CONFIG.vocab_size), CHAIN, mirror)
    jax.effects_barrier()
    assert ours.tokens == plain.tokens
    counts = ours.mirror
    # One guess after each node is enough, greedy and sampled: the first tree alone is waited for.
    assert (counts.now, counts.fallback_rate) == (1, 0.0)
    rows = len(BATCH["prompts"])
    assert calls == [rows] + counts.steps * [rows * mirror.count(CHAIN)]


@pytest.mark.long
@pytest.mark.parametrize("devices", [0, 1])
def test_requests_come_and_go(devices: int) -> None:
    target, random = target_of(0), np.random.default_rng(0)
    beginning = random.integers(24, size=70).tolist()
    requests = [
        Request(
            beginning[: random.choice([0, 5, 70])] + random.integers(24, size=4).tolist(),
            int(random.integers(1, 30)),
            seed,
            SamplingConfig(float(seed % 2)),
            speculate=seed % 5 > 0,
        )
        for seed in range(12)
    ]
    engine = Engine(
        target,
        drafter_of("model", target),
        tree=CHAIN,
        slots=3,
        context_length=120,
        stop_tokens=(),
        prefill_chunk=16,
        mirror=MirrorConfig(layer=2, candidates=2, drafter_devices=devices),
    )
    texts: dict[int, list[int]] = {engine.submit(request): [] for request in requests}
    while engine.busy:
        for event in engine.advance():
            texts[event.number] += [token.id for token in event.decided]
    plain = generate_autoregressive(
        target,
        [request.prompt for request in requests],
        max_new_tokens=[request.max_new_tokens for request in requests],
        sampling=[request.sampling for request in requests],
        eos_token_ids=(),
    )
    assert list(texts.values()) == plain.tokens
    assert engine.counters.reused_tokens > 0
    assert engine.mirror is not None
    assert engine.mirror.counts.prepared > 0


@pytest.mark.long
def test_a_target_on_a_mesh_has_a_drafter_beside_it() -> None:
    mesh = make_mesh(model=2)
    target = target_of(0)
    mirror = MirrorConfig(layer=2, candidates=2, drafter_devices=1)
    drafter = place(imitating_drafter(target), mesh)
    plain, ours = both(place(target, mesh), drafter, TREE, mirror)
    assert ours.tokens == plain.tokens


@pytest.mark.parametrize(
    ("mirror", "changes", "problem"),
    [
        (MirrorConfig(4), {}, "MirrorConfig.layer is 4; the target has 4 layers.* from 1 to 3"),
        (MirrorConfig(1, 25), {}, "candidates is 25; the vocabulary has 24 tokens"),
        (
            MirrorConfig(1, drafter_devices=8),
            {},
            "drafter_devices is 8, but the target leaves 7 devices",
        ),
        (MirrorConfig(1), {"drafter": None}, "there is no drafter; leave mirror out"),
        (
            MirrorConfig(1),
            {"tree": TreeConfig(beam_width=1, draft_rounds=2, mean_nodes=2)},
            "mean_nodes is 2, but mirror",
        ),
        (MirrorConfig(1), {"adaptive": True}, "adaptive is True, but mirror"),
    ],
)
@pytest.mark.usefixtures("nothing_compiles")
def test_what_cannot_be_mirrored_is_refused(
    mirror: MirrorConfig, changes: dict[str, Any], problem: str
) -> None:
    target = random_target(CONFIG)
    how: dict[str, Any] = {"drafter": ModelDrafter(target)} | changes
    with pytest.raises(InputError, match=problem):
        generate(target, prompts=[[1]], max_new_tokens=2, mirror=mirror, **how)


@pytest.mark.usefixtures("nothing_compiles")
def test_penalties_are_refused_with_mirror() -> None:
    target, sampling = target_of(0), SamplingConfig(repetition_penalty=1.2)
    how: dict[str, Any] = {"mirror": MirrorConfig(1), "sampling": sampling, "tree": CHAIN}
    problem = "has repetition_penalty 1.2, which mirror decoding does not support; leave that out"
    with pytest.raises(InputError, match=problem):
        generate(target, ModelDrafter(target), [[1]], max_new_tokens=2, **how)
    with pytest.raises(InputError, match=problem):
        next(stream(target, ModelDrafter(target), [[1]], max_new_tokens=2, **how))


def test_a_batch_that_is_split_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    target, problem = random_target(CONFIG), "mirror decodes a batch on one group of devices"
    how: dict[str, Any] = {"prompts": [[1], [2]], "max_new_tokens": 2, "mirror": MirrorConfig(1)}
    split = place(target, make_mesh(data=2))
    with pytest.raises(InputError, match=problem):
        generate(split, ModelDrafter(split), **how)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(InputError, match=problem):
        generate(target, ModelDrafter(target), **how)


def bytes_on(device: Any, *caches: KVCache) -> int:
    layers = [layer for cache in caches for layer in cache.keys + cache.values]
    shards = [shard for layer in layers for shard in layer.addressable_shards]
    return sum(shard.data.nbytes for shard in shards if shard.device == device)


@pytest.mark.parametrize("devices", [0, 1, 2])
@pytest.mark.parametrize("kind", ["model", "self", "lookup"])
def test_the_cache_takes_the_memory_that_it_is_given_and_no_more(kind: str, devices: int) -> None:
    target, memory = target_of(0), 2_000_000
    engine = Engine(
        target,
        drafter_of(kind, target),
        tree=CHAIN,
        slots=2,
        context_length=100,
        cache_memory=memory,
        mirror=MirrorConfig(layer=2, candidates=2, drafter_devices=devices),
    )
    assert engine.mirror is not None
    caches = engine.state.cache, engine.mirror._state.cache
    taken = {device: bytes_on(device, *caches) for device in jax.devices()}
    assert max(taken.values()) <= memory
    # One page more would not fit on some device.
    sizes = [[layer.nbytes // len(layer) for layer in one.keys + one.values] for one in caches]
    home, away = (sum(own) for own in sizes)
    page = max(home, away // devices) if devices else home + away
    assert max(taken.values()) > memory - page


@pytest.mark.long
def test_the_turns_of_a_conversation_share_a_cache() -> None:
    target, prompt = target_of(0), [5] * 70
    drafter, cache = drafter_of("model", target), KeptCache(140)
    mirror = MirrorConfig(layer=2, candidates=2, drafter_devices=1)
    for _ in range(2):
        how: dict[str, Any] = {"max_new_tokens": 20, "eos_token_ids": ()}
        plain = generate_autoregressive(target, [prompt], **how)
        updates = stream(
            target, drafter, [prompt], tree=CHAIN, mirror=mirror, kept_cache=cache, **how
        )
        (*_, last) = updates
        assert last.generation.tokens == plain.tokens
        assert last.generation.mirror is not None
        assert last.generation.mirror.prepared > 0
        prompt = [*prompt, *plain.tokens[0], 3]


@pytest.mark.parametrize("changes", [{"layer": 0}, {"layer": 1, "candidates": 0}])
def test_numbers_that_mean_nothing_are_refused(changes: dict[str, int]) -> None:
    with pytest.raises(InputError, match="is 0; it must be greater than 0"):
        MirrorConfig(**changes)
