"""Probes and metrics on a port and a thread of their own, so that full batches keep nobody waiting who only asks."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl as tls
import threading
from collections.abc import AsyncIterator, Awaitable, Callable

import uvloop
from starlette.types import Receive, Scope, Send

from loader.errors import ShardrankError
from serving.api.http import gate_of
from serving.api.http_server import HttpServer
from serving.api.probes import Probes
from serving.api.replies import REQUEST_ID, Reply, defect_reply, error_reply, header_lines, header_of
from serving.api.tokens import Tokens
from serving.errors import MethodNotAllowedError, NoSuchRouteError
from serving.rank.service import RankingService

logger = logging.getLogger(__name__)

DRAIN_TIMEOUT_S = 1.0


class AdminApp:
    """The ASGI application of the port for operators.

    Args:
        service: told of.
        tokens: says who may see metrics; None lets everybody. Probes are for everybody.
    """

    def __init__(self, service: RankingService, tokens: Tokens | None = None) -> None:
        # What shards say is asked for on the service's own loop, once a second.
        self._probes = Probes(service)
        self._tokens = tokens
        self._replies: dict[str, Callable[[], Reply]] = {
            "/healthz": self._probes.healthz,
            "/readyz": self._probes.readyz,
            "/v2/health/live": self._probes.live,
            "/v2/health/ready": self._probes.ready,
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        del receive
        path, request_id = scope["path"], header_of(scope, REQUEST_ID)
        try:
            reply = await self._reply(scope, path)
        except ShardrankError as error:
            reply = error_reply(path, request_id or "", error)
        except Exception:
            reply = defect_reply(path, request_id or "")
        headers = header_lines(reply, None if request_id is None else request_id.encode("latin-1"))
        await send({"type": "http.response.start", "status": reply.status, "headers": headers})
        await send({"type": "http.response.body", "body": reply.body})
        gate_of(scope).answered()

    async def _reply(self, scope: Scope, path: str) -> Reply:
        where = f"{scope['method']} {path[:200]}"
        probe = self._replies.get(path)
        if probe is None and path != "/metrics":
            raise NoSuchRouteError(f"{where}: there is no such path on this port")
        if scope["method"] not in ("GET", "HEAD"):
            raise MethodNotAllowedError(f"{where}: this method is not allowed here")
        if probe is not None:
            return probe()
        if self._tokens is not None:
            self._tokens.check(header_of(scope, b"authorization"), "admin")
        return await self._probes.metrics()


@contextlib.asynccontextmanager
async def running_admin(
    service: RankingService,
    host: str,
    port: int,
    *,
    tokens: Tokens | None = None,
    ssl: tls.SSLContext | None = None,
) -> AsyncIterator[int]:
    """Listen on a thread with an event loop of its own while the block runs; gives the port.

    Raises:
        ListenError: if the port can't be bound.
    """
    started: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    thread = _AdminThread(lambda: HttpServer(service, DRAIN_TIMEOUT_S, app=AdminApp(service, tokens), ssl=ssl))
    thread.begin(host, port, started)
    try:
        yield await started
    finally:
        await thread.end()


class _AdminThread:
    def __init__(self, make: Callable[[], HttpServer]) -> None:
        self._make = make
        self._loop = uvloop.new_event_loop()
        self._stop = asyncio.Event()
        self._thread: threading.Thread | None = None

    def begin(self, host: str, port: int, started: asyncio.Future[int]) -> None:
        """Start the thread, which tells the port, or why there is none, to the loop that asks."""
        main = asyncio.get_running_loop()

        async def serve() -> None:
            server = self._make()
            try:
                bound = await server.start(host, port)
            except Exception as error:
                main.call_soon_threadsafe(started.set_exception, error)
                return
            main.call_soon_threadsafe(started.set_result, bound)
            try:
                await self._stop.wait()
            finally:
                await server.stop()

        self._thread = threading.Thread(target=self._run, args=(serve,), name="admin", daemon=True)
        self._thread.start()

    async def end(self) -> None:
        """Stop listening, and wait for the thread."""
        with contextlib.suppress(RuntimeError):
            # The loop is closed already if the port could not be bound.
            self._loop.call_soon_threadsafe(self._stop.set)
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)

    def _run(self, serve: Callable[[], Awaitable[None]]) -> None:
        try:
            self._loop.run_until_complete(serve())
        finally:
            self._loop.close()
