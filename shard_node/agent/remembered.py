"""What the registry said, as this process last knew it, given back to a registry that has lost it."""

from __future__ import annotations

import logging
from collections.abc import Callable

from loader.errors import RegistryConflictError
from loader.registry.fleet import FleetRecord, FleetRegistry, PublishedVersion, WantedModel, epoch_of, rollout_key

logger = logging.getLogger(__name__)


class Remembered:
    """The highest epoch of what is wanted and of each rollout, and what was published of the versions in use.

    Args:
        fleet: the registry.
        models: only these; None for all that the registry names.
        look_every_s: how often all but what is wanted is looked at.
        clock: monotonic seconds.
    """

    def __init__(
        self, fleet: FleetRegistry, models: tuple[str, ...] | None, look_every_s: float, clock: Callable[[], float]
    ) -> None:
        self._fleet = fleet
        self._models = models
        self._look_every_s = look_every_s
        self._clock = clock
        self._looked_at: float | None = None
        self._division: FleetRecord | None = None
        self._rollouts: dict[str, tuple[int, bytes]] = {}
        self._published: dict[tuple[str, int], tuple[PublishedVersion, str | None]] = {}
        self.wanted: dict[str, WantedModel] = {}

    async def refresh(self) -> None:
        """Reads what is wanted; writes back what is missing, or older than what is known. Raises RegistryError."""
        found = await self._fleet.wanted()
        for model, record in found.items():
            known = self.wanted.get(model)
            if (self._models is None or model in self._models) and (known is None or record.epoch >= known.epoch):
                self.wanted[model] = record
        lost = [known for known in self.wanted.values() if _is_lost(known, found.get(known.model))]
        due = self._looked_at is None or self._clock() - self._looked_at >= self._look_every_s
        try:
            if lost or due:
                # Before what is wanted: while that is missing nobody starts a rollout, and the plan of one that was
                # started would be overwritten by an older one that is given back after it.
                await self._look()
        finally:
            for known in lost:
                if await self._fleet.restore_wanted(known):
                    logger.warning(
                        "the registry had lost what is wanted of %s: epoch %d restored", known.model, known.epoch
                    )

    async def _look(self) -> None:
        await self._remember_division()
        await self._remember_published()
        for model in self.wanted:
            await self._remember_rollout(model)
        self._looked_at = self._clock()

    async def _remember_division(self) -> None:
        there = await self._fleet.fleet()
        if there is None and self._division is not None:
            there = await self._fleet.join_fleet(self._division)
            logger.warning("the registry had lost how the fleet divides rows: restored")
        self._division = there

    async def _remember_published(self) -> None:
        """Of versions in use only: others may be dropped on purpose."""
        used = {(model, version) for model, wanted in self.wanted.items() for version in wanted.named()}
        self._published = {key: record for key, record in self._published.items() if key in used}
        published = {(record.model, record.version): record for record in await self._fleet.versions()}
        for key in sorted(used):
            if key in published:
                if key not in self._published:
                    self._published[key] = (published[key], await self._fleet.spec(*key))
            elif key in self._published:
                await self._restore_published(*self._published[key])

    async def _restore_published(self, record: PublishedVersion, spec_json: str | None) -> None:
        try:
            if spec_json is not None:
                await self._fleet.put_spec(record.model, record.version, spec_json)
            await self._fleet.put_version(record)
        except RegistryConflictError as error:
            # Published anew meanwhile, as something else: what is there counts.
            logger.warning("version %d of %s is not restored: %s", record.version, record.model, error)
        else:
            logger.warning("the registry had lost version %d of %s: restored", record.version, record.model)

    async def _remember_rollout(self, model: str) -> None:
        """Its steps are the coordinator's; here it is a text with an epoch."""
        key = rollout_key(model)
        entry = await self._fleet.raw(key)
        epoch = 0 if entry is None else epoch_of(key, entry.value)
        known_epoch, known = self._rollouts.get(model, (0, b""))
        if entry is not None and epoch >= known_epoch:
            self._rollouts[model] = (epoch, entry.value)
        elif epoch < known_epoch and await self._fleet.restore_raw(key, known, known_epoch):
            logger.warning("the registry had lost the rollout of %s: epoch %d restored", model, known_epoch)


def _is_lost(known: WantedModel, now: WantedModel | None) -> bool:
    return now is None or now.epoch < known.epoch
