"""`jax.jit` for whole programs: the compiler options that suit the platform they run on."""

import logging
from collections.abc import Callable
from functools import cache, wraps
from typing import Any, ParamSpec, TypeVar

import jax
import jax.core

P = ParamSpec("P")
Result = TypeVar("Result")

_log = logging.getLogger(__name__)

# XLA's CPU backend gives matrix products to YNNPACK, which takes longer over the few rows of a
# tree than XLA's own way; reductions are better left there. The figures: docs/benchmarks.
_OPTIONS = {"cpu": {"xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_REDUCE"}}


def program(**jit_arguments: Any) -> Callable[[Callable[P, Result]], Callable[P, Result]]:
    """Decorate a function as `jax.jit(**jit_arguments)` does, with options of the platform.

    Within another transformation it is an ordinary jitted function: JAX takes compiler options
    from the outermost program alone.
    """

    def decorate(function: Callable[P, Result]) -> Callable[P, Result]:
        inner = jax.jit(function, **jit_arguments)

        @cache
        def outermost() -> Callable[P, Result]:
            options = _usable_options(jax.default_backend())
            return jax.jit(function, compiler_options=options, **jit_arguments)

        @wraps(function)
        def call(*arguments: P.args, **keywords: P.kwargs) -> Result:
            leaves = jax.tree.leaves((arguments, keywords))
            traced = any(isinstance(leaf, jax.core.Tracer) for leaf in leaves)
            return (inner if traced else outermost())(*arguments, **keywords)

        return call

    return decorate


def _usable_options(platform: str) -> dict[str, str] | None:
    """The platform's options, or None where it has none or this jaxlib does not know them."""
    options = _OPTIONS.get(platform)
    if options is None:
        return None
    try:
        jax.jit(lambda x: x, compiler_options=options)(0)
    except jax.errors.JaxRuntimeError as error:
        _log.warning("This jaxlib refuses %s; programs may run slower: %s", options, error)
        return None
    return options
