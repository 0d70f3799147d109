"""Follow the dense weights that training publishes between snapshots: read, check, and offer them to versions."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable
from contextlib import suppress
from random import Random
from typing import Final

import torch

from loader.deltas.chain import entry_digest
from loader.deltas.dense import checked_tensors, read_step
from loader.errors import DeltaError, RegistryError, ShardrankError, is_passing
from loader.progress import ended
from loader.registry.fleet import DenseStep, FleetRegistry, cut_reason, delta_stream
from loader.snapshot.reader import Snapshot
from loader.snapshot.store import Store
from serving.observe.metrics import ServingMetrics
from serving.rank.ranking import Ranking
from serving.versions.loaded_version import LoadedVersion
from shard_node.errors import GenerationNotFoundError
from shard_node.generation import Generations

logger = logging.getLogger(__name__)

CHECK_EVERY_S: Final = 5.0
"""Between two checks of whether the stream still has the delta of the step in use: format 1 has up to 4 MiB in one."""
READ_FOR_S: Final = 30.0
"""A step whose file can't be read is tried for so long: a shared file system may show it later."""


async def poll(work: Callable[[], Awaitable[object]], period_s: float, what: str, random: Random) -> None:
    """Do something again and again, until cancelled; each pause is up to a quarter shorter or longer than `period_s`.

    That `what` it does fails, or works again, is logged once: a bug must not end the following for good.
    """
    fails = False
    while True:
        try:
            await work()
            if fails:
                logger.info("%s works again", what)
            fails = False
        except Exception as error:
            if not fails:
                is_bug = not isinstance(error, RegistryError)
                logger.warning("%s fails, what was known before stays in use: %s", what, error, exc_info=is_bug)
            fails = True
        await asyncio.sleep(period_s * random.uniform(0.75, 1.25))


