"""Carries a rollout one move further: the part of a coordinator that knows what a step needs.

A move changes one thing, the rollout's record or what is wanted, and each by compare-and-swap on what it was decided
from. So it may be made twice, by two coordinators at once, or not at all because one died: the next one sees from the
records where things stand.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict, Field

from loader.registry.keys import delta_stream, rollout_key
from loader.registry.records import WantedModel
from loader.registry.typed import FleetRegistry
from loader.rollout.coverage import Lag, cannot_roll, lags, refusals
from loader.rollout.guards import compare, golden_breach
from loader.rollout.record import Rollout, encode_rollout
from loader.rollout.roster import FleetView
from loader.rollout.steps import BAKE, CANARY, REPLAY, ROLL, STAGE_SERVING, STAGE_SHARDS, same_wish, wanted_in_step
from loader.rollout.tally import BakeTally, baseline_of
from loader.rollout.transitions import (
    advanced,
    baking,
    forwarded,
    given_up,
    noted,
    rebased,
    replaying,
    undone,
)

logger = logging.getLogger(__name__)

MAX_LAGS_TOLD = 8


class CoordinatorConfig(BaseModel):
    """How a coordinator works. Times in seconds.

    Attributes:
        tick_s: pause between two looks at the registry.
        lock_ttl_s: after so long without a sign of it, another coordinator takes over.
        settle_s: how long nodes are listened to before it is judged who is there; above the pause between two of
            a node's announcements.
        restore_wait_s: how long nodes are given to bring back a wanted record that the registry has lost.
        stage_timeout_s: longest time in which nothing but staging holds a step up.
        step_timeout_s: the same for anything else.
        step_delay_s: pause between putting a step on record and doing it; for drills that end processes in between.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    tick_s: float = Field(default=0.1, gt=0, le=10)
    lock_ttl_s: float = Field(default=3.0, gt=0, le=60)
    settle_s: float = Field(default=2.0, ge=0, le=60)
    restore_wait_s: float = Field(default=5.0, ge=0, le=600)
    stage_timeout_s: float = Field(default=3600.0, gt=0)
    step_timeout_s: float = Field(default=120.0, gt=0)
    step_delay_s: float = Field(default=0.0, ge=0, le=60)


@dataclass(frozen=True, slots=True)
class OnRecord:
    """A rollout as it was read, with the revision that a write of it must follow."""

    rollout: Rollout
    revision: int


