"""An HTTP listener: sockets are accepted, looked at, and handed to gates with uvicorn's protocol behind them."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import ssl as tls
import threading
from collections.abc import AsyncIterator, Callable
from email.utils import formatdate
from functools import partial
from typing import NamedTuple

import uvicorn
import uvloop
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from serving.api.dealing import Place
from serving.api.documents import create_probes
from serving.api.http import answer_whole
from serving.api.http_framing import Refuse
from serving.api.http_gate import Gate, Gates
from serving.api.listening import CountFailure
from serving.api.tokens import Tokens
from serving.dashboard.board import run_board
from serving.dashboard.sources import Source
from serving.limits import RequestLimits
from serving.rank.service import RankingService
from shard_node.byte_budget import LARGEST_MESSAGES, ByteBudget
from shard_node.wire.address import Address

logger = logging.getLogger(__name__)
_protocol_logger = logger.getChild("uvicorn")
_protocol_logger.setLevel(logging.INFO)
# The gate says so itself, and not once for each.
_protocol_logger.addFilter(lambda record: not record.getMessage().startswith("Invalid HTTP request"))

LAST_REQUEST_S = 0.5
"""How long a connection that may bring its first request is kept when the server stops."""
ADMIN_DRAIN_TIMEOUT_S = 1.0
_SWEEP_S = 0.5
_SECOND_S = 1.0


class _Wire(asyncio.Transport):
    def __init__(self, gate: Gate, transport: asyncio.Transport) -> None:
        super().__init__()
        self._gate = gate
        self.get_extra_info = transport.get_extra_info  # type: ignore[method-assign]
        self.write = gate.write  # type: ignore[method-assign]
        self.pause_reading = partial(gate.pause, "protocol")  # type: ignore[method-assign]
        self.resume_reading = partial(gate.resume, "protocol")  # type: ignore[method-assign]

    def close(self) -> None:
        # Without a request it is uvicorn's timer of idle connections, which knows of none that the gate refused.
        if self._gate.owes and not self._gate.is_feeding:
            self._gate.end()

    def is_closing(self) -> bool:
        return self._gate.is_ended


def behind_gate(
    config: uvicorn.Config, gate: Gate, transport: asyncio.Transport, state: ServerState
) -> HttpToolsProtocol:
    """Connect what parses a connection's requests and calls the application, with the gate in their scope."""
    protocol = HttpToolsProtocol(config, state, {"gate": gate, "transport": transport})
    protocol.app_state["protocol"] = protocol
    protocol.logger = _protocol_logger
    protocol.connection_made(_Wire(gate, transport))
    return protocol


