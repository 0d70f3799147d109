"""What operators ask: does the process run, is it ready, and its metrics."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from serving.api.openapi import ReadyDocument
from serving.api.replies import Reply
from serving.observe.metrics import CONTENT_TYPE
from serving.rank.service import RankingService

logger = logging.getLogger(__name__)

METRICS_REFRESH_TIMEOUT_S = 1.0


class Probes:
    """Answers over one service. May be used on any event loop, beside that which ranks.

    Args:
        service: tells.
        refresh: has the shards asked before metrics are told; None to tell what they said last.
    """

    def __init__(self, service: RankingService, refresh: Callable[[], Awaitable[None]] | None = None) -> None:
        self._service = service
        self._refresh = refresh
        self._rendering: asyncio.Task[bytes] | None = None

    def healthz(self) -> Reply:
        """Say that the process runs."""
        return Reply(200, b'{"status":"ok"}')

    def readyz(self) -> Reply:
        """Say whether every configured model is live and its shards answer. Rows that lag don't change that."""
        problems = self._service.watch.problems()
        document = ReadyDocument(ready=not problems, problems=problems, degraded=self._service.watch.degraded())
        return Reply(503 if problems else 200, document.model_dump_json().encode())

    def live(self) -> Reply:
        """Say that the process runs, as the Open Inference Protocol does."""
        return Reply(200, b"")

    def ready(self) -> Reply:
        """Say as `readyz` whether it is ready, by the status alone."""
        return Reply(503 if self._service.watch.problems() else 200, b"")

    async def metrics(self) -> Reply:
        """Give the metrics. They are rendered on a thread, once for all who ask meanwhile."""
        if self._rendering is None:
            self._rendering = asyncio.create_task(self._render())
            self._rendering.add_done_callback(self._forget)
        return Reply(200, await asyncio.shield(self._rendering), CONTENT_TYPE)

    async def _render(self) -> bytes:
        if self._refresh is not None:
            try:
                async with asyncio.timeout(METRICS_REFRESH_TIMEOUT_S):
                    await self._refresh()
            except TimeoutError:
                logger.warning("the shards did not answer within %s s of /metrics", METRICS_REFRESH_TIMEOUT_S)
        return await asyncio.to_thread(self._service.metrics.render)

    def _forget(self, rendering: asyncio.Task[bytes]) -> None:
        del rendering
        self._rendering = None
