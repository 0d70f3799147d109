"""The coordinator: whoever holds the lock carries the rollouts of all models. It keeps nothing that it can't lose."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from loader.errors import RegistryConflictError, RegistryError, RegistryRecordError, RegistryUnavailableError
from loader.registry.keys import COORDINATOR_LOCK, ROLLOUTS, rollout_key
from loader.registry.records import WantedModel
from loader.registry.typed import FleetRegistry
from loader.rollout.record import Rollout, decode_rollout, encode_rollout
from loader.rollout.roster import FleetView, Roster
from loader.rollout.runner import CoordinatorConfig, OnRecord, StepRunner

logger = logging.getLogger(__name__)

__all__ = ["Coordinator", "CoordinatorConfig"]


class Coordinator:
    """Carries rollouts while it holds the lock. Two that both believe to hold it do no harm: see `runner`."""

    def __init__(
        self,
        fleet: FleetRegistry,
        owner: str,
        clock: Callable[[], float],
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        config: CoordinatorConfig | None = None,
    ) -> None:
        """Does nothing before `run` or `tick`.

        Args:
            fleet: the registry.
            owner: whose lock it is. One that stays the same over restarts takes its own lock back at once.
            clock: seconds since the epoch.
            sleep: pauses for some seconds.
            config: times.
        """
        self._fleet = fleet
        self._owner = owner
        self._clock = clock
        self._sleep = sleep
        self._config = config or CoordinatorConfig()
        self._roster = Roster(self._config.settle_s)
        self._runners: dict[str, StepRunner] = {}
        self._rollouts: dict[str, Rollout] = {}
        self._wanted: dict[str, WantedModel] = {}
        self._problems: dict[str, str] = {}
        self._lock_until: float | None = None

    @property
    def leads(self) -> bool:
        """It holds the lock, as far as it knows."""
        return self._lock_until is not None

    def problems(self) -> tuple[str, ...]:
        """What keeps it from its work, or from that of a model; logged once each."""
        return tuple(self._problems.values())

    async def run(self) -> None:
        """Works until it is cancelled, then gives the lock back. A registry that is gone is waited for."""
        try:
            while True:
                await self.tick()
                await self._sleep(self._config.tick_s)
        finally:
            await self._release()

    async def tick(self) -> bool:
        """One look at everything, and one move of each rollout that can be moved.

        Returns:
            Whether something was changed.
        """
        try:
            if not await self._lead():
                return False
            view = await self._look()
            moved = [await self._tick_model(model, view) for model in await self._models()]
        except RegistryUnavailableError as error:
            self._lose_sight()
            self._tell("registry", f"rollouts pause: {error}")
            return False
        except RegistryRecordError as error:
            self._tell("registry", str(error))
            return False
        self._tell("registry", "")
        return any(moved)

    async def _lead(self) -> bool:
        """Takes the lock, or renews it when a third of its time is over."""
        now, ttl_s = self._clock(), self._config.lock_ttl_s
        if self._lock_until is not None and 2 * ttl_s / 3 < self._lock_until - now <= ttl_s:
            return True
        led = self.leads
        if not await self._fleet.registry.acquire(COORDINATOR_LOCK, self._owner, ttl_s):
            if led:
                logger.warning("another coordinator has taken over")
            self._lose_sight()
            return False
        self._lock_until = now + ttl_s
        if not led:
            logger.info("this coordinator (%s) carries the rollouts", self._owner)
        return True

    async def _look(self) -> FleetView:
        return self._roster.observe(await self._fleet.nodes(), await self._fleet.fleet(), self._clock())

    async def _models(self) -> list[str]:
        entries = await self._fleet.registry.entries(ROLLOUTS)
        return sorted({key.removeprefix(ROLLOUTS) for key in entries} | set(self._rollouts) | set(self._wanted))

    async def _tick_model(self, model: str, view: FleetView) -> bool:
        """One move of a model's rollout. What is wrong with one model holds up no other."""
        try:
            on_record = await self._read_rollout(model)
            wanted = await self._read_wanted(model)
            moved = None
            if on_record is not None and on_record.rollout.active:
                runner = self._runners.get(model)
                if runner is None:
                    runner = self._runners[model] = StepRunner(self._fleet, self._config, self._clock)
                moved = await runner.move(on_record, wanted, view.for_model(model))
            if moved is not None:
                self._rollouts[model] = moved
        except RegistryConflictError as error:
            # Somebody else moved it: the next tick sees how.
            logger.debug("%s: %s", model, error)
            return True
        except RegistryRecordError as error:
            self._tell(model, f"{model}: its rollout pauses: {error}")
            return False
        except RegistryUnavailableError:
            raise
        except Exception as error:  # a plan of another release, or a fault of ours, must not end those of other models
            self._tell(model, f"{model}: its rollout pauses: {type(error).__name__}: {error}", error)
            return False
        self._tell(model, "")
        return moved is not None

    async def _read_rollout(self, model: str) -> OnRecord | None:
        """The record, given back to the registry first if that has lost it, or its last changes."""
        key, known = rollout_key(model), self._rollouts.get(model)
        if known is not None and await self._fleet.restore_raw(key, encode_rollout(known), known.epoch):
            logger.warning("%s: the registry had lost epoch %d of %s: given back", model, known.epoch, key)
        entry = await self._fleet.raw(key)
        if entry is None:
            return None
        rollout = decode_rollout(model, entry.value)
        self._rollouts[model] = rollout
        return OnRecord(rollout, entry.revision)

    async def _read_wanted(self, model: str) -> WantedModel | None:
        """Likewise."""
        known = self._wanted.get(model)
        if known is not None and await self._fleet.restore_wanted(known):
            logger.warning("%s: the registry had lost epoch %d of what is wanted: given back", model, known.epoch)
        wanted = await self._fleet.wanted_model(model)
        if wanted is not None:
            self._wanted[model] = wanted
        return wanted

    def _lose_sight(self) -> None:
        self._lock_until = None
        self._roster.lose_sight()
        for runner in self._runners.values():
            runner.lose_sight()

    def _tell(self, subject: str, problem: str, error: Exception | None = None) -> None:
        """Logs a problem when it appears, with the traceback of `error`, and when it is gone."""
        if problem == self._problems.get(subject, ""):
            return
        if problem:
            self._problems[subject] = problem
            logger.warning("%s", problem, exc_info=error)
        else:
            logger.info("no longer: %s", self._problems.pop(subject))

    async def _release(self) -> None:
        if not self.leads:
            return
        self._lock_until = None
        try:
            await self._fleet.registry.release(COORDINATOR_LOCK, self._owner)
        except RegistryError as error:
            logger.warning("the lock is left to expire: %s", error)
