"""What a decode step of any tree costs, from the steps of a few that are timed."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from redrafter_jax.config import DraftConfig
from redrafter_jax.drafters.bind import bind_drafter
from redrafter_jax.drafters.head_drafter import DraftModel
from redrafter_jax.models.target import Target

from .config import TuneSettings
from .step_parts import time_parts


class TimedTree(NamedTuple):
    """A tree's step and its propose: medians, in steps of the baseline, timed in turns."""

    draft: DraftConfig
    propose: float
    step: float


def pick_diverse(drafts: Sequence[DraftConfig], count: int) -> list[DraftConfig]:
    """Trees of very different sizes: fewest and most nodes, then those most unlike the chosen."""
    sizes = np.asarray([_sizes(draft) for draft in drafts])
    chosen = list(dict.fromkeys([int(sizes[:, 0].argmin()), int(sizes[:, 0].argmax())]))[:count]
    while len(chosen) < count:
        distances = np.abs(sizes[:, None] - sizes[chosen]).sum(axis=2).min(axis=1)
        if distances.max() == 0:
            break
        chosen.append(int(distances.argmax()))
    return [drafts[index] for index in chosen]


def _sizes(draft: DraftConfig) -> Float[np.ndarray, " sizes"]:
    """Logarithms of a tree's sizes, so that half and twice a size are equally far away."""
    return np.log2([draft.budget, draft.beam_width, draft.draft_rounds, 1.0 + draft.lookup_tokens])


def time_steps(
    target: Target,
    drafter: DraftModel,
    drafts: Sequence[DraftConfig],
    batch_size: int,
    slots: int,
    cached: int,
    settings: TuneSettings,
) -> list[list[TimedTree]]:
    """Time the trees' steps on a filled cache; for every sampling of the settings a list.

    All are timed in turns, so that a slow second of the machine does not hit one tree alone. Each
    row of the cache has `slots` slots and `cached` tokens, the same for all trees, which share one
    baseline.
    """
    timed = time_parts(
        target,
        [bind_drafter(drafter, draft) for draft in drafts],
        settings.samplings,
        batch_size,
        slots,
        turns={"propose": settings.steps, "step": settings.steps, "baseline": settings.steps},
        cached=cached,
        repeats=settings.step_repeats,
        name=f"time steps, batch size {batch_size}",
    )
    return [
        [
            TimedTree(
                draft,
                propose=float(np.median(seconds["propose"] / seconds["baseline"])),
                step=float(np.median(seconds["step"] / seconds["baseline"])),
            )
            for draft, seconds in zip(drafts, own, strict=True)
        ]
        for own in timed
    ]


def predict(timed: Sequence[TimedTree], draft: DraftConfig) -> float:
    """A tree's step in baseline steps.

    Drafting costs a constant, which includes the first round of one beam; an amount per later
    round, and per beam of it; and an amount for prompt lookup. All four are fitted to the timed
    trees. How many tokens of a beam are ranked, more with `rerank`, is ignored. The rest of a step,
    verify and finish, depends on the nodes alone and is interpolated linearly.
    """
    for one in timed:
        if one.draft == draft:
            return one.step
    costs = np.asarray([one.propose for one in timed])
    features = np.stack([_features(one.draft) for one in timed])
    fitted, *_ = np.linalg.lstsq(features, costs)
    propose = max(float(_features(draft) @ fitted), 0.0)
    rests: dict[int, list[float]] = {}
    for one in timed:
        rests.setdefault(one.draft.budget, []).append(one.step - one.propose)
    nodes = sorted(rests)
    rest = np.interp(draft.budget, nodes, [np.mean(rests[count]) for count in nodes])
    return propose + float(rest)


def _features(draft: DraftConfig) -> Float[np.ndarray, " features"]:
    later = draft.draft_rounds - 1
    return np.asarray([1.0, later, later * draft.beam_width, float(draft.lookup_tokens > 0)])
