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
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from loader.errors import ShardrankError
from loader.progress import ended
from loader.registry.registry import Registry
from loader.snapshot.reader import Snapshot
from router.errors import HotRowsError
from router.hot_rows import TABLE_SHIFT, HotRows, HotRowsConfig, HotSet, index_bytes, set_bytes
from router.plan import BucketOwners, Plan
from router.popularity import Popularity
from router.replicas import ReplicatedShard
from router.router import Cutter
from shard_node.access_counts import MAX_BYTES, MIN_SKETCH_COUNTERS
from shard_node.agent.delta_follower import DeltaFollower
from shard_node.answer import Answer, group_keys
from shard_node.bags import Int64Array, KeyedBags, TableLayout
from shard_node.engine.memory import MemoryClaim, RowMemory
from shard_node.node import DeltaPosition, ServedVersion
from shard_node.split import split

logger = logging.getLogger(__name__)

FIRST_FILL_S: Final = 20.0
"""How long a version waits, before it is checked, for the rows that its tier begins with."""
RETRY_S: Final = 2.0
STATUS_EVERY_S: Final = 1.0
FETCH_TIMEOUT_S: Final = 5.0
FETCH_PIECE_BYTES: Final = 2 << 20
FETCH_SHARE: Final = 0.5
"""Of the time, at most, in which a node is busy with rows for a tier."""
FETCH_KEYS: Final = 1 << 18
"""Whose owners are worked out at a time."""
LEARN_EVERY_S: Final = 0.1
LEARN_SHARE: Final = 0.1
"""Of the time, at most, that goes into learning and into new sets; what is looked up meanwhile is a sample the less."""
LEAST_CHANGE: Final = 1 / 32
"""Of the rows of a set: fewer new ones are not worth another set."""
MAX_SAMPLE_BYTES: Final = 8 << 20
CLOSE_TIMEOUT_S: Final = 10.0
_LOOK_S: Final = 0.02
_COUNTED_ROWS: Final = 1 << 20
_COUNTER_BYTES: Final = 4
_BUILD_BYTES = 40
"""For each row, while an index is built."""
_LEARN_BYTES = 180
"""For each row of capacity: what `Popularity` takes at most."""


