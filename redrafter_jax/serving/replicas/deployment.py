"""The Ray Serve application of the replicas and their endpoint, and the cluster that runs it."""

# The extra `ray` may be missing.
# pyright: reportMissingImports=false

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ray
from ray import serve
from ray._private.state import available_resources_per_node  # public are only the sums of machines
from ray.serve.config import RequestRouterConfig

from redrafter_jax.config.serving import ReplicaConfig, ServeConfig
from redrafter_jax.engine.engine import Engine
from redrafter_jax.errors import InputError
from redrafter_jax.parallel.cluster import join_cluster
from redrafter_jax.serving.guard import Guard
from redrafter_jax.serving.replicas.front import Front
from redrafter_jax.serving.replicas.replica import EngineReplica
from redrafter_jax.serving.server import LOOPBACK
from redrafter_jax.serving.service import ServedModel

NAME = "redrafter"
# Seconds between health checks of a replica, and until one without an answer has failed.
_HEALTH_PERIOD, _HEALTH_TIMEOUT = 2.0, 30.0
# Seconds after the drain in which a replica sends errors for answers that it cut off.
_GRACE = 5.0
# Percent of the replicas, which Ray Serve rounds up to a whole one.
_ONE_MORE = 1
# Number of requests that the endpoint forwards at a time; in effect unlimited, because the replicas
# have limits.
_HANDED_ON = 10_000


@dataclass(frozen=True)
class Endpoint:
    """The address and the API key of the endpoint.

    Attributes:
      host: address to listen on.
      port: port to listen on.
      api_key: the key that requests must send; None for no key.
    """

    host: str
    port: int
    api_key: str | None


class GuardedFront:
    """The Ray Serve deployment of the endpoint: one process, whose loss ends all streams."""

    def __init__(self, engines: Any, endpoint: Endpoint, max_body: int) -> None:
        front = Front(engines)
        self._app = Guard(
            front,
            api_key=endpoint.api_key,
            hosts=LOOPBACK if endpoint.host in LOOPBACK else None,
            max_body=max_body,
            on_refusal=front.counts.count_refusal,
        )

    def __serve_build_asgi_app__(self) -> Guard:
        return self._app


def make_application(
    load: Callable[[], tuple[Engine, ServedModel]],
    limits: ServeConfig,
    replicas: ReplicaConfig,
    endpoint: Endpoint,
    *,
    log_prompts: bool = False,
) -> serve.Application:
    """Build the Ray Serve application of the replicas and their endpoint.

    Args:
      load: picklable function that each replica calls to load its engine and the served model.
      limits: limits of each replica.
      replicas: number and resources of the replicas.
      endpoint: address and API key of the endpoint.
      log_prompts: whether prompts are logged.
    """
    few, most = replicas.replicas or 1, replicas.max_replicas
    gpus = replicas.replica_gpus
    if gpus is None:
        gpus = 1.0 if ray.cluster_resources().get("GPU") else 0.0
    scaled: dict[str, Any] = {"num_replicas": few}
    if most is not None:
        # With more requests than slots, some wait.
        target = {"target_ongoing_requests": limits.slots}
        scaled = {"autoscaling_config": {"min_replicas": few, "max_replicas": most} | target}
    routing: Any = {
        "request_router_class": "redrafter_jax.serving.replicas.router:ConversationRouter",
        "request_router_kwargs": {"slack": limits.slots},
    }
    engines: Any = serve.deployment(
        EngineReplica,
        name="engine",
        max_ongoing_requests=limits.choices,
        max_queued_requests=limits.queue_limit,
        ray_actor_options={"num_cpus": replicas.replica_cpus, "num_gpus": gpus},
        health_check_period_s=_HEALTH_PERIOD,
        health_check_timeout_s=_HEALTH_TIMEOUT,
        graceful_shutdown_timeout_s=limits.drain + _GRACE,
        request_router_config=RequestRouterConfig(**routing),
        max_surge_percent=_surge(replicas.replica_cpus, gpus),
        **scaled,
    )
    front: Any = serve.deployment(
        serve.ingress()(GuardedFront),
        name="front",
        max_ongoing_requests=_HANDED_ON,
        ray_actor_options={"num_cpus": 0},
        max_surge_percent=_ONE_MORE,
        graceful_shutdown_timeout_s=limits.drain + _GRACE,
    )
    bound = engines.bind(load, limits, log_prompts)
    return front.bind(bound, endpoint, limits.max_body)


def _surge(cpus: float, gpus: float) -> int:
    """Return the percentage of replicas that a rolling update starts before it ends old ones.

    If no machine has room for one more replica, the update would wait forever. It then ends an old
    replica first, and the percentage is 0.
    """
    for free in available_resources_per_node().values():  # a replica is on one machine
        if free.get("CPU", 0) >= cpus and free.get("GPU", 0) >= gpus:
            return _ONE_MORE
    return 0


class Cluster:
    """Ray's cluster, which the constructor starts or joins; see `join_cluster`.

    Raises:
      InputError: the cluster cannot be joined.
    """

    def __init__(self) -> None:
        join_cluster()

    def deploy(self, application: serve.Application, endpoint: Endpoint) -> None:
        """Serve the application; if an earlier one runs, its replicas are replaced one by one.

        Raises:
          InputError: the replicas do not start.
        """
        try:
            serve.start(http_options={"host": endpoint.host, "port": endpoint.port})
            serve.run(application, name=NAME, route_prefix="/")
        except RuntimeError as error:
            raise InputError(
                f"The replicas do not start: {' '.join(str(error).split())}; their log says why."
            ) from None

    def end(self) -> None:
        """Wait for running answers, then end the replicas and the cluster."""
        serve.delete(NAME)
        serve.shutdown()
        ray.shutdown()
