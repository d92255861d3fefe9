"""Limits on the work that a server takes on."""

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge

from redrafter_jax.config.limits import Bytes, Checked, Count, Natural, Positive, require


@dataclass(frozen=True)
class ServeConfig(Checked):
    """Limits of `redrafter serve`.

    Attributes:
      slots: number of requests that decode together.
      cache_memory: size of the cache on each device, such as 40GB, which all slots share; by
        default a share of a GPU's free memory, or without a GPU room for 4096 tokens per slot.
      context_length: limit on the tokens of a prompt and its answer; by default the target's limit,
        or the size of the cache if that is less.
      queue_limit: number of requests that may wait for a slot; further requests are refused.
      deadline: seconds that a request may take; by default there is no limit.
      drain: seconds that running answers may take after SIGTERM.
      max_body: limit on the bytes of a request's body.
      max_logprobs: limit on the `top_logprobs` of a request; every step computes this number of
        log-probabilities.
      steps_per_call: number of decode steps between two moments at which requests can be admitted
        or cancelled.
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
        """Limit on the choices of one request: the number of slots plus places in the queue."""
        return self.slots + self.queue_limit


@dataclass(frozen=True)
class ReplicaConfig(Checked):
    """Replicas of `redrafter serve`, which Ray Serve runs.

    Attributes:
      replicas: number of engines behind one endpoint, each in its own process.
      max_replicas: number of replicas up to which Ray adds replicas while requests wait for a slot;
        by default the number does not change.
      replica_cpus: CPUs that Ray reserves for each replica.
      replica_gpus: GPUs of each replica; by default one, if the machine has GPUs.
    """

    replicas: Count | None = None
    max_replicas: Count | None = None
    replica_cpus: Positive = 1.0
    replica_gpus: Annotated[float, Ge(0)] | None = None

    @property
    def several(self) -> bool:
        """Whether the settings ask for replicas."""
        return self.replicas is not None or self.max_replicas is not None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_replicas is not None:
            require(
                self.max_replicas >= (self.replicas or 1),
                self,
                "max_replicas",
                f"is {self.max_replicas}; it must be at least the number of replicas, "
                f"{self.replicas or 1}.",
            )
