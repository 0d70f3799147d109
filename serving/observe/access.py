"""The access log: a line for each call of an API (docs/logs.md).

Lines are made on a thread, many at a time: one between two requests, with cold caches, costs four times as much.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from typing import Any, Final

from loader.errors import ShardrankError
from serving.errors import printable
from serving.observe.calls import Call

logger = logging.getLogger("shardrank.access")
# On or off, whatever else the process logs.
logger.setLevel(logging.INFO)
WRITE_EVERY_S: Final = 0.2
MAX_WAITING: Final = 100_000
MAX_ID_CHARS: Final = 128


class AccessLog:
    """Calls whose lines are not written yet, the oldest of them dropped if they are too many. Thread-safe."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[float, dict[str, Any]]] = deque(maxlen=MAX_WAITING)

    def add(self, call: Call, seconds: float, kind: str, error: BaseException | None) -> None:
        """Add a call that has lasted so long and ended with an error of this kind, or `ok`."""
        is_http, known = "http" in call.api, error if isinstance(error, ShardrankError) else ShardrankError
        status: object = known.http_status if is_http else known.grpc_status
        if error is None or isinstance(error, asyncio.CancelledError):
            status = (200 if is_http else "OK") if error is None else 499 if is_http else "CANCELLED"
        request = call.request if call.parsed_at else None
        fields = {"api": call.api, "method": call.method, "model": call.model, "version": call.version}
        fields |= {"candidates": getattr(request, "num_candidates", 0), "status": status, "error": error and kind}
        request_id = call.request_id or getattr(request, "request_id", "")
        # One more than is written, which says that it was cut.
        fields |= {"ms": seconds, "request_id": request_id[: MAX_ID_CHARS + 1]}
        self._waiting.append((time.time(), fields))

    def write(self) -> None:
        """Write the lines of those that are there."""
        always = {"name": logger.name, "levelno": logging.INFO, "levelname": "INFO", "msg": "request"}
        # Another thread may pop the last.
        with contextlib.suppress(IndexError):
            while True:
                at, fields = self._waiting.popleft()
                fields["ms"] = round(1e3 * fields["ms"], 3)
                fields["request_id"] = printable(fields["request_id"], MAX_ID_CHARS)
                known = {name: value for name, value in fields.items() if value}
                times = {"created": at, "msecs": 1e3 * (at % 1)}
                logger.handle(logging.makeLogRecord({**always, **times, "fields": known}))

    async def run(self) -> None:
        """Write lines until it is cancelled, and then the last ones."""
        try:
            while True:
                await asyncio.sleep(WRITE_EVERY_S)
                await asyncio.to_thread(self.write)
        finally:
            self.write()
