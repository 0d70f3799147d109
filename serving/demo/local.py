"""The demo's server without a fleet: rows, router and ranking in this process, answering over HTTP and gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from loader.progress import Progress
from serving.demo.config import DemoConfig
from serving.fleet.local_fleet import WorkerPorts, connectable_host
from serving.rank.service import RankingService
from serving.server import Listening, ServerConfig, running_server
from serving.versions.loading import ModelSource, load_served_model
from shard_node.cuda.card_set import CardSet


@asynccontextmanager
async def local_server(
    config: DemoConfig, folder: Path, card_set: CardSet | None, ports: WorkerPorts, progress: Progress
) -> AsyncIterator[Listening]:
    """Loads the snapshot and serves it at ports that the caller holds, on this event loop, while the block runs.

    Raises:
        ShardrankError: as `load_served_model`.
    """
    source = ModelSource(
        snapshot=folder,
        cards=config.cards,
        card_set=card_set,
        sharding=config.sharding,
        replicate_bytes=config.replicate_bytes,
    )
    service = RankingService()
    try:
        service.install(await asyncio.to_thread(load_served_model, source, service, progress))
        server = ServerConfig(host=config.host, http_port=ports.http, grpc_port=ports.grpc)
        async with running_server(service, server) as listening:
            yield Listening(connectable_host(listening.host), listening.http_port, listening.grpc_port)
    finally:
        await asyncio.to_thread(service.close)
