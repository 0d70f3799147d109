"""Versions on cards come and go as on the CPU: staged beside the live one, flipped, retired; every byte comes back."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from loader.deltas.publisher import AsyncDeltaPublisher
from loader.registry.directory import DirectoryRegistry
from loader.snapshot.publishing import register
from loader.snapshot.reader import Snapshot
from shard_node.access_counts import SAMPLE_EVERY
from shard_node.agent.delta_follower import FollowerConfig
from shard_node.agent.node_agent import share_of, stage_tables
from shard_node.bags import KeyedBags, TableLayout
from shard_node.cuda.card_engine import POOLS_PER_CARD
from shard_node.cuda.card_loading import CardTableLoad
from shard_node.cuda.card_set import CardMemory, CardOptions, CardSet
from shard_node.cuda.kernel_params import owners_of
from shard_node.cuda.places import Placer
from shard_node.engine.memory import RowMemory
from shard_node.engine.reference import ReferenceEngine
from shard_node.errors import MemoryBudgetError
from shard_node.node import ShardNode
from shard_node.partition import NodeIdentity
from shardrank_testing.agents import NodeUnderTest, plan_of, published, run, running_node
from shardrank_testing.bags import assert_blocks_equal, random_table_bags
from shardrank_testing.deltas import (
    MODEL,
    assert_stored,
    delta_spec,
    export_state,
    follow,
    load_version,
    register_version,
)
from shardrank_testing.emulated_cards import EmulatedCards
from shardrank_testing.snapshots import make_spec, random_rows, random_tables, write_snapshot
from shardrank_testing.topologies import decoded_tables

SPEC = delta_spec(rows=700)
MIXED = CardOptions(card_memory_gb=24e-6, pinned_memory_gb=70e-6, hot_gb=2e-6)
TIMEOUT_S = 30.0


def free_bytes(cards: EmulatedCards) -> list[int]:
    """Of each card, and of pinned memory."""
    return [*(card.free_bytes() for card in cards.cards), cards.space.free_bytes(None)]


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


def test_a_version_staged_beside_the_live_one_and_retired_gives_every_byte_back(tmp_path, cards):
    held = cards(3)
    card_set = CardSet(held, MIXED)
    node, bags = node_of(3), some_bags()
    before = free_bytes(held) if isinstance(held, EmulatedCards) else None
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
        assert free_bytes(held) == before


def test_the_live_version_answers_right_all_the_while_another_comes_and_goes(tmp_path):
    card_set = CardSet(EmulatedCards(2), MIXED)
    node, bags = node_of(2), some_bags()
    (first, rows), (second, _) = versions(tmp_path, 2)
    node.stage(MODEL, 1, load_version(first, card_set=card_set))
    node.flip(MODEL, 1)
    expected = rows.pool(bags)
    ended, errors, answers = threading.Event(), [], []

    def ask() -> None:
        try:
            while not ended.is_set():
                assert_blocks_equal(node.pool(MODEL, 1, bags), expected, scale=20.0)
                answers.append(1)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(5):
            node.stage(MODEL, 2, load_version(second, card_set=card_set))
            assert node.retire(MODEL, 2).retired.wait(TIMEOUT_S)
    finally:
        ended.set()
        for thread in threads:
            thread.join()
    assert not errors
    assert answers
    node.close()
    assert card_set.memory.held_bytes == (0, 0)


def test_a_version_with_no_room_beside_the_live_one_is_refused_and_fits_once_that_is_gone(tmp_path):
    (first, first_rows), (second, second_rows) = versions(tmp_path, 2)
    cards = EmulatedCards(2, total_bytes=32 << 20)
    card_set = CardSet(cards, MIXED, CardMemory(cards, reserve_bytes=0))
    node, bags, memory = node_of(2), some_bags(), RowMemory()
    partition, digest = plan_of(second, 2)
    node.stage(MODEL, 1, load_version(first, card_set=card_set))
    node.flip(MODEL, 1)
    for _ in range(2 * POOLS_PER_CARD):
        node.pool(MODEL, 1, bags)  # each of the engine's own buffers is as large as it will be
    load = CardTableLoad(second, partition, digest, card_set, upload_bytes=2048)
    # Somebody else takes all but a byte less than the rows need.
    elsewhere = [card.allocate(card.free_bytes() - load.card_bytes[0] + 1) for card in cards.cards]
    before, held = free_bytes(cards), card_set.memory.held_bytes
    with pytest.raises(
        MemoryBudgetError,
        match=rf"rows take {load.card_bytes[0]} bytes of device 0 \(card 0\), but {load.card_bytes[0] - 1} are free "
        rf"and 0 are kept free; versions that are here take {held[0]}, others that are being staged 0\. .* by replica",
    ):
        load.take(memory)
    assert (free_bytes(cards), card_set.memory.held_bytes) == (before, held)
    assert_blocks_equal(node.pool(MODEL, 1, bags), first_rows.pool(bags), scale=20.0)
    assert node.retire(MODEL, 1).retired.wait(TIMEOUT_S)
    tables = load.run(load.take(memory))
    assert_blocks_equal(tables.engine.pool(bags), second_rows.pool(bags), scale=20.0)
    assert len(elsewhere) == 2


@pytest.mark.parametrize("options", [CardOptions(), MIXED], ids=["all on cards", "every tier"])
def test_staging_onto_cards_takes_nothing_on_trust_and_tells_its_share(tmp_path, options):
    (snapshot, rows), (another, _) = versions(tmp_path, 2)
    card_set, memory, shares = CardSet(EmulatedCards(1), options), RowMemory(), []
    record = published(MODEL, 1, snapshot.identity)
    tables = stage_tables(
        snapshot.path, record, plan_of, memory=memory, card_set=card_set, progress=share_of(shares.append)
    )
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    assert memory.held_bytes == sum(use.size_bytes for use in tables.engine.memory() if use.tier == "pinned")
    assert_blocks_equal(tables.engine.pool(some_bags()), rows.pool(some_bags()), scale=20.0)
    tables.close()
    row_file = sorted((another.path / "tables" / "int8").iterdir())[1]
    content = bytearray(row_file.read_bytes())
    content[-3] ^= 4
    row_file.write_bytes(content)
    with pytest.raises(Exception, match=row_file.name):
        stage_tables(another.path, published(MODEL, 2, another.identity), plan_of, memory=memory, card_set=card_set)
    assert (card_set.memory.held_bytes, memory.held_bytes) == ((0,), 0)


class Trainer:
    """Publishes deltas, and knows what rows they make."""

    def __init__(self, registry: DirectoryRegistry, state: dict[str, np.ndarray]):
        self.state = state
        self._publisher = AsyncDeltaPublisher(registry, MODEL, 1)
        self._rng = np.random.default_rng(1)

    async def publish(self, count: int) -> int:
        sequence = 0
        for number in range(count):
            table = SPEC.tables[number % len(SPEC.tables)]
            rows = self._rng.choice(table.num_embeddings, 60, replace=False)
            values = random_rows(self._rng, 60, table.embedding_dim)
            self.state[table.name][rows] = values
            sequence = await self._publisher.publish(table.name, rows, values)
        return sequence


@pytest.mark.parametrize("deferred", [False, True])
def test_rows_caught_up_on_deltas_are_the_bytes_of_a_fresh_export_on_every_copy(tmp_path, deferred):
    async def main() -> None:
        registry = DirectoryRegistry(tmp_path / "registry")
        state = random_tables(SPEC, 5)
        snapshot = export_state(tmp_path / "store", SPEC, state, 1)
        await register_version(registry, snapshot)
        trainer = Trainer(registry, state)
        card_set = CardSet(EmulatedCards(3, deferred=deferred), MIXED)
        live = load_version(snapshot, card_set=card_set)
        await trainer.publish(9)
        await caught_up(registry, snapshot, live, 9)
        # A snapshot that has some of them, staged beside the live one, replays the rest.
        later = export_state(tmp_path / "store", SPEC, state, 2, last_delta=9, delta_base=1)
        sequence = await trainer.publish(11)
        staged = load_version(later, card_set=card_set)
        assert staged.deltas.snapshot().sequence == 9
        await caught_up(registry, snapshot, live, sequence)
        await caught_up(registry, later, staged, sequence)
        fresh = export_state(tmp_path / "store", SPEC, state, 3)
        for tables in (live, staged):
            assert_stored(tables.engine, fresh)
            tables.close()
        assert card_set.memory.held_bytes == (0, 0, 0)
        await registry.close()

    run(main())


async def caught_up(registry, snapshot, tables, sequence: int) -> None:
    follower = follow(registry, snapshot, tables, config=FollowerConfig(poll_s=0.002, retry_s=0.002))
    task = asyncio.create_task(follower.run())
    async with asyncio.timeout(TIMEOUT_S):
        while tables.deltas.sequence < sequence:  # noqa: ASYNC110 - it happens in another thread
            await asyncio.sleep(0.002)
    task.cancel()
    await asyncio.wait([task])


async def publish(under: NodeUnderTest, store: Path, version: int) -> Snapshot:
    snapshot = Snapshot.open(write_snapshot(store, make_spec(), seed=version, version=version)[0])
    await register(under.fleet, snapshot, clock=time.time)
    return snapshot


def test_an_agent_stages_flips_and_retires_versions_on_cards_and_tells_what_they_take(tmp_path):
    async def main() -> None:
        cards = EmulatedCards(3)
        card_set = CardSet(cards, CardOptions(card_memory_gb=24e-6, pinned_memory_gb=1e-3, hot_gb=2e-6))
        before = free_bytes(cards)
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
        assert free_bytes(cards) == before

    run(main())


def finder_bytes_of(layout: TableLayout, num_cards: int) -> int:
    """For each table its number of rows and first place, and where its rows begin at each owner."""
    return len(layout.tables) * (32 + 8 * (num_cards + 2))


def test_the_rows_that_a_live_version_is_asked_for_are_hot_in_the_next_one(tmp_path):
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
