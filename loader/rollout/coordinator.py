"""Carry the rollouts of all models, one move at a time, while holding the coordinator's lock.

A move changes one thing, the rollout's record or what is wanted, and each by compare-and-swap on what it was decided
from. So it may be made twice, by two coordinators at once, or not at all because one died: the next one sees from the
records where things stand. A coordinator keeps nothing that it can't lose.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Sequence

from loader.errors import RegistryConflictError, RegistryError, RegistryRecordError, RegistryUnavailableError
from loader.registry.fleet import (
    COORDINATOR_LOCK,
    ROLLOUTS,
    FleetRegistry,
    PublishedVersion,
    WantedModel,
    delta_stream,
    rollout_key,
)
from loader.rollout import CoordinatorConfig, coverage
from loader.rollout.guards import compare
from loader.rollout.plan import OnRecord, Rollout, Step, advanced, changed, read_rollout, undone, wanted_in_step

logger = logging.getLogger(__name__)

MAX_QUOTED_LAGS = 8
MAX_TICKS = 10
"""Pauses between ticks (`tick_s`) that count at most between two: a process that was stopped observed nothing."""
PROGRESS_S = 1.0
"""How much of a bake, or of a wait, is not on record at most; the next coordinator does not know of it."""


class _StepRunner:
    def __init__(
        self,
        fleet: FleetRegistry,
        config: CoordinatorConfig,
        clock: Callable[[], float],
        monotonic: Callable[[], float],
    ) -> None:
        self._fleet, self._config = fleet, config
        self._clock, self._monotonic, self._bake_began_s = clock, monotonic, -math.inf
        self._tally = coverage.BakeTally()
        # The record with the time that was observed since it was written, which is `_unwritten_s`.
        self._counted: OnRecord | None = None
        self._unwritten_s = 0.0
        # How long nodes have known of a later desired record than the registry.
        self._behind_s = 0.0

    async def move(
        self, on_record: OnRecord, wanted: WantedModel | None, view: coverage.FleetView, elapsed_s: float, now_s: float
    ) -> Rollout | None:
        """Make the next move of a rollout that has not ended; its record and `wanted` must have just been read.

        `elapsed_s` is how long the fleet has been observed since the last tick, until `now_s`. Returns the record as it
        is now, or None if there is nothing to do but wait. After a RegistryConflictError or a RegistryUnavailableError
        (the change may or may not be made) read it again.
        """
        if self._counted is None or self._counted.revision != on_record.revision:
            # Another process wrote it, and may have counted the time since the last tick as well.
            self._counted, self._unwritten_s, self._behind_s, elapsed_s = on_record, 0.0, 0.0, 0.0
        self._unwritten_s += elapsed_s
        rollout, epoch = self._counted.rollout, wanted.epoch if wanted is not None else 0
        update = {"waited_s": rollout.waited_s + elapsed_s}
        if rollout.bake_began_at is not None and rollout.state == "running":
            # Not what of the last tick came before the bake was on record.
            update["baked_s"] = rollout.baked_s + max(0.0, min(elapsed_s, now_s - self._bake_began_s))
        rollout = rollout.model_copy(update=update)
        on_record = OnRecord(rollout, on_record.revision)
        known = max(rollout.base_epoch, *(node.applied.get(rollout.model, 0) for node in view.nodes), 0)
        self._behind_s = 0.0 if epoch >= known else self._behind_s + elapsed_s
        if epoch < known and self._behind_s < self._config.restore_wait_s:
            return None
        if wanted is None or epoch <= rollout.base_epoch:
            # Write what the step wants, unless somebody else wrote since it was read.
            if rollout.waited_s < self._config.step_delay_s:
                return await self._count(on_record, rollout.waited_s, staging=True)
            if blockers := coverage.cannot_roll(rollout, view):
                return await self._wait(on_record, view, blockers)
            # Also if it changes nothing: above the plan's epoch, no coordinator with an older plan writes any more.
            step = wanted_in_step(rollout, max(epoch, known) + 1)
            await self._fleet.put_wanted(step, wanted.epoch if wanted is not None else None)
            await self._count(on_record, 0.0)
            return rollout
        if not wanted.wants_same(wanted_in_step(rollout, epoch)):
            return await self._write(on_record, self._resumed(rollout, wanted))
        return await self._judge(on_record, view, epoch)

    def _resumed(self, rollout: Rollout, wanted: WantedModel) -> Rollout:
        # What is wanted is not what this step wants: one of the two records has lost its last writes.
        now = self._clock()
        for index in range(rollout.step_index + 1, len(rollout.steps)):
            later = rollout.model_copy(update={"step_index": index})
            if wanted.wants_same(wanted_in_step(later, wanted.epoch)):
                # This record is older than the wanted one.
                text = f"the registry had lost how far it was: step {later.step}"
                change = {"step_index": index, "step_began_at": now, "base_epoch": wanted.epoch - 1, "waited_s": 0.0}
                return changed(rollout, now, text, **change)
        if wanted.live not in (rollout.from_version, rollout.to_version):
            reason = f"version {wanted.live} was made live by somebody else"
            return changed(rollout, now, reason, state="aborted", outcome="aborted", reason=reason)
        is_undone_now = rollout.step_index == rollout.undo_index
        text = "begins" if is_undone_now else "the registry had lost what this step wrote: it is done again"
        return changed(rollout, now, text, base_epoch=wanted.epoch)

    async def _judge(self, on_record: OnRecord, view: coverage.FleetView, epoch: int) -> Rollout | None:
        rollout, now = on_record.rollout, self._clock()
        undoable = rollout.state == "running" and not rollout.committed
        if undoable and view.settled and (refused := coverage.refusals(rollout, view)):
            return await self._write(on_record, undone(rollout, now, "refused", refused))
        if rollout.step == Step.REPLAY and rollout.state == "running" and rollout.replay_until is None:
            bounds = await self._fleet.registry.bounds(delta_stream(rollout.model, rollout.delta_base))
            text = f"deltas are replayed up to {bounds.last}"
            return await self._write(on_record, changed(rollout, now, text, replay_until=bounds.last))
        blockers = coverage.step_blockers(rollout, view, epoch)
        baking_now = rollout.step in (Step.CANARY, Step.BAKE) and rollout.bake_s > 0 and undoable
        compared, missing = "", 0
        if baking_now and rollout.bake_began_at is not None:
            totals, live_answers = self._tally.totals(rollout, view.nodes), rollout.step == Step.CANARY
            verdict = compare(*totals, rollout.guards, live_answers=live_answers)
            compared, missing = verdict.text(), verdict.missing
            if verdict.breached:
                return await self._write(on_record, undone(rollout, now, "rolled_back", f"guard: {compared}"))
        if blockers:
            return await self._wait(on_record, view, blockers)
        if baking_now and rollout.bake_began_at is None:
            baseline = coverage.baseline_of(view.nodes, rollout)
            text = f"bake of {rollout.bake_s:g} s begins on {len(baseline)} serving processes"
            change = {"bake_began_at": now, "baked_s": 0.0, "waited_s": 0.0, "baseline": baseline}
            begun = await self._write(on_record, changed(rollout, now, text, **change))
            self._bake_began_s = self._monotonic()
            return begun
        if baking_now and rollout.baked_s < (rollout.longest_bake_s if missing else rollout.bake_s):
            return await self._count(on_record, 0.0)
        if missing:
            requests = f"min_requests is {rollout.guards.min_requests}, {missing} are missing"
            text = f"guard: {requests} after {rollout.baked_s:.0f} s"
            return await self._write(on_record, undone(rollout, now, "rolled_back", f"{text}; {compared}"))
        text = f"done after {max(now - rollout.step_began_at, 0.0):.1f} s"
        if rollout.committed and (refused := coverage.refusals(rollout, view)):
            text = f"{text}; refused by {refused}"
        return await self._write(on_record, advanced(rollout, now, epoch, f"{text}; {compared}" if compared else text))

    async def _wait(
        self, on_record: OnRecord, view: coverage.FleetView, blockers: Sequence[coverage.StepBlocker]
    ) -> Rollout | None:
        """Wait for nodes that lag, and when that lasts too long undo the rollout, or note it if it can't be undone."""
        if not view.settled:
            return None
        rollout = on_record.rollout
        stages = rollout.step in (Step.STAGE_SHARDS, Step.STAGE_SERVING) or rollout.step.startswith(Step.ROLL)
        stages = stages or any(blocker.staging for blocker in blockers)
        timeout_s = self._config.stage_timeout_s if stages else self._config.step_timeout_s
        # For another reason it begins anew.
        waited_s = rollout.waited_s if rollout.waited_staging == stages else 0.0
        if waited_s < timeout_s:
            return await self._count(on_record, waited_s, staging=stages)
        more = f" and {len(blockers) - MAX_QUOTED_LAGS} more" if len(blockers) > MAX_QUOTED_LAGS else ""
        who = "; ".join(blocker.text for blocker in blockers[:MAX_QUOTED_LAGS]) + more
        text = f"step {rollout.step} is not done after {timeout_s:g} s: {who}"
        if rollout.state == "running" and not rollout.committed:
            return await self._write(on_record, undone(rollout, self._clock(), "rolled_back", text))
        return await self._write(on_record, changed(rollout, self._clock(), text, waited_s=0.0))

    async def _count(self, on_record: OnRecord, waited_s: float, *, staging: bool = False) -> Rollout | None:
        """Remember how long the step has baked and waited, and put it on record now and then, without an event."""
        rollout = on_record.rollout.model_copy(update={"waited_s": waited_s, "waited_staging": staging})
        self._counted = OnRecord(rollout, on_record.revision)
        return await self._put(self._counted, rollout) if self._unwritten_s >= PROGRESS_S else None

    async def _write(self, on_record: OnRecord, rollout: Rollout) -> Rollout:
        await self._put(on_record, rollout)
        last = rollout.events[-1]
        logger.info("%s: %s: %s: %s", rollout.model, rollout.state, last.step, last.text)
        return rollout

    async def _put(self, on_record: OnRecord, rollout: Rollout) -> Rollout:
        revision = await self._fleet.registry.put(rollout_key(rollout.model), rollout.encode(), on_record.revision)
        self._counted, self._unwritten_s = OnRecord(rollout, revision), 0.0
        return rollout


