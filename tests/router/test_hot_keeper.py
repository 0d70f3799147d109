"""A tier has the hottest rows, never older than it is itself, and what goes wrong leaves it empty."""

from __future__ import annotations

import asyncio
import copy
import itertools
import shutil
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loader.deltas.publisher import AsyncDeltaPublisher
from loader.registry import open_registry
from loader.registry.fleet import FleetRegistry, delta_stream
from loader.snapshot.codecs import RowCodec
from loader.snapshot.reader import Snapshot
from router.errors import HotRowsError
from router.feature_schema import FeatureSchema
from router.hot_keeper import HotBudget, HotRowsKeeper, HotStatus, learning_counter
from router.hot_rows import HotRowsConfig, HotSet, KeyNumbers
from router.plan import Plan
from router.router import Router
from router.shard import ReplicaSource, ReplicatedShard
from shard_node.access_counts import TABLE_SHIFT
from shard_node.agent.delta_follower import Followers
from shard_node.bags import Bags, Int64Array, TableLayout
from shard_node.engine.loading import load_tables
from shard_node.engine.memory import RowMemory
from shard_node.errors import MemoryBudgetError
from shard_node.node import ServedVersion, ShardNode
from shard_node.wire.address import Address
from shardrank_testing import bags as table_bags
from shardrank_testing import nodes as running
from shardrank_testing.deltas import StreamWriter, make_batch, register_version
from shardrank_testing.keyed_tables import KeyedModel, keyed_spec, random_keys
from shardrank_testing.snapshots import make_spec, write_snapshot
from shardrank_testing.topologies import hot_keys, lookup, make_node, make_router

