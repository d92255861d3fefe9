"""Limits on the work that a server takes on."""

from dataclasses import dataclass

from redrafter_jax.config.limits import Bytes, Checked, Count, Natural, Positive


@dataclass(frozen=True)
class ServeConfig(Checked):
    """Limits of `redrafter serve`.

    Attributes:
      slots: requests that decode together.
      cache_memory: size of the cache on each device, such as 40GB, which all slots share; by
        default a share of what a GPU has free, elsewhere room for 4096 tokens in each slot.
      context_length: tokens of a prompt and its answer; by default the target's limit, or what the
        cache holds if that is less.
      queue_limit: requests that may wait for a slot; more are refused.
      deadline: seconds that a request may take; by default any.
      drain: seconds that running answers may take after SIGTERM.
      max_body: bytes of a request.
      max_logprobs: likeliest tokens that may be asked for; each step computes as many.
      steps_per_call: decode steps per call; requests are admitted and cancelled between calls.
    """

    slots: Count = 8
    cache_memory: Bytes | None = None
    context_length: Count | None = None
    queue_limit: Count = 64
    deadline: Positive | None = None
    drain: Positive = 30.0
    max_body: Count = 1 << 20
    max_logprobs: Natural = 5
    steps_per_call: Count = 4

    @property
    def choices(self) -> int:
        """Number of choices that one request may ask for: as many as slots and queue hold."""
        return self.slots + self.queue_limit
