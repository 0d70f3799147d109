"""Versions that go: announced as draining first, withdrawn once nobody can be asking for them any more."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from loader.errors import cut
from loader.registry.fleet import VersionReport

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Retirement:
    report: VersionReport
    announced_at: float | None = None
    task: asyncio.Task[None] | None = None


class Retirements:
    """What is being retired, from its announcement until it is freed.

    Args:
        retire: withdraws a version; returns when it is freed.
        grace_s: between the announcement and that.
        clock: monotonic seconds.
    """

    def __init__(
        self, retire: Callable[[str, int], Awaitable[None]], grace_s: float, clock: Callable[[], float]
    ) -> None:
        self._retire = retire
        self._grace_s = grace_s
        self._clock = clock
        self._going: dict[tuple[str, int], _Retirement] = {}

    def __bool__(self) -> bool:
        """Whether there is any."""
        return bool(self._going)

    def versions(self, model: str) -> set[int]:
        """Of a model, those that go."""
        return {version for name, version in self._going if name == model}

    def add(self, report: VersionReport) -> None:
        """Begins with a version, whose last report is given; does nothing if it goes already."""
        key = (report.model, report.version)
        if key not in self._going:
            logger.info("version %d of %s drains", report.version, report.model)
            self._going[key] = _Retirement(report.model_copy(update={"state": "draining", "reason": ""}))

    def keep(self, model: str, versions: Sequence[int]) -> None:
        """Calls off what is wanted again and was not withdrawn yet."""
        for version in versions:
            going = self._going.get((model, version))
            if going is not None and going.task is None:
                del self._going[model, version]

    def announced(self) -> None:
        """All reports have been announced."""
        for going in self._going.values():
            if going.announced_at is None:
                going.announced_at = self._clock()

    def go_on(self) -> None:
        """Withdraws what was announced long enough ago."""
        now = self._clock()
        for key, going in self._going.items():
            if going.task is None and going.announced_at is not None and now - going.announced_at >= self._grace_s:
                going.task = asyncio.create_task(self._withdraw(*key), name=f"retire {key[0]} {key[1]}")

    def reports(self) -> list[VersionReport]:
        """One for each, in state `draining`."""
        return [going.report for going in self._going.values()]

    async def close(self) -> None:
        """Waits for what was withdrawn; the rest stays."""
        tasks = [going.task for going in self._going.values() if going.task is not None]
        if tasks:
            await asyncio.wait(tasks)

    async def _withdraw(self, model: str, version: int) -> None:
        try:
            await self._retire(model, version)
            logger.info("version %d of %s is retired", version, model)
        except Exception as error:
            # If it is still held, it is tried again.
            logger.exception("retiring version %d of %s failed: %s", version, model, cut(error))
        finally:
            self._going.pop((model, version), None)
