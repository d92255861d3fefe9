"""Tiny targets and drafters with random weights, and drafters that really guess their target."""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from eval.abstract import abstract_drafter, abstract_target
from redrafter_jax.config import TargetConfig
from redrafter_jax.config.drafter import HeadConfig
from redrafter_jax.drafters.base import LoadedHead
from redrafter_jax.drafters.block_head import BlockConfig
from redrafter_jax.drafters.eagle_head import EagleConfig
from redrafter_jax.drafters.hydra_head import HydraConfig, PrefixLayer
from redrafter_jax.drafters.kinds import init_drafter
from redrafter_jax.drafters.medusa import MedusaConfig
from redrafter_jax.drafters.recurrent_head import RecurrentConfig
from redrafter_jax.files.parameters import dotted, stored_parameters
from redrafter_jax.files.target_weights import LAYOUT
from redrafter_jax.models.linear import join, joint_of, parts_of
from redrafter_jax.models.target import Target
from redrafter_jax.parallel.model import Model

# Vocabulary no larger than the width: a linear map of the embeddings can then say anything.
PARITY_CONFIG = TargetConfig(
    vocab_size=24,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    rope_theta=10000.0,
    rms_norm_eps=1e-5,
    max_position_embeddings=512,
    tie_word_embeddings=False,
    eos_token_ids=(),
)


# The layer of a recurrent head that attends.
ATTENTION: dict[str, Any] = {
    "attention": True,
    "intermediate_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "rope_theta": 100.0,
    "rms_norm_eps": 1e-5,
}


def tiny_config(**changes: Any) -> TargetConfig:
    """`PARITY_CONFIG` with changes."""
    return dataclasses.replace(PARITY_CONFIG, **changes)


def with_random_weights(model: Model[Any, Any], seed: int) -> Any:
    """The model with every parameter random, biases and norms included."""
    random = np.random.default_rng(seed)

    def draw(name: str, shape: tuple[int, ...]) -> Any:
        if "norm" in name:
            values = random.uniform(0.5, 1.5, shape)
        elif "embed_tokens" in name:
            values = random.normal(size=shape)
        else:
            values = random.normal(size=shape) / np.sqrt(shape[0])
        return jnp.asarray(values, jnp.float32)

    # By the names that joined parameters have in files, whose order is the draws'.
    flat = nnx.to_flat_state(model.params)
    shapes = {
        path: value.shape for whole, variable in flat for path, value in parts_of(whole, variable)
    }
    drawn = {path: draw(dotted(path), shapes[path]) for path in sorted(shapes, key=_in_order)}

    def value(whole: tuple[Any, ...], variable: Any) -> Any:
        parts = [drawn[path] for path, _ in parts_of(whole, variable)]
        joint = joint_of(variable)
        return variable.replace(parts[0] if joint is None else join(joint, parts))

    params = nnx.from_flat_state([(path, value(path, variable)) for path, variable in flat])
    return dataclasses.replace(model, params=params)


def _in_order(path: tuple[Any, ...]) -> list[tuple[int, Any]]:
    """Layers by number, names by letter, as Flax sorts a state."""
    return [(0, key) if isinstance(key, int) else (1, key) for key in path]


def random_target(config: TargetConfig = PARITY_CONFIG, seed: int = 0) -> Target:
    """A target whose logits are neither flat nor one-sided."""
    return with_random_weights(abstract_target(config, jnp.float32), seed)


def random_drafter(config: HeadConfig, seed: int = 0) -> LoadedHead:
    """A drafter that knows nothing of any target."""
    return with_random_weights(abstract_drafter(config, jnp.float32), seed)


def stored_shapes(config: TargetConfig) -> dict[str, tuple[int, ...]]:
    """Every weight of such a target by its name in the files, and its shape there."""
    _, parameters = stored_parameters(config, LAYOUT)
    return {parameter.name: parameter.shape for parameter in parameters}


