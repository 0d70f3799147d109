"""The shard nodes of `--shard`: the one process that uses them announces them, in its private registry, for good."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from loader.registry.fleet import FleetRecord, FleetRegistry, NodeRecord, PublishedVersion, VersionReport
from serving.observe.watch import Readiness
from shard_node.node import NodeInfo
from shard_node.wire.address import Address

ANNOUNCE_S: Final = 1.0
TTL_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class FixedShards:
    """The addresses of each shard's replicas, how they divide rows, and the version that they are to have."""

    shards: Sequence[Sequence[Address]]
    division: FleetRecord
    version: PublishedVersion

    async def announce(self, fleet: FleetRegistry, readiness: Readiness) -> None:
        """Announce all of them, with what `readiness` last heard of them, until cancelled.

        Each is said to have the version ready: whether it does is checked before it is used, as with all replicas.
        """
        await fleet.join_fleet(self.division)
        while True:
            reported = {address: info for _, address, info in readiness.nodes()}
            for index, replicas in enumerate(self.shards):
                for number, address in enumerate(map(str, replicas)):
                    record = NodeRecord(
                        node_id=f"shard-{index}-{number}",
                        kind="shard",
                        process_id=0,
                        address=address,
                        shard_index=index,
                        versions=(self._report(reported.get(address)),),
                        **self.division.model_dump(),
                    )
                    await fleet.announce_node(record, TTL_S)
            await asyncio.sleep(ANNOUNCE_S)

    def _report(self, info: NodeInfo | None) -> VersionReport:
        key, tiers, served = (self.version.model, self.version.version), Counter[str](), None
        if info is not None:
            served = next((served for served in info.versions if (served.model, served.version) == key), None)
            for use in info.memory:
                if (use.model, use.version) == key:
                    tiers[use.tier] += use.size_bytes
        return VersionReport(
            model=key[0],
            version=key[1],
            state="ready",
            identity=self.version.identity,
            memory_tiers=dict(tiers),
            plan_digest="" if served is None else served.plan_digest,
            delta_sequence=0 if served is None else served.delta_sequence,
        )
