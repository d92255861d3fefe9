"""Numerical ties: whether rounding explains that two texts diverge at a token.

A score is a logit divided by the temperature, plus the sampling noise. The target chooses the token
with the largest score among those that the filters keep.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from redrafter_jax.decoding.read import chunk_length, read_chunk
from redrafter_jax.drafters.base import RootOnly
from redrafter_jax.engine.requests import check_batch, slots_for
from redrafter_jax.models.cache import init_cache
from redrafter_jax.models.target import Target
from redrafter_jax.parallel.collectives import all_gather
from redrafter_jax.parallel.mesh import per_shard, place, to_host
from redrafter_jax.sampling import draw_noise, filter_logits
from redrafter_jax.types import KVCache, Sampling

from .benchmark import Batch
from .row_sampling import stack_sampling


class Scores(NamedTuple):
    """The numbers from which the target chooses a row's next token.

    Attributes:
      logits: the target's logits.
      noise: sampling noise of the token's position; 0 for greedy rows.
      sampling: sampling parameters of this row, as arrays with B = 1 row.
    """

    logits: Float[np.ndarray, " V"]
    noise: Float[np.ndarray, " V"]
    sampling: Sampling

    @property
    def temperature(self) -> float:
        """The number by which logits are divided; 1 for greedy rows."""
        return float(self.sampling.temperature[0]) or 1.0

    @property
    def unfiltered(self) -> Float[np.ndarray, " V"]:
        """The scores of all tokens, before the filters drop any."""
        return self.logits / self.temperature + self.noise

    def keeps(self, by: Float[np.ndarray, " V"] | float = 0.0) -> Bool[np.ndarray, " V"]:
        """Return the mask of the tokens that the filters keep if `by` is added to the logits."""
        moved = jnp.asarray(self.logits + by, jnp.float32)[None, None]
        # Without `jit`, the filter would compile its branches in every call.
        return np.isfinite(jax.jit(filter_logits)(moved, self.sampling)[0, 0])

    def may_choose(self, token: int, tolerance: float) -> bool:
        """Whether the token may be chosen if rounding moves each logit by at most the tolerance.

        The filters keep the tokens with the largest logits, and the kept token with the largest
        score is chosen. So rounding must do two things at once: the filters must keep this token,
        and they must drop every token whose score is larger by more than the tolerance over the
        temperature. Each of the two is tested with its own perturbation of the logits. A single
        perturbation can do both if it can also raise this token's logit to the largest logit of the
        tokens to drop. This is tested last.
        """
        logits, scores = self.logits, self.unfiltered
        if not self.keeps(np.where(logits > logits[token], -tolerance, tolerance))[token]:
            return False
        ahead = scores > scores[token] + tolerance / self.temperature
        if not ahead.any():
            return True
        rival = int(np.where(ahead, logits, -np.inf).argmax())
        down = ahead | (logits < logits[rival] - 2 * tolerance)
        dropped = not self.keeps(np.where(down, -tolerance, tolerance))[rival]
        return dropped and bool(logits[rival] <= logits[token] + 2 * tolerance)


def score(target: Target, batch: Batch) -> list[Scores]:
    """Compute the scores of the token after each prompt of a batch."""
    rows = check_batch(target.config, batch)
    lengths = np.asarray([len(row.prompt) for row in rows], np.int32)
    # Pad to whole chunks, plus the token after the last one.
    tokens = np.zeros((len(rows), slots_for(int(lengths.max()), 1) + 1), np.int32)
    for own, row in zip(tokens, rows, strict=True):
        own[: len(row.prompt)] = row.prompt
    sampling = stack_sampling(target.config, rows)
    placed = place((tokens, lengths, sampling), target.mesh)
    logits, noise = to_host(_score(target, *placed))
    return [
        Scores(
            logits[row],
            noise[row],
            jax.tree.map(lambda leaf, row=row: leaf[row : row + 1], sampling),
        )
        for row, _ in enumerate(batch.prompts)
    ]


@jax.jit
@per_shard
def _score(
    target: Target, tokens: Int[Array, "B Splus1"], lengths: Int[Array, " B"], sampling: Sampling
) -> tuple[Float[Array, "B V"], Float[Array, "B V"]]:
    """Compute the logits and the noise of the token after each prompt."""
    decoder, V = target.merge(), target.config.vocab_size
    B, S = tokens.shape[0], tokens.shape[1] - 1
    C = min(chunk_length(), S)

    def read(
        index: Int[Array, ""], carry: tuple[KVCache, Float[Array, "B V"]]
    ) -> tuple[KVCache, Float[Array, "B V"]]:
        cache, logits = carry
        chunk = jax.lax.dynamic_slice_in_dim(tokens, index * C, C + 1, axis=1)
        fresh = read_chunk(decoder, RootOnly(), (), cache, chunk, lengths, sampling)
        ends = (lengths - 1) // C == index
        return fresh.cache, jnp.where(ends[:, None], all_gather(fresh.logits[:, 0], V), logits)

    nothing = init_cache(target.config, B, S, decoder.dtype), jnp.zeros((B, V))
    _, logits = jax.lax.fori_loop(0, (lengths.max() - 1) // C + 1, read, nothing)
    return logits, draw_noise(sampling, lengths, 1, V)[:, 0]


def explain(
    seen: Scores, token: int | None, speculative_token: int | None, tolerance: float
) -> dict[str, Any]:
    """Explain the first divergence of two texts.

    Args:
      seen: the target's scores at the first divergence.
      token: the token of the baseline's text; None if this text has ended.
      speculative_token: the token of the speculative text; None if this text has ended.
      tolerance: the tolerance in logits; see `eval.config.Tolerances`.

    Returns:
      The fields "gap", "filtered" and "tie"; see `eval.parity.DEFINITIONS`.
    """
    if token is None or speculative_token is None:
        return {"gap": None, "filtered": False, "tie": False}
    both = (token, speculative_token)
    gap = float(seen.unfiltered[token] - seen.unfiltered[speculative_token])
    tie = all(seen.may_choose(one, tolerance) for one in both)
    by_scores = abs(gap) <= tolerance / seen.temperature
    filtered = (tie and not by_scores) or not seen.keeps()[[*both]].all()
    return {"gap": None if filtered else gap, "filtered": bool(filtered), "tie": tie}
