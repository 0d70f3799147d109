"""Uvicorn on a socket of our own, inside an event loop and a process that are not its own."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator

import uvicorn

from serving.http.app import Handlers, create_app
from serving.http.known_heads import bounded_protocol
from serving.http.large_work import LargeWork
from serving.http.protocol import BoundedHttpProtocol
from serving.http.reading import reading_protocol
from serving.listening_socket import accept_waiting, listening_socket
from serving.rank.service import RankingService

BACKLOG = 1024


class _Uvicorn(uvicorn.Server):
    """Leaves signals to the process, and says when it listens."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        accepted = [connection for listener in sockets or [] for connection in accept_waiting(listener)]
        for server in self.servers:
            server.close()
        for listener in sockets or []:
            listener.close()
        for connection in accepted:
            await asyncio.get_running_loop().connect_accepted_socket(self._make_protocol, connection)
        await super().shutdown(sockets)

    def _make_protocol(self) -> asyncio.Protocol:
        made: asyncio.Protocol = self.config.http_protocol_class(  # type: ignore[call-arg]
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )
        return made


class HttpServer:
    """An HTTP listener over one service.

    Args:
        service: answers the requests.
        drain_timeout_s: how long requests in flight may take once it is stopped.
    """

    def __init__(self, service: RankingService, drain_timeout_s: float) -> None:
        limits = service.limits
        self._large = LargeWork()
        handlers = Handlers.of(service, self._large)
        self._protocol = bounded_protocol(limits, service.metrics, handlers.direct_routes())
        config = uvicorn.Config(
            create_app(service, handlers),
            http=reading_protocol(self._protocol),  # type: ignore[arg-type]
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            backlog=BACKLOG,
            timeout_keep_alive=max(1, round(limits.keep_alive_s)),
            timeout_graceful_shutdown=max(1, round(drain_timeout_s)),
        )
        self._server = _Uvicorn(config)
        self._task: asyncio.Task[None] | None = None

    async def start(self, host: str, port: int) -> int:
        """Listens. Returns the port, which is a free one if 0 was asked for.

        Raises:
            ListenError: if the port can't be bound.
        """
        listener = listening_socket(host, port, "HTTP")
        bound: int = listener.getsockname()[1]
        self._task = asyncio.create_task(self._server.serve(sockets=[listener]))
        await self._server.listening.wait()
        return bound

    def begin_drain(self) -> None:
        """Goes on as before, but every answer from now on closes its connection."""
        self._protocol.is_draining = True
        for connection in list(self._server.server_state.connections):
            if isinstance(connection, BoundedHttpProtocol):
                connection.begin_drain()

    async def stop(self) -> None:
        """Takes in what has connected, then nothing more; ends idle connections, and waits for requests in flight."""
        self.begin_drain()
        self._server.should_exit = True
        if self._task is not None:
            await self._task
        self._large.close()
