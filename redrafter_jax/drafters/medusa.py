"""Medusa heads (arXiv 2401.10774): each head predicts one further token, from one hidden state.

All heads read the target's last hidden state, and none reads drafted tokens. So the probability of
a path in the tree is the product of the probabilities that the heads give to its tokens. A path is
written as ranks, one per head: (0, 2) is the best token of the first head, followed by the third
best token of the second head.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from redrafter_jax.config import TreeConfig
from redrafter_jax.config.drafter import HeadConfig
from redrafter_jax.config.limits import Count, FieldError, Natural, require
from redrafter_jax.drafters.head_drafter import (
    Dense,
    HeadDrafter,
    TrainedHead,
    make_blocks,
    run_blocks,
)
from redrafter_jax.drafters.ranking import rank_tokens
from redrafter_jax.drafters.tree import rank_tree
from redrafter_jax.errors import InputError
from redrafter_jax.models.linear import linear
from redrafter_jax.models.target import Decoder
from redrafter_jax.sampling import of_drafted
from redrafter_jax.types import DraftReads, KVCache, Scorer, TokenTree, View

MODEL_TYPE = "medusa"
Path = tuple[int, ...]


@dataclass(frozen=True)
class MedusaConfig(HeadConfig):
    """Configuration of Medusa heads, which read the target's last hidden state only.

    Attributes:
      num_heads: K, number of tokens predicted after the root, each by its own head.
      num_draft_layers: number of residual blocks per head, of the target's width; training uses 1
        by default.
      head: "own" for a vocabulary projection per head; "target" for the target's projection.
    """

    num_heads: Count
    num_draft_layers: Natural
    head: Literal["own", "target"] = field(default="own", kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        problem = "is 0 and head is 'target', so the head has no weights; give 1 or more."
        trains = self.num_draft_layers > 0 or self.head == "own"
        require(trains, self, "num_draft_layers", problem)
        problem = f"is {self.context_layers}; Medusa heads read only the last layer: leave it out."
        require(not self.context_layers, self, "context_layers", problem)

    def check_tree(self, tree: TreeConfig) -> None:
        """Refuse beam search options, more draft rounds than heads, and more ranks than tokens."""
        if tree.draft_rounds > self.num_heads:
            raise InputError(
                f"TreeConfig.draft_rounds is {tree.draft_rounds}, but the drafter has "
                f"{self.num_heads} Medusa heads; give that number or fewer."
            )
        for name in ("final_beams_only", "rerank"):
            if getattr(tree, name):
                raise InputError(
                    f"TreeConfig.{name} is for heads that draft in beams, but Medusa heads draft "
                    f"by rank; leave {name} out."
                )
        super().check_tree(tree)


class MedusaHead(nnx.Module):
    """The residual blocks of one head, and its projection unless `head` is "target"."""

    def __init__(self, config: MedusaConfig, *, rngs: nnx.Rngs) -> None:
        D = config.hidden_size
        self.blocks = make_blocks(D, config.num_draft_layers, rngs)
        if config.head == "own":
            self.lm_head = Dense(D, config.draft_vocab_size, bias=False, rngs=rngs)


class MedusaHeads(TrainedHead):
    """The K heads; head k, from 0, predicts the token k + 2 positions after its hidden state.

    The token at the next position is the root, which the target itself predicts.
    """

    config: MedusaConfig

    def __init__(self, config: MedusaConfig, *, rngs: nnx.Rngs) -> None:
        self.config = config
        self.heads = nnx.List([MedusaHead(config, rngs=rngs) for _ in range(config.num_heads)])

    def logits(
        self, hidden: Float[Array, "... D"], rounds: int, scorer: Scorer | None = None
    ) -> Float[Array, "... R U"]:
        """Return float32 scores of the draftable tokens from each of the first R heads.

        On a mesh, the scores are this device's shard. With `head="target"`, `scorer` computes the
        scores of all heads in one pass over its weights.
        """
        used = self.heads[:rounds]
        features = [run_blocks(head.blocks, hidden) for head in used]
        if self.config.head == "target":
            assert scorer is not None, "head='target' has no projection of its own: pass scorer="
            return scorer(jnp.stack(features, axis=-2))
        own = [
            linear(x, head.lm_head.kernel.get_value(), jnp.float32)
            for head, x in zip(used, features, strict=True)
        ]
        return jnp.stack(own, axis=-2)

    def unroll(
        self,
        contexts: Float[Array, "B C D"],
        embedded: Float[Array, "B M D"],
        rounds: int,
        scorer: Scorer | None = None,
    ) -> Iterator[Float[Array, "B C U"]]:
        """Yield the scores of one head per round; see `TrainedHead.unroll`.

        Medusa heads do not read `embedded`.
        """
        del embedded
        yield from jnp.moveaxis(self.logits(contexts, rounds, scorer), -2, 0)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class MedusaDrafter(HeadDrafter):
    """Drafts with Medusa heads.

    A step drafts the most probable paths that fit in the tree's N nodes. With `tree.static_tree`,
    every step drafts the same paths.
    """

    @property
    def name(self) -> str:
        return "medusa"

    def propose(
        self,
        target: Decoder,
        own: Float[Array, "B D"],
        cache: KVCache,
        view: View,
        noise: Float[Array, "B P V"],
        tree: TreeConfig,
    ) -> TokenTree:
        del cache
        heads = self.model.merge()
        rounds, drafted = tree.draft_rounds, heads.draft_token_ids
        logits = heads.logits(own, rounds, self.scorer(target))
        size = heads.config.draft_vocab_size

        def own_noise() -> Float[Array, "B R U"]:
            of_rounds = noise[:, :rounds]
            return of_rounds if drafted is None else of_rounds[..., drafted]

        sampling = of_drafted(view.sampling, drafted)
        log_probs, tokens = rank_tokens(logits, own_noise, sampling, tree, size)
        tokens = tokens if drafted is None else drafted[tokens]
        return rank_tree(view.root, tokens, log_probs, paths_of(tree), tree.budget)


def paths_of(tree: TreeConfig) -> list[Path]:
    """Return the paths of ranks from which a step chooses N - 1; prefixes precede longer paths."""
    if isinstance(tree.static_tree, tuple):
        return sorted(tree.static_tree, key=_order)
    paths = sorted(_possible_paths(tree), key=_order)
    if tree.static_tree:
        paths.sort(key=_assumed_acceptance, reverse=True)
        paths = sorted(paths[: tree.beam_nodes - 1], key=_order)
    return paths


def _possible_paths(tree: TreeConfig, above: Path = (), better: int = 0) -> Iterator[Path]:
    """Yield every path that can be among the N - 1 most probable, whatever the probabilities.

    Paths of the same or a greater length with the same or higher ranks at every depth cannot be
    more probable than a given path. So a path cannot be chosen if at least N - 1 other paths are
    certain to be as probable: for (0, 2) these are (0,), (0, 0) and (0, 1).

    Args:
      tree: the shape of the tree, which provides W, R and N.
      above: prefix of the paths.
      better: number of paths that are certainly at least as probable as this prefix, including the
        prefix.
    """
    if len(above) == tree.draft_rounds:
        return
    for rank in range(tree.beam_width):
        path = (*above, rank)
        count = better + prod(each + 1 for each in path)
        if count >= tree.beam_nodes:
            return
        yield path
        yield from _possible_paths(tree, path, count)


def _order(path: Path) -> tuple[int, Path]:
    return len(path), path


def _assumed_acceptance(path: Path) -> float:
    """Return the assumed probability that a path is accepted.

    The paper measures such probabilities, and builds its tree from them greedily, one node at a
    time (section 2.3.3). The result is the tree of the most likely nodes. This library assumes a
    probability of 0.55 / (rank + 1)^2 for the first head, and for each further head four fifths of
    the probability of the previous head. The authors report about 0.6 for the best token of the
    first head, and over 0.8 for its five best tokens together.
    """
    return prod(0.55 * 0.8**head / (rank + 1) ** 2 for head, rank in enumerate(path))


def is_published(stated: Mapping[str, Any]) -> bool:
    """Whether `config.json` comes from Medusa's authors, whose files state no `model_type`.

    The authors' files state the numbers of heads and blocks under the same names as this library's
    files, but no sizes (https://github.com/FasterDecoding/Medusa).
    """
    return not stated.get("model_type") and "medusa_num_heads" in stated


def from_files(stated: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """Return the numbers of heads and blocks; for published heads the sizes come from the weights.

    Some published files state fewer heads than they hold, so the number of heads comes from the
    weights as well.
    """
    heads, layers = stated["medusa_num_heads"], stated["medusa_num_layers"]
    if stated.get("model_type"):
        return {"num_heads": heads, "num_draft_layers": layers}
    last = f".{layers}.weight"
    if len(shapes.get(f"0{last}", ())) != 2:
        problem = (
            f"is {layers}, but the files hold no matrix '0{last}', which would be the vocabulary "
            "projection of the first head; use matching files."
        )
        raise FieldError(MedusaConfig, "medusa_num_layers", problem)
    V, D = shapes[f"0{last}"]
    heads = max(heads, sum(name.removesuffix(last).isdecimal() for name in shapes))
    return {"num_heads": heads, "num_draft_layers": layers, "vocab_size": V, "hidden_size": D}


def to_files(config: MedusaConfig) -> dict[str, Any]:
    """Return the fields of `config.json`; `draft_tokens` and `head` are added if not default."""
    fields: dict[str, Any] = {
        "architectures": ["Medusa"],
        "model_type": MODEL_TYPE,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "medusa_num_heads": config.num_heads,
        "medusa_num_layers": config.num_draft_layers,
    }
    if config.draft_tokens is not None:
        fields["draft_tokens"] = config.draft_tokens
    if config.head != "own":
        fields["head"] = config.head
    return fields


def stored_name(config: MedusaConfig, name: str) -> str:
    """Map a parameter's name (heads.0.blocks.0.kernel) to the authors' name (0.0.linear.weight)."""
    _, head, *path = name.replace("kernel", "weight").split(".")
    if path == ["lm_head", "weight"]:
        return f"{head}.{config.num_draft_layers}.weight"
    _, block, last = path
    return f"{head}.{block}.linear.{last}"


def start_from_target(module: MedusaHeads, projection: Float[Array, "D U"]) -> None:
    """Give every head zero blocks and the target's projection (arXiv 2401.10774, section 2.1.1)."""
    for head in module.heads:
        for block in head.blocks:
            block.kernel[...] = jnp.zeros_like(block.kernel[...])
        if module.config.head == "own":
            # Each head needs a buffer of its own, because training donates its state.
            head.lm_head.kernel[...] = jnp.copy(projection)


def count_reads(config: MedusaConfig, params: Any, tree: TreeConfig) -> DraftReads:
    """Count the weights that drafting one tree reads, for cost estimates.

    Each head that drafts is read once. The target's projection is read once for all heads.
    """
    used = [(params["heads"][head], 1) for head in range(tree.draft_rounds)]
    return DraftReads(used, 1 if config.head == "target" else 0, 0)
