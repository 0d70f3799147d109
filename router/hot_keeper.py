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
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from operator import attrgetter
from typing import Final

import numpy as np

from loader.access_counts import AccessCounter
from loader.errors import ShardrankError, UnavailableError
from loader.progress import end_tasks
from loader.registry.fleet import FleetRegistry
from loader.snapshot.reader import Snapshot
from router.errors import HotRowsError
from router.hot_rows import ROW_OVERHEAD_BYTES, HotPolicy, HotRows, HotRowsConfig, HotSet
from router.plan import BucketOwners, Plan
from router.router import Cutter
from router.shard import ReplicatedShard
from shard_node.access_counts import TABLE_SHIFT, hottest_rows
from shard_node.agent.delta_follower import DeltaFollower
from shard_node.bags import Bags, Int64Array, TableLayout
from shard_node.engine.memory import RowMemory
from shard_node.node import DeltaPosition, ServedVersion
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
FILL_KEYS: Final = 1 << 17
"""Copied, and divided by their owners, at a time."""
LEARN_EVERY_S: Final = 0.1
LEARN_FRACTION: Final = 0.1
"""Of the time, at most, that goes into learning and into new sets; what is looked up meanwhile is a sample the less."""
MIN_CHANGE: Final = 1 / 32
"""Of the rows of a set: fewer new ones are not worth another set."""
CANDIDATES: Final = 3
"""Rows that have a count, x the rows that fit."""
KEY_NUMBERS: Final = 5
"""Keys of each table that have numbers, x the rows that fit: candidates, those that are hot, and what is queued."""
HALF_LIFE: Final = 32
"""Lookups after which a count weighs half, x the rows that fit."""
MIN_EPOCH: Final = 256
"""Lookups that are counted together, at least."""
CLOSE_TIMEOUT_S: Final = 10.0
MAX_SHARDS_WITHOUT: Final = 4
"""With more shards, versions with access counts have hot rows by default,"""
DEFAULT_DIVISOR: Final = 16
"""in this part of the memory limit, which all processes of a host and two versions of each share."""
_POLL_S: Final = 0.02
_BUILD_BYTES: Final = 40
"""For each row, while an index is built."""
_NUMBER_BYTES: Final = 28
"""For each number of a key."""
_LEARN_BYTES: Final = 240
"""For each row that fits: of its candidates' counts, of what is queued, and of counting it."""


@dataclass(frozen=True, slots=True, eq=False)
class HotStatus:
    """The set in use, its last delta (0 for none), and int64 [tables] counts since the last report, by layout order."""

    model: str
    version: int
    tables: tuple[str, ...]
    rows: int
    size_bytes: int
    sequence: int
    lookups: Int64Array
    hits: Int64Array


class HotBudget:
    """How many rows fit into the memory of one tier. Raises HotRowsError if not even one does.

    Attributes:
        learns: whether the policy is `learning`.
        capacity: how many rows of mean width fit.
    """

    def __init__(self, config: HotRowsConfig, layout: TableLayout) -> None:
        row_bytes = [group.row_bytes for group in layout.groups for _ in range(group.first_table, group.end_table)]
        self.learns = config.policy == "learning"
        # By table. If it learns, the set in use, the one that is built, and what is known of more rows than fit.
        self._costs = np.array(row_bytes) + ROW_OVERHEAD_BYTES
        learning = _LEARN_BYTES + _NUMBER_BYTES * KEY_NUMBERS * int(layout.is_keyed.sum())
        self._costs = 2 * self._costs + _BUILD_BYTES + learning if self.learns else self._costs + _BUILD_BYTES
        self._size_bytes = config.size_bytes
        self.capacity = config.size_bytes // int(self._costs.mean())
        if not self.capacity:
            needed = int(self._costs.mean())
            raise HotRowsError(f"hot rows: {config.size_bytes} bytes have no room for one row; {needed} have")

    def fitting(self, hottest_first: Int64Array) -> Int64Array:
        """Return as many of these keys as fit, ascending."""
        total = np.cumsum(self._costs.take(hottest_first >> TABLE_SHIFT))
        return np.sort(hottest_first[: total.searchsorted(self._size_bytes, side="right")])

    def hottest_counted(self, snapshot: Snapshot, layout: TableLayout) -> Int64Array:
        """Choose rows by the snapshot's access counts, with the most lookups for a byte: int64 keys; none without."""
        counted = {
            number: (counts, float(self._costs[number]))
            for number, table in enumerate(layout.tables)
            if table.keys is None and (counts := snapshot.access_counts(table.name)) is not None
        }
        return hottest_rows(counted, self._size_bytes)