def logits_error(target: Target, expected: Target) -> float:
    """The largest difference of their logits on four tokens, over the largest of the second's."""
    tokens = jnp.asarray([[1, 5, 2, 9]])
    ours, theirs = (
        np.asarray(decoder.logits(decoder.forward(tokens)[0]))
        for decoder in (target.merge(), expected.merge())
    )
    return float(np.abs(ours - theirs).max() / np.abs(theirs).max())


def cast(model: Model[Any, Any], dtype: Any) -> Any:
    """The model with parameters of another dtype."""
    params = jax.tree.map(lambda leaf: leaf.astype(dtype), model.params)
    return dataclasses.replace(model, params=params)


def forgetful_target(
    memory: float, seed: int = 0, config: TargetConfig = PARITY_CONFIG, contrast: float = 3.0
) -> Target:
    """A target whose next token depends mostly on the current one.

    `memory` scales what attention and feed-forward add: at 0 the text is a Markov chain, which a
    drafter can know exactly; a little more and the text depends on its whole history again.
    `contrast` scales its logits.
    """
    target = random_target(config, seed)
    decoder = target.merge()
    for layer in decoder.layers:
        layer.self_attn.o_proj[...] = memory * layer.self_attn.o_proj[...]
        layer.mlp.down_proj[...] = memory * layer.mlp.down_proj[...]
    decoder.lm_head[...] = contrast * decoder.lm_head[...]
    return Model.split(target.config, decoder)


def _markov_chain(target: Target) -> tuple[Any, Any, Any]:
    """Of every token its embedding, its normalised hidden state and its logits, without memory."""
    decoder = target.merge()
    embedding = np.asarray(decoder.embed_tokens[...], np.float64)
    rms = np.sqrt((embedding**2).mean(axis=-1, keepdims=True) + target.config.rms_norm_eps)
    normalised = embedding / rms * np.asarray(decoder.norm[...], np.float64)
    return embedding, normalised, normalised @ np.asarray(decoder.lm_head[...], np.float64)


def imitating_drafter(
    target: Target, corruption: float = 0.0, seed: int = 0, **variant: Any
) -> LoadedHead:
    """A drafter that computes the forgetful target's map from token to logits.

    Its recurrence forgets (U = 0, and a gated one never keeps its state), so its state is a fixed
    vector per token; the head then solves a linear system from these vectors to the target's
    logits, or to what its head reads. `corruption` adds noise to it.

    Args:
      target: the forgetful target.
      corruption: how wrong it is.
      seed: of its random parameters.
      variant: fields of `RecurrentConfig`.
    """
    random = np.random.default_rng(seed)
    V, D = target.config.vocab_size, target.config.hidden_size
    embedding, normalised, logits = _markov_chain(target)

    mix = random.normal(size=(D, D)) / np.sqrt(D)
    mixed = embedding @ mix
    config = RecurrentConfig(
        vocab_size=V, hidden_size=D, exit_dim=2 * D, num_draft_layers=0, **variant
    )
    head = init_drafter(config, 0).merge()
    if config.cell == "gru":
        states = np.tanh(mixed)
        never_kept = np.repeat([0.0, -1e3, 0.0], D)
        head.gru_w.kernel[...] = jnp.asarray(np.tile(mix, 3) * (never_kept == 0), jnp.float32)
        head.gru_w.bias[...] = jnp.asarray(never_kept, jnp.float32)
        head.gru_u.kernel[...] = jnp.zeros((D, 3 * D))
    else:
        states = mixed / (1 + np.exp(-mixed))
        head.rnn_w.kernel[...] = jnp.asarray(mix, jnp.float32)
        head.rnn_u.kernel[...] = jnp.zeros((D, D))
    solution = np.linalg.pinv(states) @ (normalised if config.head == "target" else logits)
    solution += corruption * np.abs(solution).mean() * random.normal(size=solution.shape)

    into = jnp.asarray(np.concatenate([np.zeros_like(solution), solution]), jnp.float32)
    match config.head:
        case "own":
            head.lm_head.kernel[...] = into[:, list(config.draft_tokens or range(V))]
        case "target":
            head.head_proj.kernel[...] = into
        case "low_rank":
            assert config.head_rank == V, "a factor of the identity loses nothing"
            head.head_proj.kernel[...] = into
            head.lm_head.kernel[...] = jnp.eye(V)
    return Model.split(config, head)


