"""Versions on cards come and go as on the CPU: staged beside the live one, flipped, retired; every byte comes back."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np

from loader.snapshot.publishing import register
from loader.snapshot.reader import Snapshot
from shard_node.access_counts import SAMPLE_EVERY
from shard_node.bags import KeyedBags, TableLayout
from shard_node.cuda.card_set import CardOptions, CardSet
from shard_node.cuda.kernel_params import owners_of
from shard_node.cuda.places import Placer
from shard_node.engine.reference import ReferenceEngine
from shard_node.node import ShardNode
from shard_node.partition import NodeIdentity
from shardrank_testing.agents import NodeUnderTest, run, running_node
from shardrank_testing.bags import assert_blocks_equal, random_table_bags
from shardrank_testing.deltas import (
    MODEL,
    delta_spec,
    export_state,
    load_version,
)
from shardrank_testing.emulated_cards import EmulatedCards
from shardrank_testing.snapshots import make_spec, random_tables, write_snapshot
from shardrank_testing.topologies import decoded_tables

SPEC = delta_spec(rows=700)
MIXED = CardOptions(card_memory_gb=24e-6, pinned_memory_gb=70e-6, hot_gb=2e-6)
TIMEOUT_S = 30.0


def versions(store: Path, count: int) -> list[tuple[Snapshot, ReferenceEngine]]:
    made = []
    for version in range(1, count + 1):
        state = random_tables(SPEC, version)
        snapshot = export_state(store, SPEC, state, version)
        made.append((snapshot, ReferenceEngine(SPEC, decoded_tables(SPEC, state))))
    return made


def some_bags() -> KeyedBags:
    return random_table_bags(np.random.default_rng(8), TableLayout.of(SPEC), 30, 5, weighted=True)


def node_of(num_cards: int) -> ShardNode:
    return ShardNode(NodeIdentity(shard_index=0, num_shards=1, num_cards=num_cards, sharding="hash"))


def test_a_retired_version_frees_all_its_memory(tmp_path, cards):
    held = cards(3)
    card_set = CardSet(held, MIXED)
    node, bags = node_of(3), some_bags()
    before = held.free_bytes() if isinstance(held, EmulatedCards) else None
    (first, first_rows), (second, second_rows) = versions(tmp_path, 2)
    node.stage(MODEL, 1, load_version(first, card_set=card_set))
    node.flip(MODEL, 1)
    one = card_set.memory.held_bytes
    node.stage(MODEL, 2, load_version(second, card_set=card_set))
    assert card_set.memory.held_bytes == tuple(2 * size for size in one)
    assert_blocks_equal(node.pool(MODEL, 1, bags), first_rows.pool(bags), scale=20.0)
    assert_blocks_equal(node.pool(MODEL, 2, bags), second_rows.pool(bags), scale=20.0)
    node.flip(MODEL, 2)
    assert node.retire(MODEL, 1).retired.wait(TIMEOUT_S)
    assert card_set.memory.held_bytes == one
    assert_blocks_equal(node.pool(MODEL, 2, bags), second_rows.pool(bags), scale=20.0)
    assert node.retire(MODEL, 2).retired.wait(TIMEOUT_S)
    assert card_set.memory.held_bytes == (0, 0, 0)
    if before is not None:
        assert held.free_bytes() == before


async def publish(under: NodeUnderTest, store: Path, version: int) -> Snapshot:
    snapshot = Snapshot.open(write_snapshot(store, make_spec(), seed=version, version=version)[0])
    await register(under.fleet, snapshot, clock=time.time)
    return snapshot


def test_an_agent_stages_flips_and_retires_on_cards(tmp_path):
    async def main() -> None:
        cards = EmulatedCards(3)
        card_set = CardSet(cards, CardOptions(card_memory_gb=24e-6, pinned_memory_gb=1e-3, hot_gb=2e-6))
        before = cards.free_bytes()
        async with running_node(str(tmp_path / "registry"), tmp_path / "store", card_set) as under:
            await publish(under, tmp_path / "store", 1)
            await publish(under, tmp_path / "store", 2)
            await under.want("films", hold=(1,), live=1)
            await under.until("films", 1, "ready")
            await under.want("films", hold=(1, 2))
            report = await under.until("films", 2, "ready")
            memory = [use for use in under.node.info().memory if use.version == 2]
            assert {(use.card, use.tier) for use in memory} == {
                *((card, tier) for card in range(3) for tier in ("card", "hot")),
                (0, "pinned"),
            }
            assert report.memory_bytes == sum(use.size_bytes for use in memory)
            layout = under.node.table_layout("films", 2)
            bags = random_table_bags(np.random.default_rng(5), layout, 40, 5)
            under.node.pool("films", 2, bags)
            looked_up = {one.table: one for one in under.node.info().lookups if one.version == 2}
            assert {one.tier for one in looked_up.values()} <= {"card"}
            values = bags.values_per_key().tolist()
            for key, count in zip(bags.keys.tolist(), values, strict=True):
                assert looked_up[layout.tables[key].name].rows == count
            await under.want("films", hold=(2,), live=2)
            await under.until("films", 1, None)
            assert card_set.memory.held_bytes == tuple(
                sum(use.size_bytes for use in memory if use.card == card and use.tier in ("card", "hot"))
                + finder_bytes_of(layout, 3)
                for card in range(3)
            )
        assert card_set.memory.held_bytes == (0, 0, 0)
        assert cards.free_bytes() == before

    run(main())


def finder_bytes_of(layout: TableLayout, num_cards: int) -> int:
    """For each table its number of rows and first place, and where its rows begin at each owner."""
    return len(layout.tables) * (32 + 8 * (num_cards + 2))


def test_rows_looked_up_most_are_hot_in_the_next_version(tmp_path):
    async def main() -> None:
        wanted = [5, 300, 999]
        options = CardOptions(card_memory_gb=1e-3, hot_gb=len(wanted) * 32 / 1e9)
        card_set = CardSet(EmulatedCards(2), options)
        async with running_node(str(tmp_path / "registry"), tmp_path / "store", card_set) as under:
            for version in (1, 2, 3):
                await publish(under, tmp_path / "store", version)
            await under.want("films", hold=(1,), live=1)
            await under.until("films", 1, "ready")
            await under.want("films", hold=(1, 2))
            await under.until("films", 2, "ready")
            assert hot_users(under, 2) != wanted  # nobody had asked for any row by then
            user = np.array([under.node.table_layout("films", 1).index["user"]], np.int32)
            one = np.ones(1, np.int64)
            bags = KeyedBags.from_lengths(user, one, np.array([9]), np.array(3 * wanted, np.int64))
            for _ in range(SAMPLE_EVERY):
                under.node.pool("films", 1, bags)
            await under.want("films", hold=(1, 3))
            await under.until("films", 3, "ready")
            assert hot_users(under, 3) == wanted

    run(main())


def hot_users(under: NodeUnderTest, version: int) -> list[int]:
    with under.node.generations.lease("films", version) as lease:
        plan = lease.payload.engine.plan
    places = Placer(plan).places(plan.layout.index["user"])
    return np.flatnonzero(owners_of(places, 2) == 2).tolist()
