"""Limits on the work that a server takes on."""

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge

from redrafter_jax.config.limits import Bytes, Checked, Count, Natural, Positive, require


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


@dataclass(frozen=True)
class ReplicaConfig(Checked):
    """Replicas of `redrafter serve`, by Ray Serve.

    Attributes:
      replicas: engines, each in a process of its own, behind one endpoint.
      max_replicas: as many of them while requests wait for a slot; by default no more.
      replica_cpus: CPUs that Ray counts for each.
      replica_gpus: GPUs that each has; by default one, where there are any.
    """

    replicas: Count | None = None
    max_replicas: Count | None = None
    replica_cpus: Positive = 1.0
    replica_gpus: Annotated[float, Ge(0)] | None = None

    @property
    def several(self) -> bool:
        """Whether there are replicas at all."""
        return self.replicas is not None or self.max_replicas is not None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_replicas is not None:
            require(
                self.max_replicas >= (self.replicas or 1),
                self,
                "max_replicas",
                f"is {self.max_replicas}, fewer than the {self.replicas or 1} replicas; give more.",
            )
