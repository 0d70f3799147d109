"""What the watch over the shard nodes tells readiness and metrics."""

from __future__ import annotations

import asyncio
import itertools
import re
from pathlib import Path

import pytest

from loader.snapshot.reader import Snapshot
from router.plan import Plan
from serving.observe.watch import NodeWatch
from serving.rank.service import RankingService
from serving.versions.loading import ModelSource, load_served_model
from serving.versions.served_versions import ServedVersions
from shard_node.generation import Generations
from shard_node.wire.address import Address
from shard_node.wire.server import NodeServer
from shardrank_testing.serving_api import MODEL, api_request, ask, run
from shardrank_testing.topologies import make_node


class Broken:
    """A version that can't be asked, for a reason that is nobody's error class."""

    def __init__(self) -> None:
        self.error: Exception | None = ValueError("a defect")

    async def nodes(self) -> list:
        if self.error is not None:
            raise self.error
        return []


def test_a_defect_of_one_model_is_told_and_stops_neither_the_watch_nor_the_others(caplog):
    payloads = {"books": Broken(), "films": Broken()}
    versions = ServedVersions(list(payloads), lambda model, version: None)
    generations: Generations = versions.generations
    payloads["films"].error = None
    for model, payload in payloads.items():
        generations.stage(model, 1, payload)
        generations.flip(model, 1)
    watch = NodeWatch(versions)

    async def main() -> None:
        await watch.refresh()
        assert watch.problems() == {"books": "internal: asking its shards failed with ValueError"}
        assert "a defect" in caplog.text
        running = asyncio.create_task(watch.run())
        await asyncio.sleep(0)
        payloads["books"].error = None
        await watch.refresh()
        assert not running.done()
        assert watch.problems() == {}
        running.cancel()

    run(main())
    assert [one.leases for one in generations.all()] == [0, 0]


@pytest.fixture
def addresses(tmp_path: Path) -> list[Address]:
    return [Address.parse(f"unix:{tmp_path}/{name}.sock") for name in ("a", "b")]


def test_each_replica_of_a_shard_counts_its_rows_for_itself(api_model, addresses):
    snapshot = Snapshot.open(api_model.path)
    plan = Plan.make(snapshot.spec, 1, "hash", 1, 0)

    async def main() -> None:
        servers = [NodeServer(make_node(snapshot, plan, 0)) for _ in addresses]
        for server, address in zip(servers, addresses, strict=True):
            await server.start([address])
        service = RankingService(expected_models=[MODEL])
        source = ModelSource(snapshot=snapshot.path, shards=(tuple(addresses),), replicate_bytes=0, dtype="float32")
        service.install(await asyncio.to_thread(load_served_model, source, service))
        seen: list[dict[str, float]] = []
        for seed in range(6):
            await ask(service, api_request(seed) | {"timeout_ms": 10_000})
            await service.watch.refresh()
            seen.append(rows_by_replica(service, "users"))
        for before, after in itertools.pairwise(seen):
            assert set(after) == {str(address) for address in addresses}
            assert all(after[replica] >= before[replica] for replica in after)
            assert sum(after.values()) == sum(before.values()) + 1
        await asyncio.to_thread(service.close)
        for server in servers:
            await server.close()

    run(main())


def test_a_process_whose_version_the_shards_have_let_go_is_not_ready(api_model, addresses):
    snapshot = Snapshot.open(api_model.path)
    nodes = [make_node(snapshot, Plan.make(snapshot.spec, 1, "hash", 1, 0), 0) for _ in addresses]

    async def main() -> None:
        servers = [NodeServer(node) for node in nodes]
        for server, address in zip(servers, addresses, strict=True):
            await server.start([address])
        service = RankingService(expected_models=[MODEL])
        source = ModelSource(snapshot=snapshot.path, shards=(tuple(addresses),), replicate_bytes=0, dtype="float32")
        service.install(await asyncio.to_thread(load_served_model, source, service))
        problems = []
        for node in nodes:
            node.generations.retire(MODEL, snapshot.version)
            await service.watch.refresh()
            problems.append(service.watch.problems())
        # One replica without it is the other one's work; with none, no request could be answered.
        assert problems[0] == {}
        told = f"not_ready: no node of shard 0 that answers has version {snapshot.version} of model {MODEL!r}"
        assert problems[1] == {MODEL: told}
        await asyncio.to_thread(service.close)
        for server in servers:
            await server.close()

    run(main())


def rows_by_replica(service: RankingService, table: str) -> dict[str, float]:
    text = service.metrics.render().decode()
    pattern = r'rows_looked_up_total\{model="films",replica="([^"]+)",shard="0",table="' + table + r'".*\} (\S+)'
    return {replica: float(rows) for replica, rows in re.findall(pattern, text)}