class HttpServer:
    """An HTTP listener: `app` answers what `refuse` has let pass by its head; `failed` counts refused connections.

    Requests in flight may take `drain_timeout_s` once it is stopped.
    """

    def __init__(
        self,
        limits: RequestLimits,
        clock: Callable[[], float],
        failed: CountFailure,
        drain_timeout_s: float,
        app: ASGIApp,
        *,
        buffers: ByteBudget | None = None,
        ssl: tls.SSLContext | None = None,
        refuse: Refuse = lambda head: None,
    ) -> None:
        config = uvicorn.Config(
            app,
            interface="asgi3",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            # The gate ends idle connections; uvicorn's own timer shall never come first.
            timeout_keep_alive=round(2 * limits.keep_alive_s) + 60,
        )
        config.load()
        buffers = buffers or ByteBudget(LARGEST_MESSAGES * limits.max_body_bytes)
        self._gates = Gates(partial(behind_gate, config), limits, failed, buffers, clock, ssl, refuse)
        self._drain_timeout_s = drain_timeout_s
        self._ticking: asyncio.Task[None] | None = None

    async def start(self, host: str, port: int, place: Place | None = None) -> int:
        """Listen, as `Front.listen` does. Returns the port. Raises ConfigError."""
        bound = self._gates.listen(host, port, "HTTP", place)
        self._ticking = asyncio.create_task(self._tick())
        return bound

    def begin_drain(self) -> None:
        """Go on as before, but every answer from now on closes its connection."""
        self._gates.is_draining = True
        for gate in list(self._gates.open):
            gate.begin_drain()

    async def stop(self) -> None:
        """Take in what has connected, then nothing more; end idle connections, and wait for requests in flight."""
        self.begin_drain()
        await self._gates.stop_listening(self._drain_timeout_s)
        gates = self._gates
        for gate in list(gates.open):
            if gate.is_between_requests() and not gate.may_bring_request():
                gate.end()
        await gates.all_closed(min(LAST_REQUEST_S, self._drain_timeout_s))
        for gate in list(gates.open):
            if gate.is_between_requests():
                gate.end()
        await gates.all_closed(self._drain_timeout_s)
        if gates.open:
            logger.error("%d HTTP requests did not end within %s s", len(gates.state.tasks), self._drain_timeout_s)
        for task in list(gates.state.tasks):
            task.cancel()
        if gates.state.tasks:
            await asyncio.wait(gates.state.tasks, timeout=LAST_REQUEST_S)
        await gates.all_closed(LAST_REQUEST_S)
        for gate in list(gates.open):
            gate.drop()
        if self._ticking is not None:
            self._ticking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._ticking

    async def _tick(self) -> None:
        """Sweep, and keep the date that answers have; nobody else does."""
        gates, second = self._gates, 0.0
        period_s = min(_SWEEP_S, gates.limits.receive_timeout_s / 8)
        while True:
            if (now := gates.clock()) - second >= _SECOND_S:
                second = now
                gates.state.default_headers = [(b"date", formatdate(usegmt=True).encode())]
                gates.tell()
            gates.sweep()
            await asyncio.sleep(period_s)


class Answering(NamedTuple):
    """An application, and what ends its endless streams."""

    app: ASGIApp
    end_streams: Callable[[], None] = lambda: None


@contextlib.asynccontextmanager
async def running_admin(
    service: RankingService,
    host: str,
    port: int,
    *,
    tokens: Tokens | None = None,
    ssl: tls.SSLContext | None = None,
    page: Callable[[], Source] | None = None,
) -> AsyncIterator[int]:
    """Serve probes, metrics and a page while the block runs, and yield the port. Raises ConfigError, or as `page`."""

    @contextlib.asynccontextmanager
    async def probes() -> AsyncIterator[Answering]:
        async with contextlib.AsyncExitStack() as stack:
            board = None if page is None else await stack.enter_async_context(run_board(page))
            app = create_probes(service, tokens, board, is_loopback=Address(host).is_loopback)
            answer = partial(answer_whole, app)
            yield Answering(answer) if board is None else Answering(answer, board.close)

    async with listening_beside(
        service.limits, service.clock, service.metrics.failed, probes(), host, port, ssl
    ) as bound:
        yield bound


@contextlib.asynccontextmanager
async def listening_beside(
    limits: RequestLimits,
    clock: Callable[[], float],
    failed: CountFailure,
    opening: contextlib.AbstractAsyncContextManager[Answering],
    host: str,
    port: int,
    ssl: tls.SSLContext | None,
) -> AsyncIterator[int]:
    """Let an application answer on a separate thread while the block runs, and yield the port. Raises ConfigError.

    So full batches keep nobody waiting who only asks. It is opened there.
    """
    loop, stop = uvloop.new_event_loop(), asyncio.Event()
    bound: concurrent.futures.Future[int] = concurrent.futures.Future()
    # From now on it can't be cancelled, which the thread would not expect.
    bound.set_running_or_notify_cancel()

    async def listen() -> None:
        try:
            async with opening as answering:
                server = HttpServer(limits, clock, failed, ADMIN_DRAIN_TIMEOUT_S, answering.app, ssl=ssl)
                bound.set_result(await server.start(host, port))
                await stop.wait()
                answering.end_streams()
                await server.stop()
        except Exception as error:
            if bound.done():
                raise
            bound.set_exception(error)

    thread = threading.Thread(target=loop.run_until_complete, args=(listen(),), name="admin", daemon=True)
    thread.start()
    try:
        yield await asyncio.wrap_future(bound)
    finally:
        loop.call_soon_threadsafe(stop.set)
        await asyncio.to_thread(thread.join)
        loop.close()
