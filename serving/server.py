"""A serving process: HTTP and gRPC over one service, in one event loop, until SIGTERM or SIGINT."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import uvloop
from pydantic import Field

from loader.memory import settle_heap
from loader.registry.registry import Registry
from loader.snapshot.tables import Frozen
from serving.api.grpc.services import GrpcServer
from serving.api.http import HttpApp, HttpServer, running_admin
from serving.api.tokens import Tokens
from serving.dashboard.board import FleetSource, ProcessSource, Source
from serving.fleet.process import notify_ready, run_until_stopped
from serving.rank.service import RankingService
from shard_node.wire.tls import TlsConfig, TlsContext, server_context

logger = logging.getLogger(__name__)

_ALPN = {"http": ("http/1.1",), "grpc": ("h2",)}


class ServerConfig(Frozen):
    """Where a serving process listens.

    Attributes:
        http_port, grpc_port: 0 takes a free one.
        admin_port: for probes, metrics and the status page; 0 takes a free one, None has none.
        shutdown_delay_s: how long it goes on to take requests after SIGTERM, not ready any more and closing each
            connection with its answer, so that balancers and clients turn elsewhere before the ports are closed.
        drain_timeout_s: how long requests in flight may take after that.
        tls: what clients of all these ports must speak; None for plain text. A worker's private probe port never does.
        tokens: the file of those who are let in, as of `serving.api.tokens`; None to let everybody in.
        num_workers: how many processes share both ports.
    """

    host: str = "127.0.0.1"
    http_port: int = Field(default=8080, ge=0, le=65535)
    grpc_port: int = Field(default=8081, ge=0, le=65535)
    admin_port: int | None = Field(default=None, ge=0, le=65535)
    shutdown_delay_s: float = Field(default=0.5, ge=0, le=600)
    drain_timeout_s: float = Field(default=10.0, gt=0, le=600)
    tls: TlsConfig | None = None
    tokens: Path | None = None
    num_workers: int = Field(default=1, ge=1)


@dataclass(frozen=True, slots=True)
class Listening:
    """Where it listens, with real ports."""

    host: str
    http_port: int
    grpc_port: int
    admin_port: int | None = None


@contextlib.asynccontextmanager
async def running_server(service: RankingService, config: ServerConfig) -> AsyncIterator[Listening]:
    """Listen while the block runs, then stop as `ServerConfig` says. Raises ConfigError if a port can't be bound."""
    tokens, ssl = _protection(service, config, "http")
    app = HttpApp(service, tokens)
    http = HttpServer(
        service.limits,
        service.clock,
        service.metrics.failed,
        app,
        buffers=service.buffers,
        ssl=ssl,
        admit=app.admit,
    )
    grpc = GrpcServer(service, *_protection(service, config, "grpc"))
    watching: asyncio.Future[tuple[None, None]] | None = None
    try:
        http_port = await http.start(config.host, config.http_port)
        grpc_port = await grpc.start(config.host, config.grpc_port)
        # Only now, so that whoever is told that the process is ready can connect.
        await service.watch.refresh()
        watching = asyncio.gather(service.watch.run(), service.metrics.keep_up())
        logger.info("listening on %s: HTTP %d, gRPC %d", config.host, http_port, grpc_port)
        yield Listening(config.host, http_port, grpc_port)
    finally:
        service.watch.begin_shutdown()
        if watching is not None:
            http.begin_drain()
            await asyncio.sleep(config.shutdown_delay_s)
        await asyncio.gather(http.stop(config.drain_timeout_s), grpc.stop(config.drain_timeout_s))
        if watching is not None:
            watching.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watching


def _protection(
    service: RankingService, config: ServerConfig, api: Literal["http", "grpc"]
) -> tuple[Tokens | None, TlsContext | None]:
    """Who is let in at a port, and by which certificates; the metrics count who is not."""
    tokens = None
    if config.tokens is not None:
        tokens = Tokens(config.tokens, note=partial(service.metrics.failed, api, "authorization"))
    return tokens, None if config.tls is None else server_context(config.tls, alpn=_ALPN[api])


async def serve(
    service: RankingService,
    config: ServerConfig,
    load: Callable[[], Awaitable[object]],
    on_ready: Callable[[Listening], None] = lambda listening: None,
    probe_port: int | None = None,
    on_listening: Callable[[Listening], None] = lambda listening: None,
    leave: Callable[[], Awaitable[object]] | None = None,
    open_registry: Callable[[], Registry] | None = None,
) -> None:
    """Serve until it is cancelled, or its cards fail; then finish what is in flight and close everything.

    Alone, it listens at once and says that it is not ready until the model is loaded. Beside other workers, at ports
    that it shares with them, it listens only then: requests that reach it earlier would be answered by nobody else.
    Until then `probe_port`, a private HTTP port on loopback, tells how it is.

    `load` installs the models; `on_listening` and `on_ready` are called with the ports before it and after it; `leave`
    once requests have ended: until then it follows what is wanted, and a rollout waits for it. `open_registry` opens
    the registry of its fleet once more, for the page at the admin port; None without a fleet.

    Raises ConfigError if a port can't be bound, CardError once the cards have failed, and as `load`.
    """
    try:
        async with contextlib.AsyncExitStack() as stack:
            if leave is not None:
                stack.push_async_callback(leave)
            admin_port = None
            tokens, ssl = _protection(service, config, "http")
            if config.admin_port is not None:
                page: Callable[[], Source] = partial(ProcessSource, service, config.num_workers)
                if open_registry is not None:
                    page = partial(FleetSource, open_registry)
                admin_port = await stack.enter_async_context(
                    running_admin(service, config.host, config.admin_port, tokens=tokens, ssl=ssl, page=page)
                )
            if probe_port is None:
                listening = await stack.enter_async_context(running_server(service, config))
            else:
                await stack.enter_async_context(running_admin(service, "127.0.0.1", probe_port, tokens=tokens))
                listening = Listening(config.host, config.http_port, config.grpc_port)
            on_listening(replace(listening, admin_port=admin_port))
            await load()
            settle_heap()
            if probe_port is None:
                await service.watch.refresh()
                notify_ready()
            else:
                listening = await stack.enter_async_context(running_server(service, config))
            on_ready(replace(listening, admin_port=admin_port))
            await service.watch.cards_failed()
    finally:
        await asyncio.to_thread(service.close)


def serve_until_signalled(*args: Any, **kwargs: Any) -> None:
    """Serve as `serve` does, with its arguments and errors, until the process receives SIGTERM or SIGINT."""
    # A second signal ends the process with status 1: a load that is under way can't be interrupted, and whoever asks
    # twice does not want to wait for it.
    run_until_stopped(lambda: serve(*args, **kwargs), lambda: os._exit(1), uvloop.new_event_loop)
