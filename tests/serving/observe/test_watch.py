"""What a process watches of its shards, and what a shard node reports at a port of its own. On real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import re
from pathlib import Path

import httpx
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from loader.snapshot.reader import Snapshot
from router.plan import Plan
from router.shard_client import ShardClient
from serving.api.node_port import NodeMetrics, running_node_port
from serving.embedded import ModelSource, load_served_model
from serving.rank.service import RankingService
from serving.versions.loaded_version import LoadedVersion, LoadOptions
from shard_node.cuda.card_set import CardSet
from shard_node.engine.loading import load_tables
from shard_node.errors import GenerationNotFoundError
from shard_node.node import DeltaPosition, LocalShard, ShardNode
from shard_node.wire.address import Address
from shard_node.wire.server import NodeServer
from shardrank_testing.bags import bags_of, random_table_bags
from shardrank_testing.card_engines import options_for
from shardrank_testing.emulated_cards import EmulatedCards
from shardrank_testing.nodes import pool
from shardrank_testing.serving_api import MODEL, ApiModel, api_request, run, running_api, write_api_model
from shardrank_testing.snapshots import make_spec, one_table_spec, write_snapshot
from shardrank_testing.standalone import serving_alone
from shardrank_testing.topologies import make_node


@pytest.fixture
def addresses(tmp_path: Path) -> list[Address]:
    return [Address.parse(f"unix:{tmp_path}/{name}.sock") for name in ("a", "b")]


async def test_a_process_whose_version_no_shard_has_is_not_ready(api_model, addresses):
    snapshot = Snapshot.open(api_model.path)
    nodes = [make_node(snapshot, Plan.make(snapshot.spec, 1, "hash", 1, 0), 0) for _ in addresses]
    servers = [NodeServer(node) for node in nodes]
    for server, address in zip(servers, addresses, strict=True):
        await server.start([address])
    service = RankingService(expected_models=[MODEL])
    problems = []
    async with serving_alone(service, snapshot.path, [addresses]):
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


def following_model(
    model: ApiModel, service: RankingService, position: DeltaPosition, nodes: list[ShardNode] | None = None
) -> LoadedVersion:
    """The model with its rows in this process, as far along its deltas as `position` says; its node joins `nodes`."""
    snapshot = Snapshot.open(model.path)
    plan = Plan.make(snapshot.spec)
    node = ShardNode(plan.identity(0))
    if nodes is not None:
        nodes.append(node)
    tables = load_tables(snapshot, plan.partition(0), plan.digest)
    node.generations.stage(MODEL, snapshot.version, dataclasses.replace(tables, deltas=position))
    node.generations.flip(MODEL, snapshot.version)
    options, shards = LoadOptions(dtype="float32"), [LocalShard(node)]
    return LoadedVersion.load(snapshot, plan, lambda _: shards, options, metrics=service.metrics, on_close=node.close)


async def test_with_a_fallback_it_is_degraded_until_no_version_has_nodes(api_model, tmp_path):
    service, nodes = RankingService(expected_models=[MODEL]), list[ShardNode]()
    newer = write_api_model(tmp_path, version=2, seed=9)
    for model in (api_model, newer):
        position = DeltaPosition(delta_base=1, last_delta=5)
        service.install_staged(await asyncio.to_thread(following_model, model, service, position, nodes))
    service.flip(MODEL, 2)
    service.fallbacks[MODEL] = 1
    states = []
    for node, version in ((nodes[1], 2), (nodes[0], 1)):
        node.generations.retire(MODEL, version)
        await service.watch.refresh()
        states.append((service.watch.problems(), service.watch.degraded()))
    lost = f"not_ready: no node of shard 0 that answers has version 2 of model {MODEL!r}"
    assert states == [({}, {MODEL: f"only version 1 answers: {lost}"}), ({MODEL: lost}, {})]
    await asyncio.to_thread(service.close)


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
            assert delta_metric(text, "delta_forks_total") == 0
            answer = await api.http.post(f"/v1/models/{MODEL}:rank", json=api_request(1))
            assert answer.status_code == 200
            for sequence in (6, 7, 8):
                position.applied(sequence, published_at=1041.0, rows=1, now=1042.0)
            assert await degraded() == {}
            assert delta_metric((await api.http.get("/metrics")).text, "delta_lag") == 0
            position.refused("another delta 8", forked=True)
            assert await degraded() == {MODEL: "row updates of version 1 have forked on 1 of 1 nodes"}

    run(main())
    service.close()


async def test_readyz_and_health_hold_while_versions_come_and_go(api_model, tmp_path):
    newer = write_api_model(tmp_path, version=2, seed=9)
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


def test_a_node_tells_its_requests_errors_connections_and_rows(tmp_path: Path) -> None:
    folder, _ = write_snapshot(tmp_path, make_spec(), seed=1)
    snapshot = Snapshot.open(folder)
    node = make_node(snapshot, Plan.make(snapshot.spec), 0)
    layout = node.generations.payload("films", 1).engine.layout
    bags = random_table_bags(np.random.default_rng(1), layout, 20, 4)

    async def program() -> None:
        async with running_node_port(node, Address("127.0.0.1", 0)) as (metrics, url):
            server = NodeServer(node, watch=metrics)
            await server.start([Address("127.0.0.1", 0)])
            (address,) = server.addresses
            metrics.of(server, str(address))
            client = ShardClient(address)
            for _ in range(3):
                await pool(client, "films", 1, bags)
            with pytest.raises(GenerationNotFoundError):
                await pool(client, "films", 2, bags)
            async with httpx.AsyncClient(base_url=url.removesuffix("/metrics")) as http:
                text = (await http.get("/metrics")).text
                assert (await http.head("/metrics")).content == b""
                assert (await http.get("/healthz")).json() == {"status": "ok"}
                for problems, status in (({}, 200), ({"films": "version 1 is not loaded yet"}, 503)):
                    node.problems = problems.copy
                    answer = await http.get("/readyz")
                    assert answer.status_code == status
                    assert answer.json() == {"ready": not problems, "problems": problems}
                for method, path, kind in (("GET", "/", "no_such_route"), ("POST", "/metrics", "method_not_allowed")):
                    answer = await http.request(method, path)
                    assert answer.json()["error"]["kind"] == kind
            await client.close()
            await server.close()
        lines = set(text.splitlines())
        assert 'shardrank_node_request_seconds_count{model="films"} 3.0' in lines
        assert 'shardrank_node_errors_total{api="wire",kind="generation_not_found"} 1.0' in lines
        assert "shardrank_node_connections 1.0" in lines
        assert "shardrank_node_requests_in_flight 0.0" in lines
        assert 'shardrank_version_state{model="films",state="live",version="1"} 1.0' in lines
        looked_up = re.findall(r"^shardrank_rows_looked_up_total\{.*\} (\d+)", text, re.MULTILINE)
        assert sum(map(int, looked_up)) == 3 * bags.values.size
        assert f'replica="{address}"' in text

    asyncio.run(program())
    node.close()


def test_a_node_with_rows_on_disk_tells_reads_and_times_by_tier(tmp_path: Path) -> None:
    spec = one_table_spec(100)
    snapshot, plan = Snapshot.open(write_snapshot(tmp_path, spec, seed=1)[0]), Plan.make(spec)
    with contextlib.closing(ShardNode(plan.identity(0))) as node:
        tables = load_tables(snapshot, plan.partition(0), plan.digest, memory_budget_bytes=0)
        node.generations.stage(spec.model, 1, tables)
        node.pool(spec.model, 1, bags_of({0: [[3, 4], [4]]}))
        text = NodeMetrics(node).render().decode()
    where = f'{{model="{spec.model}",replica="",shard="0",version="1"'
    assert f"shardrank_disk_reads_total{where}}} 2.0" in text
    assert f"shardrank_disk_read_failures_total{where}}} 0.0" in text
    pattern = r'^shardrank_lookup_tier_seconds\{.*quantile="([^"]*)".*tier="([^"]*)".*\} (.*)$'
    times = re.findall(pattern, text, re.MULTILINE)
    assert sorted((tier, quantile, float(time_s) > 0) for quantile, tier, time_s in times) == [
        (tier, quantile, tier == "disk") for tier in ("disk", "ram") for quantile in ("0.5", "0.99")
    ]


def test_a_node_whose_cards_have_failed_says_so_beside_all_that_is_known(tmp_path: Path) -> None:
    spec, cards = one_table_spec(100), EmulatedCards(2)
    path, _ = write_snapshot(tmp_path, spec, seed=1)
    snapshot, plan = Snapshot.open(path), Plan.make(spec, cards_per_shard=2)
    node = ShardNode(plan.identity(0))
    card_set = CardSet(cards, options_for(spec, 2, "peers"))
    node.generations.stage(spec.model, 1, load_tables(snapshot, plan.partition(0), plan.digest, card_set=card_set))
    node.generations.flip(spec.model, 1)

    async def told(http: httpx.AsyncClient) -> list[str]:
        answer = await http.get("/metrics")
        assert answer.status_code == 200
        return [one for one in answer.text.splitlines() if re.match("shardrank_(cards?_|version_state|memory)", one)]

    async def program() -> None:
        async with (
            running_node_port(node, Address("127.0.0.1", 0)) as (metrics, url),
            httpx.AsyncClient(base_url=url.removesuffix("/metrics")) as http,
        ):
            metrics.replica = "a:1"
            whole = await told(http)
            cards.fault = "device 1: cudaErrorIllegalAddress"
            failing = await told(http)
            cards.fault = ""
            assert await told(http) == whole
        where = f'{{model="{spec.model}",replica="a:1",shard="0",version="1"}}'
        assert f"shardrank_cards_failed{where} 0.0" in whole
        only_cards_know = [one for one in whole if one.startswith(("shardrank_cards_", "shardrank_card_"))]
        assert len(only_cards_know) == 4
        known = [one for one in whole if one not in only_cards_know]
        assert sorted(failing) == sorted([*known, f"shardrank_cards_failed{where} 1.0"])

    asyncio.run(program())
    node.close()
