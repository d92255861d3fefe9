"""How often JAX compiles: after a warm-up, never."""

import weakref

import jax

from redrafter_jax.serving.messages import Counters

_COMPILED = "/jax/core/compile/backend_compile_duration"


def count_compilations(owner: object, counters: Counters) -> None:
    """Let the counters count what JAX compiles in this process, while the owner lives."""

    def count(event: str, duration_secs: float, **kwargs: str | int) -> None:
        del duration_secs, kwargs
        counters.compiled += event == _COMPILED

    jax.monitoring.register_event_duration_secs_listener(count)
    weakref.finalize(owner, jax.monitoring.unregister_event_duration_listener, count)