class Patience:
    """Measures how long there has been one and the same reason to wait."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """Waits for nothing."""
        self._clock = clock
        self._reason: object = None
        self._since = 0.0

    def reset(self) -> None:
        """Waits no more."""
        self._reason = None

    def is_out(self, reason: object, timeout_s: float) -> bool:
        """Whether this reason has lasted for `timeout_s`. Another one, or a clock set back, begins anew."""
        now = self._clock()
        if reason != self._reason or now < self._since:
            self._reason, self._since = reason, now
        return now - self._since >= timeout_s


class StepRunner:
    """Carries the rollout of one model. Belongs to one coordinator, which tells it when it lost sight of the fleet."""

    def __init__(self, fleet: FleetRegistry, config: CoordinatorConfig, clock: Callable[[], float]) -> None:
        """Reads and writes `fleet`; `clock` gives seconds since the epoch."""
        self._fleet = fleet
        self._config = config
        self._clock = clock
        self._tally = BakeTally()
        self._patience = Patience(clock)
        self._restoring = Patience(clock)

    def lose_sight(self) -> None:
        """Time in which the fleet was not seen is no lateness of its nodes."""
        self._patience.reset()
        self._restoring.reset()

    async def move(self, on_record: OnRecord, wanted: WantedModel | None, view: FleetView) -> Rollout | None:
        """Makes the next move of a rollout that has not ended.

        Args:
            on_record: its record, just read.
            wanted: what is wanted of its model, just read.
            view: the nodes.

        Returns:
            The record as it is now if something was changed, None if there is nothing to do but wait.

        Raises:
            RegistryConflictError: somebody else changed it meanwhile: read it again.
            RegistryUnavailableError: the change may or may not have been made: read it again.
        """
        rollout, epoch = on_record.rollout, wanted.epoch if wanted is not None else 0
        known = max([node.applied.get(rollout.model, 0) for node in view.nodes], default=0)
        known = max(known, rollout.base_epoch)
        if epoch >= known:
            self._restoring.reset()
        elif not self._restoring.is_out("restore", self._config.restore_wait_s):
            return None
        if wanted is None or epoch <= rollout.base_epoch:
            return await self._do(on_record, wanted, view, known)
        if not same_wish(wanted, wanted_in_step(rollout, epoch)):
            return await self._write(on_record, self._resumed(rollout, wanted))
        return await self._judge(on_record, view, epoch)

    async def _do(
        self, on_record: OnRecord, wanted: WantedModel | None, view: FleetView, known_epoch: int
    ) -> Rollout | None:
        """Writes what the step wants, unless somebody else wrote since it was read."""
        rollout = on_record.rollout
        if self._clock() - rollout.step_began_at < self._config.step_delay_s:
            return None
        if hindered := cannot_roll(rollout, view):
            return await self._wait(on_record, hindered)

        # Also if it changes nothing: above the plan's epoch, no coordinator with an older plan writes any more.
        epoch = wanted.epoch if wanted is not None else 0
        step = wanted_in_step(rollout, max(epoch, known_epoch) + 1)
        await self._fleet.put_wanted(step, wanted.epoch if wanted is not None else None)
        self._patience.reset()
        return rollout

    def _resumed(self, rollout: Rollout, wanted: WantedModel) -> Rollout:
        """What is wanted is not what this step wants: one of the two records has lost its last writes."""
        now = self._clock()
        for index in range(rollout.step_index + 1, len(rollout.steps)):
            later = rollout.model_copy(update={"step_index": index})
            if same_wish(wanted, wanted_in_step(later, wanted.epoch)):
                return forwarded(rollout, now, index, wanted.epoch, f"step {later.step} is wanted already")
        if wanted.live not in (rollout.from_version, rollout.to_version):
            return given_up(rollout, now, f"version {wanted.live} was made live by somebody else")
        text = f"epoch {wanted.epoch} of what is wanted is not this step's: it is done again"
        return rebased(rollout, now, wanted.epoch, text)

    async def _judge(self, on_record: OnRecord, view: FleetView, epoch: int) -> Rollout | None:
        rollout, now = on_record.rollout, self._clock()
        undoable = rollout.state == "running" and not rollout.committed
        if undoable and view.settled and (refused := refusals(rollout, view)):
            return await self._write(on_record, undone(rollout, now, "refused", refused))
        if rollout.step == REPLAY and rollout.state == "running" and rollout.replay_until is None:
            bounds = await self._fleet.registry.bounds(delta_stream(rollout.model, rollout.delta_base))
            return await self._write(on_record, replaying(rollout, now, bounds.last))
        behind = lags(rollout, view, epoch)
        baking_now = rollout.step in (CANARY, BAKE) and rollout.bake_s > 0 and undoable
        told = ""
        if baking_now and rollout.bake_began_at is not None:
            verdict = compare(*self._tally.totals(rollout, view.nodes), rollout.guards)
            breach = verdict.told() if verdict.breached else ""
            breach = "; ".join(filter(None, (breach, self._golden_breach(rollout, view))))
            if breach:
                return await self._write(on_record, undone(rollout, now, "rolled_back", f"guard: {breach}"))
            told = verdict.told()
        if behind:
            return await self._wait(on_record, behind)
        self._patience.reset()
        if baking_now and rollout.bake_began_at is None:
            return await self._write(on_record, baking(rollout, now, baseline_of(view.nodes, rollout)))
        if baking_now and now - (rollout.bake_began_at or now) < rollout.bake_s:
            return None
        text = f"done after {max(now - rollout.step_began_at, 0.0):.1f} s"
        if left_behind := refusals(rollout, view) if rollout.committed else "":
            text = f"{text}; refused by {left_behind}"
        return await self._write(on_record, advanced(rollout, now, epoch, f"{text}; {told}" if told else text))

    def _golden_breach(self, rollout: Rollout, view: FleetView) -> str:
        reports = [node.report(rollout.model, rollout.to_version) for node in view.nodes]
        if any(report is not None and report.delta_sequence > rollout.last_delta for report in reports):
            return ""
        return golden_breach(view.nodes, rollout.model, rollout.to_version)

    async def _wait(self, on_record: OnRecord, behind: Sequence[Lag]) -> Rollout | None:
        """Waits for those who lag, and when that takes too long ends the rollout, or notes it if it can't be ended."""
        rollout = on_record.rollout
        stages = rollout.step in (STAGE_SHARDS, STAGE_SERVING) or rollout.step.startswith(ROLL)
        stages = stages or any(lag.staging for lag in behind)
        timeout_s = self._config.stage_timeout_s if stages else self._config.step_timeout_s
        if not self._patience.is_out((rollout.rollout_id, rollout.step_index, stages), timeout_s):
            return None
        self._patience.reset()
        more = f" and {len(behind) - MAX_LAGS_TOLD} more" if len(behind) > MAX_LAGS_TOLD else ""
        who = "; ".join(lag.text for lag in behind[:MAX_LAGS_TOLD]) + more
        text = f"step {rollout.step} is not done after {timeout_s:g} s: {who}"
        if rollout.state == "running" and not rollout.committed:
            return await self._write(on_record, undone(rollout, self._clock(), "rolled_back", text))
        return await self._write(on_record, noted(rollout, self._clock(), text))

    async def _write(self, on_record: OnRecord, rollout: Rollout) -> Rollout:
        key = rollout_key(rollout.model)
        await self._fleet.registry.put(key, encode_rollout(rollout), on_record.revision)
        last = rollout.events[-1]
        logger.info("%s: %s: %s: %s", rollout.model, rollout.state, last.step, last.text)
        return rollout
