"""Where the page reads a fleet: in its registry; or, of a process that belongs to none, in the process itself."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Iterator
from typing import Protocol

from loader.errors import RolloutError
from loader.registry.fleet import Canary, FleetRegistry, NodeRecord, VersionReport, WantedModel
from loader.registry.registry import Registry
from loader.rollout.plan import Rollout
from loader.rollout.requests import FleetState, SeenRollout, read_fleet, roll_back
from serving.rank.service import RankingService
from shard_node.node import NodeInfo


class Source(Protocol):
    """What the page shows. Belongs to one event loop.

    Attributes:
        name: for people, without secrets.
        note: what the page must say of its numbers; "" for nothing.
        fixed: why nothing can be changed here; "" if it can.
    """

    name: str
    note: str
    fixed: str

    async def look(self) -> FleetState:
        """Read it. Raises RegistryError."""
        ...

    async def roll_back(self, model: str, seen: SeenRollout) -> Rollout:
        """Do as `shardrank rollback`, if nothing that was seen has changed.

        Raises RolloutError if it has, or can't be rolled back; RegistryError.
        """
        ...

    async def close(self) -> None:
        """End connections."""
        ...


class FleetSource:
    """A fleet, by its registry, which `open_registry` opens and `close` closes."""

    note = fixed = ""

    def __init__(self, open_registry: Callable[[], Registry]) -> None:
        self._fleet = FleetRegistry(open_registry())
        self.name = self._fleet.name

    async def look(self) -> FleetState:
        """As `Source.look`."""
        return await read_fleet(self._fleet)

    async def roll_back(self, model: str, seen: SeenRollout) -> Rollout:
        """As `Source.roll_back`."""
        return await roll_back(self._fleet, model, clock=time.time, rollout_id=secrets.token_hex(16), seen=seen)

    async def close(self) -> None:
        """As `Source.close`."""
        await self._fleet.registry.close()


class ProcessSource:
    """One serving process without a registry, told in the words of a fleet: itself, and what its shards last said."""

    fixed = "this process belongs to no fleet (no --registry): it serves what it was started with"

    def __init__(self, service: RankingService, num_workers: int = 1) -> None:
        self._service = service
        self.name = f"process {os.getpid()}"
        self.note = ""
        if num_workers > 1:
            self.note = (
                f"{num_workers} worker processes share this port and one of them answers this page: "
                f"requests and latencies are those of process {os.getpid()} alone; /metrics adds all workers up"
            )

    async def look(self) -> FleetState:
        """As `Source.look`."""
        wanted = {}
        for model, version in self._service.generations.live_versions().items():
            choice = self._service.canary(model)
            canary = None if choice is None else Canary(version=choice.version, share=choice.share)
            wanted[model] = WantedModel(model=model, epoch=1, live=version, hold=(version,), canary=canary)
        return FleetState(nodes=(self._itself(), *self._shards()), wanted=wanted)

    async def roll_back(self, model: str, seen: SeenRollout) -> Rollout:
        """As `Source.roll_back`."""
        raise RolloutError(f"{model}: {self.fixed}")

    async def close(self) -> None:
        """As `Source.close`."""

    def _itself(self) -> NodeRecord:
        versions = [
            VersionReport(
                model=one.model,
                version=one.version,
                state="draining" if one.state == "draining" else "ready",
                progress=1.0,
                leases=one.leases,
                golden_difference=one.payload.checked.difference,
                golden_tolerance=one.payload.checked.tolerance,
                dense_step=one.payload.dense_step,
                stats=one.payload.counter.stats(),
            )
            for one in self._service.generations.all()
        ]
        return NodeRecord(
            node_id=f"process-{os.getpid()}",
            kind="serving",
            process_id=os.getpid(),
            address="",
            live=self._service.generations.live_versions(),
            versions=tuple(versions),
        )

    def _shards(self) -> Iterator[NodeRecord]:
        # A node that holds several models is told by each of them.
        nodes: dict[str, NodeInfo] = {address: info for _, address, info in self._service.watch.nodes()}
        for place, (address, info) in enumerate(sorted(nodes.items())):
            yield NodeRecord(
                node_id=f"shard-{info.identity.shard_index}-{place}",
                kind="shard",
                process_id=0,
                address=address,
                shard_index=info.identity.shard_index,
                num_shards=info.identity.num_shards,
                num_cards=info.identity.num_cards,
                versions=tuple(_reports(info)),
            )


def _reports(info: NodeInfo) -> Iterator[VersionReport]:
    for one in info.versions:
        tiers: dict[str, int] = {}
        for use in info.memory:
            if (use.model, use.version) == (one.model, one.version):
                tiers[use.tier] = tiers.get(use.tier, 0) + use.size_bytes
        yield VersionReport(
            model=one.model,
            version=one.version,
            state="draining" if one.state == "draining" else "ready",
            progress=1.0,
            plan_digest=one.plan_digest,
            memory_bytes=sum(tiers.values()) - tiers.get("mapped", 0),
            memory_tiers=tiers,
            delta_sequence=one.delta_sequence,
            delta_published_at=one.delta_published_at,
        )
