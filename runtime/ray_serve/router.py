"""Ray Serve's request router, by `prefixes`: in every ingress, for the replicas."""

from __future__ import annotations

import random
from collections import Counter, OrderedDict
from typing import Any

from ray.serve.request_router import (
    PendingRequest,
    ReplicaID,
    RequestRouter,
    RunningReplica,
)

from outrider.runtime.ray_serve.prefixes import BLOCK, BLOCKS, KERNELS, Balance, PrefixIndex, choose
from outrider.runtime.ray_serve.replica_request import ReplicaRequest

_MOST_CHOSEN = 256


class PrefixRouter(RequestRouter):  # type: ignore[misc]
    """Requests that share a beginning go to the replica that holds it, load permitting."""

    def initialize_state(self, **_: Any) -> None:
        self._index: PrefixIndex[ReplicaID] = PrefixIndex()
        self._balance, self._draw = Balance(), random.Random()
        self._chosen: OrderedDict[str, tuple[ReplicaID, int]] = OrderedDict()  # by request, and not sent yet: blocks

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Replicas in ranks of one; Ray takes the first that has room."""
        sent = _sent(pending_request)
        by_id = {each.replica_id: each for each in candidate_replicas if _may_go_on(each, sent)}
        path = [] if sent is None else sent.path
        loads = {name: self.replica_queue_len_cache.get(name) or 0 for name in by_id}
        sizes = Counter({name: self._index.size(name) for name in by_id})
        for name, blocks in self._chosen.values():
            sizes[name] += blocks
        known = self._index.match(path, "" if sent is None else sent.owner)
        order = choose(len(path), known, loads, sizes, self._balance, self._draw)
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True  # once all have been tried
        if pending_request is not None and order:
            self._chosen[pending_request.metadata.internal_request_id] = order[0], len(path) // BLOCK
            while len(self._chosen) > _MOST_CHOSEN:  # cancelled before they were sent
                self._chosen.popitem(last=False)
        return [[by_id[name]] for name in order]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """A replica has taken the request."""
        self._chosen.pop(pending_request.metadata.internal_request_id, None)
        sent = _sent(pending_request)
        if sent is not None:
            self._index.insert(sent.path, replica_id, sent.owner)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._index.forget(replica_id)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Called when replicas come or go."""
        before = set(self.curr_replicas)
        super().update_replicas(replicas)
        for gone in before - set(self.curr_replicas):
            self._index.forget(gone)
        for replica in replicas:  # what other ingresses have sent
            self._index.hold(replica.routing_stats.get(BLOCKS, ()), replica.replica_id)


class RoundRobinRouter(RequestRouter):  # type: ignore[misc]
    """Each request to the next replica, whatever it holds: what routing by prefix is measured against."""

    def initialize_state(self, **_: Any) -> None:
        self._turn = 0

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        self._turn += 1
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True
        ordered = sorted(candidate_replicas, key=lambda replica: replica.replica_id.unique_id)
        first = self._turn % max(1, len(ordered))
        return [[replica] for replica in [*ordered[first:], *ordered[:first]]]


def _sent(pending: PendingRequest | None) -> ReplicaRequest | None:
    given = pending.args[0] if pending is not None and pending.args else None
    return given if isinstance(given, ReplicaRequest) else None


def _may_go_on(replica: RunningReplica, sent: ReplicaRequest | None) -> bool:
    """Whether a replica would take a request, as far as is known: not one that has tokens of other kernels."""
    here = replica.routing_stats.get(KERNELS)
    return sent is None or not sent.kernels or not here or dict(sent.kernels) == here
