"""Shadows: versions that score a share of the requests that another one has answered, for their differences alone.

Nobody waits for it. A request that is chosen is put aside once its answer is encoded, and scored by itself while no
call is being handled; while there is no such time requests are dropped, and counted.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from loader.errors import ShardrankError
from serving.formats.requests import RankAnswer, RankRequest
from serving.formats.schema import RequestSchema
from serving.rank.service import RankingService
from shard_node.errors import GenerationNotFoundError

logger = logging.getLogger(__name__)

MAX_WAITING = 64
MAX_WAIT_S = 1.0
POLL_S = 0.002
"""Between two looks at whether a call is being handled, while a request waits."""
TIMEOUT_S = 5.0


class _Choice(NamedTuple):
    version: int
    share: float


class _Waiting(NamedTuple):
    shadow: int
    schema: RequestSchema
    request: RankRequest
    answer: RankAnswer
    since: float


class Shadows:
    """The shadow of each model of a service. Belongs to the event loop that the service answers on.

    Args:
        service: that answers; while there is a shadow it tells of every answered request.
        draw: gives a number from 0 to below 1 for each.
    """

    def __init__(self, service: RankingService, draw: Callable[[], float] = random.random) -> None:
        self._service, self._draw = service, draw
        self._choices: dict[str, _Choice] = {}
        self._waiting: deque[_Waiting] = deque()
        self._task: asyncio.Task[None] | None = None
        self._told: set[tuple[str, int]] = set()

    def set(self, model: str, version: int | None, share: float = 0.0) -> None:
        """Have a version score a share of a model's requests, above 0 and up to 1; None ends it."""
        wanted = None if version is None else _Choice(version, share)
        if self._choices.get(model) == wanted:
            return
        others = {name: one for name, one in self._choices.items() if name != model}
        self._choices = others if wanted is None else {**others, model: wanted}
        without = tuple(one for one in self._service.on_ranked if one != self.offer)
        self._service.on_ranked = (*without, self.offer) if self._choices else without

    def offer(self, schema: RequestSchema, request: RankRequest, answer: RankAnswer, began: float) -> None:
        """Put an answered request aside, if it is chosen."""
        del began
        choice = self._choices.get(answer.model)
        if choice is None or choice.version == answer.version or self._draw() >= choice.share:
            return
        if len(self._waiting) >= MAX_WAITING:
            self._service.metrics.shadow(answer.model, answer.version, choice.version, "dropped")
            return
        self._waiting.append(_Waiting(choice.version, schema, request, answer, self._service.clock()))
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._score_all())

    async def idle(self) -> None:
        """Wait until nothing waits to be scored."""
        while self._task is not None:
            await asyncio.shield(self._task)

    async def _score_all(self) -> None:
        try:
            while self._waiting:
                if self._service.clock() - self._waiting[0].since > MAX_WAIT_S:
                    one = self._waiting.popleft()
                    self._service.metrics.shadow(one.answer.model, one.answer.version, one.shadow, "dropped")
                elif self._service.is_idle:
                    await self._score(self._waiting.popleft())
                    # What came meanwhile has its turn.
                    await asyncio.sleep(0)
                else:
                    await asyncio.sleep(POLL_S)
        finally:
            self._task = None

    async def _score(self, one: _Waiting) -> None:
        answer, service = one.answer, self._service
        versions = answer.model, answer.version, one.shadow
        try:
            lease = service.generations.lease(answer.model, one.shadow)
        except GenerationNotFoundError:
            # It was withdrawn since.
            service.metrics.shadow(*versions, "dropped")
            return
        # Until all is counted: what is told of the shadow is dropped once nobody has a lease.
        with lease:
            try:
                served = lease.payload
                if served.schema.features.digest != one.schema.features.digest:
                    self._tell(versions, "its requests have other features")
                    return
                scoring = served.score_beside(one.request, service.clock() + TIMEOUT_S)
                # A replica that has ended, or hangs, answers nothing at all: the lease must not wait for it.
                async with asyncio.timeout(2 * TIMEOUT_S):
                    scored = await asyncio.wrap_future(scoring)
            except TimeoutError:
                self._tell(versions, f"no scores within {2 * TIMEOUT_S:g} s")
                return
            except ShardrankError as error:
                self._tell(versions, str(error))
                return
            except Exception:
                logger.exception("a shadow's scores of a request failed")
                service.metrics.shadow(*versions, "failed")
                return
            scores = scored.scores[0]
            if len(scored.rejected) or not np.isfinite(scores).all():
                self._tell(versions, "it has no row for an id, or a score that is not finite")
                return
            same = int(scores.argmax()) == int(answer.order[0])
            service.metrics.shadow_scored(*versions, np.abs(scores - answer.scores), same=same)

    def _tell(self, versions: tuple[str, int, int], problem: str) -> None:
        """Count a request that the shadow could not score; the log tells of each shadow's first one."""
        model, _, shadow = versions
        self._service.metrics.shadow(*versions, "failed")
        if (model, shadow) not in self._told:
            self._told.add((model, shadow))
            logger.warning("shadow %s %d could not score a request: %s", model, shadow, problem)
