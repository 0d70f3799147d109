"""Versions that come: one at a time for each model, tried again or refused."""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from pydantic import Field

from loader.errors import is_passing
from loader.progress import end_tasks
from loader.registry.fleet import FleetRegistry, VersionReport, WantedModel, cut_reason
from loader.snapshot.tables import Frozen

logger = logging.getLogger(__name__)

Stage = Callable[[str, int, WantedModel, Callable[[float], None]], Awaitable[None]]
TRY_AGAIN = frozenset({503, 504})
NO_ROOM = 507


class StagingConfig(Frozen):
    """How versions are staged.

    Each begins up to `jitter_s` later, so that a fleet does not pull a version in one moment. What passes by itself is
    tried again after `retry_first_s`, doubled each time; what a file system refuses for `retry_s`, then the version is
    refused. A refused one that is live, or that a file system refuses, is tried again after `live_retry_s`. A process
    that `must_serve` has nothing else to do: a version that is refused ends its agent.
    """

    jitter_s: float = Field(default=0.3, ge=0, le=600)
    retry_first_s: float = Field(default=0.2, gt=0, le=60)
    retry_max_s: float = Field(default=2.0, gt=0, le=600)
    retry_s: float = Field(default=60.0, ge=0, le=86400)
    live_retry_s: float = Field(default=30.0, gt=0, le=3600)
    must_serve: bool = False


@dataclass(slots=True)
class _Attempt:
    state: Literal["waiting", "staging", "refused"] = "waiting"
    progress: float = 0.0
    reason: str = ""
    # Of what was published when it was refused.
    identity: str = ""
    failures: int = 0
    # Whether a file system refused the last try, and since when it does, seconds of the clock.
    passing: bool = False
    passing_since: float = math.inf
    due: float = field(default=float("-inf"))
    task: asyncio.Task[None] | None = None


@dataclass(slots=True, eq=False)
class Stagings:
    """What is being staged, waits for that, or was refused; `refusal` is the error of the version refused last.

    `is_room_coming` returns whether memory is being freed, so that a lack of it passes by itself.
    """

    _fleet: FleetRegistry
    _stage: Stage
    _is_room_coming: Callable[[], bool]
    _config: StagingConfig
    _clock: Callable[[], float]
    _sleep: Callable[[float], Awaitable[None]]
    _random: random.Random
    _attempts: dict[str, dict[int, _Attempt]] = field(default_factory=dict)
    refusal: Exception | None = None

    def want(self, desired: WantedModel, missing: Sequence[int], waits_for: str) -> None:
        """Note which versions of a model are missing, in the order in which they are to be staged.

        Begins with the first that is due, unless `waits_for` says why none may; ends what is not missing.
        """
        attempts = self._attempts.setdefault(desired.model, {})
        for version in attempts.keys() - missing:
            if (task := attempts[version].task) is None:
                del attempts[version]
            else:
                task.cancel()
        for version in missing:
            attempts.setdefault(version, _Attempt())
        if any(attempt.task is not None for attempt in attempts.values()):
            return
        for version in missing:
            attempt = attempts[version]
            is_over = attempt.state == "refused" and not attempt.passing and version != desired.live
            if waits_for and attempt.state == "waiting":
                attempt.reason = cut_reason(waits_for)
            elif not waits_for and attempt.due <= self._clock() and not is_over:
                name = f"stage {desired.model} {version}"
                attempt.task = asyncio.create_task(self._attempt(attempt, version, desired), name=name)
                return

    def reports(self) -> Iterator[VersionReport]:
        """Report each version that is not held, but is to be."""
        for model, attempts in self._attempts.items():
            for version, attempt in attempts.items():
                yield VersionReport(
                    model=model,
                    version=version,
                    state=attempt.state,
                    progress=min(1.0, max(0.0, attempt.progress)),
                    reason=attempt.reason,
                    passing=attempt.passing,
                )

    async def retry_republished(self) -> None:
        """Let refused versions be tried again that were published anew. Raises RegistryError."""
        for model, attempts in self._attempts.items():
            for version, attempt in list(attempts.items()):
                if attempt.state == "refused" and await self._identity(model, version) != attempt.identity:
                    attempt.state, attempt.due, attempt.reason = "waiting", self._clock(), "published anew"
                    attempt.passing, attempt.passing_since = False, math.inf

    async def close(self) -> None:
        """Cancel all and wait until they have let go."""
        tasks = [attempt.task for attempts in self._attempts.values() for attempt in attempts.values()]
        await end_tasks([task for task in tasks if task is not None])

    async def _attempt(self, attempt: _Attempt, version: int, desired: WantedModel) -> None:
        model = desired.model
        try:
            if not attempt.failures:
                await self._sleep(self._random.uniform(0, self._config.jitter_s))
            attempt.identity = await self._identity(model, version)
            attempt.state, attempt.progress = "staging", 0.0
            # What a file system refuses may hang as well: it stays the reason until it has passed.
            if not attempt.passing:
                attempt.reason = ""
            await self._stage(model, version, desired, lambda share: setattr(attempt, "progress", share))
        except asyncio.CancelledError:
            logger.info("staging version %d of %s was called off", version, model)
            self._attempts[model].pop(version, None)
            raise
        except Exception as error:
            status, config, now = getattr(error, "http_status", 500), self._config, self._clock()
            attempt.failures += 1
            attempt.reason = cut_reason(f"{type(error).__name__}: {error}")
            # A version that is not on record need not be anywhere.
            passing = bool(attempt.identity) and is_passing(error)
            # In between others may have to be waited for, which says nothing of the file system.
            if status not in TRY_AGAIN:
                attempt.passing = passing
                attempt.passing_since = min(attempt.passing_since, now) if passing else math.inf
            is_retried = status in TRY_AGAIN or (passing and now < attempt.passing_since + config.retry_s)
            if is_retried or (status == NO_ROOM and self._is_room_coming()):
                attempt.state = "waiting"
                wait_s = min(config.retry_max_s, config.retry_first_s * 2.0 ** min(attempt.failures - 1, 30))
                attempt.due = now + wait_s
                if attempt.failures == 1 or config.must_serve:
                    level = logging.WARNING if config.must_serve or attempt.passing else logging.INFO
                    logger.log(level, "version %d of %s waits: %s", version, model, attempt.reason)
            else:
                attempt.state, attempt.due, self.refusal = "refused", now + config.live_retry_s, error
                if not config.must_serve:
                    is_bug = not (attempt.passing or hasattr(error, "http_status"))
                    reason = attempt.reason
                    logger.error("version %d of %s is refused: %s", version, model, reason, exc_info=is_bug and error)
        else:
            del self._attempts[model][version]
            logger.info("version %d of %s is ready", version, model)
        finally:
            attempt.task = None

    async def _identity(self, model: str, version: int) -> str:
        published = await self._fleet.version(model, version)
        return "" if published is None else published.identity
