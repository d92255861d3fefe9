"""The drafter that training starts from."""

from collections.abc import Collection, Sequence
from dataclasses import asdict, replace

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Float

from redrafter_jax.config import TargetConfig
from redrafter_jax.config.drafter import HeadConfig
from redrafter_jax.config.limits import FieldError
from redrafter_jax.drafters.base import LoadedHead
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
    """A drafter to start from, of the target's width, that learns to draft R = `rounds` tokens.

    A smaller vocabulary, if one is asked for, is chosen from the training data, the `sources`.

    Raises:
      InputError: the head is to start from the target's, but is wider; the target has fewer tokens
        or layers than are asked for; or a trained drafter to start from is of another shape.
    """
    tokens = None
    count = settings.count_draft_tokens(target.config.vocab_size)
    if count is not None:
        # Without end tokens no draft could end a text: each would take one more target call.
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
    drafter: LoadedHead = find_head(folder).load("float32")
    kind = kind_of(drafter.config)
    if kind.training is None:
        raise InputError(
            f"drafter.initial_drafter is {folder}, {kind.title}, which is not trained here; name "
            f"one of {', '.join(TRAINING)}."
        )
    tokens = drafter.config.draft_tokens
    count = len(tokens or ()) or None
    asked = settings.draft_vocab_size
    if asked not in (count, "auto") and drafter.config.head == "target":
        # None of its parameters belongs to a token, so that the data may choose others.
        module, tokens = drafter.merge(), chosen
        module.config = replace(module.config, draft_tokens=chosen)
        drafter = Model.split(module.config, module)
    elif asked not in (count, "auto"):
        raise InputError(
            f"drafter.draft_vocab_size is {asked}, and that of {folder} is "
            f"{count}; state the same, or another drafter.initial_drafter."
        )
    # "auto" is as many as it has.
    shape = settings.model_copy(update={"draft_vocab_size": None})
    config = shape.build_for(target, rounds, tokens)
    if kind is kind_of(config):
        drafter = _with_additions(drafter, config, kind.training.additions, seed)
    stated, found = asdict(config), asdict(drafter.config)
    for name in stated | found:
        if stated.get(name) != found.get(name):
            raise InputError(
                f"drafter.initial_drafter is {folder}, whose {name} is {found.get(name)} and not "
                f"{stated.get(name)}; state the same shape."
            )
    return drafter


def _with_additions(
    drafter: LoadedHead, config: HeadConfig, additions: Sequence[str], seed: int
) -> LoadedHead:
    """The drafter with a fresh part that `config` has and it has not; else as it is."""
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
    """The `count` of V tokens that most often carry loss, in rising order.

    Each source counts by its weight, whatever its size. Of equally frequent tokens the lower ids
    are taken. Those of `always`, such as the end token, are included however rare they are.

    Raises:
      InputError: the vocabulary has fewer tokens, or `always` more.
    """
    if not len(always) <= count <= vocab_size:
        raise InputError(
            f"drafter.draft_vocab_size is {count}; the target has {vocab_size} tokens, of which "
            f"{len(always)} end a text and are always drafted, so ask for {len(always)} to "
            f"{vocab_size}, or leave it out for all."
        )
    frequency = _frequencies(sources, vocab_size)
    frequency[list(always)] = np.inf
    best = np.argsort(-frequency, kind="stable")[:count]
    return tuple(np.sort(best).tolist())


def share_drafted(
    sources: Sequence[tuple[Windows, float]], tokens: Collection[int], vocab_size: int
) -> float:
    """The part of the tokens that carry loss that can be drafted, as `most_frequent` counts."""
    frequency = _frequencies(sources, vocab_size)
    return float(frequency[list(tokens)].sum() / frequency.sum())


def _frequencies(
    sources: Sequence[tuple[Windows, float]], vocab_size: int
) -> Float[np.ndarray, " V"]:
    """How often each token carries loss in a row, weighted by its source."""
    frequency = np.zeros(vocab_size)
    for windows, weight in sources:
        counts = np.bincount(windows.tokens[windows.loss_mask], minlength=vocab_size)
        frequency += weight * counts / len(windows.tokens)
    return frequency
