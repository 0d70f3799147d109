"""The agent: makes a process what is wanted of it, and tells the fleet what it is.

Shard nodes and serving processes each run one. It knows no rows and no models: `Actions` does what has to be done.
It never writes what is wanted, except to give a registry that lost it back what it knew.
"""

from __future__ import annotations

import asyncio
import logging
import random as random_module
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Protocol, Self

from pydantic import Field

from loader.errors import RegistryConflictError, RegistryError, cut
from loader.registry import fleet as records
from loader.registry.fleet import FleetRegistry, NodeRecord, VersionReport, WantedModel
from loader.snapshot.tables import Frozen, Name
from shard_node.agent.version_loading import StagingConfig, Stagings

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Remembered:
    """What the registry said, as this process last knew it, restored in a registry that has lost it.

    That is the highest epoch of what is wanted and of each rollout, and what was published of the versions in use, of
    `models` only, if given. All but what is wanted is read every `poll_every_s`. `is_read` once what is wanted was.
    A registry of another id is given nothing, and nothing of it is remembered. Streams are their publishers' to mend.
    """

    _fleet: FleetRegistry
    _models: tuple[str, ...] | None
    _poll_every_s: float
    _clock: Callable[[], float]
    _polled_at: float = float("-inf")
    is_read: bool = False
    _division: records.FleetRecord | None = None
    _rollouts: dict[str, tuple[int, bytes]] = field(default_factory=dict)
    _published: dict[tuple[str, int], tuple[records.PublishedVersion, str | None]] = field(default_factory=dict)
    desired: dict[str, WantedModel] = field(default_factory=dict)

    async def refresh(self) -> None:
        """Read what is wanted; write back what is missing, or older than what is known. Raises RegistryError."""
        read = await self._fleet.wanted()
        # Records without an id are of releases that wrote none.
        await self._fleet.check_identity(self.desired.values(), create=bool(read))
        self.is_read = True
        for model, record in read.items():
            known = self.desired.get(model)
            if (self._models is None or model in self._models) and (known is None or record.epoch >= known.epoch):
                if known is None and self._models is None:
                    logger.info("model %s is rolled out: it is taken, since no --model names others", model)
                self.desired[model] = record
        now = ((known, read.get(known.model)) for known in self.desired.values())
        lost = [known for known, there in now if there is None or there.epoch < known.epoch]
        try:
            if lost or self._clock() - self._polled_at >= self._poll_every_s:
                # Before what is wanted: while that is missing nobody starts a rollout, and the plan of one that was
                # started would be overwritten by an older one that is given back after it.
                await self._restore()
        finally:
            for known in lost:
                if await self._fleet.restore_wanted(known):
                    logger.warning("the registry had lost which versions of %s shall serve: restored", known.model)

    async def _restore(self) -> None:
        there = await self._fleet.fleet()
        if there is None and self._division is not None:
            there = await self._fleet.join_fleet(self._division)
            logger.warning("the registry had lost how the fleet divides rows: restored")
        self._division = there
        # Of versions in use only: others may be dropped on purpose.
        used = {(model, version) for model, desired in self.desired.items() for version in desired.named()}
        self._published = {key: record for key, record in self._published.items() if key in used}
        published = {(record.model, record.version): record for record in await self._fleet.versions()}
        for key in sorted(used):
            if key in published:
                if key not in self._published:
                    self._published[key] = (published[key], await self._fleet.spec(*key))
            elif key in self._published:
                record, spec_json = self._published[key]
                try:
                    await self._fleet.restore_version(record, spec_json)
                except RegistryConflictError as error:
                    # Published anew meanwhile, as something else: what is there counts.
                    logger.warning("version %d of %s is not restored: %s", record.version, record.model, error)
        for model in self.desired:
            rollout = records.rollout_key(model)
            entry = await self._fleet.registry.get(rollout)
            epoch = 0 if entry is None else records.epoch_of(rollout, entry.value)
            known_epoch, known = self._rollouts.get(model, (0, b""))
            if entry is not None and epoch >= known_epoch:
                self._rollouts[model] = (epoch, entry.value)
            elif epoch < known_epoch and await self._fleet.restore_raw(rollout, known, known_epoch):
                logger.warning("the registry had lost the rollout of %s: restored", model)
        self._polled_at = self._clock()


@dataclass(slots=True)
class _Retirement:
    report: VersionReport
    announced_at: float = float("inf")
    task: asyncio.Task[None] | None = None


