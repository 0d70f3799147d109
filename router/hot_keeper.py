"""Keeps hot rows: which rows a version's tier holds, where they come from, and that row updates reach them in order.

Each served version has a keeper, a thread with an event loop of its own, off the path of requests. It reads rows from
shard nodes as they are stored, and follows the version's stream of deltas from the number on that the nodes had reached
before. A row that is read is never older than the tier: a node is asked that has applied as many deltas as the tier,
and a delta that comes meanwhile wins. A set that is filled is used once the tier has applied what any node had that was
read from, so no row goes back in time. docs/decisions/hot-rows.md says why so.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from bisect import bisect_right
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from loader.access_counts import AccessCounter, AccessCounts
from loader.errors import ShardrankError
from loader.progress import ended
from loader.registry.registry import Registry
from loader.snapshot.reader import Snapshot
from router.errors import HotRowsError
from router.hot_rows import HotRows, HotRowsConfig, HotSet, index_bytes, set_bytes
from router.plan import BucketOwners, Plan
from router.replicas import ReplicatedShard
from router.router import Cutter
from shard_node.access_counts import MAX_ROWS, TABLE_SHIFT
from shard_node.agent.delta_follower import DeltaFollower
from shard_node.answer import Answer, group_keys
from shard_node.bags import Int64Array, KeyedBags, TableLayout
from shard_node.engine.memory import Claim, RowMemory
from shard_node.node import DeltaPosition
from shard_node.split import split

logger = logging.getLogger(__name__)

FIRST_FILL_S: Final = 20.0
"""How long a version waits, before it is checked, for the rows that its tier begins with."""
RETRY_S: Final = 2.0
STATUS_EVERY_S: Final = 1.0
FETCH_TIMEOUT_S: Final = 5.0
FETCH_PIECE_BYTES: Final = 2 << 20
FETCH_FRACTION: Final = 0.5
"""Of the time, at most, in which a node is busy with rows for a tier."""
FETCH_KEYS: Final = 1 << 18
"""Whose owners are worked out at a time."""
LEARN_EVERY_S: Final = 0.1
LEARN_FRACTION: Final = 0.1
"""Of the time, at most, that goes into learning and into new sets; what is looked up meanwhile is a sample the less."""
MIN_CHANGE: Final = 1 / 32
"""Of the rows of a set: fewer new ones are not worth another set."""
CANDIDATES: Final = 3
"""Rows that have a count, x the rows that fit."""
HALF_LIFE: Final = 32
"""Lookups after which a count weighs half, x the rows that fit."""
MIN_EPOCH: Final = 256
"""Lookups that are counted together, at least."""
CLOSE_TIMEOUT_S: Final = 10.0
_POLL_S: Final = 0.02
_PIECE_ROWS: Final = 1 << 20
_BUILD_BYTES: Final = 40
"""For each row, while an index is built."""
_LEARN_BYTES: Final = 240
"""For each row that fits: of its candidates' counts, of what is queued, and of counting it."""
_MIN_COUNTED: Final = 64
_HIT_BYTES: Final = 84
"""For each row whose hits are counted, likewise."""


@dataclass(frozen=True, slots=True, eq=False)
class HotStatus:
    """What a keeper reports of its tier, about every second.

    Attributes:
        tables: their names, in layout order.
        rows, size_bytes: of the set in use.
        sequence: the last delta that is applied; 0 for none.
        lookups, hits: int64 [tables], since the last report.
    """

    model: str
    version: int
    tables: tuple[str, ...]
    rows: int
    size_bytes: int
    sequence: int
    lookups: Int64Array
    hits: Int64Array


