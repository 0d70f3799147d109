"""Which versions of a process follow their streams of deltas: one task for each."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from loader.errors import RegistryError, ShardrankError
from loader.registry.fleet import delta_stream
from loader.registry.registry import Registry
from shard_node.agent.delta_follower import DeltaFollower
from shard_node.node import LoadedTables

logger = logging.getLogger(__name__)

RETRY_S = 10.0
"""After a follower that could not go on; its stream may be whole again."""
CATCH_UP_LIMIT_S = 60.0
"""How long a version that is staged while it is followed may take to catch up before it is asked for as it is."""
_LOOK_S = 0.02


async def catch_up(
    registry: Registry,
    model: str,
    version: int,
    tables: LoadedTables,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    limit_s: float = CATCH_UP_LIMIT_S,
) -> None:
    """Applies what its stream of deltas holds by now to tables that nobody uses yet; then nothing writes to them.

    What can't be applied, or not within `limit_s`, is logged and left to whoever follows the stream from then on: old
    rows are better than none.
    """
    now = tables.deltas.snapshot()
    try:
        until = (await registry.bounds(delta_stream(model, now.delta_base))).last
    except RegistryError as error:
        logger.warning("version %d of %s is staged without a look at its deltas: %s", version, model, error)
        return
    if until <= now.sequence:
        return
    follower = DeltaFollower(registry, model, version, tables, now.delta_base, now.last_delta)
    following = asyncio.create_task(follower.run(), name=f"catch up {model} {version}")
    reason = ""
    try:
        async with asyncio.timeout(limit_s):
            while follower.caught_up_to < until and not following.done() and not tables.deltas.snapshot().reason:
                await sleep(_LOOK_S)
    except TimeoutError:
        reason = f"not applied within {limit_s:g} s"
    finally:
        following.cancel()
        await _ended(following)
    if (applied := follower.caught_up_to) < until:
        if not following.cancelled() and (ended := following.exception()) is not None:
            reason = f"{type(ended).__name__}: {ended}"
        reason = reason or tables.deltas.snapshot().reason
        logger.error(
            "version %d of %s is staged without deltas %d to %d: %s", version, model, applied + 1, until, reason
        )


async def _ended(task: asyncio.Task[None]) -> None:
    """Waits for it, however often the waiting itself is cancelled: nothing may be freed before."""
    cancelled = False
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError:
            cancelled = True
    if cancelled:
        raise asyncio.CancelledError


@dataclass(slots=True)
class _Following:
    task: asyncio.Task[None]
    gap: str = ""
    ended_at: float = float("-inf")


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
            # One whose stopping was cut short has no gap, and ends nevertheless.
            if before is None or (before.task.done() and self._clock() - before.ended_at >= RETRY_S):
                self._begin(model, version, tables)

    def gap(self, model: str, version: int) -> str:
        """Why a version that shall follow can't; "" if it can, or does not follow."""
        following = self._following.get((model, version))
        return "" if following is None else following.gap

    async def stop(self, model: str, version: int) -> None:
        """Nothing writes rows of the version any more afterwards. Does nothing if it does not follow."""
        following = self._following.get((model, version))
        if following is None:
            return
        following.task.cancel()
        # It stays known until it has ended: a wait that is cancelled must not let another one begin beside it.
        await asyncio.wait([following.task])
        if self._following.get((model, version)) is following:
            del self._following[model, version]

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
