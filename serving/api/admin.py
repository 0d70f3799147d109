"""Probes and metrics on a port and a thread of their own, so that full batches keep nobody waiting who only asks."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import ssl as tls
import threading
from collections.abc import AsyncIterator
from functools import partial

import uvloop

from serving.api.documents import create_probes
from serving.api.http import answer_whole
from serving.api.http_server import HttpServer
from serving.api.tokens import Tokens
from serving.rank.service import RankingService

DRAIN_TIMEOUT_S = 1.0


@contextlib.asynccontextmanager
async def running_admin(
    service: RankingService, host: str, port: int, *, tokens: Tokens | None = None, ssl: tls.SSLContext | None = None
) -> AsyncIterator[int]:
    """Listen on a thread with an event loop of its own while the block runs; gives the port. Raises ListenError."""
    loop, stop = uvloop.new_event_loop(), asyncio.Event()
    bound: concurrent.futures.Future[int] = concurrent.futures.Future()
    # From now on it can't be cancelled, which the thread would not expect.
    bound.set_running_or_notify_cancel()
    app = partial(answer_whole, create_probes(service, tokens))

    async def listen() -> None:
        server = HttpServer(service, DRAIN_TIMEOUT_S, app=app, ssl=ssl)
        try:
            bound.set_result(await server.start(host, port))
        except Exception as error:
            bound.set_exception(error)
            return
        await stop.wait()
        await server.stop()

    thread = threading.Thread(target=loop.run_until_complete, args=(listen(),), name="admin", daemon=True)
    thread.start()
    try:
        yield await asyncio.wrap_future(bound)
    finally:
        loop.call_soon_threadsafe(stop.set)
        await asyncio.to_thread(thread.join)
        loop.close()
