"""The demo's server without a fleet: rows, router and ranking in this process, answering over HTTP and gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from loader.progress import Progress
from serving.demo.config import DemoConfig
from serving.fleet.ports import SharedPort, connectable_host
from serving.loading import ModelSource, load_served_model
from serving.server import Listening, ServerConfig, running_server
from serving.service import RankingService


@asynccontextmanager
async def local_server(config: DemoConfig, folder: Path, progress: Progress) -> AsyncIterator[Listening]:
    """Loads the snapshot and serves it on this event loop while the block runs.

    Raises:
        FleetError: if a port is taken.
        ShardrankError: as `load_served_model`.
    """
    for port in (config.http_port, config.grpc_port):
        SharedPort(config.host, port).close()
    source = ModelSource(
        snapshot=folder, cards=config.cards, sharding=config.sharding, replicate_bytes=config.replicate_bytes
    )
    service = RankingService()
    try:
        service.install(await asyncio.to_thread(load_served_model, source, service, progress))
        ports = ServerConfig(host=config.host, http_port=config.http_port, grpc_port=config.grpc_port)
        async with running_server(service, ports) as listening:
            yield Listening(connectable_host(listening.host), listening.http_port, listening.grpc_port)
    finally:
        await asyncio.to_thread(service.close)