class Actions(Protocol):
    """What an agent can have done. Everything runs on the agent's event loop and must not block it."""

    def desired_versions(self, desired: WantedModel) -> Sequence[int]:
        """Return the versions that this process shall hold, the one to be staged first at the beginning.

        What is held and not named is retired: name what still answers requests, too.
        """

    def loaded(self) -> Collection[tuple[str, int]]:
        """Return (model, version) of all that is staged here in full and not withdrawn."""

    async def stage(self, model: str, version: int, desired: WantedModel, tell: Callable[[float], None]) -> None:
        """Load, check and warm a version; it is held afterwards.

        `tell` is given the progress, 0 to 1, from any thread. After an exception with `http_status` 503 or 504, or of a
        file system, it is tried again, after any other the version is refused. On CancelledError it must free all
        before it ends.
        """

    async def reconcile(self, desired: WantedModel) -> bool:
        """Set pointers and followers as far as versions are held; repeatable. True if all of it is in effect."""

    async def retire(self, model: str, version: int) -> None:
        """Withdraws a version that is held; returns when its memory is freed."""

    def reports(self) -> Sequence[VersionReport]:
        """Report each version that is held, in state `ready`."""

    def record(self, reports: Sequence[VersionReport], applied: Mapping[str, int]) -> NodeRecord:
        """Return what is to be announced."""


class AgentConfig(Frozen):
    """How an agent behaves. `models` are the only ones it knows; None for all that the registry names.

    What is wanted is read every `poll_s`; an announcement that says nothing new is repeated every `heartbeat_s`, and
    good for `ttl_s`. A version is withdrawn `unannounce_grace_s` after that was announced, so that nobody asks for it
    then. An `Actions.reconcile` that takes longer than `reconcile_timeout_s` is cancelled, and called again.
    """

    poll_s: float = Field(default=0.2, gt=0, le=60)
    heartbeat_s: float = Field(default=1.0, gt=0, le=60)
    ttl_s: float = Field(default=3.0, gt=0, le=600)
    unannounce_grace_s: float = Field(default=0.5, ge=0, le=60)
    reconcile_timeout_s: float = Field(default=1.0, gt=0, le=600)
    models: tuple[Name, ...] | None = None
    staging: StagingConfig = StagingConfig()

    @classmethod
    def for_only_process(cls, model: str, retry_s: float = 60.0) -> Self:
        """Return how the only process of a fleet behaves: it has to serve that model, and nobody to wait for."""
        staging = StagingConfig(jitter_s=0.0, retry_s=retry_s, must_serve=True)
        return cls(models=(model,), unannounce_grace_s=0.0, staging=staging)


