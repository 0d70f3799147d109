"""Following a stream on real registries: in order, each once, refused with a reason, and stopped cleanly.

Whatever happens on the way, rows that are caught up are, byte for byte, a fresh export of the same state.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import tempfile
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loader.deltas.batch import DeltaBatch
from loader.deltas.chain import NUM_PARTITIONS, Commit, Tail
from loader.deltas.publisher import AsyncDeltaPublisher
from loader.errors import DeltaError, DeltaFormatError, RegistryUnavailableError
from loader.registry import open_registry
from loader.registry.fleet import FleetRegistry, delta_stream
from loader.registry.registry import StreamBounds, StreamEntry
from loader.snapshot.reader import Snapshot
from router.plan import Plan
from shard_node.agent.delta_follower import FollowerConfig, Followers, catch_up
from shard_node.engine.cpu import CLAIM_BYTES
from shard_node.engine.loading import load_tables, prepare_load
from shard_node.engine.memory import RowMemory
from shard_node.node import DeltaPosition
from shardrank_testing import deltas, nodes
from shardrank_testing.card_engines import OnCards, OnCpu, engine_params
from shardrank_testing.deltas import (
    MODEL,
    StreamWriter,
    assert_stored,
    delta_spec,
    encoded,
    export_state,
    make_batch,
    stored_rows,
)
from shardrank_testing.errors import raises_kind
from shardrank_testing.registries import REGISTRY_KINDS, redis_server, registry_of
from shardrank_testing.snapshots import model_of, random_rows, random_tables, table_of, with_slices

SPEC = delta_spec(rows=300)
STREAM = delta_stream(MODEL, 1)
TIMEOUT_S = 30.0
CONFIG = FollowerConfig(poll_s=0.002, retry_s=0.002, check_end_s=0.01, max_entries=3)
PLACES = [
    *(OnCpu(num_cards, in_ram) for num_cards in (1, 3) for in_ram in (None, 0)),
    OnCards(1, "peers"),
    OnCards(3, "every tier"),
    OnCards(2, "every tier", "as late as can be"),
]


class Scene:
    """A trainer, its registry, and a version on a node with its follower."""

    def __init__(self, registry, store: Path):
        self.registry, self.store = registry, store
        self.state = random_tables(SPEC, 5)
        self.snapshots = [export_state(store, SPEC, self.state, 1)]
        self.publisher = AsyncDeltaPublisher(registry, MODEL, 1)
        self.rng = np.random.default_rng(1)
        self.published = 0
        self.stage(self.snapshots[0], PLACES[2])

    def stage(self, snapshot: Snapshot, place: OnCpu | OnCards) -> None:
        self.snapshot, self.tables = snapshot, place.tables(snapshot)

    @property
    def position(self) -> DeltaPosition:
        return self.tables.deltas

    def follower(self, registry=None, tables=None, **options):
        return deltas.follow(
            registry or self.registry, self.snapshot, tables or self.tables, **{"config": CONFIG} | options
        )

    @contextlib.asynccontextmanager
    async def following(self, **options) -> AsyncIterator[None]:
        task = asyncio.create_task(self.follower(**options).run())
        yield
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    async def publish(self, count: int = 1, rng: np.random.Generator | None = None) -> None:
        rng = rng or self.rng
        for _ in range(count):
            table = SPEC.tables[int(rng.integers(len(SPEC.tables)))]
            rows = rng.integers(0, table.num_embeddings, int(rng.integers(1, 60)))
            values = random_rows(rng, rows.size, table.embedding_dim)
            for row, value in zip(rows, values, strict=True):
                self.state[table.name][row] = value
            self.published = await self.publisher.publish(table.name, rows, values)

    async def caught_up(self) -> None:
        await until(lambda: self.position.sequence == self.published)

    def check(self) -> None:
        """The rows are, byte for byte, those of a fresh export of what was published."""
        with tempfile.TemporaryDirectory() as folder:
            assert_stored(self.tables.engine, export_state(Path(folder), SPEC, self.state, 1000))


# What becomes true in another thread.
until = functools.partial(nodes.until, pause_s=0.001)


@contextlib.asynccontextmanager
async def scene_on(folder: Path, kind: str = "directory") -> AsyncIterator[Scene]:
    with registry_of(kind, folder) as url:
        registry = open_registry(url)
        scene = Scene(registry, folder / "store")
        try:
            await deltas.register_version(registry, scene.snapshot)
            yield scene
        finally:
            await registry.close()


@pytest.fixture
async def scene(request, tmp_path):
    async with scene_on(tmp_path, getattr(request, "param", "directory")) as scene:
        yield scene


@pytest.mark.parametrize("scene", REGISTRY_KINDS, indirect=True)
async def test_published_deltas_are_applied(scene):
    await scene.publish(5)
    async with scene.following():
        await scene.caught_up()
        await scene.publish(25)
        await scene.caught_up()
        progress = scene.position.now
        assert (progress.sequence, progress.lag, progress.refused) == (30, 0, 0)
        assert progress.rows > 30
    scene.check()


STEPS = st.one_of(
    st.tuples(st.just("publish"), st.integers(0, 2**32)),
    st.tuples(st.just("deliver"), st.lists(st.integers(0, 30), max_size=12)),
    st.tuples(st.just("catch up")),
    st.tuples(st.just("snapshot")),
    st.tuples(st.just("stage"), st.integers(0, 5), st.sampled_from(PLACES)),
)


@given(st.lists(STEPS, max_size=20))
async def test_any_interleaving_equals_a_fresh_export(steps):
    """Deltas come twice, in any order or not at all; followers begin anew; snapshots contain some of the deltas."""
    with tempfile.TemporaryDirectory() as folder:
        async with scene_on(Path(folder)) as scene:
            for step in steps:
                await play(scene, step)
                assert scene.position.sequence <= scene.published
            async with scene.following():
                await scene.caught_up()
            scene.check()


async def play(scene: Scene, step: tuple[Any, ...]) -> None:
    match step:
        case ("publish", seed):
            await scene.publish(rng=np.random.default_rng(seed))
        case ("deliver", sequences):
            entries = {entry.sequence: entry for entry in await scene.registry.read(STREAM, 0)}
            parts = {number: await read_parts(scene.registry, entry) for number, entry in entries.items()}
            with contextlib.suppress(DeltaError):
                scene.follower().apply([entries[number] for number in sequences if number in entries], parts)
        case ("catch up",):
            async with scene.following():
                await scene.caught_up()
        case ("snapshot",):
            version = len(scene.snapshots) + 1
            scene.snapshots.append(export_state(scene.store, SPEC, scene.state, version, scene.published, 1))
        case ("stage", index, place):
            scene.stage(scene.snapshots[index % len(scene.snapshots)], place)


async def read_parts(registry, entry: StreamEntry) -> list[bytes]:
    """What lies beside an entry, without the heads."""
    ranges = Commit.decode(entry.payload).ranges(np.ones(NUM_PARTITIONS, np.bool_))
    return await registry.read_rows(STREAM, [(entry.sequence, *each) for each in ranges])


def delta(number: int, **changes) -> StreamEntry:
    """A delta of a row of table int8; with changes, something that must not be there."""
    batch = make_batch(SPEC, "int8", number, [number], np.ones((1, 4), np.float32))
    return StreamEntry(number, replace(batch, **changes).encode())


BAD = {
    "a flipped bit": (delta(2).payload[:-1] + b"\xff", "does not have the checksum"),
    "no delta at all": (b"hello", "are no delta"),
    "another model's": (delta(2, model="other").payload, "in which delta 2 of 'other' from 1 must not be"),
    "another stream's": (delta(2, delta_base=9).payload, "must not be"),
    "another number's": (delta(2, sequence=3).payload, f"lies at 2 of {STREAM}"),
    "an unknown table's": (delta(2, table="nope").payload, "for table 'nope', which it does not have"),
    "another table's": (delta(2, table="fp32").payload, "table 'fp32' has fp32 rows of 10, the delta int8 of 4"),
    "a row outside": (delta(2, rows=np.array([300])).payload, "row 300 is not in 0..299"),
}


@pytest.mark.parametrize("bad", list(BAD))
async def test_a_wrong_delta_is_refused_and_holds_up_later_ones(scene, bad, caplog):
    payload, message = BAD[bad]
    for number, appended in enumerate((delta(1).payload, payload, delta(3).payload), 1):
        await scene.registry.append(STREAM, number, appended)
    scene.state["int8"][1] = 1.0
    async with scene.following():
        await until(lambda: scene.position.now.refused >= 3)
        progress = scene.position.now
        assert (progress.sequence, progress.lag) == (1, 2)
        assert message in progress.reason
        assert caplog.text.count(progress.reason) == 1  # logged once, counted each time
    scene.check()


async def test_duplicates_are_skipped_and_gaps_refused(scene):
    follower = scene.follower()
    first, second, third, fourth = map(delta, (1, 2, 3, 4))
    follower.apply([first, first, second], {})
    with raises_kind("delta_gap", match=f"needs what follows delta 2, but {STREAM} begins with 4 after 3"):
        follower.apply([second, fourth, third], {})
    with raises_kind("delta_fork", match=f"has delta 2 .* of {STREAM}, where it is another one"):
        follower.apply([delta(2, published_at=9.0)], {})
    assert scene.position.sequence == 2
    follower.apply([first, second, third, second, fourth], {})
    assert (scene.position.sequence, scene.position.now.rows) == (4, 4)


async def test_a_publisher_that_knows_no_digests_begins_new_chains(scene):
    """The entry that it follows was trimmed, with the digests of the last parts."""
    writer, rows = StreamWriter(SPEC), np.arange(300)
    for value in (1.0, 2.0):
        writer.write("int8", rows, np.full((300, 4), value))
    writer.entries[-1] = replace(writer.entries[-1], tail=Tail(2))
    writer.write("int8", rows[:100], np.full((100, 4), 3.0))
    writer.write("int8", rows, np.full((300, 4), 4.0))
    for count in (2, 4):
        await writer.put(scene.registry, count - 2, count)
        await scene.follower().run(until=count)
    np.testing.assert_array_equal(
        stored_rows(scene.tables.engine, "int8"), encoded(SPEC.tables[0], np.full((300, 4), 4.0))
    )


class Unsteady:
    """A registry that can be silent, report other bounds than it has, and return only deltas up to some number."""

    def __init__(self, registry):
        self._registry = registry
        self.silent = False
        self.reported: StreamBounds | None = None
        self.last_read: int | None = None

    async def read(self, *arguments, **limits):
        if self.silent:
            raise RegistryUnavailableError("nobody there")
        entries = await self._registry.read(*arguments, **limits)
        return [entry for entry in entries if self.last_read is None or entry.sequence <= self.last_read]

    async def get(self, key):
        return await self._registry.get(key)

    async def read_rows(self, *arguments):
        return await self._registry.read_rows(*arguments)

    async def bounds(self, stream):
        return self.reported or await self._registry.bounds(stream)


async def test_a_silent_registry_is_waited_for(scene, caplog):
    registry = Unsteady(scene.registry)
    registry.silent = True
    await scene.publish(3)
    with caplog.at_level(logging.INFO, logger="shard_node"):
        async with scene.following(registry=registry):
            await until(lambda: "until the registry answers: nobody there" in caplog.text)
            registry.silent = False
            await scene.caught_up()
            assert caplog.text.count("nobody there") == caplog.text.count("the registry answers again") == 1
    scene.check()


async def test_an_empty_registry_is_waited_for_and_a_lost_end_is_a_fork(scene):
    registry = Unsteady(scene.registry)
    await scene.publish(3)
    following = asyncio.create_task(scene.follower(registry=registry).run())
    await scene.caught_up()
    registry.reported = StreamBounds(0, 0)
    await until(lambda: f"has delta 3, but the registry has no {STREAM}" in scene.position.now.reason)
    await scene.publish()
    for _ in range(5):
        await asyncio.sleep(0)
    assert (scene.position.sequence, scene.position.now.forked) == (3, False)
    registry.reported = None
    await scene.caught_up()
    assert scene.position.now.reason == ""
    scene.check()
    registry.reported = StreamBounds(1, 2)
    with raises_kind("delta_fork", match=rf"has delta 4 \(.*\) of {STREAM}, which ends with 2"):
        await following
    assert (scene.position.sequence, scene.position.now.forked) == (4, True)


async def test_lost_deltas_still_count_as_missing(scene):
    registry = Unsteady(scene.registry)
    registry.last_read = 2
    await scene.publish(3)
    looks = iter(range(1, 10**9))
    async with scene.following(registry=registry, clock=lambda: 2e9 + next(looks)):
        await until(lambda: scene.position.sequence == 2)
        assert (scene.position.now.stream_last, scene.position.now.lag) == (3, 1)
        registry.reported, registry.last_read = StreamBounds(0, 0), 0
        fresh, now = scene.position.now.fresh_at, next(looks)
        await until(lambda: next(looks) > now + 50)
        # The registry does not report a delta 3 any more, but its rows were changed, and not here.
        assert (scene.position.now.lag, scene.position.now.fresh_at) == (1, fresh)
        registry.reported = registry.last_read = None
        await scene.caught_up()
        await until(lambda: scene.position.now.fresh_at > 2e9)
        assert scene.position.now.lag == 0


async def test_catching_up_ends_where_the_stream_has_lost_its_end(scene):
    registry = Unsteady(scene.registry)
    registry.last_read = 2
    await scene.publish(3)
    catching_up = asyncio.create_task(catch_up(FleetRegistry(registry), MODEL, 1, scene.tables, limit_s=None))
    await until(lambda: scene.position.sequence == 2)
    registry.reported = StreamBounds(1, 2)
    await catching_up
    assert not scene.position.now.has_caught_up


async def test_a_follower_without_memory_waits_for_it(scene, caplog):
    """Rows on disk need memory once they are changed."""
    free_bytes = CLAIM_BYTES - 1
    plan, memory = Plan.make(SPEC), RowMemory(available=lambda: free_bytes, reserve_bytes=0)
    load = prepare_load(scene.snapshot, plan.partition(0), plan.digest, memory_budget_bytes=0)
    scene.tables = load.run(load.take(memory))
    await scene.publish(3)
    async with scene.following():
        await until(lambda: scene.position.now.refused >= 3)
        assert scene.position.now.reason == "version 1 of model 'fresh' has no memory for the next delta"
        assert_stored(scene.tables.engine, scene.snapshot)
        (logged,) = [record for record in caplog.records if record.levelno >= logging.ERROR]
        assert f"rows take {CLAIM_BYTES} bytes, but {free_bytes} are available" in logged.getMessage()
        free_bytes += 1
        await scene.caught_up()
        assert (scene.position.now.reason, memory.held_bytes) == ("", CLAIM_BYTES)
    scene.check()


async def test_followers_of_many_shards_read_as_much_as_of_few(tmp_path):
    """What Redis sends to the followers of all shards does not grow with their number; each slice gets its rows."""
    tables = [table_of("item", 20_000, 16, bucketing="mixed"), table_of("wide", 2000, 16, bucketing="mixed")]
    spec = with_slices(model_of(tables, MODEL), {"wide": (4, 12)})
    state, rng = random_tables(spec, 5), np.random.default_rng(1)
    snapshot = export_state(tmp_path / "store", spec, state, 1)
    with redis_server(tmp_path) as server:
        registry = open_registry(server.url)
        await deltas.register_version(registry, snapshot)
        publisher = AsyncDeltaPublisher(registry, MODEL, 1)
        for table in ["item"] * 10 + ["wide"]:
            rows = rng.choice(len(state[table]), 1500, replace=False)
            state[table][rows] = random_rows(rng, rows.size, 16)
            last = await publisher.publish(table, rows, state[table][rows])
        fresh = export_state(tmp_path / "store", spec, state, 2)
        sent = {}
        for num_shards in (1, 2, 4, 8):
            plan = Plan.make(spec, num_shards=num_shards, replicate_bytes=0)
            shards = [load_tables(snapshot, plan.partition(shard), plan.digest) for shard in range(num_shards)]
            before = await output_bytes(registry)
            for of_shard in shards:
                config = FollowerConfig(max_entries=10)
                await deltas.follow(registry, snapshot, of_shard, config=config).run(until=last - 1)
            sent[num_shards] = await output_bytes(registry) - before
            for of_shard in shards:
                await deltas.follow(registry, snapshot, of_shard).run(until=last)
            for table in spec.stored_tables:
                total = sum(stored_rows(of_shard.engine, table.name) for of_shard in shards)
                np.testing.assert_array_equal(total, fresh.read_rows(table.name, 0, table.num_embeddings))
        await registry.close()
    for num_shards in (2, 4, 8):
        assert sent[num_shards] < 1.25 * sent[1], sent


async def output_bytes(registry) -> int:
    """What Redis has sent so far."""
    information = await registry._command("INFO", "stats")
    return int(information["total_net_output_bytes"])


async def test_a_cancelled_follower_finishes_the_delta_it_writes(scene):
    await scene.publish(3)
    entered, go_on = threading.Event(), threading.Event()
    engine = scene.tables.engine
    finished = []

    class Slow:
        layout = engine.layout

        def write_rows(self, table, rows, stored):
            entered.set()
            assert go_on.wait(TIMEOUT_S)
            finished.append(table)
            return engine.write_rows(table, rows, stored)

    task = asyncio.create_task(scene.follower(tables=replace(scene.tables, engine=Slow())).run())
    await until(entered.is_set)
    task.cancel()
    await asyncio.sleep(0)
    task.cancel()
    assert not task.done()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    # The delta that was being written is complete; no other one was begun.
    assert len(finished) == scene.position.sequence == 1


ON_CARDS = engine_params((OnCards(1, "peers"), OnCards(4, "every tier")), ())


@pytest.mark.parametrize("place", [OnCpu(), OnCpu(2), OnCpu(1, 0), *ON_CARDS], ids=str)
def test_deltas_of_a_sliced_table_reach_all_slices(place, tmp_path):
    spec = with_slices(SPEC, {"int8": (12, 4, 12), "int4": (2, 6), "fp32": (1, 3)})
    state, rng = random_tables(spec, 5), np.random.default_rng(2)
    snapshot = export_state(tmp_path, spec, state, 1)
    tables = place.tables(snapshot)
    entries = []
    for sequence in range(1, 9):
        table = spec.tables[sequence % len(spec.tables)]
        rows = np.sort(rng.choice(table.num_embeddings, 60, replace=False))
        state[table.name][rows] = random_rows(rng, 60, table.embedding_dim)
        batch = make_batch(spec, table.name, sequence, rows, state[table.name][rows])
        entries.append(StreamEntry(sequence, batch.encode()))
    follower = deltas.follow(None, snapshot, tables)
    follower.apply(entries, {})
    assert_stored(tables.engine, export_state(tmp_path, spec, state, 2))
    # What training publishes is of the table; a slice is no table of it.
    batch = replace(make_batch(spec, "int8", 9, [1], np.zeros((1, 28))), table="int8.c0")
    with pytest.raises(DeltaFormatError, match=r"for table 'int8\.c0', which it does not have"):
        follower.apply([StreamEntry(9, batch.encode())], {})
    tables.close()


@pytest.mark.parametrize("place", [OnCpu(2), OnCpu(1, 0)])
async def test_updates_of_divided_tables_equal_a_fresh_export(place, tmp_path):
    made = deltas.all_divisions(2)
    snapshot, state = made.export(tmp_path / "store", version=1), made.given
    rng = np.random.default_rng(3)
    registry = open_registry(tmp_path / "registry")
    await deltas.register_version(registry, snapshot)
    publisher = AsyncDeltaPublisher(registry, MODEL, 1, tmp_path / "store")
    sequence, updates = 0, []
    for name in list(state) * 4:
        rows = rng.integers(0, len(state[name]), 40)
        updates.append((name, rows, random_rows(rng, 40, state[name].shape[1])))
    # A trainer that did not hear of its last ones publishes them again.
    for name, rows, values in [*updates, *updates[-6:]]:
        sequence = await publisher.publish(name, rows, values)
        state[name][rows] = values
    for name, pruned in publisher.pruned_updates.items():
        # What the row that stands for pruned ones was made of.
        state[name][pruned.keys] = deltas.all_divisions(2).given[name][pruned.keys]
    tables = place.tables(snapshot)
    follower = deltas.follow(registry, snapshot, tables)
    await follower.run(until=sequence)
    follower.apply(await registry.read(STREAM, sequence - 3), {})
    assert tables.deltas.sequence == sequence
    assert_stored(tables.engine, made.export(tmp_path / "fresh", version=2))
    assert list(publisher.pruned_updates) == ["item", "film"]
    await registry.close()


def followers_running() -> list[asyncio.Task[None]]:
    return [task for task in asyncio.all_tasks() if task.get_name() == f"deltas {MODEL} 1"]


async def test_an_interrupted_stop_starts_no_second_follower(scene, monkeypatch):
    writing, go_on = threading.Event(), threading.Event()
    decode = DeltaBatch.decode

    def slow(payload: bytes) -> DeltaBatch:
        writing.set()
        go_on.wait()
        return decode(payload)

    monkeypatch.setattr(DeltaBatch, "decode", slow)

    await scene.registry.append(STREAM, 1, delta(1).payload)
    followers = Followers(FleetRegistry(scene.registry))
    await followers.reconcile(MODEL, {1: scene.tables})
    await asyncio.to_thread(writing.wait)
    first = followers_running()
    # As a settling that takes too long is.
    stopping = asyncio.create_task(followers.stop(MODEL, 1))
    await asyncio.sleep(0)
    stopping.cancel()
    await asyncio.wait([stopping])
    await followers.reconcile(MODEL, {1: scene.tables})
    assert followers_running() == first
    go_on.set()
    await asyncio.wait(first)
    await followers.reconcile(MODEL, {1: scene.tables})
    assert len(followers_running()) == 1
    await followers.close()
    assert followers_running() == []
