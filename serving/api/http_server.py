"""An HTTP listener: sockets are accepted, looked at, and handed to gates with uvicorn's protocol behind them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl as tls
from email.utils import formatdate

import uvicorn
from starlette.types import ASGIApp

from serving.api.addresses import Addresses
from serving.api.http import HttpApp
from serving.api.http_framing import refusal
from serving.api.http_gate import Gate, Gates
from serving.api.listening_socket import Acceptor, forget_unsent, listening_socket
from serving.api.tokens import Tokens
from serving.rank.service import RankingService

logger = logging.getLogger(__name__)

LAST_REQUEST_S = 0.5
"""How long a connection that may bring its first request is kept when the server stops."""
_SWEEP_S = 0.5
_SECOND_S = 1.0


class HttpServer:
    """An HTTP listener over one service; without `tokens` everybody may do everything.

    Requests in flight may take `drain_timeout_s` once it is stopped. `app` answers, by default the whole API.
    `addresses` are accounts of whoever connects, shared with other listeners.

    Attributes:
        handshake_timeout_s: how long a TLS handshake may take.
    """

    def __init__(
        self,
        service: RankingService,
        drain_timeout_s: float,
        *,
        app: ASGIApp | None = None,
        addresses: Addresses | None = None,
        ssl: tls.SSLContext | None = None,
        tokens: Tokens | None = None,
    ) -> None:
        limits = service.limits
        config = uvicorn.Config(
            app or HttpApp(service, tokens),
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
        addresses = addresses or Addresses(limits, service.clock)
        self._gates = Gates(config, limits, service.metrics, addresses, service.clock, is_tls=ssl is not None)
        self._drain_timeout_s = drain_timeout_s
        self._metrics = service.metrics
        self.addresses = addresses
        self.handshake_timeout_s = limits.receive_timeout_s
        self._ssl = ssl
        self._acceptor: Acceptor[Gate] | None = None
        self._ticking: asyncio.Task[None] | None = None

    async def start(self, host: str, port: int) -> int:
        """Listen. Returns the port, which is a free one if 0 was asked for. Raises ListenError."""
        listener = listening_socket(host, port, "HTTP")
        self._acceptor = Acceptor(listener, self, self._ssl)
        self._ticking = asyncio.create_task(self._tick())
        bound: int = listener.getsockname()[1]
        return bound

    def begin_drain(self) -> None:
        """Go on as before, but every answer from now on closes its connection."""
        self._gates.is_draining = True
        for gate in list(self._gates.open):
            gate.begin_drain()

    async def stop(self) -> None:
        """Take in what has connected, then nothing more; end idle connections, and wait for requests in flight."""
        self.begin_drain()
        if self._acceptor is not None:
            await self._acceptor.stop(self._drain_timeout_s)
        await self._drain()
        if self._ticking is not None:
            self._ticking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._ticking

    async def _drain(self) -> None:
        gates = self._gates
        for gate in list(gates.open):
            if gate.is_between_requests() and not gate.may_bring_request():
                gate.end()
        await self._all_closed(min(LAST_REQUEST_S, self._drain_timeout_s))
        for gate in list(gates.open):
            if gate.is_between_requests():
                gate.end()
        await self._all_closed(self._drain_timeout_s)
        if gates.open:
            logger.error("%d HTTP requests did not end within %s s", len(gates.state.tasks), self._drain_timeout_s)
        for task in list(gates.state.tasks):
            task.cancel()
        if gates.state.tasks:
            await asyncio.wait(gates.state.tasks, timeout=LAST_REQUEST_S)
        await self._all_closed(LAST_REQUEST_S if gates.open else 0)
        for gate in list(gates.open):
            gate.drop()

    async def _all_closed(self, timeout_s: float) -> None:
        gates = self._gates
        gates.all_closed.clear()
        if gates.open:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(gates.all_closed.wait(), timeout_s)

    def admit(self, connection: socket.socket, address: str) -> Gate | None:
        """Make the gate of a new connection, or refuse it before it costs anything: in plain text it is told why."""
        gates = self._gates
        error = gates.refusal(address)
        if error is not None:
            if gates.addresses.is_waiting(address):
                forget_unsent(connection)
            elif self._ssl is None:
                with contextlib.suppress(OSError):
                    connection.send(refusal(error, gates.state.default_headers))
            return None
        return gates.make(address)

    def give_up(self, protocol: Gate) -> None:
        """Count a connection out that could not be made."""
        if not protocol.has_connected:
            self._gates.lose(protocol)

    def note(self, kind: str) -> None:
        """Count a connection that was refused, or ended; TLS logs its own."""
        if kind.startswith("tls_"):
            self._metrics.failed("http", "connection", kind)
        else:
            self._gates.note(kind)

    async def _tick(self) -> None:
        """Sweep, and keep the date that answers have; nobody else does."""
        gates, second = self._gates, 0.0
        period_s = min(_SWEEP_S, self.handshake_timeout_s / 8)
        while True:
            if (now := gates.clock()) - second >= _SECOND_S:
                second = now
                gates.state.default_headers = [(b"date", formatdate(usegmt=True).encode())]
                gates.tell()
            gates.sweep()
            await asyncio.sleep(period_s)
