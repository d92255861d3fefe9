"""Whole programs: the platform's compiler options, and none where JAX would refuse them."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from redrafter_jax.parallel import program as programs
from redrafter_jax.parallel.program import program


@program(static_argnames="power")
def raised(x: jax.Array, *, power: int) -> jax.Array:
    """x ** power."""
    return x**power


def test_a_program_is_the_function_alone_and_within_other_transformations() -> None:
    x = jnp.arange(4.0)
    expected = np.arange(4.0) ** 3
    np.testing.assert_array_equal(raised(x, power=3), expected)
    np.testing.assert_array_equal(jax.jit(lambda y: raised(y, power=3))(x), expected)
    np.testing.assert_array_equal(jax.vmap(lambda y: raised(y, power=3))(x), expected)
    np.testing.assert_allclose(jax.grad(lambda y: raised(y, power=3))(2.0), 12.0)


def test_options_that_this_jaxlib_does_not_know_are_left_out_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(programs, "_OPTIONS", {"cpu": {"xla_no_such_option": "1"}})
    doubled = program()(lambda x: x * 2)
    with caplog.at_level(logging.WARNING):
        assert doubled(21) == 42
    assert "xla_no_such_option" in caplog.text