def default_hot_rows(policy: HotPolicy, memory_bytes: int, processes: int) -> HotRowsConfig:
    """Return the tier of one version in each of so many processes, where no size is chosen."""
    return HotRowsConfig(size_bytes=memory_bytes // (2 * DEFAULT_DIVISOR * processes), policy=policy, is_default=True)


def reason_off(config: HotRowsConfig | None, snapshot: Snapshot, plan: Plan) -> str:
    """Return why a version has no hot rows; empty if it has some."""
    if config is None:
        return "no memory is set aside for them (hot_rows_gb 0)"
    if config.is_default and plan.num_shards <= MAX_SHARDS_WITHOUT:
        return f"{plan.num_shards} shards; without hot_rows_gb they are on for more than {MAX_SHARDS_WITHOUT}"
    if config.is_default and all(snapshot.access_counts(table.name) is None for table in plan.layout.tables):
        return "the snapshot has no access counts; without hot_rows_gb they are on where it has"
    return ""


def learning_counter(capacity: int) -> AccessCounter:
    """Return what counts lookups for a tier that learns which of them are the hottest, as many as `capacity`."""
    return AccessCounter(CANDIDATES * capacity, MIN_EPOCH, HALF_LIFE * capacity)


class HotRowsKeeper:
    """Keeps the hot rows of one version, from `start` until it is closed.

    `connect` makes it shards of its own. `fleet` opens the registry whose stream of deltas is followed, as long as it
    is still the fleet's; None if the nodes follow none. `on_status` is called with the tier's state about every second,
    on the keeper's thread. `before` are the rows of a version before: one that learns begins with them, if they are
    rows of the same tables.

    Raises MemoryBudgetError if there is no room for the tier in `memory`, and HotRowsError if that has none for a row.

    Attributes:
        rows: the tier, for the version's routers.
    """

    def __init__(
        self,
        config: HotRowsConfig,
        snapshot: Snapshot,
        plan: Plan,
        connect: Callable[[], Sequence[ReplicatedShard]],
        fleet: Callable[[], FleetRegistry] | None = None,
        on_status: Callable[[HotStatus], None] = lambda status: None,
        memory: RowMemory | None = None,
        before: HotRows | None = None,
    ) -> None:
        self._snapshot, self._plan = snapshot, plan
        self._model, self._version = snapshot.spec.model, snapshot.version
        self._name = f"hot rows of version {self._version} of model {self._model!r}"
        self._owners, self._cutter = BucketOwners(plan), Cutter(plan.layout, FETCH_PIECE_BYTES)
        self._connect, self._fleet, self._on_status = connect, fleet, on_status
        self._budget = HotBudget(config, plan.layout)
        self._claim = (memory or RowMemory()).take(config.size_bytes)
        learned = learning_counter(self._budget.capacity) if self._budget.learns else None
        self.rows = HotRows(plan.layout, learned, KEY_NUMBERS * self._budget.capacity if learned else 0)
        # Tables and rows, or keys: their numbers may be another key's when the tier begins again.
        self._first = np.empty((2, 0), np.int64)
        if before is not None and learned is not None and _row_kinds(before.layout) == _row_kinds(plan.layout):
            self._first = np.stack([before.current.keys >> TABLE_SHIFT, before.current.rows])
        self._problem, self._forks = "", dict[str, int]()
        self._begun = threading.Event()
        self._stop: Callable[[], object] = lambda: None
        self._thread = threading.Thread(target=self._run, name=f"hot-{self._model}-{self._version}", daemon=True)

    def start(self) -> None:
        """Begin, and return once the first rows are there, or could not be read yet."""
        self._thread.start()
        self._begun.wait(FIRST_FILL_S)
        self._claim.filled()

    def close(self) -> None:
        """End it and free the rows. The version's routers must be closed. Idempotent."""
        if self._thread.is_alive():
            self._stop()
            self._thread.join(CLOSE_TIMEOUT_S)
        self._claim.give_back()

    def _run(self) -> None:
        try:
            with suppress(asyncio.CancelledError):
                asyncio.run(self._keep_up())
        finally:
            self._begun.set()
            self.rows.close()

    async def _keep_up(self) -> None:
        loop, keeping = asyncio.get_running_loop(), asyncio.current_task()
        assert keeping is not None
        self._stop = lambda: loop.call_soon_threadsafe(keeping.cancel)
        shards = list(self._connect())
        fleet = None if self._fleet is None else self._fleet()
        try:
            while True:
                try:
                    await self._keep(shards, fleet)
                except ShardrankError as error:
                    self._warn(f"{type(error).__name__}: {error}")
                except Exception:
                    logger.exception("%s: none, since keeping them failed", self._name)
                # What can't be kept up to date must not be looked up: the nodes have all rows.
                await self._replace(None)
                self._begun.set()
                await asyncio.sleep(RETRY_S)
        finally:
            for shard in shards:
                await shard.close()
            if fleet is not None:
                await fleet.registry.close()

    async def _keep(self, shards: Sequence[ReplicatedShard], fleet: FleetRegistry | None) -> None:
        self._forks.clear()
        reached = await self._check_nodes(shards, follows=fleet is not None)
        if len(reached) < len(shards):
            raise HotRowsError(f"{self._name}: no node of some shard that answers has the version")
        at = min(reached, key=attrgetter("delta_sequence"))
        # Nodes of older releases tell no digest: what they have is trusted.
        delta_base, last_delta = self._snapshot.manifest.delta_start
        last_delta, digest = last_delta if at.delta_digest else at.delta_sequence, bytes.fromhex(at.delta_digest)
        self.rows.deltas = DeltaPosition(delta_base, last_delta, at.delta_sequence, digest)
        work = [self._choose(shards), self._report_often(shards, follows=fleet is not None)]
        if fleet is not None:
            work.append(DeltaFollower(fleet, self._model, self._version, self.rows, self.rows.deltas).run())
        tasks = [asyncio.create_task(each) for each in work]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            await end_tasks(tasks)

    async def _check_nodes(self, shards: Sequence[ReplicatedShard], *, follows: bool) -> list[ServedVersion]:
        """Return, of each shard that has nodes with the version, what the one reports that has the most deltas.

        Raises HotRowsError if a node has forked since the tier began, or deltas are applied that are not followed here.
        """
        reached: list[ServedVersion] = []
        key = (self._model, self._version)
        for shard, infos in enumerate(await asyncio.gather(*(shard.infos() for shard in shards))):
            served = {node: each for node, info in infos for each in info.versions if (each.model, each.version) == key}
            # A node may have mended since it was read from.
            forks = {node: each.delta_forks for node, each in served.items()}
            if any(each.forked or forks[node] > self._forks.get(node, forks[node]) for node, each in served.items()):
                raise HotRowsError(f"{self._name}: row updates of a node have forked, and it may have been read from")
            self._forks |= forks
            reached += sorted(served.values(), key=attrgetter("delta_sequence"))[-1:]
            if not follows and any(each.delta_sequence > each.last_delta for each in served.values()):
                raise HotRowsError(
                    f"{self._name}: nodes of shard {shard} apply row updates, which copies here would not "
                    "get without --registry"
                )
        return reached

    async def _report_often(self, shards: Sequence[ReplicatedShard], *, follows: bool) -> None:
        """Report the tier, and check that no node's rows forked or, where there is no registry, change."""
        names = tuple(table.name for table in self._plan.layout.tables)
        while True:
            hot, sequence = self.rows.current, self.rows.deltas.sequence
            size = hot.keys.size, hot.size_bytes
            self._on_status(HotStatus(self._model, self._version, names, *size, sequence, *self.rows.counts()))
            await asyncio.sleep(STATUS_EVERY_S)
            with suppress(UnavailableError):
                await self._check_nodes(shards, follows=follows)

    async def _choose(self, shards: Sequence[ReplicatedShard]) -> None:
        """Hold the first rows; then, if this tier learns, those with the most lookups in the last epochs."""
        budget, learned, keys = self._budget, self.rows.learned, np.sort(self.rows.numbers.counted(*self._first))
        if not keys.size:
            keys = await asyncio.to_thread(budget.hottest_counted, self._snapshot, self._plan.layout)
            if learned is None and not keys.size:
                logger.warning("%s: the snapshot has no access counts: no row is hot", self._name)
        keys = budget.fitting(keys)
        while not await self._build(shards, keys):
            self._begun.set()
            await asyncio.sleep(RETRY_S)
        self._begun.set()
        while True:
            started_at = time.monotonic()
            if learned is not None and learned.is_full:
                keys = await asyncio.to_thread(self._hottest, learned)
                is_new = ~np.isin(keys, self.rows.current.keys, assume_unique=True)
                if np.count_nonzero(is_new) > MIN_CHANGE * keys.size:
                    await self._build(shards, keys)
            await asyncio.sleep(max(LEARN_EVERY_S, (time.monotonic() - started_at) * (1 / LEARN_FRACTION - 1)))

    def _hottest(self, learned: AccessCounter) -> Int64Array:
        counted = learned.fold()
        self.rows.numbers.keep(counted.keys, self.rows.current.keys)
        return self._budget.fitting(counted.most_frequent(self._budget.capacity).hottest_first())

    async def _build(self, shards: Sequence[ReplicatedShard], keys: Int64Array) -> bool:
        """Fill a set with these rows, ascending keys, and use it. False, and why in the log, if they can't be read."""
        try:
            pending = await asyncio.to_thread(HotSet, self._plan.layout, keys, self.rows.numbers.rows(keys))
            self.rows.begin(pending)
            until = await self._fill(shards, pending)
            while self.rows.deltas.sequence < until:  # noqa: ASYNC110
                await asyncio.sleep(_POLL_S)
        except ShardrankError as error:
            self._warn(f"rows can't be read: {error}")
            self.rows.begin(self.rows.current)
            return False
        await self._replace(pending)
        logger.info("%s: %d rows, %d bytes", self._name, keys.size, pending.size_bytes)
        self._problem = ""
        return True

    async def _replace(self, hot: HotSet | None) -> None:
        """Use a set, or none, and free the one before once the last batch that uses it has ended."""
        before = self.rows.use(hot)
        # The set of no rows is always the same one: lookups that use it go on doing so.
        while before.users and before is not self.rows.current:  # noqa: ASYNC110
            await asyncio.sleep(_POLL_S)
        self.rows.retired()

    async def _fill(self, shards: Sequence[ReplicatedShard], pending: HotSet) -> int:
        """Copy what the set in use has, and read the others. Return the last delta that any of these may be of."""
        until = self.rows.deltas.sequence
        every = np.arange(self._plan.num_shards, dtype=np.int16)
        for first in range(0, pending.keys.size, FILL_KEYS):
            numbers = np.arange(first, min(first + FILL_KEYS, pending.keys.size))
            self.rows.copy(pending, numbers)
            numbers = numbers[~pending.is_filled[numbers]]
            if not numbers.size:
                continue
            keys = pending.keys.take(numbers)
            tables, counts = np.unique(keys >> TABLE_SHIFT, return_counts=True)
            rows = pending.rows.take(numbers)
            bags = Bags.from_lengths(tables.astype(np.int32), counts, np.ones(rows.size, np.int64), rows)
            for part in split(bags, self._owners.of(bags, lambda: every, first), range(every.size)):
                for piece in self._cutter.cut(part):
                    started_at = time.monotonic()
                    # Deltas that are applied here from now on are kept: what is read need not have them.
                    answer, sequence = await shards[piece.owner].pool_at(
                        self._model, self._version, piece.bags, started_at + FETCH_TIMEOUT_S, self.rows.deltas.sequence
                    )
                    until = max(until, sequence)
                    if sum(map(len, answer.stored or ())) != piece.positions.size:
                        raise HotRowsError(f"{self._name}: a node sends sums in place of rows; it must be upgraded")
                    self.rows.fill(pending, numbers.take(piece.positions), answer.stored or (), answer.missing)
                    await asyncio.sleep((time.monotonic() - started_at) * (1 / FETCH_FRACTION - 1))
        return until

    def _warn(self, reason: str) -> None:
        if reason != self._problem:
            logger.warning("%s: %s", self._name, reason)
        self._problem = reason


def _row_kinds(layout: TableLayout) -> list[tuple[object, ...]]:
    """Return what must be equal for keys of one layout to be keys of another, of rows that take as many bytes."""
    return [(table.name, table.num_embeddings, table.keys, table.embedding_dim, table.dtype) for table in layout.tables]
