"""A serving process: HTTP and gRPC over one service, in one event loop, until SIGTERM or SIGINT."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from pydantic import Field

from loader.manifest import Frozen
from serving.grpc_api.server import GrpcServer
from serving.http.server import HttpServer
from serving.service import RankingService

logger = logging.getLogger(__name__)


class ServerConfig(Frozen):
    """Where a serving process listens.

    Attributes:
        host: address for both.
        http_port, grpc_port: 0 takes a free one.
        drain_timeout_s: how long requests in flight may take after SIGTERM.
    """

    host: str = "127.0.0.1"
    http_port: int = Field(default=8080, ge=0, le=65535)
    grpc_port: int = Field(default=8081, ge=0, le=65535)
    drain_timeout_s: float = Field(default=10.0, gt=0, le=600)


@dataclass(frozen=True, slots=True)
class Listening:
    """Where it listens, with real ports."""

    host: str
    http_port: int
    grpc_port: int


@contextlib.asynccontextmanager
async def running_server(service: RankingService, config: ServerConfig) -> AsyncIterator[Listening]:
    """Listens while the block runs; then takes no new requests and finishes those in flight. The service stays open.

    Raises:
        ListenError: if a port can't be bound.
    """
    await service.watch.refresh()
    watching = asyncio.create_task(service.watch.run())
    http, grpc = HttpServer(service, config.drain_timeout_s), GrpcServer(service)
    try:
        http_port = await http.start(config.host, config.http_port)
        grpc_port = await grpc.start(config.host, config.grpc_port)
        logger.info("listening on %s: HTTP %d, gRPC %d", config.host, http_port, grpc_port)
        yield Listening(config.host, http_port, grpc_port)
    finally:
        service.begin_shutdown()
        await asyncio.gather(http.stop(), grpc.stop(config.drain_timeout_s))
        watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watching


async def serve(
    service: RankingService,
    config: ServerConfig,
    on_listening: Callable[[Listening], None] = lambda listening: None,
) -> None:
    """Serves until SIGTERM or SIGINT; then not ready, no new requests, those in flight finished, everything closed.

    Args:
        service: closed at the end.
        config: where to listen.
        on_listening: told the ports.

    Raises:
        ListenError: if a port can't be bound.
    """
    loop, stopped = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    try:
        async with running_server(service, config) as listening:
            on_listening(listening)
            await stopped.wait()
            logger.info("stopping: %d requests in flight", service.in_flight)
    finally:
        await asyncio.to_thread(service.close)
