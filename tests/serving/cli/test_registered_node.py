"""`shardrank shard-node --registry`: a process leaves its fleet without a failed lookup, or with its cards' error."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import httpx
import numpy as np
import pytest

from loader.snapshot.reader import Snapshot
from router.plan import Plan
from router.replicas import ReplicatedShard
from serving.cli.serve import _fleet_configs, _serve_rows_in_fleet, shard_node
from shard_node.cuda.card_set import CardSet
from shard_node.errors import CardError
from shard_node.node import ShardNode
from shard_node.partition import NodeIdentity
from shard_node.wire.address import Address
from shard_node.wire.client import ShardClient
from shardrank_testing.bags import random_table_bags
from shardrank_testing.emulated_cards import EmulatedCards
from shardrank_testing.processes import WAIT_S, Program, running, wait_until
from shardrank_testing.registered_fleet import nodes, publish, want
from shardrank_testing.snapshots import make_spec, write_snapshot


@pytest.fixture
def registry(folder: Path) -> Path:
    """Of a model of one version, which is to be live."""
    path, _ = write_snapshot(folder / "store", make_spec(), seed=1)
    publish(folder / "registry", path)
    want(folder / "registry", "films", hold=(1,), live=1)
    return folder / "registry"


def flags(folder: Path, name: str) -> list[str]:
    where = ["--registry", f"{folder}/registry", "--store", f"{folder}/store", "--listen", f"unix:{folder}/{name}.sock"]
    return [*where, "--shard", "0/1", "--node-id", name]


async def until(condition: Callable[[], bool], what: str) -> None:
    await asyncio.to_thread(wait_until, condition, what)


def are_ready(registry: Path, *names: str) -> bool:
    found = nodes(registry)
    return all(name in found and found[name].has("films", 1, "ready") for name in names)


def test_a_node_that_ends_under_load_fails_no_lookup(folder: Path, registry: Path) -> None:
    async def scenario(first: Program) -> None:
        await until(partial(are_ready, registry, "a", "b"), "both nodes")
        snapshot = Snapshot.open(folder / "store" / "films" / "1")
        plan = Plan.make(snapshot.spec)
        metrics = await asyncio.to_thread(httpx.get, first.read_until(r"metrics: (http://\S+)")[1])
        assert 'state="live"' in metrics.text
        clients = [ShardClient(Address(path=f"{folder}/{name}.sock")) for name in ("a", "b")]
        shard = ReplicatedShard(plan, 0, snapshot.identity, clients)
        # Large enough to be pooled by a thread, not by the event loop.
        bags = random_table_bags(np.random.default_rng(3), plan.layout, 2000, 10)
        answers: set[bytes] = set()
        answered, ended = 0, asyncio.Event()

        async def load() -> None:
            nonlocal answered
            while not ended.is_set():
                answer = await shard.pool("films", 1, bags, time.monotonic() + WAIT_S)
                answers.add(b"".join(block.tobytes() for block in answer.sums))
                answered += 1

        loads = [asyncio.create_task(load()) for _ in range(3)]
        await until(lambda: answered > 20, "lookups by both")
        assert await asyncio.to_thread(first.stop, signal.SIGTERM) == 0
        before = answered
        await until(lambda: answered > before + 20, "lookups by the other")
        ended.set()
        await asyncio.gather(*loads)
        assert len(answers) == 1
        await until(lambda: set(nodes(registry)) == {"b"}, "the end of the first")
        await shard.close()

    admin = ("--admin-listen", "127.0.0.1:0")
    with running("shard-node", *flags(folder, "a"), *admin) as first, running("shard-node", *flags(folder, "b")):
        asyncio.run(scenario(first))


def test_a_node_whose_cards_have_failed_leaves_with_their_error(folder: Path, registry: Path) -> None:
    async def scenario() -> None:
        identity = NodeIdentity(shard_index=0, num_shards=1, num_cards=2, sharding="hash")
        cards, node = EmulatedCards(2), ShardNode(identity)
        given = [*flags(folder, "a"), "--cards", "2", "--replicate-bytes", "0", "--stage-cpu-share", "1"]
        options = shard_node.make_context("shard-node", given).params
        address = Address(path=f"{folder}/a.sock")
        serving = _serve_rows_in_fleet(options, *_fleet_configs(options), node, CardSet(cards), [address], None)
        program = asyncio.create_task(serving)
        await until(partial(are_ready, registry, "a"), "the node")
        cards.fault = "device 0: cudaErrorIllegalAddress"
        with pytest.raises(CardError, match="cudaErrorIllegalAddress"):
            await asyncio.wait_for(program, WAIT_S)
        cards.fault = ""
        node.close()

    asyncio.run(scenario())
    assert nodes(registry) == {}