class DenseSteps:
    """Updates each served version to its newest dense weights. Belongs to the event loop of the registry.

    A step that must not answer is refused once (`refused`, with the reason, by model and version), in the log, metrics
    and announcements; the step before goes on. One whose file can't be read is tried for `READ_FOR_S` before, and one
    without room, or node to check it with, for as long as it is the newest.
    A version of which no batch had rows of a step for `wait_s` begins anew, with the snapshot's weights.
    """

    def __init__(
        self, fleet: FleetRegistry, store: Store, metrics: ServingMetrics, clock: Callable[[], float], wait_s: float
    ) -> None:
        self.refused: dict[tuple[str, int], tuple[DenseStep, str]] = {}
        # Steps whose files could not be read, and until when that is tried again, seconds of the clock.
        self._unread: dict[tuple[str, int], tuple[DenseStep, float]] = {}
        self._fleet, self._store, self._metrics, self._clock, self._wait_s = fleet, store, metrics, clock, wait_s
        self._checked_at, self._is_check_due = -math.inf, False

    async def update(self, served: LoadedVersion) -> None:
        """Offer a version the newest step, if it has an older one. Raises RegistryError.

        A version without any first accepts, unchecked for drift, the step that other processes accepted last: the
        snapshot's weights may have drifted far from it.
        """
        key = served.model, served.version
        newest = await self._fleet.dense_step(*key)
        if newest is None or newest.step <= served.dense_step or self._is_refused(newest):
            return
        await self._fleet.check_identity()
        accepted = None if served.dense_step else await self._fleet.dense_step(*key, accepted=True)
        # One that can't be read now is waited for; a file that is damaged is not.
        if accepted and not await self._try(served, accepted, math.inf) and not self._is_refused(accepted):
            return
        is_next = newest.step > served.dense_step and not self._is_refused(newest)
        if is_next and await self._try(served, newest, newest.max_drift):
            await self._fleet.accept_dense_step(newest)

    def _is_refused(self, record: DenseStep) -> bool:
        before = self.refused.get((record.model, record.version))
        return before is not None and before[0] == record

    def _is_read_again(self, record: DenseStep) -> bool:
        key, now = (record.model, record.version), self._clock()
        if key not in self._unread or self._unread[key][0] != record:
            self._unread[key] = record, now + READ_FOR_S
        return now < self._unread[key][1]

    async def _try(self, served: LoadedVersion, record: DenseStep, max_drift: float) -> bool:
        key = served.model, served.version

        def change(snapshot: Snapshot) -> None:
            served.change_dense(snapshot, checked_tensors(snapshot, read_step(self._store, record)), record, max_drift)

        try:
            await self._check_delta(record)
            if not await served.accepts_dense(record.sequence) or await self._has_lost_rows(served, record.sequence):
                return False
            await self._with_snapshot(served, change)
        except ShardrankError as error:
            if error.http_status in (503, 504) or (is_passing(error) and self._is_read_again(record)):
                logger.warning("dense step %d of %s %d can't be used yet: %s", record.step, *key, error)
                return False
            reason = cut_reason(f"dense step {record.step}: {error.kind}: {error}")
            self.refused[key] = record, reason
            self._metrics.count("dense_steps_refused", *key)
            logger.error("%s %d goes on with dense step %d: %s", *key, served.dense_step, reason)
            return False
        self.refused.pop(key, None)
        self._unread.pop(key, None)
        self._metrics.set_version("dense_step", *key, 0 if served.dense_fallback else record.step)
        logger.info("dense step %d of %s %d is loaded, rows need delta %d", record.step, *key, record.sequence)
        return True

    async def _check_delta(self, record: DenseStep) -> None:
        """Raise DeltaError if the stream has lost the delta that a step needs: rows with a later one may lack it."""
        published = await self._fleet.version(record.model, record.version)
        if record.digest and published is not None:
            stream = delta_stream(record.model, published.delta_base)
            if await self._has_lost(stream, record.sequence, record.digest):
                raise DeltaError(f"{stream} has lost delta {record.sequence} ({record.digest})", kind="delta_fork")

    async def _has_lost_rows(self, served: LoadedVersion, sequence: int) -> bool:
        """Return whether nodes have rows of a delta, as far as a step needs, that the stream has lost.

        They notice that themselves, but up to a second later. Those that lag do before they apply what comes next.
        """
        ends = {
            (delta_stream(reported.model, reported.delta_base), reported.delta_sequence, reported.delta_digest)
            for _, info in await served.nodes()
            for reported in info.versions
            if (reported.model, reported.version) == (served.model, served.version)
            and reported.delta_sequence >= sequence
            and reported.delta_digest
        }
        for end in ends:
            if await self._has_lost(*end):
                return True
        return False

    async def _has_lost(self, stream: str, sequence: int, digest: str) -> bool:
        # Before the bounds: what is trimmed in between counts as trimmed, not as lost.
        entries = await self._fleet.registry.read(stream, sequence - 1, 1)
        bounds = await self._fleet.registry.bounds(stream)
        is_known = bounds.first <= sequence and bounds.last > 0
        return is_known and [entry_digest(entry.payload).hex() for entry in entries] != [digest]

    async def follow(self, generations: Generations[LoadedVersion]) -> None:
        """Update what is served to new steps. Raises RegistryError."""
        served = {(each.model, each.version) for each in generations.all() if each.state != "draining"}
        for known in (self.refused, self._unread):
            for gone in known.keys() - served:
                del known[gone]
        self._is_check_due = (now := self._clock()) - self._checked_at >= CHECK_EVERY_S
        self._checked_at = now if self._is_check_due else self._checked_at
        # All versions go back before the registry, which may be unreachable, is needed.
        for work in (self._go_back, self.update):
            for key in served:
                # Leased until its new weights are checked, which its replicas do; it may be withdrawn by now.
                with suppress(GenerationNotFoundError), generations.lease(*key) as lease:
                    await work(lease.payload)

    async def _go_back(self, served: LoadedVersion) -> None:
        """Go back to the snapshot's weights if rows lack what steps need for too long; note if a step answers again."""
        key, step, before = (served.model, served.version), served.dense_step, served.dense_fallback
        lost = await self._lost(served)
        try:
            if before and step and not lost and await served.accepts_dense():
                await served.on_each(Ranking.require_step)
                served.dense_fallback = ""
            elif not before and (lost or any(ranking.lacking_s >= self._wait_s for ranking in served.rankings)):
                await self._with_snapshot(served, served.use_snapshot_weights)
                reason = lost or f"rows lack what dense step {step} needs"
                served.dense_fallback = f"{reason}: weights of snapshot {key[1]} answer"
                self.refused.pop(key, None)
        except ShardrankError as error:
            logger.warning("%s %d: rows lack what dense step %d needs: %s", *key, step, error)
        if served.dense_fallback != before:
            logger.warning("%s %d: %s", *key, served.dense_fallback or f"dense step {step} answers again")
            self._metrics.set_version("dense_step", *key, served.dense_step)
            self._metrics.set_version("dense_step_fallback", *key, bool(served.dense_fallback))

    async def _lost(self, served: LoadedVersion) -> str:
        """Return, now and then, why the step in use must not answer whatever delta rows have; "" if it may."""
        if served.dense_record is not None and self._is_check_due:
            try:
                await self._check_delta(served.dense_record)
            except DeltaError as error:
                return str(error)
            except RegistryError:
                pass  # which `follow` needs next, and raises
        return ""

    async def _with_snapshot(self, served: LoadedVersion, work: Callable[[Snapshot], None]) -> None:
        """Do in a thread what takes the snapshot that is served, without its rows."""

        def run() -> None:
            torch.set_num_threads(1)
            # What is served, though the store may have another one in its place by now.
            model, version, identity = served.model, served.version, served.description.identity
            with self._store.hold(model, version, identity=identity, with_rows=False, verify=False) as files:
                work(Snapshot.open(files.path, verify=False, rows_here=False))

        working = asyncio.ensure_future(asyncio.to_thread(run))
        try:
            await asyncio.shield(working)
        except asyncio.CancelledError:
            # Its replicas must not end under it, which would wait for them for good.
            await ended(working)
            raise
