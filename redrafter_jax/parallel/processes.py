"""Jobs of several processes, on JAX's distributed runtime.

A job has one process per host or per GPU, all started with the same command. XLA's collectives run
over NCCL on GPUs and gloo on CPUs.
"""

import os
from collections.abc import Mapping
from pathlib import Path

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from redrafter_jax.errors import InputError
from redrafter_jax.parallel.mesh import DATA

# Seconds without a heartbeat after which a process counts as dead and the job ends.
_HEARTBEAT_SECONDS = 20
# Schedulers' variables for the number of processes; JAX then finds the other values by itself.
_SCHEDULERS = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE")


def join(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    environment: Mapping[str, str] = os.environ,
) -> None:
    """Join the other processes of this job, if there are any; call this before JAX lists devices.

    Arguments that are None are taken from JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and
    JAX_PROCESS_ID, or from the variables of SLURM and Open MPI, which JAX reads.

    Args:
      coordinator_address: HOST:PORT on which process 0 listens.
      num_processes: total number of processes.
      process_id: index of this process, from 0.
      environment: environment variables of this process.

    Raises:
      InputError: some values are given but others are missing, a value is out of range, or the
        processes do not connect.
    """
    address = coordinator_address or environment.get("JAX_COORDINATOR_ADDRESS")
    count = _number(num_processes, "JAX_NUM_PROCESSES", environment)
    own = _number(process_id, "JAX_PROCESS_ID", environment)
    given = {"coordinator_address": address, "num_processes": count, "process_id": own}
    scheduled = any((_number(None, name, environment) or 1) > 1 for name in _SCHEDULERS)
    missing = [name for name, value in given.items() if value is None]
    if len(missing) == len(given) and not scheduled:
        return
    if missing and not scheduled:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in missing)
        raise InputError(
            f"A job of several processes also needs {flags}; give them, or set the variables "
            "JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID."
        )
    if count is not None and count < 1:
        raise InputError(f"num_processes is {count}; it must be 1 or more.")
    if count is not None and own is not None and not 0 <= own < count:
        raise InputError(f"process_id is {own}; of {count} processes it must be 0 to {count - 1}.")
    try:
        jax.distributed.initialize(
            address,
            count,
            own,
            # Even with all values given, JAX would assign GPUs by the scheduler's task numbers.
            cluster_detection_method="deactivate" if not missing else None,
            heartbeat_timeout_seconds=_HEARTBEAT_SECONDS,
        )
    except (RuntimeError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise InputError(
            f"This process could not join the other processes ({reason}); start all processes with "
            "the same --coordinator-address and --num-processes, and each with its own "
            "--process-id."
        ) from None


def wait_for_all(what: str) -> None:
    """Wait until all processes of the job have made this call; `what` names it in JAX's errors."""
    if jax.distributed.is_initialized():
        multihost_utils.sync_global_devices(what)


def broadcast_from_first(values: np.ndarray) -> np.ndarray:
    """Return the first process's array on all processes; all processes must make this call.

    The other processes pass any array of the same shape and dtype.
    """
    if not jax.distributed.is_initialized():
        return values
    return np.asarray(multihost_utils.broadcast_one_to_all(values))


def bytes_from_first(content: bytes) -> bytes:
    """Return the first process's bytes on all processes; all processes must make this call.

    The argument of the other processes is ignored.
    """
    size = broadcast_from_first(np.asarray(len(content)))
    padded = np.frombuffer(content.ljust(int(size), b"\0"), np.uint8)
    return broadcast_from_first(padded).tobytes()


def least_of_all(value: int) -> int:
    """Return the minimum of the processes' values; all processes must make this call."""
    if not jax.distributed.is_initialized():
        return value
    # As bytes: JAX would make 32 bits of 64.
    own = np.frombuffer(value.to_bytes(8), np.uint8)
    return min(int.from_bytes(row.tobytes()) for row in multihost_utils.process_allgather(own))


def read_lines(path: Path) -> tuple[list[bytes], bytes]:
    """Return the complete lines of a file, and the bytes of an incomplete last line.

    A process that is killed while it writes leaves an incomplete line. The first process reads the
    file, and all processes return the result. If the file does not exist, there are no lines and no
    bytes.
    """
    content = path.read_bytes() if is_first() and path.is_file() else b""
    *lines, tail = bytes_from_first(content).split(b"\n")
    return lines, tail


def is_first() -> bool:
    """Whether this is process 0 of its job; only that process writes files and messages."""
    return jax.process_index() == 0


def rows_of_process(mesh: Mesh | None) -> tuple[int, int]:
    """Return which part of each batch this process loads, as (index of the part, number of parts).

    Processes whose devices share a row of the mesh load the same part.

    Raises:
      InputError: this process has no device in the mesh, or its rows are not contiguous.
    """
    if mesh is None:
        return 0, 1
    own = [
        index
        for index, row in enumerate(mesh.devices)
        if any(device.process_index == jax.process_index() for device in row)
    ]
    if not own:
        raise InputError(
            f"The mesh of {dict(mesh.shape)} has no device of process {jax.process_index()}; make "
            f"a mesh of all {jax.device_count()} devices of the job, or start fewer processes."
        )
    first, size, parts = own[0], len(own), mesh.shape[DATA]
    if own != list(range(first, first + size)) or first % size or parts % size:
        raise InputError(
            f"The mesh gives process {jax.process_index()} the shards {own} of {parts} along data, "
            "but every process needs equally many adjacent shards; start every process with the "
            "same number of devices, and give a data that the processes can share evenly."
        )
    return first // size, parts // size


def _number(given: int | None, name: str, environment: Mapping[str, str]) -> int | None:
    text = environment.get(name)
    if given is not None or not text:
        return given
    try:
        return int(text)
    except ValueError:
        raise InputError(f"{name} is {text!r}; it must be a whole number.") from None
