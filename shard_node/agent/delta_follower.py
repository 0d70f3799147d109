"""Follow streams of deltas: apply each to a generation's rows, in order and once, while lookups go on."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Final

import numpy as np
from pydantic import Field

from loader.deltas import chain
from loader.deltas.batch import DELETE_KEYS, WRITE_ROWS, DeltaBatch
from loader.deltas.chain import Commit, is_commit
from loader.errors import DeltaError, DeltaFormatError, RegistryUnavailableError, ShardrankError
from loader.progress import end_tasks, ended
from loader.registry.fleet import FleetRegistry, delta_stream
from loader.registry.registry import MAX_SEQUENCE, StreamEntry
from loader.snapshot.buckets import RowBuckets
from loader.snapshot.tables import Frozen
from shard_node.bags import TableLayout
from shard_node.buckets import Partition
from shard_node.engine.base import WritableRows
from shard_node.errors import MemoryBudgetError
from shard_node.node import DeltaPosition, LoadedTables

logger = logging.getLogger(__name__)

RETRY_S: Final = 10.0
"""After a follower that could not go on; its stream may be whole again."""
CATCH_UP_LIMIT_S: Final = 60.0
"""How long a version that is staged while it is followed may take to catch up before it is asked for as it is."""


class FollowerConfig(Frozen):
    """How a stream is followed: pauses after a read without deltas, and after a refusal; how much is read at once.

    At most `busy_share` of the time is spent on applying: a long replay leaves lookups their processor.
    """

    poll_s: float = Field(default=0.05, gt=0)
    retry_s: float = Field(default=0.5, gt=0)
    check_end_s: float = Field(default=1.0, gt=0)
    max_entries: int = Field(default=16, ge=1)
    max_bytes: int = Field(default=16 << 20, ge=1)
    busy_share: float = Field(default=0.5, gt=0, le=1)


DEFAULT_CONFIG: Final = FollowerConfig()


class DeltaFollower:
    """Follows one stream for one generation. Where it begins, how far it is, and what holds it up, is in `position`.

    `rows`, of `partition` or any, must not be freed before `run` has ended; `clock` gives seconds since the epoch.
    """

    def __init__(
        self,
        fleet: FleetRegistry,
        model: str,
        version: int,
        rows: WritableRows,
        position: DeltaPosition,
        partition: Partition | None = None,
        clock: Callable[[], float] = time.time,
        sleep: Callable[[float], Coroutine[Any, Any, None]] = asyncio.sleep,
        config: FollowerConfig = DEFAULT_CONFIG,
    ) -> None:
        self._fleet, self._registry = fleet, fleet.registry
        self._model = model
        self._where = f"version {version} of model {model!r}"
        self._engine = rows
        self._position = position
        self._partitions = _read_partitions(rows.layout, partition)
        self._delta_base = position.now.delta_base
        self._stream = delta_stream(model, self._delta_base)
        self._clock = clock
        self._sleep = sleep
        self._config = config
        self._looked_at_end: float | None = None
        self._last = MAX_SEQUENCE
        self._stopping = False
        self._silent = False

    async def run(self, until: int | None = None) -> None:
        """Follow the stream until cancelled; nothing writes rows any more when it ends.

        With `until` it ends once that delta is applied, or one was refused, or the stream has lost it. Raises
        DeltaError if the stream does not have what comes next any more (`delta_gap`: the version must be staged anew,
        from a snapshot that contains more), or not what was applied (`delta_fork`: these rows must be replaced).
        """
        self._stopping = False
        executor = ThreadPoolExecutor(1, thread_name_prefix=f"deltas-{self._model}")
        try:
            while until is None or (self._position.sequence < min(until, self._last) and not self._position.now.reason):
                await self._sleep(await self._round(executor))
        finally:
            # Waits for nothing: what was handed to it has ended.
            executor.shutdown(wait=False)

    def apply(self, entries: Sequence[StreamEntry], parts: Mapping[int, Sequence[bytes]]) -> None:
        """Apply what comes next; what is applied already is passed over. Blocks; called in a thread of its own.

        `parts` are, by number, the bytes of the rows that lie beside entries. Raises DeltaError if the next one is
        missing or the stream has forked, DeltaFormatError or DeltaError if it is not what it should be. Those before it
        are applied.
        """
        position, layout = self._position, self._engine.layout
        for entry in entries:
            if self._stopping:
                return
            stated = Commit.decode(entry.payload) if is_commit(entry.payload) else DeltaBatch.decode(entry.payload)
            if not self._is_next(entry, stated):
                continue
            name = f"delta {stated.sequence} of {stated.model!r} from {stated.delta_base}"
            if (stated.model, stated.delta_base) != (self._model, self._delta_base):
                raise DeltaError(
                    f"{self._where} follows {self._stream}, in which {name} must not be", kind="delta_base"
                )
            if stated.sequence != entry.sequence:
                raise DeltaFormatError(f"{self._where}: {name} lies at {entry.sequence} of {self._stream}")
            if (slices := layout.slices.get(stated.table)) is None:
                raise DeltaFormatError(f"{self._where}: {name} is for table {stated.table!r}, which it does not have")
            heads, written, absent = position.heads, 0, 0
            if isinstance(stated, Commit):
                # A publisher that knew of no entry before knew no last parts either.
                before = {} if stated.predecessor == chain.NOTHING else heads
                pieces = parts.get(entry.sequence, ())
                batch, heads = stated.decode_parts(self._partitions[stated.table], pieces, before)
            else:
                batch = stated
            if batch is not None:
                batch.check_table(*(layout.tables[number] for number in slices))
                if batch.operation == WRITE_ROWS:
                    tables = slices if batch.column_dims else slices[0]
                    written = self._engine.write_rows(tables, batch.rows, batch.stored)
                else:
                    stored = None if batch.operation == DELETE_KEYS else batch.stored
                    written, present = self._engine.update_keys(slices, batch.rows, stored)
                    absent = written - present if stored is None else 0
            position.heads = heads
            position.is_chained, digest = isinstance(stated, Commit), chain.entry_digest(entry.payload)
            position.applied(stated.sequence, stated.published_at, written, self._clock(), digest, absent)

    def _is_next(self, entry: StreamEntry, stated: Commit | DeltaBatch) -> bool:
        """Return whether an entry follows what was applied, or was applied. Raises DeltaError if it is neither."""
        position, sequence, number = self._position, self._position.sequence, entry.sequence
        if number <= sequence:
            self._check_same(entry)
            return False
        previous = stated.previous if isinstance(stated, Commit) else number - 1
        if previous > sequence:
            raise DeltaError(
                f"{self._where} needs what follows delta {sequence}, but {self._stream} begins with {number} after "
                f"{previous}: stage a snapshot that contains more",
                kind="delta_gap",
            )
        # A snapshot may contain deltas that were lost: as long as no other was applied, it goes on from there.
        if isinstance(stated, Commit) and position.now.digest:
            allowed = (position.now.digest, chain.NOTHING) if previous == sequence else ()
            if stated.predecessor not in allowed:
                raise self._fork(f"where {number} follows {previous} ({stated.predecessor.hex()})")
        return True

    def _check_same(self, entry: StreamEntry) -> None:
        digest = chain.entry_digest(entry.payload)
        if entry.sequence == self._position.sequence and self._position.now.digest not in (b"", digest):
            raise self._fork(f"where it is another one ({digest.hex()})")

    def _fork(self, what: str) -> DeltaError:
        applied = f"{self._position.sequence} ({self._position.now.digest.hex()})"
        return DeltaError(f"{self._where} has delta {applied} of {self._stream}, {what}", kind="delta_fork")

    async def _round(self, executor: ThreadPoolExecutor) -> float:
        """Read and apply what comes next. Return for how long to pause. Raises DeltaError as `run`."""
        config, refused = self._config, self._position.now.reason
        try:
            await self._check_end()
            looked_at, after = self._clock(), self._position.sequence
            entries = await self._registry.read(self._stream, after, config.max_entries, config.max_bytes)
            if self._silent:
                logger.info("%s: the registry answers again", self._where)
                self._silent = False
            if not entries:
                self._position.seen(after, looked_at)
                return config.poll_s
            last = entries[-1].sequence
            entries, parts = await self._read_parts(entries)
            # Another fleet may have a stream of this name.
            await self._fleet.check_identity()
            self._position.seen(last, looked_at)
            loop = asyncio.get_running_loop()
            started_at = loop.time()
            work = loop.run_in_executor(executor, self.apply, entries, parts)
            try:
                await asyncio.shield(work)
            except asyncio.CancelledError:
                # The rows are about to be freed: the thread must not write to them any more.
                self._stopping = True
                await ended(work)
                raise
        except RegistryUnavailableError as error:
            if not self._silent:
                logger.warning("%s: deltas wait until the registry answers: %s", self._where, error)
            self._silent = True
            return config.retry_s
        except (DeltaError, MemoryBudgetError) as error:
            # How much memory is left differs each time.
            reason = str(error) if isinstance(error, DeltaError) else f"{self._where} has no memory for the next delta"
            if refused != reason:
                logger.error("a delta is not applied: %s", error)
            self._position.refused(reason, error.kind, forked=error.kind == "delta_fork")
            if error.kind in ("delta_fork", "delta_gap"):
                raise
            return config.retry_s
        if refused:
            logger.info("%s: deltas are applied again", self._where)
        return (loop.time() - started_at) * (1 / config.busy_share - 1)

    async def _read_parts(self, entries: Sequence[StreamEntry]) -> tuple[list[StreamEntry], dict[int, list[bytes]]]:
        """Read what lies beside entries, up to the one that reaches `max_bytes`. Return both, bytes by number."""
        chosen, ranges = list[StreamEntry](), list[tuple[int, int, int]]()
        for entry in entries:
            chosen.append(entry)
            # What is no commit, or of no table, is refused once those before it are applied.
            with suppress(DeltaFormatError, KeyError):
                commit = Commit.decode(entry.payload)
                of_entry = commit.ranges(self._partitions[commit.table])
                ranges += ((entry.sequence, begin, end) for begin, end in of_entry)
            if sum(end - begin for _, begin, end in ranges) >= self._config.max_bytes:
                break
        pieces = await self._registry.read_rows(self._stream, ranges) if ranges else []
        parts: dict[int, list[bytes]] = {}
        for (sequence, _, _), piece in zip(ranges, pieces, strict=True):
            parts.setdefault(sequence, []).append(piece)
        return chosen, parts

    async def _check_end(self) -> None:
        """Compare, once in a while, where the stream ends. Raises DeltaError if what was applied is not there."""
        now = self._clock()
        if self._looked_at_end is not None and 0 <= now - self._looked_at_end < self._config.check_end_s:
            return
        bounds, position, sequence = await self._registry.bounds(self._stream), self._position, self._position.sequence
        await self._fleet.check_identity()
        if bounds.last < sequence and sequence > position.now.last_delta:
            if bounds.last:
                raise self._fork(f"which ends with {bounds.last}: it has lost what came after")
            # No stream says nothing of these rows.
            lost = f"{self._where} has delta {sequence}, but the registry has no {self._stream}"
            raise DeltaError(f"{lost}: it was emptied, or is another one", kind="delta_lost")
        if bounds.last == sequence and position.is_chained:
            for entry in await self._registry.read(self._stream, sequence - 1, 1):
                self._check_same(entry)
                position.is_chained = is_commit(entry.payload)
        self._looked_at_end, self._last = now, bounds.last
        position.seen(bounds.last, now)


def _read_partitions(layout: TableLayout, partition: Partition | None) -> dict[str, chain.Partitions]:
    """Return, by table, which partitions of its deltas have rows that are here."""
    read = dict[str, chain.Partitions]()
    for table, slices in layout.slices.items():
        buckets = RowBuckets.of(layout.tables[slices[0]])
        is_local = np.ones(buckets.count, np.bool_)
        if partition is not None:
            is_local = np.logical_or.reduce([partition.card_of_bucket[number] >= 0 for number in slices])
            if len(slices) > 1 and buckets.seed is not None:
                # Each slice mixes its rows by its name, so a part has rows of every shard that has a slice.
                is_local[:] = is_local.any()
        read[table] = np.zeros(chain.NUM_PARTITIONS, np.bool_)
        read[table][chain.partition_of_bucket(buckets)[is_local]] = True
    return read


async def catch_up(
    fleet: FleetRegistry,
    model: str,
    version: int,
    tables: LoadedTables,
    limit_s: float | None = CATCH_UP_LIMIT_S,
    clock: Callable[[], float] = time.time,
) -> None:
    """Apply what its stream of deltas holds by now to tables that nobody uses yet; then nothing writes to them.

    What can't be applied, or not within `limit_s` (None for no limit), is logged and left to whoever follows the stream
    from then on: old rows are better than none.
    """
    deltas, until, reason, looked_at = tables.deltas, MAX_SEQUENCE, "", clock()
    try:
        async with asyncio.timeout(limit_s):
            last = (await fleet.registry.bounds(delta_stream(model, deltas.now.delta_base))).last
            await fleet.check_identity()
            until = last
            deltas.seen(until, looked_at)
            rows = tables.engine, deltas, tables.partition
            await DeltaFollower(fleet, model, version, *rows, clock).run(until)
    except TimeoutError:
        reason = f"not applied within {limit_s} s"
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
    if deltas.sequence < until:
        reason = reason or deltas.now.reason
        logger.error("version %d of %s is loaded without deltas after %d: %s", version, model, deltas.sequence, reason)


class Followers:
    """Starts and stops the followers of a process, one for each version.

    `gaps` are why versions that shall follow can't, `forks` count those that ended for a fork.
    """

    def __init__(
        self, fleet: FleetRegistry, clock: Callable[[], float] = time.time, config: FollowerConfig = DEFAULT_CONFIG
    ) -> None:
        self.gaps: dict[tuple[str, int], str] = {}
        self.forks = Counter[tuple[str, int]]()
        self._fleet, self._clock, self._config = fleet, clock, config
        self._tasks: dict[tuple[str, int], asyncio.Task[None]] = {}

    async def reconcile(self, model: str, versions: Mapping[int, LoadedTables]) -> None:
        """Has exactly these versions of a model follow."""
        for name, version in list(self._tasks):
            if name == model and version not in versions:
                await self.stop(model, version)
        for version, tables in versions.items():
            before = self._tasks.get((model, version))
            if (before is None or before.done()) and not tables.deltas.now.forked:
                rows = tables.engine, tables.deltas, tables.partition
                follower = DeltaFollower(self._fleet, model, version, *rows, self._clock, config=self._config)
                task = asyncio.create_task(self._follow(model, version, follower), name=f"deltas {model} {version}")
                self._tasks[model, version] = task

    async def stop(self, model: str, version: int) -> None:
        """Stop a follower, if there is one: nothing writes rows of the version any more afterwards."""
        if (task := self._tasks.get((model, version))) is None:
            return
        # It stays known until it has ended: a wait that is cancelled must not let another one begin beside it.
        await end_tasks([task])
        if self._tasks.get((model, version)) is task:
            del self._tasks[model, version]
            self.gaps.pop((model, version), None)

    async def close(self) -> None:
        """Stop all."""
        for model, version in list(self._tasks):
            await self.stop(model, version)

    async def _follow(self, model: str, version: int, follower: DeltaFollower) -> None:
        self.gaps.pop((model, version), None)
        try:
            await follower.run()
        except Exception as error:
            self.gaps[model, version] = f"{type(error).__name__}: {error}"
            self.forks[model, version] += getattr(error, "kind", "") == "delta_fork"
            unforeseen = None if isinstance(error, ShardrankError) else error
            logger.error("version %d of %s gets no deltas, tried again: %s", version, model, error, exc_info=unforeseen)
            # Then it is followed again: its stream may be whole.
            await asyncio.sleep(RETRY_S)
