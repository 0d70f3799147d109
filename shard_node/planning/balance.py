"""Gives things to owners so that none has much more to do than another: buckets of tables, and tables as a whole.

Two measures count for each thing: its load (any unit; what is to be even) and its bytes (of which each owner has room
for so many). The largest load goes first, to whoever has the least. A model has millions of buckets and most of them
are cold and alike, so of each table only the hot ones are given one by one; the others are dealt out by the run.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from shard_node.bags import Int64Array
from shard_node.errors import MemoryBudgetError
from shard_node.planning.hotness import Float64Array

Int16Array = npt.NDArray[np.int16]
Even: TypeAlias = Literal["load", "bytes"]

MAX_HOT_BUCKETS = 1 << 16
"""Buckets that are given one by one at most, of all tables together; each costs about 2 us."""
_HOT_SHARE = 1e-3
_HALVINGS = 60


@dataclass(slots=True, eq=False)
class Owners:
    """What owners have so far, [owners]: their load (float64), bytes that each may take yet and has taken (int64)."""

    load: Float64Array
    free: Int64Array
    used: Int64Array

    @classmethod
    def empty(cls, free_bytes: Sequence[int]) -> Owners:
        """Return owners that have nothing, with room for so many bytes each."""
        free = np.array(free_bytes, np.int64)
        return cls(np.zeros(free.size), free, np.zeros_like(free))

    def of(self, chosen: Sequence[int]) -> Owners:
        """Return some of them, as they are now."""
        picked = list(chosen)
        return Owners(self.load[picked], self.free[picked], self.used[picked])

    def put(self, chosen: Sequence[int], owners: Owners) -> None:
        """Take over what `of` returned, as it was changed since."""
        picked = list(chosen)
        self.load[picked], self.free[picked], self.used[picked] = owners.load, owners.free, owners.used

    def give(self, owners: int | Int64Array, load: float | Float64Array, size_bytes: int | Int64Array) -> None:
        """Let owners, none of them twice, have things."""
        self.load[owners] += load
        self.free[owners] -= size_bytes
        self.used[owners] += size_bytes


def deal(
    loads: Sequence[Float64Array], sizes: Sequence[Int64Array], owners: Owners, *, even: Even = "load"
) -> tuple[Int16Array, ...]:
    """Give every bucket of some tables to an owner; the same arguments always give the same answer.

    Of each table, `loads` are float64 [buckets], `sizes` int64 [buckets], bytes of each bucket's rows; a bucket without
    rows costs nobody anything. `owners` are changed to what they have then. With `even` bytes loads are still divided
    alike, as far as that costs none. Returns the owners, int16 [buckets] of each table. Raises MemoryBudgetError if the
    bytes do not fit.
    """
    total = float(owners.load.sum() + sum(one.sum() for one in loads))
    # The buckets that are given one by one.
    threshold = total / owners.load.size * _HOT_SHARE if even == "load" else np.inf
    hot = [one > threshold for one in loads]
    if sum(int(one.sum()) for one in hot) > MAX_HOT_BUCKETS:
        all_hot = np.concatenate([one[is_hot] for one, is_hot in zip(loads, hot, strict=True)])
        threshold = float(-np.partition(-all_hot, MAX_HOT_BUCKETS)[MAX_HOT_BUCKETS])
        hot = [one > threshold for one in loads]
    given = [np.full(one.size, -1, np.int16) for one in loads]
    mean_load = max(total / owners.load.size, 1e-300)
    mean_bytes = max(1.0, sum(float(one.sum()) for one in sizes) / owners.load.size)
    runs = [_Run.of(number, loads[number], sizes[number], hot[number]) for number in range(len(loads))]
    # What weighs more in bytes than in load evens out bytes; what comes after it then evens out loads.
    runs.sort(key=lambda run: run.load / mean_load * mean_bytes / max(run.size_bytes, 1))
    for run in runs:
        by_load = even == "load" and run.load / mean_load > run.size_bytes / mean_bytes
        given[run.table][run.buckets] = run.dealt(owners, by_load=by_load)
    _give_hot(loads, sizes, hot, owners, given)
    for owner_of_bucket in given:
        _give_empty(owner_of_bucket)
    return tuple(given)


@dataclass(frozen=True, slots=True, eq=False)
class _Run:
    """The cold buckets of one table, the most loaded first."""

    table: int
    buckets: Int64Array
    loads: Float64Array
    sizes: Int64Array

    @classmethod
    def of(cls, table: int, loads: Float64Array, sizes: Int64Array, hot: npt.NDArray[np.bool_]) -> _Run:
        cold = np.flatnonzero(~hot & (sizes > 0))
        cold = cold[np.argsort(-loads[cold], kind="stable")]
        return cls(table, cold, loads[cold], sizes[cold])

    @property
    def load(self) -> float:
        return float(self.loads.sum())

    @property
    def size_bytes(self) -> float:
        return float(self.sizes.sum())

    def dealt(self, owners: Owners, *, by_load: bool) -> Int16Array:
        count = self.buckets.size
        if not count:
            return np.empty(0, np.int16)
        largest = int(self.sizes.max())
        most = np.minimum(owners.free // largest, count)
        if most.sum() < count:
            raise MemoryBudgetError(
                f"{count} buckets of up to {largest} bytes are left over: owners have room for {owners.free.tolist()}"
            )
        have = owners.load if by_load else owners.used.astype(np.float64)
        each = (self.load if by_load else self.size_bytes) / count
        counts = _levelled(have, max(each, 1e-300), count, most)
        # Each owner's share of every stretch: who gets n of them takes the (k + 1/2) / n-th, k = 0 .. n - 1. Of those
        # whose turn it is at once, the order is reversed from one stretch to the next.
        owner = np.repeat(np.arange(counts.size), counts)
        turn = np.arange(count) - np.repeat(np.cumsum(counts) - counts, counts)
        place = owners.load.argsort(kind="stable").argsort(kind="stable")[owner]
        owner = owner[np.lexsort((np.where(turn & 1, -place, place), (turn + 0.5) / counts[owner]))]
        taken = np.bincount(owner, self.sizes, counts.size).astype(np.int64)
        owners.give(np.arange(counts.size), np.bincount(owner, self.loads, counts.size).astype(np.float64), taken)
        dealt: Int16Array = owner.astype(np.int16)
        return dealt


def _levelled(have: Float64Array, each: float, count: int, most: Int64Array) -> Int64Array:
    """Divide `count` things alike, so that what owners have then is as even as can be: int64 [owners]."""
    low, high = float(have.min()), float(have.max()) + each * (count + 1)
    for _ in range(_HALVINGS):
        level = (low + high) / 2
        low, high = (low, level) if np.clip((level - have) / each, 0, most).sum() >= count else (level, high)
    wanted = np.clip((high - have) / each, 0, most)
    counts = np.floor(wanted).astype(np.int64)
    # The remainders: to who lacks most, in order of owners among equals.
    while (left := count - int(counts.sum())) > 0:
        order = np.argsort(-np.where(counts < most, wanted - counts, -np.inf), kind="stable")
        order = order[counts[order] < most[order]][:left]
        counts[order] += 1
    while left < 0:  # pragma: no cover - floors of what sums to `count` do not exceed it but for rounding
        counts[int(np.argmax(counts))] -= 1
        left += 1
    return counts


def _give_hot(
    loads: Sequence[Float64Array],
    sizes: Sequence[Int64Array],
    hot: Sequence[npt.NDArray[np.bool_]],
    owners: Owners,
    given: Sequence[Int16Array],
) -> None:
    """Give hot buckets one by one, the largest load first, to the owner with the least who has room."""
    buckets = [np.flatnonzero(one) for one in hot]
    tables = np.repeat(np.arange(len(loads)), [one.size for one in buckets])
    bucket = np.concatenate([*buckets, np.empty(0, np.int64)])
    load = np.concatenate([*(one[chosen] for one, chosen in zip(loads, buckets, strict=True)), np.empty(0)])
    size = np.concatenate([*(one[chosen] for one, chosen in zip(sizes, buckets, strict=True)), np.empty(0, np.int64)])
    order = np.argsort(-load, kind="stable")
    free = owners.free.tolist()
    heap = [(one, owner) for owner, one in enumerate(owners.load.tolist())]
    heapq.heapify(heap)
    for table, number, more, size_bytes in zip(
        tables[order].tolist(), bucket[order].tolist(), load[order].tolist(), size[order].tolist(), strict=True
    ):
        full = []
        while heap and free[heap[0][1]] < size_bytes:
            full.append(heapq.heappop(heap))
        if not heap:
            raise MemoryBudgetError(f"a bucket of {size_bytes} bytes is left over: owners have room for {free}")
        has, owner = heap[0]
        heapq.heapreplace(heap, (has + more, owner))
        free[owner] -= size_bytes
        given[table][number] = owner
        for one in full:
            heapq.heappush(heap, one)
    for has, owner in heap:
        owners.load[owner] = has
    owners.used += owners.free - np.array(free, np.int64)
    owners.free[:] = free


def _give_empty(owner_of_bucket: Int16Array) -> None:
    # Buckets without rows have the owner of the one before them, so that none is missing.
    known = np.flatnonzero(owner_of_bucket >= 0)
    if not known.size:
        owner_of_bucket[:] = 0
        return
    before = np.searchsorted(known, np.arange(owner_of_bucket.size), side="right") - 1
    owner_of_bucket[:] = owner_of_bucket[known[np.maximum(before, 0)]]
