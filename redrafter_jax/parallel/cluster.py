"""The Ray cluster of this process: a new local cluster, or one that runs already."""

# The extra `ray` may be missing.
# pyright: reportMissingImports=false

import os
import warnings

import ray

from redrafter_jax.errors import InputError


def is_own() -> bool:
    """Whether this process starts its own cluster, because RAY_ADDRESS is not set."""
    return not os.environ.get("RAY_ADDRESS")


def join_cluster() -> None:
    """Start a cluster on this machine, or join the one that RAY_ADDRESS names.

    Raises:
      InputError: the cluster cannot be joined.
    """
    # By default Ray reports usage statistics of every cluster.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if is_own():
        with warnings.catch_warnings():
            # Ray's processes are other programs, which JAX's threads do not matter to.
            warnings.filterwarnings("ignore", r"os\.fork\(\) was called", RuntimeWarning)
            ray.init("local", include_dashboard=False)
        return
    try:
        ray.init()
    except (ConnectionError, RuntimeError, ValueError) as error:
        cause = str(error).strip().partition("\n")[0].rstrip(".:") or type(error).__name__
        raise InputError(
            f"RAY_ADDRESS is {os.environ['RAY_ADDRESS']!r}, where no cluster can be joined: "
            f"{cause}; start a cluster with `ray start --head`, or unset RAY_ADDRESS."
        ) from None
