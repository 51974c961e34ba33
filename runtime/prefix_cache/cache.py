"""KV of earlier sequences, found by their tokens.

A radix tree says which beginnings are known, and a pool of pages holds their KV: of the target, and of the drafters
that were asked. KV is copied in and out, so that no two sequences ever write the same slots.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from outrider.plans import names
from outrider.plans.check import kv_caches
from outrider.plans.errors import PlanError, RequestError
from outrider.plans.manifest import BackendPlan
from outrider.runtime.kv.memory import host_kv
from outrider.runtime.kv.state import Snapshot, StateShape
from outrider.runtime.kv.token_kv import TokenKv
from outrider.runtime.prefix_cache.page_pool import PAGE, Allocate, PagePool, PageRun, TokenShape
from outrider.runtime.prefix_cache.radix_tree import Match, Node, RadixTree, TreeStats
from outrider.runtime.prefix_cache.stats import PrefixCacheStats


@dataclass(frozen=True)
class PrefixCacheConfig:
    """How much is kept, and what is worth it.

    `memory_bytes` bounds the pool, which may then hold less than `max_cached_tokens`, and `state_bytes` the states of
    models that keep some, of which those that were not used for longest go first. With `enable_auto_eviction`, an
    insert that leaves more than `eviction_threshold` of the tokens in use evicts down to `eviction_target`; without, it
    keeps what there is room for.
    """

    max_cached_tokens: int = 65536
    memory_bytes: int = 2**30
    state_bytes: int = 2**28
    min_prefix_length: int = 4
    enable_auto_eviction: bool = True
    eviction_threshold: float = 0.9
    eviction_target: float = 0.8
    enable_stats: bool = True

    def __post_init__(self) -> None:
        for name in ("max_cached_tokens", "memory_bytes", "state_bytes", "min_prefix_length"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise RequestError(f"{name} is {value!r}; pass a whole number of at least 1.")
        if not 0 < self.eviction_target <= self.eviction_threshold <= 1:
            raise RequestError(
                f"eviction_target is {self.eviction_target!r} and eviction_threshold {self.eviction_threshold!r}; pass "
                "shares of 0 to 1, the target not above the threshold."
            )


@dataclass
class PrefixMatch:
    """The known beginning of a sequence. Its KV stays where it is until `PrefixCache.release`.

    `lengths` says of each model how many leading tokens have KV.
    """

    tokens: int  # of the sequence
    matched_tokens: int
    cache_hit: bool
    matched_prefix: list[int]
    lengths: dict[str, int]
    held: Node[PageRun] | None
    runs: list[tuple[int, PageRun]]  # where each begins, as it lay when it was found

    @property
    def prefill_start_pos(self) -> int:
        """Index of the first token to compute: at least the last one always is."""
        return min(self.matched_tokens, self.tokens - 1)

    def state_within(self, limit: int) -> Snapshot | None:
        """Return the state after the most of the first `limit` tokens, if any was kept."""
        limit, found = min(limit, self.matched_tokens), None
        for start, run in self.runs:
            for after, state in run.states.items():
                if start + after <= limit and (found is None or state.cut(limit).end > found.end):
                    found = state.cut(limit)
        return found


class PrefixCache:
    """Thread-safe: one lock covers a lookup and its reference. Reading KV that is held needs no lock."""

    def __init__(
        self,
        shapes: Mapping[str, TokenShape],
        config: PrefixCacheConfig | None = None,
        allocate: Allocate = host_kv,
        states: Sequence[StateShape] = (),
    ) -> None:
        """Allocate all memory, by `allocate`; `states` are those of the target. Raises RequestError where the budget is
        less than two pages."""
        config = config or PrefixCacheConfig()
        affordable = config.memory_bytes // PagePool.page_bytes(shapes)
        pages = min(-(-config.max_cached_tokens // PAGE), affordable)
        if pages < 2:
            raise RequestError(
                f"memory_bytes is {config.memory_bytes}; two pages of {PAGE} tokens need "
                f"{2 * PagePool.page_bytes(shapes)}."
            )
        self.config = replace(config, max_cached_tokens=min(config.max_cached_tokens, pages * PAGE))
        self.state_shapes = tuple(states)
        self._pool = PagePool(shapes, pages, allocate)
        self._tree: RadixTree[PageRun] = RadixTree()
        self._stats = PrefixCacheStats()
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        """Bytes that the cache has allocated, and those of states that it keeps."""
        with self._lock:
            return self._pool.nbytes + self._state_bytes()

    def _state_bytes(self) -> int:
        return sum(state.nbytes for node in self._tree.walk() if node.value for state in node.value.states.values())

    # Looking up.

    def match(self, tokens: Sequence[int], owner: str = "") -> PrefixMatch:
        """Return the longest beginning of `tokens` (one or more) that is known of `owner`, held until `release`."""
        began, tokens = perf_counter(), list(tokens)
        with self._lock:
            found = self._tree.find(tokens, owner)
            hit = found.length >= self.config.min_prefix_length
            if not hit:
                found = Match([], 0, 0, owner)
            self._tree.touch(found)
            if found.node is not None:
                self._tree.hold(found.node)
            match = PrefixMatch(
                len(tokens), found.length, hit, tokens[: found.length], _lengths_of(found), found.node, _copied(found)
            )
            if self.config.enable_stats:
                stats = self._stats
                stats.total_requests += 1
                stats.total_tokens_processed += len(tokens)
                stats.cache_hits += hit
                stats.tokens_matched += found.length
                stats.match_ms += _since(began)
        return match

    def read(self, match: PrefixMatch, model: str, start: int, stop: int, to: TokenKv) -> None:
        """Copy a model's KV of tokens `[start, stop)`, at most `match.lengths[model]`, to where a sequence has them."""
        began = perf_counter()
        assert match.held is not None or start >= stop, "a match is read before it is released"
        assert stop <= match.lengths.get(model, 0) or start >= stop, "KV that the model does not have"
        for first, run in match.runs:
            low, high = max(start - first, 0), min(stop - first, len(run))
            for at, slot, count in self._pool.pieces(run, low, high):
                to.put(first + at, count, self._pool.memory(model), slot)
        if self.config.enable_stats:
            with self._lock:
                self._stats.read_ms += _since(began)

    def note_reused(self, tokens: int) -> None:
        """Count `tokens` of a matched request as not computed again."""
        if self.config.enable_stats:
            with self._lock:
                self._stats.tokens_reused += tokens

    def release(self, match: PrefixMatch) -> None:
        """Release the match's KV. A second time changes nothing."""
        with self._lock:
            if match.held is not None:
                self._tree.release(match.held)
                match.held = None

    def contains(self, tokens: Sequence[int], owner: str = "") -> bool:
        """Whether all of `tokens` is known. Does not count as a use."""
        with self._lock:
            return self._tree.find(list(tokens), owner).length == len(tokens)

    # Changing.

    def insert(
        self,
        tokens: Sequence[int],
        kv: Mapping[str, tuple[int, TokenKv]],
        owner: str = "",
        *,
        states: Sequence[Snapshot] = (),
        wait: bool = True,
    ) -> int:
        """Keep the KV of `tokens`; `kv` says how many leading ones each model has, the target all. `states` are after
        some of them. Only matches of the same `owner` find it.

        Returns how many of the tokens are known now: not all, where too few pages are free or evictable. Without
        `wait`, returns 0 and does nothing where another thread holds the lock.
        """
        began, tokens = perf_counter(), list(tokens)
        if len(tokens) < self.config.min_prefix_length:
            return 0
        if not self._lock.acquire(blocking=wait):
            return 0
        try:
            found = self._tree.find(tokens, owner)
            if found.node is not None:
                self._tree.hold(found.node)
            try:
                end = self._make_room(found, len(tokens))
                self._complete(found, kv)
                if end is None:
                    self._tree.touch(found)
                node = found.node if end is None else self._add(found, tokens[:end], kv)
                self._keep_states(self._tree.find(tokens, owner), states)
            finally:
                if found.node is not None:
                    self._tree.release(found.node)
            if self.config.enable_auto_eviction and self._usage() > self.config.eviction_threshold and node is not None:
                self._tree.hold(node)
                self._evict(int(self.config.eviction_target * self.config.max_cached_tokens))
                self._tree.release(node)
            if self.config.enable_stats:
                self._stats.insert_ms += _since(began)
        finally:
            self._lock.release()
        return found.length if end is None else end

    def _keep_states(self, found: Match[PageRun], states: Sequence[Snapshot]) -> None:
        """Keep states after tokens that are known, and no more of all than there is memory for."""
        if not states:
            return
        for start, run in _runs(found):
            most = min(len(run), found.length - start)  # the rest of the last run may be of another sequence
            for state in states:
                if 0 < state.base - start <= most:
                    run.states.setdefault(state.base - start, state.cut(start + most))
        used = self._state_bytes()
        held = [
            (node.used, after, node.value) for node in self._tree.walk() if node.value for after in node.value.states
        ]
        for _, after, run in sorted(held, key=lambda each: each[:2]):
            if used <= self.config.state_bytes:
                break
            used -= run.states.pop(after).nbytes

    def _make_room(self, found: Match[PageRun], wanted: int) -> int | None:
        """Evict pages for a sequence of `wanted` tokens; return up to where it fits, None where not even its end can be
        marked.

        No sequence evicts more than half of the pool: a longer one is kept in part.
        """
        spare = int(self._tree.splits(found))
        need = PageRun.pages_for(wanted - found.length) + spare
        free = self._pool.free
        if len(free) < need and self.config.enable_auto_eviction:
            worth = min(need, max(2, self._pool.pages // 2))
            self._evict_until(lambda: len(free) >= worth)
        if len(free) >= need:
            return wanted
        self._stats.inserts_refused += wanted > found.length
        end = min(wanted, found.length + (len(free) - spare) * PAGE)
        return end if end > found.length else None

    def _add(self, found: Match[PageRun], tokens: list[int], kv: Mapping[str, tuple[int, TokenKv]]) -> Node[PageRun]:
        start, run = found.length, None
        if len(tokens) > start:
            pages = self._pool.allocate(PageRun.pages_for(len(tokens) - start))
            run = PageRun(self._pool, pages, len(tokens) - start, {})
            try:
                self._fill(run, start, kv)
            except PlanError:  # of a device
                self._pool.release(pages)
                raise
            self._stats.tokens_inserted += len(run)
        node = self._tree.insert(found, tokens, run)
        self._tree.touch(self._tree.find(tokens, found.owner))
        return node

    def _complete(self, found: Match[PageRun], kv: Mapping[str, tuple[int, TokenKv]]) -> None:
        """Add KV of models for known tokens that had none of them."""
        for start, run in _runs(found):
            self._fill(run, start, kv, found.length - start)

    def _fill(self, run: PageRun, start: int, kv: Mapping[str, tuple[int, TokenKv]], most: int | None = None) -> None:
        """Copy what a run, whose first token is `start` of the sequence, lacks of at most its `most` first tokens."""
        length = len(run) if most is None else min(most, len(run))
        for model, (count, source) in kv.items():
            low, high = run.valid.get(model, 0), min(count - start, length)
            if low < high:
                for at, slot, tokens in self._pool.pieces(run, low, high):
                    source.get(start + at, tokens, self._pool.memory(model), slot)
                run.valid[model] = high

    def remove(self, tokens: Sequence[int], owner: str = "") -> bool:
        """Forget an inserted sequence, but for parts that others need or use; return whether it was known."""
        with self._lock:
            gone = self._tree.remove(list(tokens), owner)
            for run in gone or ():
                self._pool.release(run.pages)
        return gone is not None

    def evict(self, target_tokens: int = 0) -> int:
        """Evict the least recently used tokens until `target_tokens` are left; return how many were evicted."""
        with self._lock:
            return self._evict(target_tokens)

    def clear(self) -> int:
        """Evict all that is not in use; return how many tokens."""
        return self.evict(0)

    def _evict(self, target_tokens: int) -> int:
        return self._evict_until(lambda: self._tree.tokens <= target_tokens)

    def _evict_until(self, enough: Callable[[], bool]) -> int:
        evicted = self._tree.evict(enough, lambda run: self._pool.release(run.pages))
        self._stats.eviction_count += evicted > 0
        self._stats.tokens_evicted += evicted
        return evicted

    # As data.

    @property
    def shapes(self) -> Mapping[str, TokenShape]:
        return self._pool.shapes

    def export(self) -> tuple[list[dict[str, object]], list[NDArray[np.generic]]]:
        """All that it holds: edges, parents before children, and KV of each, a piece for each model that has some: on
        the host, `[planes, heads, tokens, size]`.

        After its KV come its states, each its parts and its records. Of an edge: `parent`, the place of the one before
        it or -1; `owner`; `tokens`; `terminal`, whether a sequence ends there; `valid`, how many of its tokens have KV,
        by model in the order of their names, as the pieces are; `states`, after how many of its tokens there is one,
        and how many records it has.
        """
        edges, pieces, places = list[dict[str, object]](), list[NDArray[np.generic]](), dict[int, int]()
        with self._lock:
            owners = {id(root): owner for owner, root in self._tree.roots.items()}
            for node in self._tree.walk():
                run, parent = node.value, node.parent
                assert run is not None
                places[id(node)] = len(edges)
                valid = {model: run.valid[model] for model in sorted(run.valid) if run.valid[model]}
                for model, count in valid.items():
                    kv = self._pool.memory(model)
                    parts = [kv.array(slot, length) for _, slot, length in self._pool.pieces(run, 0, count)]
                    pieces.append(np.ascontiguousarray(np.concatenate(parts, 2)))
                for state in run.states.values():
                    pieces += map(np.ascontiguousarray, (*state.parts, *state.records))
                states = {after: state.end - state.base for after, state in run.states.items()}
                place = places.get(id(parent), -1)
                owner = owners[id(parent)] if place < 0 else edges[place]["owner"]
                own = {"parent": place, "owner": owner, "tokens": node.tokens}
                edges.append(own | {"terminal": node.terminal, "valid": valid, "states": states})
        return edges, pieces

    # Looking at it.

    def get_cached_tokens(self) -> int:
        with self._lock:
            return self._tree.tokens

    def get_usage_ratio(self) -> float:
        """Tokens in use / `max_cached_tokens`."""
        with self._lock:
            return self._usage()

    def _usage(self) -> float:
        return self._tree.tokens / self.config.max_cached_tokens

    def get_stats(self) -> PrefixCacheStats:
        """A copy of the counts."""
        with self._lock:
            return replace(self._stats)

    def get_tree_stats(self) -> TreeStats:
        with self._lock:
            return self._tree.stats

    def check(self) -> None:
        """Raise AssertionError where the tree does not hold together, or a page is not owned exactly once."""
        with self._lock:
            self._tree.check()
            owned = list(self._pool.free)
            for node in self._tree.walk():
                run = node.value
                assert run is not None
                assert len(run.pages) == PageRun.pages_for(run.offset + len(run)), "pages that a run does not need"
                assert all(count <= len(run) for count in run.valid.values()), "KV after the end of a run"
                owned += run.pages
            assert sorted(owned) == list(range(self._pool.pages)), "pages that are not owned once"

    @property
    def in_use(self) -> int:
        """Number of references held, for tests: 0 when no sequence runs."""
        with self._lock:
            return sum(node.references for root in self._tree.roots.values() for node in root.children.values())


def _since(began: float) -> float:
    return 1000 * (perf_counter() - began)


def token_shapes(plan: BackendPlan) -> dict[str, TokenShape]:
    """Shape of a token's KV in each model of a plan, by its buffers; the partial cache's is the target's."""
    shapes = {}
    for model, kv in kv_caches(plan).items():
        if model != names.PARTIAL:
            planes, _, heads, _, size = kv.resolve({})
            shapes[model] = TokenShape(planes, heads, size, kv.dtype.numpy)
    return shapes


def state_shapes(plan: BackendPlan) -> tuple[StateShape, ...]:
    """Shapes of the target's states, by its buffers; none where it keeps none."""
    buffers = {buffer.name: buffer for buffer in plan.buffers}
    found = []
    for pair in names.STATES:
        part, log = (names.buffer_name(names.TARGET, name) for name in pair)
        if part in buffers:
            (layers, _, *rest), (_, _, most, *record) = (buffers[name].resolve({}) for name in (part, log))
            found.append(StateShape((layers, *rest), (layers, *record), most))
    return tuple(found)


def _runs(found: Match[PageRun]) -> list[tuple[int, PageRun]]:
    """Return the runs of a path, and where each begins."""
    runs, start = [], 0
    for node in found.nodes:
        assert node.value is not None
        runs.append((start, node.value))
        start += len(node.tokens)
    return runs


def _copied(found: Match[PageRun]) -> list[tuple[int, PageRun]]:
    """Return copies of the match's runs: when an edge is split, or gets a state, its run changes."""
    copies = [(start, copy(run)) for start, run in _runs(found)]
    for _, run in copies:
        run.states = dict(run.states)
    return copies


def _lengths_of(found: Match[PageRun]) -> dict[str, int]:
    """Return the number of leading tokens of a path that have KV, by model."""
    counts: dict[str, int] = {}
    for start, run in _runs(found):
        length = min(len(run), found.length - start)
        for model, valid in run.valid.items():
            if counts.get(model, 0) == start:
                counts[model] = start + min(valid, length)
    return counts