class Coordinator:
    """Carries rollouts while it holds the lock. Two that both believe to hold it do no harm."""

    def __init__(
        self,
        fleet: FleetRegistry,
        owner: str,
        clock: Callable[[], float],
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        config: CoordinatorConfig | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """Do nothing before `run` or `tick`.

        `clock` returns seconds since the epoch, for people alone; what is waited for goes by `monotonic`. `owner` is
        whose lock it is: the same over restarts, it acquires its lock again at once.
        """
        self._fleet = fleet
        self._owner = owner
        self._clock = clock
        self._sleep = sleep
        self._monotonic = monotonic
        self._config = config or CoordinatorConfig()
        self._nodes = coverage.RecentNodes(self._config.settle_s)
        self._runners: dict[str, _StepRunner] = {}
        self._rollouts: dict[str, Rollout] = {}
        self._wanted: dict[str, WantedModel] = {}
        self._published: dict[str, tuple[PublishedVersion, str | None]] = {}
        self._problems: dict[str, str] = {}
        self._lock_until: float | None = None
        self._seen_at: float | None = None
        self._observed_s = 0.0

    @property
    def leads(self) -> bool:
        """It has the lock, as far as it knows."""
        return self._lock_until is not None

    def problems(self) -> tuple[str, ...]:
        """Return what keeps it from its work, or from that of a model; logged once each."""
        return tuple(self._problems.values())

    async def run(self) -> None:
        """Work until it is cancelled, then release the lock. A registry that is gone is waited for."""
        try:
            while True:
                await self.tick()
                await self._sleep(self._config.tick_s)
        finally:
            if self._lock_until is not None:
                self._lock_until = None
                try:
                    await self._fleet.registry.release(COORDINATOR_LOCK, self._owner)
                except RegistryError as error:
                    logger.warning("the next coordinator has to wait until the lock of this one expires: %s", error)

    async def tick(self) -> bool:
        """Read everything once, and make one move of each rollout that can be moved. Return whether one was."""
        try:
            await self._fleet.check_identity(self._wanted.values())
            if not await self._lead():
                return False
            nodes, fleet, now = await self._fleet.nodes(), await self._fleet.fleet(), self._monotonic()
            passed_s = 0.0 if self._seen_at is None else min(now - self._seen_at, MAX_TICKS * self._config.tick_s)
            self._seen_at, self._observed_s = now, self._observed_s + passed_s
            view = self._nodes.observe(nodes, fleet, self._observed_s)
            elapsed_s = passed_s if view.settled else 0.0
            models = {key.removeprefix(ROLLOUTS) for key in await self._fleet.registry.entries(ROLLOUTS)}
            models |= self._rollouts.keys() | self._wanted.keys()
            moved = [await self._tick_model(model, view, elapsed_s) for model in sorted(models)]
        except RegistryUnavailableError as error:
            self._lose_lock()
            self._note("registry", f"rollouts pause: {error}")
            return False
        except RegistryRecordError as error:
            self._note("registry", str(error))
            return False
        self._note("registry", "")
        return any(moved)

    async def _lead(self) -> bool:
        now, ttl_s = self._monotonic(), self._config.lock_ttl_s
        if self._lock_until is not None and 2 * ttl_s / 3 < self._lock_until - now:
            return True
        if not await self._fleet.registry.acquire(COORDINATOR_LOCK, self._owner, ttl_s):
            if self.leads:
                logger.warning("another coordinator has taken over")
            self._lose_lock()
            return False
        if not self.leads:
            logger.info("this coordinator (%s) carries out the rollouts", self._owner)
        self._lock_until = now + ttl_s
        return True

    async def _tick_model(self, model: str, view: coverage.FleetView, elapsed_s: float) -> bool:
        try:
            key, rollout, known = rollout_key(model), self._rollouts.get(model), self._wanted.get(model)
            if rollout is not None and await self._fleet.restore_raw(key, rollout.encode(), rollout.epoch):
                logger.warning("the registry had lost the rollout of %s: restored", model)
            if known is not None and await self._fleet.restore_wanted(known):
                logger.warning("the registry had lost which versions of %s shall serve: restored", model)
            on_record, wanted = await read_rollout(self._fleet, model), await self._fleet.wanted_model(model)
            if on_record is not None:
                self._rollouts[model] = on_record.rollout
            if wanted is not None:
                self._wanted[model] = wanted
            moved = None
            if on_record is not None and on_record.rollout.active:
                await self._restore_version(model, on_record.rollout.to_version)
                if model not in self._runners:
                    self._runners[model] = _StepRunner(self._fleet, self._config, self._clock, self._monotonic)
                runner = self._runners[model]
                moved = await runner.move(on_record, wanted, view.for_model(model), elapsed_s, self._seen_at or 0.0)
            if moved is not None:
                self._rollouts[model] = moved
        except RegistryConflictError as error:
            # Another coordinator or command moved it: the next tick reads how.
            logger.debug("%s: %s", model, error)
            return True
        except RegistryRecordError as error:
            self._note(model, f"{model}: its rollout pauses: {error}")
            return False
        except RegistryUnavailableError:
            raise
        except Exception as error:  # a plan of another release, or a fault of ours, must not end those of other models
            self._note(model, f"{model}: its rollout pauses: {type(error).__name__}: {error}", error)
            return False
        self._note(model, "")
        return moved is not None

    async def _restore_version(self, model: str, version: int) -> None:
        """Put the version of a rollout, and its spec, on record again if they are lost: no node may know of it yet."""
        there, (known, spec_json) = await self._fleet.version(model, version), self._published.get(model, (None, None))
        if there is None and known is not None and known.version == version:
            await self._fleet.restore_version(known, spec_json)
        elif there is not None and there != known:
            self._published[model] = there, await self._fleet.spec(model, version)

    def _lose_lock(self) -> None:
        self._lock_until = self._seen_at = None
        self._nodes.restart()

    def _note(self, subject: str, problem: str, error: Exception | None = None) -> None:
        if problem == self._problems.get(subject, ""):
            return
        if problem:
            self._problems[subject] = problem
            logger.warning("%s", problem, exc_info=error)
        else:
            logger.info("it has passed: %s", self._problems.pop(subject))
