"""Following the dense weights that training publishes between snapshots: read, checked, and offered to what serves."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from loader.deltas.dense import checked_tensors, read_step
from loader.errors import RegistryError, ShardrankError
from loader.registry.fleet import DenseStep, FleetRegistry, cut_reason
from loader.snapshot.reader import Snapshot
from loader.snapshot.store import Store
from serving.observe.metrics import ServingMetrics
from serving.versions.served_model import ServedModel

logger = logging.getLogger(__name__)

LOOK_S: Final = 0.25
"""Between two looks for new steps; each is up to a quarter earlier or later."""


@dataclass(frozen=True, slots=True)
class RefusedStep:
    """A step that is not taken, and why."""

    record: DenseStep
    reason: str


class DenseSteps:
    """Brings each served version the newest dense weights of its own. Belongs to the event loop of the registry.

    A step that must not answer is refused once, by name, in the log, metrics and what the process announces; what
    answered before goes on. One that can't be read now is tried again.

    Attributes:
        refused: by model and version, what was refused since the last step that was taken.
    """

    def __init__(self, fleet: FleetRegistry, store: Path, metrics: ServingMetrics) -> None:
        self.refused: dict[tuple[str, int], RefusedStep] = {}
        self._fleet, self._store, self._metrics = fleet, store, metrics

    async def look(self, served: ServedModel) -> None:
        """Have a version go on with the newest step, if there is one that it does not have. Raises RegistryError."""
        key = served.model, served.version
        record = await self._fleet.dense_step(*key)
        if record is None or record.step <= served.dense_step:
            return
        if (before := self.refused.get(key)) is not None and before.record == record:
            return
        try:
            await asyncio.to_thread(self._take, served, record)
        except ShardrankError as error:
            if error.http_status in (503, 504):
                logger.warning("dense step %d of %s %d can't be taken yet: %s", record.step, *key, error)
                return
            reason = cut_reason(f"dense step {record.step}: {error.kind}: {error}")
            self.refused[key] = RefusedStep(record, reason)
            self._metrics.dense_refused(*key)
            logger.error("%s %d goes on with dense step %d: %s", *key, served.dense_step, reason)
        else:
            self.refused.pop(key, None)
            self._metrics.dense_step(*key, record.step)
            logger.info("dense step %d of %s %d is offered, rows from delta %d on", record.step, *key, record.sequence)

    async def run(self, versions: Callable[[], list[ServedModel]]) -> None:
        """Look for new steps of what is served, until cancelled."""
        is_silent = False
        while True:
            try:
                await self._look_at_all(versions())
                is_silent = False
            except Exception as error:  # a fault of ours must not end the following for good
                if not is_silent:
                    trace = not isinstance(error, RegistryError)
                    logger.warning("dense weights are those that answer: %s", error, exc_info=trace)
                is_silent = True
            await asyncio.sleep(LOOK_S * random.uniform(0.75, 1.25))

    async def _look_at_all(self, versions: list[ServedModel]) -> None:
        # Here, and not in `run`, whose frame would keep retired versions until the next look.
        for gone in self.refused.keys() - {(one.model, one.version) for one in versions}:
            del self.refused[gone]
        for one in versions:
            await self.look(one)

    def _take(self, served: ServedModel, record: DenseStep) -> None:
        # OpenMP would give this thread helpers of its own.
        torch.set_num_threads(1)
        tensors = read_step(self._store, record)
        folder = Store(self._store).snapshot_path(served.model, served.version)
        snapshot = Snapshot.open(folder, verify=False)
        served.change_dense(snapshot, checked_tensors(snapshot, tensors), record)
