"""What tells that a run goes on with what it began with."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from rich.console import Console
from train_runs import settings

from redrafter_jax.config import TargetConfig
from redrafter_jax.config.quantization import Quantization
from redrafter_jax.errors import InputError
from redrafter_jax.models.quantize import quantize_model
from redrafter_jax.models.target import init_target
from redrafter_jax.parallel.mesh import make_mesh, place
from train.config import TrainSettings
from train.data.types import Windows
from train.loop import train
from train.setup import (
    check_same_inputs,
    check_same_run,
    digest_rows,
    digest_weights,
)

CONFIG = TargetConfig(32, 16, 24, 1, 2, 2, 8, 1e4, 1e-5, 64, False, (0,))


@pytest.mark.parametrize(
    "form",
    [
        "float32",
        "int4",
        *(pytest.param(form, marks=pytest.mark.long) for form in ("bfloat16", "int8", "fp8")),
    ],
)
def test_a_digest_tells_of_one_changed_or_moved_weight(form: Any) -> None:
    config = replace(CONFIG, hidden_size=32, intermediate_size=64, head_dim=16)
    target = init_target(config, 0)
    if form in ("float32", "bfloat16"):
        target = jax.tree.map(lambda leaf: leaf.astype(form), target)
    else:
        target = quantize_model(target, Quantization.of(form))
    leaves, structure = jax.tree.flatten(target)
    digests, others = {digest_weights(target)}, 0
    for index, leaf in enumerate(leaves):
        flat = leaf.ravel()
        for changed in (flat.at[-1].set(-flat[-1]), flat[::-1]):
            # Norms are all ones: turned round they are the same.
            if (changed != flat).any():
                swapped = [*leaves[:index], changed.reshape(leaf.shape), *leaves[index + 1 :]]
                digests.add(digest_weights(jax.tree.unflatten(structure, swapped)))
                others += 1
    assert len(digests) == 1 + others > len(leaves)


def test_a_digest_of_rows_tells_of_their_length() -> None:
    flat = (np.arange(8, dtype=np.int32), np.ones(8, bool), np.ones(8, np.int32))
    digests = {digest_rows(Windows(*(x.reshape(rows, -1) for x in flat))) for rows in (1, 2, 4)}
    assert len(digests) == 3


def test_a_digest_is_the_same_on_a_mesh() -> None:
    target = init_target(CONFIG, 0)
    assert digest_weights(place(target, make_mesh(1, 2))) == digest_weights(target)


def test_a_template_of_another_day_is_told_the_way_out() -> None:
    saved, now = {"target": "a", "chats": "b", "texts": "c"}, {"target": "a", "chats": "B"}
    with pytest.raises(InputError, match=r"contents of chats; .*=\{date_string: \.\.\.\}") as told:
        check_same_inputs(saved, now | {"texts": "c"}, {"chats"}, Path("runs"))
    assert str(told.value).endswith("={date_string: ...}.")
    with pytest.raises(InputError, match=r"contents of texts; .* or delete this folder\.$"):
        check_same_inputs(saved, saved | {"texts": "C"}, {"chats"}, Path("runs"))


def test_steps_grow_once_all_are_taken_and_not_on_the_way() -> None:
    saved, more = (
        TrainSettings.model_validate(settings(Path("any"), Path("runs"), steps=steps))
        for steps in (40, 60)
    )
    check_same_run(saved.model_dump(mode="json"), 40, more)
    with pytest.raises(InputError, match=r"steps 40 \(now 60\); steps may only grow after all 40"):
        check_same_run(saved.model_dump(mode="json"), 20, more)


def test_a_place_where_no_folder_can_be_made_is_refused() -> None:
    values = settings(Path("any"), Path("README.md/x"))
    with pytest.raises(InputError, match=r"Cannot make output_dir README.md/x: Not a directory; "):
        train(TrainSettings.model_validate(values), Console(quiet=True))