SPEC = make_spec(bucketing="mixed")
MODEL = SPEC.model
LAYOUT = TableLayout.of(SPEC)
TABLES = {table.name: table for table in SPEC.tables}
ROOMY = HotRowsConfig(size_bytes=1 << 20)
STATIC = HotRowsConfig(size_bytes=40_000, policy="static")
COUNTS = {"user": np.where(np.arange(1000) % 100 == 7, 50, 0), "film": np.arange(777)[::-1] // 100}


class Nodes:
    """Two shards of two nodes each behind sockets; which of them follow deltas is the test's to say."""

    def __init__(self, folder: Path, snapshot: Snapshot, stack: AsyncExitStack) -> None:
        self.snapshot, self.stack = snapshot, stack
        self.plan = Plan.make(snapshot.spec, 2, "hash", replicate_bytes=0)
        self.registry = open_registry(folder / "registry")
        self.fleet = FleetRegistry(self.registry)
        self.publisher = AsyncDeltaPublisher(self.registry, snapshot.spec.model, snapshot.version)
        self.nodes: dict[tuple[int, int], ShardNode] = {}
        self.addresses: dict[tuple[int, int], Address] = {}
        self._folder = folder

    async def start(self) -> Nodes:
        for shard, replica in np.ndindex(2, 2):
            node = make_node(self.snapshot, self.plan, shard)
            at = running.serving(Address(path=f"{self._folder}/{shard}-{replica}.sock"), node)
            server = await self.stack.enter_async_context(at)
            self.nodes[shard, replica], self.addresses[shard, replica] = node, server.addresses[0]
        await register_version(self.registry, self.snapshot)
        self.stack.push_async_callback(self.registry.close)
        return self

    async def follow(self, *names: tuple[int, int]) -> Followers:
        """Have these nodes, or all, follow deltas; the last one by the followers that are returned."""
        for name in names or self.nodes:
            followers = Followers(self.fleet)
            model = self.snapshot.spec.model
            payload = self.nodes[name].generations.payload(model, self.snapshot.version)
            await followers.reconcile(model, {self.snapshot.version: payload})
            self.stack.push_async_callback(followers.close)
        return followers

    async def publish(self, table: str, rows: list[int], value: float) -> int:
        values = np.full((len(rows), TABLES[table].embedding_dim), value, np.float32)
        return await self.publisher.publish(table, np.array(rows), values)

    def connect(self) -> list[ReplicatedShard]:
        return [
            ReplicatedShard(
                self.plan,
                shard,
                self.snapshot,
                ReplicaSource.fixed([self.addresses[shard, replica] for replica in range(2)]),
            )
            for shard in range(2)
        ]

    async def keep(self, config: HotRowsConfig = STATIC, *, registry: bool = True, **more: Any) -> HotRowsKeeper:
        if registry:
            more["fleet"] = self._open_fleet
        keeper = HotRowsKeeper(config, self.snapshot, self.plan, self.connect, **more)
        self.stack.push_async_callback(asyncio.to_thread, keeper.close)
        await asyncio.to_thread(keeper.start)
        return keeper

    def _open_fleet(self) -> FleetRegistry:
        fleet = copy.copy(self.fleet)
        fleet.registry = open_registry(self._folder / "registry")
        return fleet

    def router(self, keeper: HotRowsKeeper) -> Router:
        router = make_router(self.snapshot, self.plan, self.connect(), keeper.rows)
        self.stack.push_async_callback(router.close)
        return router


@pytest.fixture(scope="module")
def snapshots(tmp_path_factory):
    counted, _ = write_snapshot(tmp_path_factory.mktemp("c"), SPEC, seed=1, access_counts=COUNTS)
    plain, _ = write_snapshot(tmp_path_factory.mktemp("p"), SPEC, seed=1)
    return {True: Snapshot.open(counted), False: Snapshot.open(plain)}


@pytest.fixture
async def nodes(snapshots, tmp_path, request) -> AsyncIterator[Nodes]:
    async with AsyncExitStack() as stack:
        yield await Nodes(tmp_path, snapshots[getattr(request, "param", True)], stack).start()


UNCOUNTED = pytest.mark.parametrize("nodes", [False], indirect=True)


until = partial(running.until, pause_s=0.01)


def sequence_of(node: ShardNode) -> int:
    return node.info().versions[0].delta_sequence


def held(hot: HotSet, table: str) -> dict[int, np.ndarray]:
    """The rows of a table that a set has, decoded."""
    number = LAYOUT.index[table]
    chosen = np.flatnonzero(hot.keys >> TABLE_SHIFT == number)
    rows = {}
    spec = TABLES[table]
    (stored,) = [rows for rows in hot.read(chosen) if len(rows)] or [np.zeros((0, 1), np.uint8)]
    if len(stored):
        values = RowCodec(spec.dtype, spec.embedding_dim).decode(stored)
        rows |= dict(zip((hot.keys[chosen] & 0xFFFFFFFF).tolist(), values, strict=True))
    return rows


def exported(snapshot: Snapshot, table: str, row: int) -> np.ndarray:
    spec = TABLES[table]
    return RowCodec(spec.dtype, spec.embedding_dim).decode(snapshot.read_rows(table, row, 1))[0]


def bags_of(users: Int64Array) -> Bags:
    """Feature `user` alone, one id a bag."""
    return table_bags.bags_of({FeatureSchema.of(SPEC).index["user"]: users.reshape(-1, 1)})


async def test_static_rows_are_those_with_most_counts(nodes):
    config = HotRowsConfig(size_bytes=8_000, policy="static")
    keeper = await nodes.keep(config)
    users, films = held(keeper.rows.current, "user"), held(keeper.rows.current, "film")
    # The ten users that count 50, and the films that count most: those of the lowest numbers.
    assert sorted(users) == list(range(7, 1000, 100))
    assert 0 < len(films) < 100
    assert all(row < 100 for row in films)
    for table, rows in (("user", users), ("film", films)):
        for row, values in rows.items():
            np.testing.assert_array_equal(values, exported(nodes.snapshot, table, row))


async def test_deltas_around_reading_are_in_the_rows(nodes):
    await nodes.publish("user", [7, 107], 1.0)
    last = await nodes.publish("film", [3], 2.0)
    await nodes.follow()
    await until(lambda: all(sequence_of(node) == last for node in nodes.nodes.values()))
    keeper = await nodes.keep()
    users = held(keeper.rows.current, "user")
    np.testing.assert_allclose(users[7], 1.0, atol=1e-6)
    np.testing.assert_array_equal(users[207], exported(nodes.snapshot, "user", 207))
    np.testing.assert_allclose(held(keeper.rows.current, "film")[3], 2.0, atol=1e-6)
    last = await nodes.publish("user", [7, 8, 207], 3.0)
    await until(lambda: keeper.rows.deltas.sequence == last)
    users = held(keeper.rows.current, "user")
    np.testing.assert_allclose(users[7], 3.0, atol=1e-6)
    np.testing.assert_allclose(users[107], 1.0, atol=1e-6)
    np.testing.assert_allclose(users[207], 3.0, atol=1e-6)
    assert 8 not in users


async def test_a_lagging_node_is_not_read_from(nodes):
    last = await nodes.publish("user", [7, 107, 207], 5.0)
    # The first node of each shard never hears of it.
    await nodes.follow((0, 1), (1, 1))
    await until(lambda: sequence_of(nodes.nodes[0, 1]) == sequence_of(nodes.nodes[1, 1]) == last)
    for _ in range(3):
        keeper = await nodes.keep()
        users = held(keeper.rows.current, "user")
        for row in (7, 107, 207):
            np.testing.assert_allclose(users[row], 5.0, atol=1e-6)


@UNCOUNTED
async def test_rows_are_never_older_than_the_tier(nodes):
    await nodes.follow()
    statuses: list[HotStatus] = []
    keeper = await nodes.keep(ROOMY, on_status=statuses.append)
    rows, rng = list(range(0, 1000, 50)), np.random.default_rng(1)
    written = {row: [(0, 0.0)] for row in rows}
    router = nodes.router(keeper)
    seen: set[int] = set()
    for turn in itertools.count():
        if turn >= 30 and len(seen) >= 10:
            break
        chosen = rng.choice(rows, 5, replace=False).tolist()
        sequence = await nodes.publish("user", chosen, float(turn + 1))
        for row in chosen:
            written[row].append((sequence, float(turn + 1)))
        # Others are looked up in every third turn: sets change.
        hot = np.repeat(np.array(rows[turn % 30 // 10 * 5 :][:10], np.int64), 80)
        await lookup(router, nodes.snapshot, bags_of(hot))
        with keeper.rows.used() as (found, before, _):
            for row, values in held(found, "user").items():
                if row in written:
                    least = [value for number, value in written[row] if number <= before][-1]
                    assert least == 0.0 or values[0] >= least - 1e-6
                    seen.add(row)
        await asyncio.sleep(0.02)
    assert sum(status.hits.sum() for status in statuses) + keeper.rows.counts()[1].sum() > 0


@UNCOUNTED
async def test_rows_looked_up_most_are_learned_for_the_next_version(nodes):
    statuses: list[HotStatus] = []
    keeper = await nodes.keep(ROOMY, on_status=statuses.append)
    assert keeper.rows.current.keys.size == 0
    router = nodes.router(keeper)
    users = np.repeat(np.arange(5, 15), 100)
    expected = [block.tobytes() for block in (await lookup(router, nodes.snapshot, bags_of(users))).blocks]
    learned = hot_keys(LAYOUT, {"user": list(range(5, 15))})
    while keeper.rows.current.keys.size < learned.size:
        blocks = (await lookup(router, nodes.snapshot, bags_of(users))).blocks
        assert [block.tobytes() for block in blocks] == expected
        await asyncio.sleep(0.02)
    # No shard is sent a request for rows that are all hot.
    assert (await lookup(router, nodes.snapshot, bags_of(users))).times.wire_bytes[0] == 0
    np.testing.assert_array_equal(keeper.rows.current.keys, learned)
    await until(lambda: statuses[-1].rows == learned.size)
    lookups, hits = (int(of_tables.sum()) for of_tables in keeper.rows.counts())
    lookups += sum(int(status.lookups.sum()) for status in statuses)
    hits += sum(int(status.hits.sum()) for status in statuses)
    assert hits >= users.size
    assert lookups % users.size == 0
    after = await nodes.keep(ROOMY, before=keeper.rows)
    np.testing.assert_array_equal(after.rows.current.keys, learned)


async def test_keys_are_learned_and_come_and_go_with_their_copies(tmp_path):
    """Deleted ones are asked of shards again, which say that they are missing; a later upsert brings them back."""
    model = KeyedModel(tmp_path / "store", "fp32")
    async with AsyncExitStack() as stack:
        nodes = await Nodes(tmp_path, model.snapshot, stack).start()
        await nodes.follow()
        keeper = await nodes.keep(ROOMY)
        router, hot = nodes.router(keeper), keeper.rows
        # What is missing is counted too, and no copy is made of it.
        drawn = [model.bags(max_bags=6) for _ in range(20)]
        asked = {name: np.concatenate([keys_of(model, bags, name) for bags in drawn]).tolist() for name in model.keyed}

        async def check() -> int:
            for bags in drawn:
                model.check(bags, await lookup(router, model.snapshot, bags))
            return int(hot.counts()[1][model.schema.layout.is_keyed].sum())

        def have_all(sequence: int) -> bool:
            return min(*map(sequence_of, nodes.nodes.values()), hot.deltas.sequence) >= sequence

        # All of them fit, but those that are missing.
        known_asked = sum(key in model.rows[name] for name, keys in asked.items() for key in keys)
        while (before := await check()) < known_asked:
            continue
        for name, keys in asked.items():
            known = sorted({*keys} & {*model.rows[name]})
            for change in ("delete", "upsert", "delete"):
                some = np.array(known[:: 2 if change == "delete" else 3])
                if change == "delete":
                    sequence = await nodes.publisher.delete(name, some)
                    model.delete(name, some)
                else:
                    rows = model.rng.normal(size=(some.size, model.keyed[name].embedding_dim)).astype(np.float32)
                    sequence = await nodes.publisher.upsert(name, some, rows)
                    model.put(name, some, rows)
                await until(partial(have_all, sequence))
                await check()
        assert 0 < await check() < before
        # It goes on to learn meanwhile.
        known = [set(hot.current.rows.tolist())]
        after = await nodes.keep(ROOMY, before=hot)
        known.append(set(hot.current.rows.tolist()))
        assert set(after.rows.current.rows.tolist()) in known
        router = nodes.router(after)
        await check()


def keys_of(model: KeyedModel, bags: Bags, table: str) -> np.ndarray:
    of_table = [
        number for number, each in enumerate(model.schema.features) if model.spec.table_of(each.name).name == table
    ]
    return bags.values[np.isin(bags.keys, of_table).repeat(bags.values_per_key())]


def test_keys_keep_their_numbers_until_they_are_forgotten():
    layout, rng = TableLayout.of(keyed_spec()), np.random.default_rng(4)
    films, plain, shops = (layout.index[name] for name in ("films", "plain", "shops"))
    numbers, keys = KeyNumbers(layout, 100), random_keys(rng, 60)
    tables = np.repeat([films, plain, shops], [60, 30, 40])
    rows = np.concatenate([keys, np.arange(30), keys[:40]])
    counted = numbers.counted(tables, rows)
    assert np.unique(counted).size == rows.size
    assert (counted >> TABLE_SHIFT).tolist() == tables.tolist()
    assert numbers.rows(counted).tolist() == rows.tolist()
    # A hundred have room: of the others some are not counted, whichever.
    more = numbers.counted(np.full(90, films), np.concatenate([keys, np.arange(10**6, 10**6 + 90)])[-90:])
    assert numbers.counted(tables, rows).tolist() == counted.tolist()
    assert more.size == 40
    kept = counted[10:20]
    numbers.keep(np.concatenate([kept, counted[tables == shops]]))
    assert numbers.rows(numbers.counted(tables[10:20], rows[10:20])).tolist() == rows[10:20].tolist()
    assert numbers.counted(tables[10:20], rows[10:20]).tolist() == kept.tolist()
    others = random_keys(rng, 90)
    known = numbers.counted(np.full(90, films), others)
    assert numbers.rows(known).tolist() == others.tolist()[: known.size]
    assert known.size == 90


async def test_a_tier_that_begins_again_counts_its_first_keys_anew(tmp_path, monkeypatch):
    """Their numbers may have been forgotten, and be another key's, whose copy would be taken for theirs."""
    monkeypatch.setattr("router.hot_keeper.RETRY_S", 0.05)
    model = KeyedModel(tmp_path / "store", "fp32")
    films = model.schema.layout.index["films"]
    async with AsyncExitStack() as stack:
        nodes = await Nodes(tmp_path, model.snapshot, stack).start()
        before = await nodes.keep(ROOMY)
        router = nodes.router(before)
        while films not in before.rows.current.keys >> TABLE_SHIFT:
            await lookup(router, model.snapshot, model.bags())
        keeper = await nodes.keep(ROOMY, before=before.rows)
        hot, is_down = keeper.rows, asyncio.Event()
        is_down.set()
        hot.numbers.counted(np.full(5000, films), np.arange(10**9, 10**9 + 5000))
        hot.numbers.keep(np.empty(0, np.int64))
        check_nodes, first = keeper._check_nodes, hot.current.rows

        async def check_or_fail(*shards: Any, **follows: bool) -> list[ServedVersion]:
            if is_down.is_set():
                is_down.clear()
                raise HotRowsError("no node answers")
            return await check_nodes(*shards, **follows)

        monkeypatch.setattr(keeper, "_check_nodes", check_or_fail)
        await until(lambda: not is_down.is_set())
        await until(lambda: not hot.current.keys.size)
        await until(lambda: bool(hot.current.keys.size))
        again = hot.current
        assert sorted(again.rows.tolist()) == sorted(first.tolist())
        assert hot.numbers.rows(again.keys).tolist() == again.rows.tolist()
        others = hot.numbers.counted(np.full(10**4, films), np.arange(2 * 10**9, 2 * 10**9 + 10**4))
        assert not np.isin(others, again.keys).any()


async def test_without_a_registry_a_delta_empties_the_tier(nodes, caplog):
    keeper = await nodes.keep(registry=False)
    assert keeper.rows.current.keys.size
    await nodes.publish("user", [7], 5.0)
    await nodes.follow()
    await until(lambda: not keeper.rows.current.keys.size)
    assert "row updates" in caplog.text


async def test_copies_are_dropped_while_a_node_has_forked(nodes, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr("router.hot_keeper.RETRY_S", 0.05)
    stream = StreamWriter(SPEC)
    stream.write("user", [7], np.full((1, 16), 1.0))
    await stream.put(nodes.registry)
    followers = [await nodes.follow(name) for name in nodes.nodes]
    keeper = await nodes.keep()
    await until(lambda: held(keeper.rows.current, "user").get(7, [0.0])[0] == 1.0)
    shutil.rmtree(tmp_path / "registry" / "streams")
    stream = StreamWriter(SPEC)
    stream.write("user", [7], np.full((1, 16), 2.0))
    await stream.put(nodes.registry)
    await until(lambda: "row updates of a node have forked" in caplog.text)
    assert not keeper.rows.current.keys.size
    for (shard, replica), node, of_node in zip(nodes.nodes, nodes.nodes.values(), followers, strict=True):
        await of_node.close()
        tables = load_tables(nodes.snapshot, nodes.plan.partition(shard), nodes.plan.digest)
        node.generations.replace(MODEL, nodes.snapshot.version, tables)
        await nodes.follow((shard, replica))
    await until(lambda: bool(keeper.rows.current.keys.size))
    assert held(keeper.rows.current, "user")[7][0] == 2.0


async def test_a_shard_without_nodes_is_tried_again(nodes, tmp_path, monkeypatch):
    """Again and again, while some lookup always uses the tier, as under load."""
    monkeypatch.setattr("router.hot_keeper.RETRY_S", 0.05)
    there, nodes.addresses[1, 0] = dict(nodes.addresses), Address.parse(f"unix:{tmp_path}/nobody.sock")
    nodes.addresses[1, 1] = nodes.addresses[1, 0]
    keeper = await nodes.keep()
    assert not keeper.rows.current.keys.size
    with keeper.rows.used():
        await asyncio.sleep(0.5)
        (tmp_path / "nobody.sock").symlink_to(there[1, 0].path)
        await until(lambda: bool(keeper.rows.current.keys.size))


async def test_memory_of_the_tier_is_claimed_and_freed(nodes):
    memory = RowMemory(cap_bytes=50_000)
    keeper = await nodes.keep(memory=memory)
    assert memory.held_bytes == 40_000
    with pytest.raises(MemoryBudgetError):
        await nodes.keep(memory=memory)
    await asyncio.to_thread(keeper.close)
    assert memory.held_bytes == 0
    assert not keeper.rows.current.keys.size


@pytest.mark.parametrize("policy", ["static", "learning"])
def test_a_learning_budget_leaves_room_for_a_second_set(policy):
    hottest = np.arange(1000, dtype=np.int64) + (LAYOUT.index["user"] << TABLE_SHIFT)
    before = 0
    for size_bytes in (20_000, 27_000, 40_000, 120_000):
        keys = HotBudget(HotRowsConfig(size_bytes=size_bytes, policy=policy), LAYOUT).fitting(hottest)
        assert before <= keys.size < hottest.size or size_bytes == 120_000
        assert HotSet(LAYOUT, keys).size_bytes * (2 if policy == "learning" else 1) <= size_bytes + 1_000
        before = keys.size
    with pytest.raises(HotRowsError, match="no room for one row"):
        HotBudget(HotRowsConfig(size_bytes=10, policy=policy), LAYOUT)


ROWS = 20_000


@pytest.mark.parametrize("exponent", [1.1, 0.6])
def test_the_learned_rows_are_nearly_the_hottest(exponent):
    """Within two points of the hit rate of the top rows, also some time after all rows changed places."""
    rng, capacity = np.random.default_rng(1), 500
    counter, chance = learning_counter(capacity), np.arange(1, ROWS + 1) ** -exponent
    ends = np.cumsum(chance / chance.sum())
    for _ in range(2):
        row_of_rank, share_of_row = rng.permutation(ROWS), np.empty(ROWS)
        share_of_row[row_of_rank] = chance / chance.sum()
        for _ in range(200):
            counter.add(row_of_rank[np.searchsorted(ends, rng.random(capacity))])
            if counter.is_full:
                counter.fold()
        learned = counter.fold().most_frequent(capacity).keys
        assert share_of_row[learned].sum() > ends[capacity - 1] - 0.02


async def test_copies_never_follow_another_fleets_registry(nodes, tmp_path):
    await nodes.fleet.check_identity(create=True)
    keeper = await nodes.keep()
    other, stream = open_registry(tmp_path / "other"), StreamWriter(SPEC)
    await FleetRegistry(other).check_identity(create=True)
    stream.write("user", [7], np.full((1, 16), 66.0))
    await stream.put(other)
    shutil.move(tmp_path / "registry", tmp_path / "away")
    shutil.move(tmp_path / "other", tmp_path / "registry")
    await asyncio.sleep(0.3)
    assert keeper.rows.deltas.sequence == 0
    np.testing.assert_array_equal(held(keeper.rows.current, "user")[7], exported(nodes.snapshot, "user", 7))
    shutil.move(tmp_path / "registry", tmp_path / "other")
    shutil.move(tmp_path / "away", tmp_path / "registry")
    await nodes.publish("user", [7], 5.0)
    await until(lambda: held(keeper.rows.current, "user")[7][0] == 5.0)
    await other.close()


@pytest.mark.parametrize("is_chained", [True, False])
async def test_copies_are_dropped_after_nodes_forked_and_mended(nodes, tmp_path, is_chained):
    """They do so in less than the keeper's interval between two polls, and with a restart nothing tells of a fork."""
    stream = StreamWriter(SPEC) if is_chained else None
    if stream is None:
        batch = make_batch(SPEC, "user", 1, [7], np.full((1, 16), 1.0, np.float32))
        await nodes.registry.append(delta_stream(MODEL, 1), 1, batch.encode())
    else:
        stream.write("user", [7], np.full((1, 16), 1.0))
        await stream.put(nodes.registry)
    followers = [await nodes.follow(name) for name in nodes.nodes]
    await until(lambda: all(sequence_of(node) == 1 for node in nodes.nodes.values()))
    keeper = await nodes.keep()
    assert held(keeper.rows.current, "user")[7][0] == 1.0
    shutil.rmtree(tmp_path / "registry" / "streams")
    for (shard, replica), node, of_node in zip(nodes.nodes, nodes.nodes.values(), followers, strict=True):
        await of_node.close()
        tables = load_tables(nodes.snapshot, nodes.plan.partition(shard), nodes.plan.digest)
        node.generations.replace(MODEL, nodes.snapshot.version, tables)
        await nodes.follow((shard, replica))
    stream = StreamWriter(SPEC)
    stream.write("user", [107], np.full((1, 16), 2.0), sequence=2)
    await stream.put(nodes.registry)
    await until(lambda: all(sequence_of(node) == 2 for node in nodes.nodes.values()))
    await until(lambda: bool(keeper.rows.current.keys.size) and held(keeper.rows.current, "user")[7][0] != 1.0)
    np.testing.assert_array_equal(held(keeper.rows.current, "user")[7], exported(nodes.snapshot, "user", 7))


async def test_copies_stay_while_a_shard_has_no_node_with_the_version(nodes, monkeypatch):
    monkeypatch.setattr("router.hot_keeper.STATUS_EVERY_S", 0.05)
    keeper = await nodes.keep()
    for replica in range(2):
        nodes.nodes[0, replica].generations.retire(MODEL, nodes.snapshot.version)
    await asyncio.sleep(0.3)
    assert keeper.rows.current.keys.size