class Agent:
    """Makes this process what is wanted, round by round. Belongs to one event loop; `clock` gives monotonic seconds.

    `announced` is the last record that the fleet was given, None until one is that follows from what is wanted.
    """

    def __init__(
        self,
        fleet: FleetRegistry,
        actions: Actions,
        config: AgentConfig | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        random: random_module.Random | None = None,
    ) -> None:
        self._fleet = fleet
        self._actions = actions
        self._config = config or AgentConfig()
        self._clock = clock
        self._sleep = sleep
        self._random = random or random_module.Random()
        self._node_id = actions.record((), {}).node_id
        self.announced: NodeRecord | None = None
        self._remembered = Remembered(fleet, self._config.models, self._config.heartbeat_s, clock)
        self._going: dict[tuple[str, int], _Retirement] = {}
        self._stagings = Stagings(
            fleet, actions.stage, lambda: bool(self._going), self._config.staging, clock, sleep, self._random
        )
        self._applied: dict[str, int] = {}
        self._leaving = False
        self._has_left = False
        self._announcing = asyncio.Lock()
        self._writing: asyncio.Task[None] | None = None
        self._announced_state: object = None
        self._announced_at = self._polled_at = float("-inf")
        self._problems: dict[str, str] = {}

    @property
    def desired(self) -> Mapping[str, WantedModel]:
        """What is wanted, by model, as last known; a registry that is down or was emptied does not change it."""
        return self._remembered.desired

    def problems(self) -> list[str]:
        """Return what goes wrong now; empty if nothing does."""
        return [f"{what}: {reason}" for what, reason in sorted(self._problems.items())]

    async def run(self) -> None:
        """Go round until cancelled; then end stagings and wait for what they hold to be let go of.

        Raises the error of a version that was refused, as `StagingConfig.must_serve` says.
        """
        try:
            while True:
                try:
                    await self.round()
                except Exception as error:  # a fault of ours must not take the process out of the fleet
                    if "agent" not in self._problems:
                        logger.exception("following the registry fails, and is tried again and again")
                    self._problems["agent"] = _said(error)
                else:
                    if self._problems.pop("agent", None) is not None:
                        logger.info("following the registry works again")
                refusal, self._stagings.refusal = self._stagings.refusal, None
                if self._config.staging.must_serve and refusal is not None:
                    raise refusal
                await self._sleep(self._config.poll_s * self._random.uniform(0.75, 1.25))
        finally:
            await self.close()

    async def round(self) -> None:
        """Read what is wanted, begin what is missing, set pointers, withdraw, announce."""
        await self._tried("registry", self._remembered.refresh())
        if not self._leaving:
            for desired in self.desired.values():
                self._make_so(desired)
            # All at once: those that hang cost the others, and the heartbeat, one timeout and not one each.
            await asyncio.gather(*map(self._reconcile, self.desired.values()))
            # After the pointers: what they leave may go now.
            self._retire()
            if self._clock() - self._polled_at >= self._config.heartbeat_s:
                self._polled_at = self._clock()
                await self._tried("reading again what was refused", self._stagings.retry_republished())
        await self._tried("announcing", self._announce())

    async def leave(self) -> None:
        """Announce that this process is about to end, give the fleet time to see that, and withdraw it.

        Rounds that still go on change nothing any more. A registry that is down is not waited for.
        """
        self._leaving = True
        if await self._tried("announcing", self._announce()):
            await self._sleep(self._config.unannounce_grace_s)
            self._has_left = True
            async with self._announcing:
                await self._written()
                await self._tried("withdrawing", self._fleet.withdraw_node(self._node_id))

    async def close(self) -> None:
        """Cancel stagings and wait until they have let go; what is being retired is waited for. Idempotent."""
        await self._stagings.close()
        if tasks := [going.task for going in self._going.values() if going.task is not None]:
            await asyncio.wait(tasks)

    def _make_so(self, desired: WantedModel) -> None:
        model, versions = desired.model, self._actions.desired_versions(desired)
        loaded = {version for name, version in self._actions.loaded() if name == model}
        for version in versions:
            # What is wanted again and was not withdrawn yet stays.
            if (going := self._going.get((model, version))) is not None and going.task is None:
                del self._going[model, version]
        retiring = {version for name, version in self._going if name == model}
        missing = [version for version in versions if version not in loaded or version in retiring]
        # Two versions may not fit: one that goes is gone before another one comes.
        goes = sorted(retiring | (loaded - set(versions)))
        self._stagings.want(desired, missing, f"version {', '.join(map(str, goes))} is retired first" if goes else "")

    async def _reconcile(self, desired: WantedModel) -> None:
        name = f"settling {desired.model}"
        try:
            async with asyncio.timeout(self._config.reconcile_timeout_s):
                if await self._actions.reconcile(desired):
                    self._applied[desired.model] = desired.epoch
        except TimeoutError:
            self._tell_problem(name, TimeoutError(f"not done within {self._config.reconcile_timeout_s:g} s"))
        except Exception as error:
            self._tell_problem(name, error)
        else:
            self._problems.pop(name, None)

    def _retire(self) -> None:
        reports = {(report.model, report.version): report for report in self._actions.reports()}
        for model, version in self._actions.loaded():
            desired, key = self.desired.get(model), (model, version)
            # Nothing known of a model never means that its versions are to go.
            if desired is None or key in self._going or version in self._actions.desired_versions(desired):
                continue
            logger.info("version %d of %s drains", version, model)
            report = reports.get(key) or VersionReport(model=model, version=version, state="draining")
            self._going[key] = _Retirement(report.model_copy(update={"state": "draining", "reason": ""}))
        until = self._clock() - self._config.unannounce_grace_s
        for key, going in self._going.items():
            if going.task is None and going.announced_at <= until:
                going.task = asyncio.create_task(self._withdraw(*key), name=f"retire {key[0]} {key[1]}")

    async def _withdraw(self, model: str, version: int) -> None:
        try:
            await self._actions.retire(model, version)
            logger.info("version %d of %s is retired", version, model)
        except Exception as error:
            # If it is still held, it is tried again.
            logger.exception("retiring version %d of %s failed: %s", version, model, cut(error))
        finally:
            self._going.pop((model, version), None)

    async def _announce(self) -> None:
        async with self._announcing:
            await self._written()
            if self._has_left:
                return
            going = (retirement.report for retirement in self._going.values())
            # Of one version, what comes last counts.
            latest = [*self._stagings.reports(), *self._actions.reports(), *going]
            reports = {(report.model, report.version): report for report in latest}
            record = self._actions.record([reports[key] for key in sorted(reports)], dict(self._applied))
            record = record.model_copy(update={"models": self._config.models, "draining": self._leaving})
            states = list(map(attrgetter("model", "version", "state", "reason", "identity"), record.versions))
            news = (states, record.applied, record.live, record.draining)
            now = self._clock()
            if news == self._announced_state and now - self._announced_at < self._config.heartbeat_s:
                return
            # Until it is known to be written, nothing of it is.
            self._announced_state = None
            # A write that was begun ends, also when the round is cancelled: the next one must come after it.
            self._writing = asyncio.create_task(self._fleet.announce_node(record, self._config.ttl_s))
            await asyncio.shield(self._writing)
            self._announced_state, self._announced_at = news, now
            if self._remembered.is_read:
                self.announced = record
            for retirement in self._going.values():
                retirement.announced_at = min(retirement.announced_at, self._clock())

    async def _written(self) -> None:
        if self._writing is not None:
            await asyncio.wait([self._writing])

    async def _tried(self, name: str, work: Awaitable[None]) -> bool:
        try:
            await work
        except RegistryError as error:
            self._tell_problem(name, error)
            return False
        if self._problems.pop(name, None) is not None:
            logger.info("%s works again", name)
        return True

    def _tell_problem(self, name: str, error: Exception) -> None:
        if name not in self._problems:
            logger.warning("%s fails, what was known before stays in use: %s", name, _said(error))
        self._problems[name] = _said(error)


def _said(error: Exception) -> str:
    return cut(f"{type(error).__name__}: {error}", 1000)
