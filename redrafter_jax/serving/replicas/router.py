"""Routes a request of Ray Serve to the replica that has cached the conversation's beginning."""

# The extra `ray` may be missing.
# pyright: reportMissingImports=false

from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from redrafter_jax.serving.replicas.conversation import ranked


class ConversationRouter(RequestRouter):
    """Routes a request by its first argument, the conversation's key; see `ranked`."""

    def initialize_state(self, **kwargs: Any) -> None:
        """Store `slack`, an argument of `ranked`."""
        self._slack: int = kwargs["slack"]

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Return the replicas in order of preference, as lists of one replica each."""
        key = ""
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True  # if no replica has room
            key = str(pending_request.args[0]) if pending_request.args else ""
        by_name = {one.replica_id.unique_id: one for one in candidate_replicas}
        cached = self.replica_queue_len_cache
        loads = {name: cached.get(one.replica_id) or 0 for name, one in by_name.items()}
        order = ranked(key, loads, self._slack)
        return [[by_name[name]] for name in order]