class HotBudget:
    """How many rows fit into the memory of one tier. Raises HotRowsError if there is not even room for one.

    Attributes:
        learns: whether the policy is `learning`.
        max_counted: rows whose hits are counted.
        capacity: how many rows of mean width fit.
        max_rows: more than fit of the narrowest rows.
    """

    def __init__(self, config: HotRowsConfig, layout: TableLayout) -> None:
        widths = [group.row_bytes for group in layout.groups for _ in range(group.first_table, group.end_table)]
        self._row_bytes = np.array(widths, np.int64)
        self.learns = config.policy == "learning"
        self.max_counted = min(max(config.size_bytes // 16 // _HIT_BYTES, _MIN_COUNTED), MAX_ROWS)
        self._limit = config.size_bytes - self.max_counted * _HIT_BYTES
        self.max_rows = max(1, self._limit // int(self._row_bytes.min()))
        mean = int(self._row_bytes.mean())
        self.capacity = self._num_fitting(range(mean, (self.max_rows + 1) * mean, mean))
        if not self.capacity:
            needed = self._bytes(1, mean) + config.size_bytes - self._limit
            raise HotRowsError(f"hot rows: {config.size_bytes} bytes have no room for one row; {needed} have")

    def fitting(self, hottest_first: Int64Array) -> Int64Array:
        """Return as many of these keys as fit, ascending."""
        total = np.cumsum(self._row_bytes.take(hottest_first >> TABLE_SHIFT))
        return np.sort(hottest_first[: self._num_fitting(total)])

    def hottest_counted(self, snapshot: Snapshot, layout: TableLayout) -> Int64Array:
        """Choose rows by the snapshot's access counts: int64 keys, most lookups for a byte first; none without."""
        hottest = AccessCounts(np.empty(0, np.int64), np.empty(0))
        for number, table in enumerate(layout.tables):
            counts = snapshot.access_counts(table.name)
            step = max(_PIECE_ROWS, self.max_rows)
            for first in range(0, 0 if counts is None else table.num_embeddings, step):
                piece = AccessCounts.from_rows(counts[first : first + step])  # type: ignore[index]
                per_byte = piece.counts / float(self._row_bytes[number] + index_bytes(1))
                keys = piece.keys + (first + (number << TABLE_SHIFT))
                hottest = hottest.plus(AccessCounts(keys, per_byte)).most_frequent(self.max_rows)
        return hottest.hottest_first()

    def _num_fitting(self, total: Sequence[int] | Int64Array) -> int:
        """Return how many rows fit whose bytes are, of the first n, `total[n - 1]`."""
        numbers = range(1, len(total) + 1)
        return bisect_right(numbers, self._limit, key=lambda number: self._bytes(number, int(total[number - 1])))

    def _bytes(self, num_rows: int, rows_bytes: int) -> int:
        size_bytes = set_bytes(num_rows, rows_bytes)
        if not self.learns:
            return size_bytes + _BUILD_BYTES * num_rows
        # The set in use, the one that is built, and what is known of more rows than fit.
        return 2 * size_bytes + (_BUILD_BYTES + _LEARN_BYTES) * num_rows


def learning_counter(capacity: int) -> AccessCounter:
    """Return what counts lookups for a tier that learns which of them are the hottest, as many as `capacity`."""
    return AccessCounter(CANDIDATES * capacity, MIN_EPOCH, HALF_LIFE * capacity)


class HotRowsKeeper:
    """Keeps the hot rows of one version until it is closed. Made by `HotKeepers.start`.

    Attributes:
        rows: the tier, for the version's routers.
    """

    def __init__(
        self,
        snapshot: Snapshot,
        plan: Plan,
        connect: Callable[[], Sequence[ReplicatedShard]],
        budget: HotBudget,
        first: Callable[[], Int64Array],
        registry: Callable[[], Registry] | None,
        claim: Claim,
        on_status: Callable[[HotStatus], None],
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._model, self._version = snapshot.spec.model, snapshot.version
        self._name = f"hot rows of version {self._version} of model {self._model!r}"
        self._delta_base = snapshot.manifest.delta_start[0]
        self._layout, self._num_shards = plan.layout, plan.num_shards
        self._owners, self._cutter = BucketOwners(plan), Cutter(plan.layout, FETCH_PIECE_BYTES)
        self._connect, self._first, self._registry = connect, first, registry
        self._budget, self._claim, self._on_status, self._sleep = budget, claim, on_status, sleep
        learned = learning_counter(budget.capacity) if budget.learns else None
        self.rows = HotRows(plan.layout, budget.max_counted, learned)
        self._reported = self.rows.counts()
        self._used: list[HotSet] = []
        self._problem = ""
        self._loop = asyncio.new_event_loop()
        self._begun = threading.Event()
        self._keeping: asyncio.Task[None] | None = None
        self._thread = threading.Thread(target=self._run, name=f"hot-{self._model}-{self._version}", daemon=True)

    def start(self) -> None:
        """Begin, and return once the first rows are there, or could not be read yet."""
        self._thread.start()
        self._begun.wait(FIRST_FILL_S)

    def close(self) -> None:
        """End it and free the rows. The version's routers must be closed. Idempotent."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(lambda: self._keeping and self._keeping.cancel())
            self._thread.join(CLOSE_TIMEOUT_S)
        self._claim.give_back()

    def _run(self) -> None:
        try:
            self._keeping = self._loop.create_task(self._keep_up())
            self._loop.run_until_complete(asyncio.wait([self._keeping]))
            self._loop.run_until_complete(self._loop.shutdown_default_executor())
        finally:
            self._begun.set()
            self._loop.close()
            self.rows.close()
            for hot in self._used:
                hot.close()

    async def _keep_up(self) -> None:
        shards = list(self._connect())
        registry = None if self._registry is None else self._registry()
        try:
            while True:
                try:
                    await self._keep(shards, registry)
                except ShardrankError as error:
                    self._warn(f"{type(error).__name__}: {error}")
                except Exception:
                    logger.exception("%s: none are held, since keeping them failed", self._name)
                # What can't be kept up to date must not be looked up: the nodes have all rows.
                await self._replace(HotSet(self._layout, np.empty(0, np.int64)))
                self._begun.set()
                await self._sleep(RETRY_S)
        finally:
            for shard in shards:
                await shard.close()
            if registry is not None:
                await registry.close()

    async def _keep(self, shards: Sequence[ReplicatedShard], registry: Registry | None) -> None:
        sequence = await self._check_sequence(shards, follows=registry is not None)
        self.rows.deltas = DeltaPosition(self._delta_base, sequence)
        work = [self._choose(shards), self._report_often(shards, follows=registry is not None)]
        if registry is not None:
            work.append(DeltaFollower(registry, self._model, self._version, self.rows).run())
        tasks = [asyncio.create_task(each) for each in work]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    async def _check_sequence(self, shards: Sequence[ReplicatedShard], *, follows: bool) -> int:
        """Return the last delta that a node of each shard has.

        Raises HotRowsError if a shard has no node with the version, or deltas are applied that are not followed here.
        """
        reached: list[int] = []
        key = (self._model, self._version)
        for shard, infos in enumerate(await asyncio.gather(*(shard.infos() for shard in shards))):
            served = [each for _, info in infos for each in info.versions if (each.model, each.version) == key]
            if not served:
                raise HotRowsError(f"{self._name}: no node of shard {shard} that answers has the version")
            reached.append(max(each.delta_sequence for each in served))
            if not follows and any(each.delta_sequence > each.last_delta for each in served):
                raise HotRowsError(
                    f"{self._name}: nodes of shard {shard} apply row updates, which copies here would not "
                    "get without --registry"
                )
        return min(reached)

    async def _report_often(self, shards: Sequence[ReplicatedShard], *, follows: bool) -> None:
        """Report the tier, and check where there is no registry that no node begins to apply deltas."""
        while True:
            self.report()
            await self._sleep(STATUS_EVERY_S)
            if not follows:
                await self._check_sequence(shards, follows=False)

    def report(self) -> None:
        """Report what the tier is, and what it counted since the last report."""
        before, self._reported = self._reported, self.rows.counts()
        lookups, hits = (now - then for now, then in zip(self._reported, before, strict=True))
        names, hot = tuple(table.name for table in self._layout.tables), self.rows.current
        sequence = self.rows.deltas.sequence
        self._on_status(
            HotStatus(self._model, self._version, names, hot.keys.size, hot.size_bytes, sequence, lookups, hits)
        )

    async def _choose(self, shards: Sequence[ReplicatedShard]) -> None:
        """Hold the first rows; then, if this tier learns, those with the most lookups in the last epochs."""
        keys = self._budget.fitting(await asyncio.to_thread(self._first))
        while not await self._built(shards, keys):
            self._begun.set()
            await self._sleep(RETRY_S)
        self._begun.set()
        while True:
            began = time.monotonic()
            learned = self.rows.learned
            if learned is not None and learned.is_full:
                keys = await asyncio.to_thread(self._learned_keys, learned)
                is_new = ~np.isin(keys, self.rows.current.keys, assume_unique=True)
                if np.count_nonzero(is_new) > MIN_CHANGE * keys.size:
                    await self._built(shards, keys)
            await self._sleep(max(LEARN_EVERY_S, (time.monotonic() - began) * (1 / LEARN_FRACTION - 1)))

    def _learned_keys(self, learned: AccessCounter) -> Int64Array:
        return self._budget.fitting(learned.fold().most_frequent(self._budget.capacity).hottest_first())

    async def _built(self, shards: Sequence[ReplicatedShard], keys: Int64Array) -> bool:
        """Fill a set with these rows, ascending keys, and use it. False, and why in the log, if they can't be read."""
        beginning = asyncio.get_running_loop().run_in_executor(None, self.rows.begin, keys)
        try:
            pending = await asyncio.shield(beginning)
            until = await self._fill(shards, pending)
            while self.rows.deltas.sequence < until:
                await self._sleep(_POLL_S)
        except ShardrankError as error:
            self.rows.drop()
            self._warn(f"rows can't be read: {error}")
            return False
        except BaseException:
            await ended(beginning)
            self.rows.drop()
            raise
        await self._replace(pending)
        logger.info("%s: %d rows, %d bytes", self._name, keys.size, pending.size_bytes)
        self._problem = ""
        return True

    async def _replace(self, hot: HotSet) -> None:
        """Use a set, and free the one before once the last batch that uses it has ended."""
        self._used.append(self.rows.use(hot))
        while self._used[-1].users:
            await self._sleep(_POLL_S)
        self._used.pop().close()

    async def _fill(self, shards: Sequence[ReplicatedShard], pending: HotSet) -> int:
        """Read what a set does not have yet. Returns the last delta that any of these rows may be of."""
        missing = np.flatnonzero(~pending.is_filled)
        until = self.rows.deltas.sequence
        for first in range(0, missing.size, FETCH_KEYS):
            numbers = missing[first : first + FETCH_KEYS]
            keys = pending.keys.take(numbers)
            tables, counts = np.unique(keys >> TABLE_SHIFT, return_counts=True)
            rows = keys & ((1 << TABLE_SHIFT) - 1)
            bags = KeyedBags.from_lengths(tables.astype(np.int32), counts, np.ones(rows.size, np.int64), rows)
            every = np.arange(self._num_shards, dtype=np.int16)
            owners = self._owners.of(bags, lambda every=every: every, first)  # type: ignore[misc]
            for part in split(bags, owners, range(self._num_shards)):
                for piece in self._cutter.cut(part):
                    began = time.monotonic()
                    # Deltas that are applied here from now on are kept: what is read need not have them.
                    answer, sequence = await shards[piece.owner].pool_at(
                        self._model, self._version, piece.bags, began + FETCH_TIMEOUT_S, self.rows.deltas.sequence
                    )
                    until = max(until, sequence)
                    self._put(pending, numbers.take(piece.positions), piece.bags, answer)
                    await self._sleep((time.monotonic() - began) * (1 / FETCH_FRACTION - 1))
        return until

    def _put(self, pending: HotSet, numbers: Int64Array, bags: KeyedBags, answer: Answer) -> None:
        starts = bags.value_starts()
        for group, (_, first, end) in enumerate(group_keys(self._layout, bags)):
            of_group = numbers[int(starts[first]) : int(starts[end])]
            stored = np.empty(0, np.uint8) if answer.stored is None else answer.stored[group]
            if len(stored) != of_group.size:
                raise HotRowsError(f"{self._name}: a node sends sums in place of rows; it must be upgraded")
            if of_group.size:
                self.rows.put(pending, group, of_group, stored)

    def _warn(self, reason: str) -> None:
        if reason != self._problem:
            logger.warning("%s: %s", self._name, reason)
        self._problem = reason


class HotKeepers:
    """Starts the keepers of a process's versions; a new version begins with what the one before has learned.

    Args:
        config: of each version's tier.
        registry: opens the registry whose streams of deltas are followed; None if the nodes follow none.
        on_status: told each tier's state about every second, on its keeper's thread.
        memory: what versions claim their tiers from.
    """

    def __init__(
        self,
        config: HotRowsConfig,
        registry: Callable[[], Registry] | None = None,
        on_status: Callable[[HotStatus], None] = lambda status: None,
        memory: RowMemory | None = None,
    ) -> None:
        self._config = config
        self._registry = registry
        self._on_status = on_status
        self._memory = memory or RowMemory()
        self._last: dict[str, HotRows] = {}

    def start(self, snapshot: Snapshot, plan: Plan, connect: Callable[[], Sequence[ReplicatedShard]]) -> HotRowsKeeper:
        """Start a version's keeper, and wait a while for its first rows. `connect` makes it shards of its own.

        Raises MemoryBudgetError if there is no room for its tier, and HotRowsError if that has none for a row.
        """
        model, layout = snapshot.spec.model, plan.layout
        budget, before = HotBudget(self._config, layout), self._last.get(model)
        inherits = budget.learns and before is not None and _rows_of(before.layout) == _rows_of(layout)
        learned = before.current.keys if before is not None and inherits else np.empty(0, np.int64)

        def first() -> Int64Array:
            if learned.size:
                return learned
            keys = budget.hottest_counted(snapshot, layout)
            if not budget.learns and not keys.size:
                logger.warning("version %d of %s has no access counts: no row is hot", snapshot.version, model)
            return keys

        claim = self._memory.take(self._config.size_bytes)
        try:
            keeper = HotRowsKeeper(snapshot, plan, connect, budget, first, self._registry, claim, self._on_status)
        except BaseException:
            claim.give_back()
            raise
        self._last[model] = keeper.rows
        keeper.start()
        claim.filled()
        return keeper


def _rows_of(layout: TableLayout) -> list[tuple[object, ...]]:
    """Return what must be equal for keys of one layout to be keys of another, of rows that take as many bytes."""
    return [(table.name, table.num_embeddings, table.embedding_dim, table.dtype) for table in layout.tables]
