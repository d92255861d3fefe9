"""What is compiled is counted from the end of the warm-up on."""

import jax
import numpy as np
import pytest
from tiny_models import forgetful_target, tiny_config

from redrafter_jax.serving.engine import Engine

pytestmark = pytest.mark.usefixtures("quick_compilation")


def test_what_the_warm_up_compiles_is_not_counted() -> None:
    engine = Engine(
        forgetful_target(memory=0.15, config=tiny_config(num_hidden_layers=1)),
        None,
        slots=1,
        context_length=40,
    )
    counts: list[int] = []

    def count(ready: int, programs: int) -> bool:
        counts.append(engine.counters.compiled)
        return True

    engine.warm_up(count)
    assert set(counts) == {0}
    jax.jit(lambda value: value + 1)(np.arange(3))
    assert engine.counters.compiled > 0
