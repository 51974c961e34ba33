"""Ray Serve's request router, in every ingress: which replica holds how much of a prompt, and which is to get it."""

from __future__ import annotations

import random
from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from math import inf
from typing import Any, Generic, TypeVar

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from outrider.runtime.ray_serve.following import ReplicaRequest

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
        by_id = {each.replica_id: each for each in candidate_replicas if _may_continue(each, sent)}
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
    """Each request to the next replica: what routing by prefix is measured against."""

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


def _may_continue(replica: RunningReplica, sent: ReplicaRequest | None) -> bool:
    """Whether a replica would take a request, as far as is known: not one that has tokens of other kernels."""
    here = replica.routing_stats.get(KERNELS)
    return sent is None or not sent.kernels or not here or dict(sent.kernels) == here


ReplicaName = TypeVar("ReplicaName", bound=Hashable)

BLOCK = 16  # tokens
BLOCKS, KERNELS = "blocks", "kernels"  # of the routing statistics of replicas
_NOTHING = 0  # the hash in front of the first block


def blocks_of(tokens: Sequence[int], block: int, owner: str = "") -> list[int]:
    """A hash for every whole block of `tokens`, of its owner, it and all before it: the same in every process."""
    found, before = [], int.from_bytes(sha256(owner.encode()).digest()[:7]) if owner else _NOTHING
    for start in range(0, len(tokens) - block + 1, block):
        before = hash((before, *tokens[start : start + block]))
        found.append(before)
    return found


class PrefixIndex(Generic[ReplicaName]):
    """Beginnings of sequences in blocks of tokens, and the replicas that each was sent to.

    A block is known by a hash of its tokens and of all blocks before it. Of at most `capacity` blocks, those that were
    looked up last are kept; a block never outlives the one before it, so what is found is always a beginning.
    """

    def __init__(self, block: int = BLOCK, capacity: int = 2**17) -> None:
        """`block` in tokens, `capacity` in blocks of all replicas together."""
        self._block, self._capacity = block, capacity
        self._holders: OrderedDict[int, set[ReplicaName]] = OrderedDict()  # by a block's hash, the latest at the end
        self._sizes: Counter[ReplicaName] = Counter()

    def __len__(self) -> int:
        return len(self._holders)

    def size(self, replica: ReplicaName) -> int:
        """How many blocks a replica holds."""
        return self._sizes[replica]

    @property
    def blocks(self) -> list[int]:
        """All blocks, the latest last; `hold` takes them so."""
        return list(self._holders)

    def match(self, tokens: Sequence[int], owner: str = "") -> dict[ReplicaName, int]:
        """How many tokens from the beginning of the owner's `tokens` each replica holds, of those that hold any: whole
        blocks."""
        found: dict[ReplicaName, int] = {}
        passed: list[int] = []
        present: set[ReplicaName] | None = None
        for number, block in enumerate(blocks_of(tokens, self._block, owner)):
            holders = self._holders.get(block, set())
            present = set(holders) if present is None else present & holders
            if not present:
                break
            passed.append(block)
            found.update(dict.fromkeys(present, (number + 1) * self._block))
        self.hold(reversed(passed))
        return found

    def insert(self, tokens: Sequence[int], replica: ReplicaName, owner: str = "") -> None:
        """The owner's `tokens` were sent to `replica`, which holds them from now on."""
        self.hold(reversed(blocks_of(tokens, self._block, owner)[: self._capacity]), replica)

    def hold(self, blocks: Iterable[int], replica: ReplicaName | None = None) -> None:
        """Record that `replica` holds `blocks`, and move them to the most recent end.

        Pass a sequence's blocks last to first: its first block is then evicted last. Without a replica only the order
        changes, and the blocks must be known.
        """
        for block in blocks:
            holders = self._holders.setdefault(block, set())
            if replica is not None and replica not in holders:
                holders.add(replica)
                self._sizes[replica] += 1
            self._holders.move_to_end(block)
        while len(self._holders) > self._capacity:
            _, given_up = self._holders.popitem(last=False)
            self._sizes.subtract(given_up)

    def forget(self, replica: ReplicaName) -> None:
        """`replica` is gone."""
        for block in [block for block, holders in self._holders.items() if replica in holders]:
            self._holders[block].discard(replica)
            if not self._holders[block]:
                del self._holders[block]
        del self._sizes[replica]


@dataclass(frozen=True)
class Balance:
    """When load counts for more than what a replica holds.

    A replica with over `threshold` requests more than the least loaded one is passed over. What a replica holds counts
    from `share` of the prompt on: a system prompt that all have in common should not bring all to one replica.
    """

    threshold: int = 8
    share: float = 0.25


def choose(
    tokens: int,
    held: Mapping[ReplicaName, int],
    loads: Mapping[ReplicaName, int],
    sizes: Mapping[ReplicaName, int],
    balance: Balance,
    draw: random.Random,
) -> list[ReplicaName]:
    """All replicas of `loads`, best first, for a prompt of that many tokens.

    First those that are not overloaded and hold a share of the prompt, the longest first; then the better of two drawn
    ones; then the others by load. `loads` are requests under way at each replica, `sizes` blocks that each holds.
    """

    def burden(replica: ReplicaName) -> tuple[int, int]:
        return loads[replica], sizes.get(replica, 0)

    least = min(loads.values(), default=inf)
    holders = [
        replica
        for replica, load in loads.items()
        if load <= least + balance.threshold and held.get(replica, 0) >= max(1, balance.share * tokens)
    ]
    holders.sort(key=lambda replica: (-held[replica], burden(replica)))
    others = [replica for replica in loads if replica not in set(holders)]
    draw.shuffle(others)
    drawn = sorted(others[:2], key=burden)
    return [*holders, *drawn[:1], *sorted([*drawn[1:], *others[2:]], key=burden)]
