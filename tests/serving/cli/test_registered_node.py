"""`shardrank shard-node --registry` as processes: they join, hold what is wanted, and leave without a failed lookup."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from loader.registry.fleet import FleetRegistry, NodeRecord, WantedModel
from loader.registry.opening import open_registry
from loader.snapshot.publishing import register
from loader.snapshot.reader import Snapshot
from router.plan import Plan
from router.replicas import ReplicatedShard
from serving.cli import main
from serving.cli.serve import _fleet_configs, _serve_rows_in_fleet, shard_node
from shard_node.cuda.card_set import CardSet
from shard_node.errors import CardError
from shard_node.node import ShardNode
from shard_node.partition import NodeIdentity
from shard_node.wire.address import Address
from shard_node.wire.client import ShardClient
from shardrank_testing.bags import random_table_bags
from shardrank_testing.emulated_cards import EmulatedCards
from shardrank_testing.processes import Program, running
from shardrank_testing.snapshots import make_spec, write_snapshot

NEVER_S = 60.0


def start(stack: AsyncExitStack, folder: Path, name: str, *more: str) -> Program:
    return stack.enter_context(
        running(
            *("shard-node", "--registry", str(folder / "registry"), "--store", str(folder / "store")),
            *("--shard", "0/1", "--node-id", name, "--listen", f"unix:{folder}/{name}.sock", *more),
        )
    )


@asynccontextmanager
async def fleet_in(folder: Path) -> AsyncIterator[FleetRegistry]:
    registry = open_registry(str(folder / "registry"))
    try:
        yield FleetRegistry(registry)
    finally:
        await registry.close()


async def publish(fleet: FleetRegistry, folder: Path, version: int) -> Snapshot:
    path, _ = write_snapshot(folder / "store", make_spec(), seed=version, version=version)
    snapshot = Snapshot.open(path)
    await register(fleet, snapshot, clock=time.time)
    return snapshot


async def want(fleet: FleetRegistry, **changes: object) -> None:
    def change(now: WantedModel | None) -> WantedModel:
        return (now or WantedModel(model="films", epoch=1)).model_copy(update=changes)

    await fleet.update_wanted("films", change)


async def until(fleet: FleetRegistry, condition: Callable[[dict[str, NodeRecord]], bool]) -> None:
    async with asyncio.timeout(NEVER_S):
        while not condition({one.node_id: one for one in await fleet.nodes()}):  # noqa: ASYNC110
            await asyncio.sleep(0.02)


def is_ready(node_id: str, version: int) -> Callable[[dict[str, NodeRecord]], bool]:
    def ready(nodes: dict[str, NodeRecord]) -> bool:
        report = nodes[node_id].report("films", version) if node_id in nodes else None
        return report is not None and report.state == "ready"

    return ready


def test_a_node_that_is_told_to_end_under_load_leaves_the_fleet_and_fails_no_lookup(tmp_path):
    async def scenario():
        async with AsyncExitStack() as stack:
            fleet = await stack.enter_async_context(fleet_in(tmp_path))
            snapshot = await publish(fleet, tmp_path, 1)
            await want(fleet, hold=(1,), live=1)
            first, _ = start(stack, tmp_path, "a"), start(stack, tmp_path, "b")
            await until(fleet, lambda nodes: is_ready("a", 1)(nodes) and is_ready("b", 1)(nodes))
            plan = Plan.make(snapshot.spec)
            clients = [ShardClient(Address(path=f"{tmp_path}/{name}.sock")) for name in ("a", "b")]
            shard = ReplicatedShard(plan, 0, snapshot.identity, clients)
            stack.push_async_callback(shard.close)
            # Large enough to be pooled by a thread, not by the event loop.
            bags = random_table_bags(np.random.default_rng(3), plan.layout, 2000, 10)
            answers: set[bytes] = set()
            answered, ended = 0, asyncio.Event()

            async def load() -> None:
                nonlocal answered
                while not ended.is_set():
                    answer = await shard.pool("films", 1, bags, time.monotonic() + NEVER_S)
                    answers.add(b"".join(block.tobytes() for block in answer.sums))
                    answered += 1

            async def stop() -> int:
                await until(fleet, lambda nodes: answered > 20)
                code = await asyncio.to_thread(first.stop, signal.SIGTERM)
                now = answered
                await until(fleet, lambda nodes: answered > now + 20)
                ended.set()
                return code

            *_, code = await asyncio.gather(load(), load(), load(), stop())
            assert code == 0
            assert len(answers) == 1
            await until(fleet, lambda nodes: set(nodes) == {"b"})

    asyncio.run(scenario())


def test_a_killed_node_comes_back_with_the_live_version_and_a_new_one_is_swapped_in(tmp_path):
    async def scenario():
        async with AsyncExitStack() as stack:
            fleet = await stack.enter_async_context(fleet_in(tmp_path))
            await publish(fleet, tmp_path, 1)
            await publish(fleet, tmp_path, 2)
            await want(fleet, hold=(1,), live=1)
            node = start(stack, tmp_path, "a")
            await until(fleet, is_ready("a", 1))
            assert node.stop(signal.SIGKILL) == -signal.SIGKILL
            await want(fleet, hold=(1, 2))
            start(stack, tmp_path, "a")
            await until(fleet, lambda nodes: is_ready("a", 1)(nodes) and is_ready("a", 2)(nodes))
            await want(fleet, hold=(2,), live=2)
            await until(fleet, lambda nodes: [one.version for one in nodes["a"].versions] == [2])

    asyncio.run(scenario())


def test_a_node_whose_cards_have_failed_leaves_the_fleet_and_ends_with_their_error(tmp_path):
    async def scenario():
        async with AsyncExitStack() as stack:
            fleet = await stack.enter_async_context(fleet_in(tmp_path))
            await publish(fleet, tmp_path, 1)
            await want(fleet, hold=(1,), live=1)
            identity = NodeIdentity(shard_index=0, num_shards=1, num_cards=2, sharding="hash")
            cards, node = EmulatedCards(2), ShardNode(identity)
            registry, address = str(tmp_path / "registry"), Address(path=f"{tmp_path}/a.sock")
            flags = ["--registry", registry, "--store", str(tmp_path / "store"), "--shard", "0/1", "--cards", "2"]
            flags += ["--replicate-bytes", "0", "--listen", str(address), "--node-id", "a", "--stage-cpu-share", "1"]
            options = shard_node.make_context("shard-node", flags).params
            serving = _serve_rows_in_fleet(options, *_fleet_configs(options), node, CardSet(cards), [address], None)
            program = asyncio.create_task(serving)
            await until(fleet, is_ready("a", 1))
            cards.fault = "device 0: cudaErrorIllegalAddress"
            with pytest.raises(CardError, match="cudaErrorIllegalAddress"):
                async with asyncio.timeout(NEVER_S):
                    await program
            assert not await fleet.nodes()
            cards.fault = ""
            node.close()

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--registry", "r"], "--registry needs --store"),
        (["--registry", "r", "--store", "s", "--version", "3"], "--version: not with --registry"),
        (["--store", "s", "--max-memory-gb", "3"], "--max-memory-gb: only with --registry"),
        (["--store", "s", "--model", "a", "--model", "b"], "Several --model need --registry"),
        (["--registry", "r", "--store", "s", "--node-id", "a/b"], "node_id: String should match"),
        (["--registry", "r", "--store", "s", "--advertise", "nowhere"], "address 'nowhere' is none of"),
        (["--registry", "r", "--store", "s", "--model", "a b"], "models"),
        (["--registry", "r", "--store", "s", "--shard", "0/2000"], "num_shards"),
    ],
)
def test_flags_that_do_not_go_together_are_named(arguments, message):
    result = CliRunner().invoke(main, ["shard-node", "--shard", "0/1", "--listen", "unix:/tmp/x", *arguments])
    assert result.exit_code != 0
    assert message in result.output
    assert "listens on" not in result.output