def imitating_attention(target: Target, memory: float = 0.2) -> LoadedHead:
    """`imitating_drafter` with a layer that attends, whose output has some part in the scores.

    The layer finds earlier places with the same token after them, so that what is drafted depends
    on its cache; `memory` is that part.
    """
    alone = imitating_drafter(target)
    D, heads = target.config.hidden_size, target.config.num_attention_heads
    layer = ATTENTION | {"num_attention_heads": heads, "num_key_value_heads": heads}
    layer |= {"head_dim": D // heads}
    config = dataclasses.replace(alone.config, **layer)
    head, source = random_drafter(config).merge(), alone.merge()
    head.rnn_w.kernel[...] = source.rnn_w.kernel[...]
    head.rnn_u.kernel[...], head.rnn_u.bias[...] = jnp.zeros((D, D)), jnp.zeros(D)
    by_context = memory * head.lm_head.kernel[...][:D]
    head.lm_head.kernel[...] = jnp.concatenate([by_context, source.lm_head.kernel[...][D:]])
    same, nothing = jnp.eye(D), jnp.zeros((D, D))
    weight = head.attention.self_attn.qkv_proj
    joint = joint_of(weight)
    assert joint is not None
    weight.set_value(join(joint, [jnp.concatenate([same, nothing])] * 3))
    return Model.split(config, head)


def imitating_medusa(
    target: Target, heads: int = 3, corruption: float = 0.0, seed: int = 0, **variant: Any
) -> LoadedHead:
    """Medusa heads that know the greedy text of a forgetful target, as if it had no memory.

    Its hidden state after a token is then a fixed vector per token. From these vectors every head
    solves a linear system to the logits at the end of a greedy walk. `corruption` adds noise.

    Args:
      target: the forgetful target.
      heads: K.
      corruption: how wrong the heads are.
      seed: of the noise.
      variant: fields of `MedusaConfig`.
    """
    random = np.random.default_rng(seed)
    V, D = target.config.vocab_size, target.config.hidden_size
    _, normalised, logits = _markov_chain(target)
    config = MedusaConfig(V, D, heads, num_draft_layers=0, **variant)
    medusa = init_drafter(config, 0).merge()
    walked = np.arange(V)
    for head in medusa.heads:
        walked = logits[walked].argmax(axis=-1)
        solution = np.linalg.pinv(normalised) @ logits[walked]
        solution += corruption * np.abs(solution).mean() * random.normal(size=solution.shape)
        known = list(config.draft_tokens or range(V))
        head.lm_head.kernel[...] = jnp.asarray(solution[:, known], jnp.float32)
    return Model.split(config, medusa)


def imitating_eagle(target: Target, version: Literal["1", "3"], memory: float = 0.1) -> LoadedHead:
    """An EAGLE head that mostly computes the forgetful target's map from token to logits.

    What it puts out is the embedding of the token as the target's norm scales it: the first version
    takes it from its pair; EAGLE-3 by attention, which sees all tokens of the text and finds those
    that are the same. `memory` scales all else, so that what it drafts depends on its cache.
    """
    config, heads = target.config, 4
    D, third = config.hidden_size, version == "3"
    own: dict[str, Any] = {"context_layers": (0,)} if third else {"head": "target"}
    shape = EagleConfig(config.vocab_size, D, version, D, 48, heads, heads, D // heads, **own)
    head = random_drafter(shape).merge()
    decoder = target.merge()
    norm, same = decoder.norm[...], jnp.eye(D)
    head.fc.kernel[...] = memory * head.fc.kernel[...]
    head.mlp.down_proj[...] = memory * head.mlp.down_proj[...]
    if not third:
        head.self_attn.o_proj[...] = memory * head.self_attn.o_proj[...]
        head.fc.kernel[...] = jnp.concatenate([jnp.diag(norm), head.fc.kernel[...][D:]])
        return Model.split(shape, head)
    nothing = jnp.zeros((D, D))
    head.embedding_norm[...] = jnp.ones(D)
    maps = [jnp.concatenate([factor * same, nothing]) for factor in (2.0, 2.0, 1.0)]
    joint = joint_of(head.self_attn.qkv_proj)
    assert joint is not None
    head.self_attn.qkv_proj[...] = join(joint, maps)
    head.self_attn.o_proj[...] = same
    head.norm[...] = norm
    head.lm_head.kernel[...] = decoder.lm_head[...]
    return Model.split(shape, head)


def imitating_block(
    target: Target, *, sequential: bool, memory: float = 0.05, **variant: Any
) -> LoadedHead:
    """A DFlash or DSpark head that mostly computes the forgetful target's map.

    The place of the root puts out the root's embedding, which the target's norm and projection make
    the next token's scores; a sequential head has these for every token, and outweighs the places.
    `memory` scales the layers, so that what is drafted depends on the cache.

    Args:
      target: the forgetful target.
      sequential: whether it has a sequential head; without one the first token alone is right.
      memory: how much the layers add.
      variant: fields of `BlockConfig`.
    """
    config, heads = target.config, 4
    V, D = config.vocab_size, config.hidden_size
    fields: dict[str, Any] = {"sample_from_anchor": True, "context_layers": (0,), **variant}
    if sequential:
        fields["markov_rank"] = D
    shape = BlockConfig(V, D, 2, 48, heads, heads // 2, D // heads, 4, V - 1, **fields)
    head = random_drafter(shape).merge()
    for layer in head.layers:
        layer.self_attn.o_proj[...] = memory * layer.self_attn.o_proj[...]
        layer.mlp.down_proj[...] = memory * layer.mlp.down_proj[...]
    norm = target.merge().norm[...]
    head.norm[...] = 0.2 * norm if sequential else norm
    if sequential:
        _, normalised, _ = _markov_chain(target)
        head.markov.embed_tokens[...] = jnp.asarray(normalised, jnp.float32)
        known = jnp.asarray(shape.draft_tokens or range(V))
        head.markov.scores.kernel[...] = target.merge().lm_head[:, known]
    return Model.split(shape, head)


def imitating_hydra(target: Target, *, prefix: bool, memory: float = 0.05) -> LoadedHead:
    """Hydra heads that mostly compute the forgetful target's map from the newest token to logits.

    The first block of head k takes the embedding of the last token that it is fed, as large as the
    target's norm makes it on average; the target's norm weighs it, and its projection scores it.
    `memory` scales all else, so that what is drafted depends on the hidden state.

    Args:
      target: the forgetful target.
      prefix: whether they are Hydra++'s.
      memory: how much all else adds.
    """
    config, heads = target.config, 3
    V, D = config.vocab_size, config.hidden_size
    layer = PrefixLayer(
        config.intermediate_size,
        config.num_attention_heads,
        config.num_key_value_heads,
        config.head_dim,
        config.rms_norm_eps,
    )
    shape = HydraConfig(V, D, heads, 2, prefix=layer if prefix else None)
    module, decoder = random_drafter(shape).merge(), target.merge()
    _, normalised, _ = _markov_chain(target)
    scale = np.abs(normalised).mean() / np.abs(np.asarray(decoder.embed_tokens[...])).mean()
    for head in module.heads:
        first = head.first
        first.linear.kernel[...] = memory * first.linear.kernel[...]
        first.residual.kernel[...] = memory * first.residual.kernel[...]
        first.residual.kernel[...] = first.residual.kernel[...].at[-D:].set(scale * jnp.eye(D))
        head.again.linear.kernel[...] = memory * head.again.linear.kernel[...]
        for block in (first.linear, first.residual, head.again.linear):
            block.bias[...] = memory * block.bias[...]
        head.lm_head.kernel[...] = decoder.lm_head[...]
        head.lm_head.bias[...] = memory * head.lm_head.bias[...]
    return Model.split(shape, module)


def assert_same(first: Model[Any, Any], second: Model[Any, Any]) -> None:
    assert first.config == second.config
    assert first.graphdef == second.graphdef
    for one, other in zip(
        jax.tree.leaves(first.params), jax.tree.leaves(second.params), strict=True
    ):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))
