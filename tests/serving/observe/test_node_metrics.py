"""What a shard node tells at a port of its own. On real sockets."""

from __future__ import annotations

import asyncio
import re
import time
from pathlib import Path

import httpx
import numpy as np
import pytest

from loader.snapshot.reader import Snapshot
from router.plan import Plan
from serving.api.node_port import running_node_port
from serving.cli.serve import _load, shard_node
from shard_node.cuda.card_set import CardSet
from shard_node.engine.loading import load_tables
from shard_node.errors import GenerationNotFoundError
from shard_node.node import ShardNode
from shard_node.wire.address import Address
from shard_node.wire.client import ShardClient
from shard_node.wire.server import NodeServer
from shardrank_testing.bags import random_table_bags
from shardrank_testing.card_engines import options_for
from shardrank_testing.emulated_cards import EmulatedCards
from shardrank_testing.snapshots import make_spec, one_table_spec, write_snapshot


def test_a_node_tells_its_requests_errors_connections_and_rows(tmp_path: Path) -> None:
    folder, _ = write_snapshot(tmp_path, make_spec(), seed=1)
    flags = ["--snapshot", str(folder), "--shard", "0/1", "--listen", "127.0.0.1:0"]
    node = _load(folder, shard_node.make_context("shard-node", flags).params, None)
    layout = node.table_layout("films", 1)
    bags = random_table_bags(np.random.default_rng(1), layout, 20, 4)

    async def program() -> None:
        async with running_node_port(node, Address("127.0.0.1", 0)) as (metrics, url):
            server = NodeServer(node, watch=metrics)
            await server.start([Address("127.0.0.1", 0)])
            (address,) = server.addresses
            metrics.of(server, str(address))
            client = ShardClient(address)
            for _ in range(3):
                await client.pool("films", 1, bags, time.monotonic() + 60)
            with pytest.raises(GenerationNotFoundError):
                await client.pool("films", 2, bags, time.monotonic() + 60)
            async with httpx.AsyncClient(base_url=url.removesuffix("/metrics")) as http:
                text = (await http.get("/metrics")).text
                assert (await http.head("/metrics")).content == b""
                assert (await http.get("/healthz")).json() == {"status": "ok"}
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


def test_a_node_whose_cards_have_failed_says_so_beside_all_that_is_known(tmp_path: Path) -> None:
    spec, cards = one_table_spec(100), EmulatedCards(2)
    path, _ = write_snapshot(tmp_path, spec, seed=1)
    snapshot, plan = Snapshot.open(path), Plan.make(spec, cards_per_shard=2)
    node = ShardNode(plan.identity(0))
    card_set = CardSet(cards, options_for(spec, 2, "peers"))
    node.stage(spec.model, 1, load_tables(snapshot, plan.partition(0), plan.digest, card_set=card_set))
    node.flip(spec.model, 1)

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
