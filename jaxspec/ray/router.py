"""PrefixRouter: requests with the same prefix go to the same replica while it is not overloaded."""

# pyright: reportMissingImports=false

import hashlib
import random
from collections.abc import Sequence

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from jaxspec.ray.call import Call


class PrefixRouter(RequestRouter):
    """Consistent hashing of prompt prefixes with bounded loads.

    Each prefix ranks the replicas in an order of its own (rendezvous hashing), so routers agree
    without shared state, and a replica that is added or removed moves only the prefixes that it
    gets or had. The first replica in this order is chosen whose load exceeds the least load by at
    most `max_imbalance` requests. Requests without a prefix go to the less loaded one of two random
    replicas, as by Ray's default.
    """

    def initialize_state(self, max_imbalance: int) -> None:
        """Receive the keyword arguments of the deployment's `RequestRouterConfig`."""
        self._max_imbalance = max_imbalance

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Return groups of replicas in order of preference; Ray takes the first one with room."""
        call = None
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True  # if none of these has room
            call = next((arg for arg in pending_request.args if isinstance(arg, Call)), None)
        if call is not None:
            sound = [each for each in candidate_replicas if _id(each) not in call.avoid]
            candidate_replicas = sound or candidate_replicas
        if call is None or call.prefix is None or not candidate_replicas:
            return [random.sample(candidate_replicas, min(2, len(candidate_replicas)))]
        loads = [self.replica_queue_len_cache.get(r.replica_id) or 0 for r in candidate_replicas]
        order = ranked(call.prefix, [_id(each) for each in candidate_replicas])
        most = min(loads) + self._max_imbalance
        return [[candidate_replicas[i]] for i in order if loads[i] <= most]


def ranked(prefix: bytes, replicas: Sequence[str]) -> list[int]:
    """Return the indices of the replicas in the order of a prefix."""

    def weight(index: int) -> bytes:
        return hashlib.blake2b(replicas[index].encode(), key=prefix, digest_size=8).digest()

    return sorted(range(len(replicas)), key=weight)


def _id(replica: RunningReplica) -> str:
    return replica.replica_id.unique_id
