"""A serving process without a registry, over shard nodes that a test runs."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from loader.registry.fleet import FleetRecord
from loader.registry.memory import single_process_fleet
from loader.snapshot.publishing import version_record
from loader.snapshot.reader import Snapshot
from serving.rank.service import RankingService
from serving.versions.fleet_member import FixedShards, FleetMember, ServingConfig
from shard_node.agent.agent import AgentConfig
from shard_node.wire.address import Address


def member_alone(
    service: RankingService, snapshot: Path, shards: Sequence[Sequence[Address]], retry_s: float = 60.0, **options: Any
) -> FleetMember:
    """The only process of its fleet, which has not begun to load; `options` are those of `ServingConfig`."""
    version = version_record(Snapshot.open(snapshot, verify=False), 0.0)
    division = FleetRecord(num_shards=len(shards), sharding="hash", replicate_bytes=0)
    config = ServingConfig(node_id="serve", store=snapshot.parent.parent, **{"dtype": "float32", **options})
    fleet, agent = single_process_fleet("alone", version), AgentConfig.for_only_process(version.model, retry_s)
    return FleetMember(fleet, service, config, agent, fixed=FixedShards(shards, division, version))


@asynccontextmanager
async def serving_alone(
    service: RankingService, snapshot: Path, shards: Sequence[Sequence[Address]], **options: Any
) -> AsyncIterator[FleetMember]:
    """Have a service serve a snapshot, as `member_alone`, until the block ends."""
    member = member_alone(service, snapshot, shards, **options)
    try:
        await member.load()
        yield member
    finally:
        await member.leave()
