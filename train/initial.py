"""Initialization of the drafter before training."""

from collections.abc import Collection, Sequence
from dataclasses import asdict, replace

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Float

from redrafter_jax.config import TargetConfig
from redrafter_jax.config.drafter import HeadConfig
from redrafter_jax.config.limits import FieldError
from redrafter_jax.drafters.base import LoadedHead, outline
from redrafter_jax.drafters.kinds import TRAINING, init_drafter, kind_of
from redrafter_jax.errors import InputError
from redrafter_jax.files.drafter_files import find_head
from redrafter_jax.models.target import Target
from redrafter_jax.parallel.model import Model

from .config import DrafterSettings
from .data.types import Windows


def new_drafter(
    target: Target,
    settings: DrafterSettings,
    rounds: int,
    sources: Sequence[tuple[Windows, float]],
    seed: int,
) -> LoadedHead:
    """Initialize a drafter for a target before training.

    Args:
      target: the loaded target.
      settings: shape and initialization of the drafter.
      rounds: R, number of tokens in succession that the drafter learns to draft.
      sources: rows and weight of each source, from which a reduced draft vocabulary is chosen.
      seed: seed of random parameters.

    Raises:
      InputError: the settings ask for more tokens or layers than the target has, the target's
        output head cannot initialize a head of this shape, or `initial_drafter` has another shape.
    """
    tokens = None
    count = settings.count_draft_tokens(target.config.vocab_size)
    if count is not None:
        # The draft vocabulary includes the end tokens: without them, every text would take one
        # more target call.
        ends = set(target.config.eos_token_ids)
        tokens = most_frequent(sources, count, target.config.vocab_size, ends)
    if settings.initial_drafter is not None:
        name = settings.initial_drafter
        return _load_initial(name, settings, target.config, rounds, tokens, seed)
    config = settings.build_for(target.config, rounds, tokens)
    drafter = init_drafter(config, seed)
    if settings.initial_head == "random":
        return drafter
    start = drafter.merge()
    head = target.merge().head.astype(jnp.float32)
    head = head if tokens is None else head[:, np.asarray(tokens)]
    try:
        TRAINING[settings.kind].start_from_target(start, head)
    except FieldError as error:
        raise InputError(f"drafter.{error.field} {error.problem}") from None
    return Model.split(config, start)


def _load_initial(
    folder: str,
    settings: DrafterSettings,
    target: TargetConfig,
    rounds: int,
    chosen: tuple[int, ...] | None,
    seed: int,
) -> LoadedHead:
    found_head = find_head(folder)
    outline(found_head.config).check(target)
    drafter: LoadedHead = found_head.load("float32")
    kind = kind_of(drafter.config)
    if kind.training is None:
        raise InputError(
            f"drafter.initial_drafter is {folder}, which holds {kind.title} and cannot be trained "
            f"here; use a drafter of kind {', '.join(TRAINING)}."
        )
    tokens = drafter.config.draft_tokens
    count = len(tokens or ()) or None
    asked = settings.draft_vocab_size
    if asked not in (count, "auto") and drafter.config.head == "target":
        # This drafter has no parameters per token, so its tokens are chosen from the data.
        module, tokens = drafter.merge(), chosen
        module.config = replace(module.config, draft_tokens=chosen)
        drafter = Model.split(module.config, module)
    elif asked not in (count, "auto"):
        raise InputError(
            f"drafter.draft_vocab_size is {asked}, but {folder} has "
            f"draft_vocab_size {count}; set the same value, or use another drafter.initial_drafter."
        )
    # "auto" takes the size of the initial drafter.
    shape = settings.model_copy(update={"draft_vocab_size": None})
    config = shape.build_for(target, rounds, tokens)
    if kind is kind_of(config):
        drafter = _with_additions(drafter, config, kind.training.additions, seed)
    stated, found = asdict(config), asdict(drafter.config)
    for name in stated | found:
        # Only files state the number of the target's layers, which `outline` has compared.
        if name == "num_target_layers" or stated.get(name) == found.get(name):
            continue
        way_out = "set the same shape under drafter"
        if name == "num_heads":  # of Medusa heads, one for each round
            way_out = "set draft_rounds to that number"
        elif kind is kind_of(config) and name not in kind.training.settings:
            way_out = "no setting changes this, so use another drafter.initial_drafter"
        raise InputError(
            f"drafter.initial_drafter is {folder}, whose {name} is {found.get(name)}, not "
            f"{stated.get(name)}; {way_out}."
        )
    return drafter


def _with_additions(
    drafter: LoadedHead, config: HeadConfig, additions: Sequence[str], seed: int
) -> LoadedHead:
    """Add newly initialized parameters for the fields `additions`, which only `config` has."""
    added = {name: getattr(config, name) for name in additions}
    if not any(added.values()) or any(getattr(drafter.config, name) for name in added):
        return drafter
    fresh = init_drafter(replace(drafter.config, **added), seed)
    trained = dict(nnx.to_flat_state(drafter.params))
    params = [(path, trained.get(path, value)) for path, value in nnx.to_flat_state(fresh.params)]
    return replace(fresh, params=nnx.from_flat_state(params))


def most_frequent(
    sources: Sequence[tuple[Windows, float]],
    count: int,
    vocab_size: int,
    always: Collection[int] = (),
) -> tuple[int, ...]:
    """Return the ids of the `count` tokens that carry loss most often, in ascending order.

    Each source counts by its weight, regardless of its size. Of equally frequent tokens, the lower
    id is chosen. The tokens in `always`, such as the end token, are always chosen.

    Raises:
      InputError: `count` is greater than the vocabulary, or less than the number of tokens in
        `always`.
    """
    if not len(always) <= count <= vocab_size:
        raise InputError(
            f"drafter.draft_vocab_size is {count}; the target has {vocab_size} tokens, of which "
            f"{len(always)} end a text and are always included, so set {len(always)} to "
            f"{vocab_size}, or null for all tokens."
        )
    frequency = _frequencies(sources, vocab_size)
    frequency[list(always)] = np.inf
    best = np.argsort(-frequency, kind="stable")[:count]
    return tuple(np.sort(best).tolist())


def share_drafted(
    sources: Sequence[tuple[Windows, float]], tokens: Collection[int], vocab_size: int
) -> float:
    """Of the tokens that carry loss, the fraction that is in `tokens`; sources count by weight."""
    frequency = _frequencies(sources, vocab_size)
    return float(frequency[list(tokens)].sum() / frequency.sum())


def _frequencies(
    sources: Sequence[tuple[Windows, float]], vocab_size: int
) -> Float[np.ndarray, " V"]:
    """The mean count per row of each token that carries loss; sources count by weight."""
    frequency = np.zeros(vocab_size)
    for windows, weight in sources:
        counts = np.bincount(windows.tokens[windows.loss_mask], minlength=vocab_size)
        frequency += weight * counts / len(windows.tokens)
    return frequency
