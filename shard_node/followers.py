"""Which versions of a process follow their streams of deltas: one task for each."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from loader.errors import ShardrankError
from loader.registry.registry import Registry
from shard_node.delta_follower import DeltaFollower
from shard_node.node import LoadedTables

logger = logging.getLogger(__name__)

RETRY_S = 10.0
"""After a follower that could not go on; its stream may be whole again."""


@dataclass(slots=True)
class _Following:
    task: asyncio.Task[None]
    gap: str = ""
    ended_at: float = 0.0


class Followers:
    """Starts and stops followers.

    Args:
        registry: where the streams are.
        clock: monotonic seconds.
    """

    def __init__(self, registry: Registry, clock: Callable[[], float] = time.monotonic) -> None:
        self._registry = registry
        self._clock = clock
        self._following: dict[tuple[str, int], _Following] = {}

    async def settle(self, model: str, versions: Mapping[int, LoadedTables]) -> None:
        """Has exactly these versions of a model follow.

        Raises:
            DeltaBaseError: tables follow another stream already.
        """
        for name, version in list(self._following):
            if name == model and version not in versions:
                await self.stop(model, version)
        for version, tables in versions.items():
            before = self._following.get((model, version))
            if before is None or (before.gap and self._clock() - before.ended_at >= RETRY_S):
                self._begin(model, version, tables)

    def gap(self, model: str, version: int) -> str:
        """Why a version that shall follow can't; "" if it can, or does not follow."""
        following = self._following.get((model, version))
        return "" if following is None else following.gap

    async def stop(self, model: str, version: int) -> None:
        """Nothing writes rows of the version any more afterwards. Does nothing if it does not follow."""
        following = self._following.pop((model, version), None)
        if following is not None:
            following.task.cancel()
            await asyncio.wait([following.task])

    async def close(self) -> None:
        """Stops all."""
        for model, version in list(self._following):
            await self.stop(model, version)

    def _begin(self, model: str, version: int, tables: LoadedTables) -> None:
        position = tables.deltas.snapshot()
        follower = DeltaFollower(self._registry, model, version, tables, position.delta_base, position.last_delta)
        task = asyncio.create_task(self._follow(model, version, follower), name=f"deltas {model} {version}")
        self._following[model, version] = _Following(task)

    async def _follow(self, model: str, version: int, follower: DeltaFollower) -> None:
        try:
            await follower.run()
        except Exception as error:
            following = self._following.get((model, version))
            if following is not None:
                following.gap, following.ended_at = f"{type(error).__name__}: {error}", self._clock()
            logger.error(
                "version %d of %s follows no deltas: %s",
                version,
                model,
                error,
                exc_info=None if isinstance(error, ShardrankError) else error,
            )
