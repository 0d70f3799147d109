"""What a process watches of its shards: readiness, and how old rows are."""

from __future__ import annotations

import asyncio
import dataclasses
import re
from pathlib import Path

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from loader.snapshot.reader import Snapshot
from router.plan import Plan
from serving.rank.service import RankingService
from serving.versions.loading import ModelSource, load_served_model
from serving.versions.served_model import ServedModel
from shard_node.engine.loading import load_tables
from shard_node.node import DeltaPosition, LocalShard, ShardNode
from shard_node.wire.address import Address
from shard_node.wire.server import NodeServer
from shardrank_testing.serving_api import MODEL, ApiModel, api_request, run, running_api, write_api_model
from shardrank_testing.topologies import make_node


@pytest.fixture
def addresses(tmp_path: Path) -> list[Address]:
    return [Address.parse(f"unix:{tmp_path}/{name}.sock") for name in ("a", "b")]


def test_a_process_whose_version_no_shard_has_is_not_ready(api_model, addresses):
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


def following_model(model: ApiModel, service: RankingService, position: DeltaPosition) -> ServedModel:
    """The model with its rows in this process, as far along its deltas as `position` says."""
    snapshot = Snapshot.open(model.path)
    plan = Plan.make(snapshot.spec)
    node = ShardNode(plan.identity(0))
    tables = load_tables(snapshot, plan.partition(0), plan.digest)
    node.stage(MODEL, snapshot.version, dataclasses.replace(tables, deltas=position))
    node.flip(MODEL, snapshot.version)
    options = {"dtype": "float32", "metrics": service.metrics, "on_close": node.close}
    return ServedModel.load(snapshot, plan, lambda on_retry: [LocalShard(node)], **options)


def delta_metric(text: str, name: str) -> float:
    (value,) = re.findall(
        rf'^shardrank_{name}\{{model="films",replica="local",shard="0",version="1"\}} (\S+)$', text, re.MULTILINE
    )
    return float(value)


def test_rows_that_lag_are_reported_and_the_process_stays_ready(api_model):
    now = 1000.0
    position = DeltaPosition(delta_base=1, last_delta=5)
    service = RankingService(expected_models=[MODEL], max_staleness_s={MODEL: 30.0}, wall_clock=lambda: now)
    service.install(following_model(api_model, service, position))

    async def main() -> None:
        nonlocal now
        async with running_api(service) as api:

            async def degraded() -> dict:
                await service.watch.refresh()
                answer = await api.http.get("/readyz")
                assert (answer.status_code, answer.json()["ready"], answer.json()["problems"]) == (200, True, {})
                return answer.json()["degraded"]

            assert "have not looked for deltas" in (await degraded())[MODEL]
            position.seen(stream_last=5, looked_at=1000.0)
            assert await degraded() == {}
            now = 1029.0
            assert await degraded() == {}
            position.seen(stream_last=8, looked_at=1029.0)
            now = 1042.0
            assert (await degraded())[MODEL] == (
                "rows of version 1 are 42.0 s behind on 1 of 1 nodes; max_staleness_s = 30"
            )
            text = (await api.http.get("/metrics")).text
            assert 'shardrank_degraded{model="films"} 1.0' in text
            assert delta_metric(text, "delta_sequence") == 5
            assert delta_metric(text, "delta_lag") == 3
            assert delta_metric(text, "delta_staleness_seconds") == 42.0
            answer = await api.http.post(f"/v1/models/{MODEL}:rank", json=api_request(1))
            assert answer.status_code == 200
            for sequence in (6, 7, 8):
                position.applied(sequence, published_at=1041.0, rows=1, now=1042.0)
            assert await degraded() == {}
            assert delta_metric((await api.http.get("/metrics")).text, "delta_lag") == 0

    run(main())
    service.close()


def test_readyz_and_health_hold_while_versions_come_and_go(api_model, tmp_path):
    newer = write_api_model(tmp_path, version=2, seed=9)

    async def main() -> None:
        service = RankingService(expected_models=[MODEL])
        service.install(await asyncio.to_thread(load_served_model, ModelSource(snapshot=api_model.path), service))
        async with running_api(service) as api:
            health = health_pb2_grpc.HealthStub(api.channel)

            async def assert_ready() -> None:
                served = await health.Check(health_pb2.HealthCheckRequest(service=""))
                assert served.status == health_pb2.HealthCheckResponse.SERVING
                assert (await api.http.get("/readyz")).status_code == 200

            source = ModelSource(snapshot=newer.path)
            loading = asyncio.create_task(asyncio.to_thread(load_served_model, source, service))
            while not loading.done():
                await assert_ready()
                await asyncio.sleep(0)
            service.install_staged(await loading)
            for change in (
                lambda: None,
                lambda: service.set_canary(MODEL, 2, 0.5),
                lambda: service.flip(MODEL, 2),
                lambda: service.retire(MODEL, 1),
            ):
                changed = change()
                await assert_ready()
            await asyncio.to_thread(changed.retired.wait, 10)
            await assert_ready()
        await asyncio.to_thread(service.close)

    run(main())
