"""A shard node whose cards have failed ends; routers ask another one meanwhile."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from loader.snapshot.reader import Snapshot
from router.errors import ShardUnavailableError
from router.outliers import ReplicaEvents
from router.plan import Plan
from router.replicas import ReplicatedShard
from shard_node.agent.node_agent import watch_cards
from shard_node.cuda.card_set import CardSet
from shard_node.errors import CardError
from shard_node.node import ShardNode
from shard_node.wire.address import Address
from shard_node.wire.client import ShardClient
from shardrank_testing.bags import bags_of
from shardrank_testing.card_engines import options_for
from shardrank_testing.emulated_cards import EmulatedCards
from shardrank_testing.nodes import serving, soon
from shardrank_testing.snapshots import one_table_spec, write_snapshot
from shardrank_testing.topologies import make_node

FAULT = "device 0: launching pool_int8 with 4 x 1 blocks: cudaErrorIllegalAddress"
SPEC = one_table_spec(100)
BAGS = bags_of({0: [[5], [6, 7]]})


@pytest.fixture(scope="module")
def snapshot(tmp_path_factory) -> Snapshot:
    path, _ = write_snapshot(tmp_path_factory.mktemp("store"), SPEC, seed=1)
    return Snapshot.open(path)


PLAN = Plan.make(SPEC, cards_per_shard=2)


def node_on(cards: EmulatedCards, snapshot: Snapshot) -> ShardNode:
    return make_node(snapshot, PLAN, 0, card_set=CardSet(cards, options_for(SPEC, 2, "peers")))


class Looks:
    """Stands between two looks: at each, the next of `faults` is what the cards answer with; then the watch ends."""

    def __init__(self, cards: EmulatedCards, faults: list[str]) -> None:
        self._cards, self._faults = cards, faults

    async def sleep(self, seconds: float) -> None:
        del seconds
        if not self._faults:
            raise asyncio.CancelledError
        self._cards.fault = self._faults.pop(0)


def test_cards_that_keep_failing_end_the_watch(snapshot):
    """A call that failed once does not; cards without a version are watched too."""
    cards = EmulatedCards(2)
    node = node_on(cards, snapshot)
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(watch_cards(node, None, Looks(cards, ["", FAULT, "", FAULT, ""]).sleep))
    with pytest.raises(CardError, match="cudaErrorIllegalAddress"):
        asyncio.run(watch_cards(node, None, Looks(cards, ["", FAULT, FAULT, ""]).sleep))
    cards.fault = ""
    node.close()
    empty = ShardNode(PLAN.identity(0))
    for watched, error in ((None, asyncio.CancelledError), (cards, CardError)):
        with pytest.raises(error):
            asyncio.run(watch_cards(empty, watched, Looks(cards, [FAULT, FAULT, FAULT]).sleep))
    empty.close()


def test_a_router_avoids_a_node_whose_cards_failed(snapshot, tmp_path: Path):
    cards = [EmulatedCards(2), EmulatedCards(2)]
    nodes = [node_on(one, snapshot) for one in cards]
    expected = nodes[0].pool(SPEC.model, snapshot.version, BAGS)[0]

    async def main() -> None:
        async with (
            serving(Address.parse(f"unix:{tmp_path}/0.sock"), nodes[0]) as first,
            serving(Address.parse(f"unix:{tmp_path}/1.sock"), nodes[1]) as second,
        ):
            addresses = [server.addresses[0] for server in (first, second)]
            retries: list[str] = []
            clients = [ShardClient(address) for address in addresses]
            shard = ReplicatedShard(PLAN, 0, snapshot.identity, clients, ReplicaEvents(retried=retries.append))

            async def ask() -> np.ndarray:
                return (await shard.pool(SPEC.model, snapshot.version, BAGS, soon())).sums[0]

            for _ in range(4):
                np.testing.assert_array_equal(await ask(), expected)
            assert retries == []
            for failed in range(2):
                cards[failed].fault = FAULT
                for _ in range(6):
                    np.testing.assert_array_equal(await ask(), expected)
                assert [address for address, _ in await shard.infos()] == [str(addresses[1 - failed])]
                cards[failed].fault = ""
            assert set(retries) == {"card"}
            cards[0].fault = cards[1].fault = FAULT
            with pytest.raises(ShardUnavailableError, match=r"card: .*cudaErrorIllegalAddress"):
                await ask()
            cards[0].fault = cards[1].fault = ""
            await shard.close()

    asyncio.run(main())
    for node in nodes:
        node.close()
