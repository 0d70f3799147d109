"""Follow streams of deltas: apply each to a generation's rows, in order and once, while lookups go on."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final, Protocol

from pydantic import Field

from loader.deltas.batch import DeltaBatch
from loader.errors import DeltaError, DeltaFormatError, RegistryError, RegistryUnavailableError, ShardrankError
from loader.progress import ended
from loader.registry.fleet import delta_stream
from loader.registry.registry import Registry, StreamEntry
from loader.snapshot.tables import Frozen
from shard_node.engine.base import WritableRows
from shard_node.node import DeltaPosition, LoadedTables

logger = logging.getLogger(__name__)

WRITE_BYTES: Final = 512 << 10
"""Copied while lookups wait: some tenths of a millisecond."""
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


class FollowedRows(Protocol):
    """Rows that follow a stream of deltas, and how far they are: `LoadedTables`, or copies of some rows."""

    @property
    def engine(self) -> WritableRows:
        """Where rows are written."""

    @property
    def deltas(self) -> DeltaPosition:
        """Told by the follower; where it begins."""


class DeltaFollower:
    """Follows one stream for one generation. How far it is, and what holds it up, is told by `tables.deltas`.

    `tables` must not be closed before `run` has ended; `clock` gives seconds since the epoch.
    """

    def __init__(
        self,
        registry: Registry,
        model: str,
        version: int,
        tables: FollowedRows,
        clock: Callable[[], float] = time.time,
        sleep: Callable[[float], Coroutine[Any, Any, None]] = asyncio.sleep,
        config: FollowerConfig = DEFAULT_CONFIG,
    ) -> None:
        self._registry = registry
        self._model = model
        self._where = f"version {version} of model {model!r}"
        self._engine = tables.engine
        self._position = tables.deltas
        self._delta_base = tables.deltas.snapshot().delta_base
        self._stream = delta_stream(model, self._delta_base)
        self._clock = clock
        self._sleep = sleep
        self._config = config
        self._looked_at_end: float | None = None
        self._stopping = False
        self._silent = False

    async def run(self, until: int | None = None) -> None:
        """Follow the stream until cancelled; nothing writes rows any more when it ends.

        With `until` it ends once that delta is applied, or one was refused. Raises DeltaError if the stream does not
        have what comes next any more: the version must be staged anew, from a snapshot that contains more.
        """
        self._stopping = False
        executor = ThreadPoolExecutor(1, thread_name_prefix=f"deltas-{self._model}")
        try:
            while until is None or (self._position.sequence < until and not self._position.snapshot().reason):
                await self._sleep(await self._round(executor))
        finally:
            # Waits for nothing: what was handed to it has ended.
            executor.shutdown(wait=False)

    def apply(self, entries: Sequence[StreamEntry]) -> None:
        """Apply what comes next; what is applied already is passed over. Blocks; called in a thread of its own.

        Raises DeltaError if the next one is missing, DeltaFormatError or DeltaError if it is not what it should
        be. Those before it are applied.
        """
        for entry in entries:
            if self._stopping:
                return
            sequence = self._position.sequence
            if entry.sequence <= sequence:
                continue
            if entry.sequence != sequence + 1:
                raise DeltaError(
                    f"{self._where}: delta {entry.sequence} came, {sequence + 1} is next", kind="delta_gap"
                )
            batch = DeltaBatch.decode(entry.payload)
            if (batch.model, batch.delta_base) != (self._model, self._delta_base):
                raise DeltaError(
                    f"{self._where} follows {self._stream}, in which {batch.name} must not be", kind="delta_base"
                )
            if batch.sequence != entry.sequence:
                raise DeltaFormatError(f"{self._where}: {batch.name} lies at {entry.sequence} of {self._stream}")
            layout = self._engine.layout
            slices = layout.slices.get(batch.table)
            if slices is None:
                unknown = f"table {batch.table!r}, which it does not have"
                raise DeltaFormatError(f"{self._where}: {batch.name} is for {unknown}")
            batch.check_table(*(layout.tables[number] for number in slices))
            table = slices if batch.column_dims else slices[0]
            written = 0
            step = max(1, WRITE_BYTES // batch.stored.shape[1])
            for begin in range(0, batch.rows.size, step):
                end = begin + step
                written += self._engine.write_rows(table, batch.rows[begin:end], batch.stored[begin:end])
            self._position.applied(batch.sequence, batch.published_at, written, self._clock())

    async def _round(self, executor: ThreadPoolExecutor) -> float:
        config = self._config
        try:
            if not await self._check_end():
                return config.retry_s
            looked_at, after = self._clock(), self._position.sequence
            entries = await self._registry.read(self._stream, after, config.max_entries, config.max_bytes)
        except RegistryUnavailableError as error:
            if not self._silent:
                logger.warning("%s: deltas wait until the registry answers: %s", self._where, error)
            self._silent = True
            return config.retry_s
        if self._silent:
            logger.info("%s: the registry answers again", self._where)
            self._silent = False
        self._position.seen(entries[-1].sequence if entries else after, looked_at)
        if not entries:
            return config.poll_s
        started_at = time.perf_counter()
        refused = self._position.snapshot().reason
        work = asyncio.get_running_loop().run_in_executor(executor, self.apply, entries)
        try:
            await asyncio.shield(work)
        except asyncio.CancelledError:
            # The rows are about to be freed: the thread must not write to them any more.
            self._stopping = True
            await ended(work)
            raise
        except DeltaError as error:
            self._refuse(str(error))
            self._looked_at_end = None  # is it lost, or only late?
            return config.retry_s
        if refused:
            logger.info("%s: deltas are applied again", self._where)
        return (time.perf_counter() - started_at) * (1 / config.busy_share - 1)

    async def _check_end(self) -> bool:
        """Compare, once in a while, where the stream begins and ends. False if it is not the one that was applied."""
        now = self._clock()
        if self._looked_at_end is not None and 0 <= now - self._looked_at_end < self._config.check_end_s:
            return True
        bounds = await self._registry.bounds(self._stream)
        self._looked_at_end = now
        sequence = self._position.sequence
        if bounds.last > sequence and bounds.first > sequence + 1:
            reason = f"{self._where} needs delta {sequence + 1}, but {self._stream} begins with {bounds.first}"
            self._refuse(reason)
            raise DeltaError(f"{reason}: stage a snapshot that contains more", kind="delta_gap")
        if 0 < bounds.last < sequence and sequence > self._position.snapshot().last_delta:
            # Its publisher gives back what the registry has lost, or refuses to go on.
            self._refuse(f"{self._where} has delta {sequence}, but {self._stream} ends with {bounds.last}")
            self._looked_at_end = None
            return False
        self._position.seen(bounds.last, now)
        return True

    def _refuse(self, reason: str) -> None:
        if self._position.snapshot().reason != reason:
            logger.error("a delta is not applied: %s", reason)
        self._position.refused(reason)


async def catch_up(registry: Registry, model: str, version: int, tables: LoadedTables) -> None:
    """Apply what its stream of deltas holds by now to tables that nobody uses yet; then nothing writes to them.

    What can't be applied, or not within `CATCH_UP_LIMIT_S`, is logged and left to whoever follows the stream from then
    on: old rows are better than none.
    """
    deltas, reason = tables.deltas, ""
    try:
        until = (await registry.bounds(delta_stream(model, deltas.snapshot().delta_base))).last
    except RegistryError as error:
        logger.warning("version %d of %s is loaded without its deltas, which can't be read: %s", version, model, error)
        return
    try:
        async with asyncio.timeout(CATCH_UP_LIMIT_S):
            await DeltaFollower(registry, model, version, tables).run(until)
    except TimeoutError:
        reason = f"not applied within {CATCH_UP_LIMIT_S:g} s"
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
    if (applied := deltas.sequence) < until:
        reason = reason or deltas.snapshot().reason
        logger.error(
            "version %d of %s is loaded without deltas %d to %d: %s", version, model, applied + 1, until, reason
        )


@dataclass(slots=True)
class _Following:
    task: asyncio.Task[None]
    gap: str = ""
    stopped_at: float = float("-inf")


class Followers:
    """Starts and stops the followers of a process, one for each version."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._following: dict[tuple[str, int], _Following] = {}

    async def reconcile(self, model: str, versions: Mapping[int, LoadedTables]) -> None:
        """Has exactly these versions of a model follow."""
        for name, version in list(self._following):
            if name == model and version not in versions:
                await self.stop(model, version)
        for version, tables in versions.items():
            before = self._following.get((model, version))
            # One whose stopping was cut short has no gap, and ends nevertheless.
            if before is None or (before.task.done() and time.monotonic() - before.stopped_at >= RETRY_S):
                follower = DeltaFollower(self._registry, model, version, tables)
                task = asyncio.create_task(self._follow(model, version, follower), name=f"deltas {model} {version}")
                self._following[model, version] = _Following(task)

    def gap(self, model: str, version: int) -> str:
        """Return why a version that shall follow can't; "" if it can, or does not follow."""
        following = self._following.get((model, version))
        return "" if following is None else following.gap

    async def stop(self, model: str, version: int) -> None:
        """Stop a follower, if there is one: nothing writes rows of the version any more afterwards."""
        following = self._following.get((model, version))
        if following is None:
            return
        following.task.cancel()
        # It stays known until it has ended: a wait that is cancelled must not let another one begin beside it.
        await asyncio.wait([following.task])
        if self._following.get((model, version)) is following:
            del self._following[model, version]

    async def close(self) -> None:
        """Stop all."""
        for model, version in list(self._following):
            await self.stop(model, version)

    async def _follow(self, model: str, version: int, follower: DeltaFollower) -> None:
        try:
            await follower.run()
        except Exception as error:
            following = self._following.get((model, version))
            if following is not None:
                following.gap, following.stopped_at = f"{type(error).__name__}: {error}", time.monotonic()
            unforeseen = None if isinstance(error, ShardrankError) else error
            logger.error("version %d of %s gets no deltas, tried again: %s", version, model, error, exc_info=unforeseen)
