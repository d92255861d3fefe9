"""Plain float64 numpy answers, loops and all, that the tests hold the library to.

Written from the papers and from Hugging Face's definitions, never from the library's code.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from flax import nnx

from redrafter_jax.config import SamplingConfig, TargetConfig, TreeConfig
from redrafter_jax.models.linear import parts_of
from redrafter_jax.types import Sampling

Array = np.ndarray[Any, Any]


def log_softmax(scores: Array) -> Array:
    """Over the last axis."""
    shifted = scores - scores.max(axis=-1, keepdims=True)
    with np.errstate(divide="ignore"):
        return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def softmax(scores: Array) -> Array:
    """Over the last axis."""
    return np.exp(log_softmax(scores))


def sigmoid(x: Array) -> Array:
    """1 / (1 + exp(-x))."""
    return 1 / (1 + np.exp(-x))


def silu(x: Array) -> Array:
    """x times its sigmoid."""
    return x * sigmoid(x)


def rms_norm(x: Array, weight: Array, epsilon: float) -> Array:
    """Over the last axis."""
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + epsilon) * weight


def rotary(x: Array, positions: Array, theta: float) -> Array:
    """Rotated by position, the halves of a head paired: x [M heads H], positions [M]."""
    half = x.shape[-1] // 2
    turned = np.empty(x.shape)
    for m, position in enumerate(positions):
        for pair in range(half):
            angle = position * theta ** (-pair / half)
            a, b = x[m, :, pair], x[m, :, half + pair]
            turned[m, :, pair] = a * np.cos(angle) - b * np.sin(angle)
            turned[m, :, half + pair] = b * np.cos(angle) + a * np.sin(angle)
    return turned


def attention(q: Array, k: Array, v: Array, visible: Array, scale: float) -> Array:
    """One row, query by query: q [M Q H], k and v [J K H], visible [M J]."""
    queries, query_heads, _ = q.shape
    group = query_heads // k.shape[1]
    out = np.zeros(q.shape)
    for m in range(queries):
        seen = np.flatnonzero(visible[m])
        for head in range(query_heads):
            scores = k[seen, head // group].astype(np.float64) @ q[m, head].astype(np.float64)
            out[m, head] = softmax(scores * scale) @ v[seen, head // group].astype(np.float64)
    return out


def ancestors(parents: Sequence[int], node: int) -> list[int]:
    """The node and everything above it, the root last."""
    path = [node]
    while path[-1] != 0:
        path.append(int(parents[path[-1]]))
    return path


def ancestor_mask(parents: Sequence[int]) -> Array:
    """mask[i, j]: j is i or above it."""
    mask = np.zeros((len(parents), len(parents)), bool)
    for node in range(len(parents)):
        mask[node, ancestors(parents, node)] = True
    return mask


def random_parents(random: np.random.Generator, nodes: int, max_depth: int) -> list[int]:
    """Parents of a random tree in topological order."""
    parents, depth = [0], [0]
    for node in range(1, nodes):
        parent = int(random.choice([other for other in range(node) if depth[other] < max_depth]))
        parents.append(parent)
        depth.append(depth[parent] + 1)
    return parents


def depth_of(parents: Sequence[int]) -> list[int]:
    """Steps to the root from every node."""
    return [len(ancestors(parents, node)) - 1 for node in range(len(parents))]


def filtered_scores(logits: Array, config: SamplingConfig) -> Array:
    """One vector through Hugging Face's temperature, top-k, top-p and min-p processors.

    Except that all tokens that tie with the last one top-p keeps are kept; Hugging Face's top-p
    keeps some of them, by their place in its sort.
    """
    scores = np.asarray(logits, np.float64).copy()
    if config.temperature == 0:
        return scores
    scores /= config.temperature
    if config.top_k is not None:
        smallest_kept = np.sort(scores)[-min(config.top_k, len(scores))]
        scores[scores < smallest_kept] = -np.inf
    if config.top_p is not None and config.top_p < 1:
        descending = np.sort(scores)[::-1]
        reached = np.cumsum(softmax(descending)) >= config.top_p
        # rounding may leave the whole sum below a top_p next to 1
        last_kept = np.argmax(reached) if reached.any() else len(scores) - 1
        scores[scores < descending[last_kept]] = -np.inf
    if config.min_p is not None:
        probabilities = softmax(scores)
        scores[probabilities < config.min_p * probabilities.max()] = -np.inf
    return scores


def sampling_arrays(
    configs: Sequence[SamplingConfig], seeds: Sequence[int], vocab_size: int
) -> Sampling:
    """The rows' configurations as the library's arrays, neutral values as `Sampling` states."""
    neutral = {"top_k": vocab_size, "top_p": 1.0, "min_p": 0.0}

    def column(name: str, dtype: Any) -> Any:
        values = [getattr(config, name) for config in configs]
        return jnp.asarray([neutral[name] if one is None else one for one in values], dtype)

    return Sampling(
        temperature=column("temperature", jnp.float32),
        top_k=column("top_k", jnp.int32),
        top_p=column("top_p", jnp.float32),
        min_p=column("min_p", jnp.float32),
        seeds=jnp.asarray(seeds, jnp.int32),
    )


class DrafterWeights:
    """A recurrent head's matrices, [in, out]; its vocabulary projection may be borrowed."""

    def __init__(self, head: Any, borrowed: Array | None = None) -> None:
        self.named: dict[str, Array] = {
            ".".join(map(str, path)): np.asarray(value, np.float64)
            for whole, parameter in nnx.to_flat_state(nnx.state(head))
            for path, value in parts_of(whole, parameter)
        }
        self.vocabulary = self.named["lm_head.kernel"] if borrowed is None else borrowed
        self.tokens = list(head.config.draft_tokens or range(head.config.vocab_size))

    def through(self, layer: str, x: Array) -> Array:
        """W x + b of a layer, x itself where the head has none of this name."""
        if f"{layer}.kernel" not in self.named:
            return x
        return x @ self.named[f"{layer}.kernel"] + self.named.get(f"{layer}.bias", 0.0)

    def step(self, state: Array, embedding: Array) -> Array:
        """SiLU(W e + U s + b), torch.nn.GRUCell, or a running sum without a recurrence."""
        if "rnn_w.kernel" in self.named:
            return silu(self.through("rnn_w", embedding) + self.through("rnn_u", state))
        if "gru_w.kernel" not in self.named:
            return state + embedding
        # As PyTorch documents it: gates r, z and candidate n, each with both biases.
        r, z, n = np.split(self.through("gru_w", embedding), 3)
        hidden_r, hidden_z, hidden_n = np.split(self.through("gru_u", state), 3)
        reset, update = sigmoid(r + hidden_r), sigmoid(z + hidden_z)
        return (1 - update) * np.tanh(n + reset * hidden_n) + update * state

    def attend(self, context: Array, embedded: Array, layer: TargetConfig) -> Array:
        """Through the layer before the recurrence: one text from its beginning, [T D] twice."""
        named = {
            name.removeprefix("attention."): value
            for name, value in self.named.items()
            if name.startswith("attention.")
        }
        normed = (
            rms_norm(embedded, named["embedding_norm"], layer.rms_norm_eps),
            rms_norm(context, named["hidden_norm"], layer.rms_norm_eps),
        )
        x, places = np.concatenate(normed, axis=-1), np.arange(len(context))
        q, k, v = (
            (x @ named[f"self_attn.{name}_proj"]).reshape(len(x), -1, layer.head_dim)
            for name in "qkv"
        )
        q, k = (rotary(one, places, layer.rope_theta) for one in (q, k))
        seen = attention(q, k, v, np.tri(len(x), dtype=bool), layer.head_dim**-0.5)
        x = context + seen.reshape(len(x), -1) @ named["self_attn.o_proj"]
        normed = rms_norm(x, named["mlp_norm"], layer.rms_norm_eps)
        gated = silu(normed @ named["mlp.gate_proj"]) * (normed @ named["mlp.up_proj"])
        return x + gated @ named["mlp.down_proj"]

    def logits(self, context: Array, state: Array) -> Array:
        """[h ; s] -> projection -> residual blocks -> head projection -> vocabulary."""
        return self.logits_from(self.through("context_proj", context), state)

    def logits_from(self, context: Array, state: Array) -> Array:
        """The same from what the projection of several hidden states, or a layer, has made."""
        x = np.concatenate([context, state])
        x = self.through("input_proj", x)
        for block in range(sum(name.startswith("blocks.") for name in self.named) // 2):
            x = x + silu(self.through(f"blocks.{block}", x))
        return self.through("head_proj", x) @ self.vocabulary

    def logits_after(self, embedding: Array, context: Array, path: Sequence[int]) -> Array:
        """Of the tokens to draft after a path, which begins at the root."""
        state = np.zeros(embedding.shape[1])
        for token in path:
            state = self.step(state, embedding[token])
        return self.logits(context, state)


class Beam(NamedTuple):
    """A beam of the brute-force search."""

    log_prob: float
    parent: int
    path: tuple[int, ...]  # from the root on

    @property
    def token(self) -> int:
        return self.path[-1]


def beam_search(
    logits_after: Callable[[tuple[int, ...]], Array],
    tokens: Sequence[int],
    root: int,
    noise: Array,
    sampling: SamplingConfig,
    tree: TreeConfig,
    traced: int,
) -> list[list[Beam]]:
    """All extensions of all beams scored and sorted whole; one row, noise [R V].

    Scores after a path are those of the tokens that can be drafted. The best `beam_width` of a
    round are its beams, the best `traced` are returned.
    """
    beams = [Beam(0.0, 0, (root,))]
    trace = []
    for step in range(tree.draft_rounds):
        extensions = []
        for parent, beam in enumerate(beams):
            scores = filtered_scores(logits_after(beam.path), sampling)
            scores = scores + noise[step, list(tokens)]
            scores = tree.sharpness * (sampling.temperature or 1.0) * scores
            if tree.candidates:
                scores = np.where(scores < np.sort(scores)[-tree.candidates], -np.inf, scores)
            extensions += [
                Beam(beam.log_prob + log_prob, parent, (*beam.path, token))
                for token, log_prob in zip(tokens, log_softmax(scores), strict=True)
            ]
        extensions.sort(key=lambda beam: -beam.log_prob)
        beams = extensions[: tree.beam_width]
        trace.append(extensions[:traced])
    return trace


def chi_square(counts: Array, probabilities: Array) -> float:
    """Pearson's statistic of observed counts against a law."""
    expected = counts.sum() * probabilities
    assert expected.min() > 5, "too few draws for the chi-square approximation"
    return float(((counts - expected) ** 2 / expected).sum())


# The statistic's 99.99% quantile by degrees of freedom, from a table of the chi-square law.
CHI_SQUARE_BOUND = {26: 61.657, 63: 113.505, 124: 191.276}