@dataclass(frozen=True, slots=True, eq=False)
class HotStatus:
    """What a keeper tells of its tier now and then.

    Attributes:
        tables: their names, in layout order.
        rows, size_bytes: of the set in use.
        sequence: the last delta that is applied; 0 for none.
        lookups, hits: int64 [tables], since the keeper told last.
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
    """How many rows fit into the memory of one tier. Raises HotRowsError if there is not even room for one."""

    def __init__(self, config: HotRowsConfig, layout: TableLayout) -> None:
        self._config = config
        widths = [group.row_bytes for group in layout.groups for _ in range(group.first_table, group.end_table)]
        self._row_bytes = np.array(widths, np.int64)
        learns = config.policy == "learning"
        self.sample_bytes = min(MAX_SAMPLE_BYTES, config.size_bytes // 8) if learns else 0
        self.access_bytes = min(max(config.size_bytes // 16, 4 * _COUNTER_BYTES * MIN_SKETCH_COUNTERS), MAX_BYTES)
        """Of counters of what is looked up."""
        self.capacity = self._most(int(self._row_bytes.mean()))
        """How many rows of mean width fit."""
        if not self.capacity:
            needed = self._bytes(1, int(self._row_bytes.mean())) + config.size_bytes - self._limit
            raise HotRowsError(f"hot rows: {config.size_bytes} bytes have no room for one row; {needed} have")

    @property
    def most_rows(self) -> int:
        """How many of the narrowest rows fit."""
        return self._most(int(self._row_bytes.min()))

    def fitting(self, hottest_first: Int64Array) -> Int64Array:
        """Return as many of these keys as fit, ascending."""
        total = np.cumsum(self._row_bytes.take(hottest_first >> TABLE_SHIFT))
        count = bisect_right(range(1, total.size + 1), self._limit, key=lambda n: self._bytes(n, int(total[n - 1])))
        return np.sort(hottest_first[:count])

    def per_byte(self, table: int) -> float:
        """Return what one byte of a table's row is worth, of one lookup."""
        return 1.0 / float(self._row_bytes[table] + index_bytes(1))

    @property
    def _limit(self) -> int:
        return self._config.size_bytes - self.sample_bytes - self.access_bytes

    def _most(self, row_bytes: int) -> int:
        most = max(1, self._limit // row_bytes)
        return bisect_right(range(1, most + 1), self._limit, key=lambda n: self._bytes(n, n * row_bytes))

    def _bytes(self, num_rows: int, rows_bytes: int) -> int:
        own = set_bytes(num_rows, rows_bytes)
        if self._config.policy == "static":
            return own + _BUILD_BYTES * num_rows
        # The set in use, the one that is built, and what is known of more rows than are held.
        return 2 * own + (_BUILD_BYTES + _LEARN_BYTES) * num_rows


def hottest_counted(snapshot: Snapshot, layout: TableLayout, budget: HotBudget) -> Int64Array:
    """Choose rows by the snapshot's access counts: int64 keys, most lookups for a byte first; none without counts."""
    most = budget.most_rows
    keys, worth = np.empty(0, np.int64), np.empty(0, np.float32)
    for number, table in enumerate(layout.tables):
        counts = snapshot.access_counts(table.name)
        if counts is None:
            continue
        step = max(_COUNTED_ROWS, most)
        for first in range(0, table.num_embeddings, step):
            piece = counts[first : first + step]
            seen = piece.nonzero()[0]
            keys = np.concatenate([keys, seen + (first + (number << TABLE_SHIFT))])
            worth = np.concatenate([worth, piece.take(seen) * np.float32(budget.per_byte(number))])
            if keys.size > most:
                kept = np.argpartition(worth, keys.size - most)[keys.size - most :]
                keys, worth = keys.take(kept), worth.take(kept)
    return keys[np.argsort(-worth, kind="stable")]


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
        config: HotRowsConfig,
        first: Callable[[HotBudget], Int64Array],
        registry: Callable[[], Registry] | None,
        claim: MemoryClaim,
        on_status: Callable[[HotStatus], None],
        sleep: Callable[[float], Coroutine[Any, Any, None]] = asyncio.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._model, self._version = snapshot.spec.model, snapshot.version
        self._where = f"hot rows of version {self._version} of model {self._model!r}"
        self._delta_base = snapshot.manifest.delta_start[0]
        self._layout, self._num_shards = plan.layout, plan.num_shards
        self._owners, self._cutter = BucketOwners(plan), Cutter(plan.layout, FETCH_PIECE_BYTES)
        self._connect, self._first, self._registry = connect, first, registry
        self._learns = config.policy == "learning"
        self._budget = HotBudget(config, plan.layout)
        self._claim, self._on_status = claim, on_status
        self._sleep, self._clock = sleep, clock
        self.rows = HotRows(plan.layout, self._budget.sample_bytes, self._budget.access_bytes)
        self._told = self.rows.counts
        self._used: list[HotSet] = []
        self._said = ""
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
            self._loop.call_soon_threadsafe(self._stop)
            self._thread.join(CLOSE_TIMEOUT_S)
        self._claim.give_back()

    def _stop(self) -> None:
        if self._keeping is not None:
            self._keeping.cancel()

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
                    self._say(f"{type(error).__name__}: {error}")
                except Exception:
                    logger.exception("%s: none are held, since keeping them failed", self._where)
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
        self.rows.deltas = DeltaPosition(self._delta_base, await self._sequence(shards, follows=registry is not None))
        if registry is None:
            following = self._watch(shards)
        else:
            following = DeltaFollower(registry, self._model, self._version, self.rows).run()
        tasks = [asyncio.create_task(one) for one in (following, self._choose(shards), self._tell())]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    async def _sequence(self, shards: Sequence[ReplicatedShard], *, follows: bool) -> int:
        """Return the last delta that a node of each shard has.

        Raises HotRowsError if a shard has no node with the version, or deltas are applied that nobody follows here.
        """
        told = await asyncio.gather(*(shard.infos() for shard in shards))
        reached: list[int] = []
        for shard, infos in enumerate(told):
            here = [one for _, info in infos for one in info.versions if self._is_own(one)]
            if not here:
                raise HotRowsError(f"{self._where}: no node of shard {shard} that answers has the version")
            reached.append(max(one.delta_sequence for one in here))
            if not follows and any(one.delta_sequence > one.last_delta for one in here):
                raise HotRowsError(
                    f"{self._where}: nodes of shard {shard} apply row updates, which copies here would not get without "
                    "--registry"
                )
        return min(reached)

    def _is_own(self, one: ServedVersion) -> bool:
        return (one.model, one.version) == (self._model, self._version)

    async def _watch(self, shards: Sequence[ReplicatedShard]) -> None:
        """Look, where there is no registry, that nobody begins to apply deltas."""
        while True:
            await self._sleep(STATUS_EVERY_S)
            await self._sequence(shards, follows=False)

    async def _tell(self) -> None:
        while True:
            self.tell()
            await self._sleep(STATUS_EVERY_S)

    def tell(self) -> None:
        """Tell what the tier is, and what it counted since this was told last."""
        now, hot = self.rows.counts, self.rows.current
        lookups, hits = now.lookups - self._told.lookups, now.hits - self._told.hits
        self._told = now
        names = tuple(table.name for table in self._layout.tables)
        sequence = self.rows.deltas.sequence
        status = HotStatus(self._model, self._version, names, hot.keys.size, hot.size_bytes, sequence, lookups, hits)
        self._on_status(status)

    async def _choose(self, shards: Sequence[ReplicatedShard]) -> None:
        """Hold the first rows; then, if this tier learns, those that are looked up most of late."""
        wanted = self._budget.fitting(await asyncio.to_thread(self._first, self._budget))
        while not await self._built(shards, wanted):
            self._begun.set()
            await self._sleep(RETRY_S)
        self._begun.set()
        if not self._learns:
            await asyncio.Event().wait()
        popularity = Popularity(self._budget.capacity)
        while True:
            began = self._clock()
            wanted = await asyncio.to_thread(self._learned, popularity)
            if wanted.size:
                await self._built(shards, wanted)
            await self._sleep(max(LEARN_EVERY_S, (self._clock() - began) * (1 / LEARN_SHARE - 1)))

    def _learned(self, popularity: Popularity) -> Int64Array:
        """Learn from what was looked up. Returns the rows to hold, ascending keys; none if they are hardly others."""
        epochs = popularity.epochs
        for keys in self.rows.take_samples():
            popularity.observe(keys)
        if popularity.epochs == epochs:
            return np.empty(0, np.int64)
        wanted = self._budget.fitting(popularity.top(self._budget.capacity))
        held = int(np.isin(wanted, self.rows.current.keys, assume_unique=True).sum())
        return wanted if wanted.size - held > LEAST_CHANGE * wanted.size else wanted[:0]

    async def _built(self, shards: Sequence[ReplicatedShard], keys: Int64Array) -> bool:
        """Fill a set with these rows, ascending keys, and use it. False, and why in the log, if they can't be read."""
        beginning = asyncio.get_running_loop().run_in_executor(None, self.rows.begin, keys)
        try:
            pending = await asyncio.shield(beginning)
            until = await self._fill(shards, pending)
            while self.rows.deltas.sequence < until:
                await self._sleep(_LOOK_S)
        except ShardrankError as error:
            self.rows.drop()
            self._say(f"rows can't be read: {error}")
            return False
        except BaseException:
            await ended(beginning)
            self.rows.drop()
            raise
        await self._replace(pending)
        logger.info("%s: %d rows, %d bytes", self._where, keys.size, pending.size_bytes)
        self._said = ""
        return True

    async def _replace(self, hot: HotSet) -> None:
        """Use a set, and free the one before once the last batch that uses it has ended."""
        self._used.append(self.rows.use(hot))
        while self._used[-1].users:
            await self._sleep(_LOOK_S)
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
                    began = self._clock()
                    # Deltas that are applied here from now on are kept: what is read need not have them.
                    answer, told = await shards[piece.owner].pool_at(
                        self._model, self._version, piece.bags, began + FETCH_TIMEOUT_S, self.rows.deltas.sequence
                    )
                    until = max(until, told)
                    self._put(pending, numbers.take(piece.positions), piece.bags, answer)
                    await self._sleep((self._clock() - began) * (1 / FETCH_SHARE - 1))
        return until

    def _put(self, pending: HotSet, numbers: Int64Array, bags: KeyedBags, answer: Answer) -> None:
        starts = bags.value_starts()
        for group, (_, first, end) in enumerate(group_keys(self._layout, bags)):
            own = numbers[int(starts[first]) : int(starts[end])]
            stored = () if answer.stored is None else answer.stored[group]
            if len(stored) != own.size:
                raise HotRowsError(f"{self._where}: a node sends sums in place of rows; it must be upgraded")
            if own.size:
                self.rows.put(pending, group, own, answer.stored[group])  # type: ignore[index]

    def _say(self, reason: str) -> None:
        if reason != self._said:
            logger.warning("%s: %s", self._where, reason)
        self._said = reason


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
        before = self._last.get(model)
        inherits = self._config.policy == "learning" and before is not None and _same_rows(before.layout, layout)

        def first(budget: HotBudget) -> Int64Array:
            if inherits and before is not None and (learned := before.current.keys).size:
                return learned
            keys = hottest_counted(snapshot, layout, budget)
            if self._config.policy == "static" and not keys.size:
                logger.warning("version %d of %s has no access counts: no row is hot", snapshot.version, model)
            return keys

        claim = self._memory.take(self._config.size_bytes)
        try:
            keeper = HotRowsKeeper(snapshot, plan, connect, self._config, first, self._registry, claim, self._on_status)
        except BaseException:
            claim.give_back()
            raise
        self._last[model] = keeper.rows
        keeper.start()
        claim.filled()
        return keeper


def _same_rows(one: TableLayout, other: TableLayout) -> bool:
    """Tell whether keys of one are keys of the other, of rows that take as many bytes."""

    def told(layout: TableLayout) -> list[tuple[object, ...]]:
        return [(table.name, table.num_embeddings, table.embedding_dim, table.dtype) for table in layout.tables]

    return told(one) == told(other)
