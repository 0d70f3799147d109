"""Following a stream on real registries: in order, each once, refused with a reason, and stopped cleanly."""

from __future__ import annotations

import asyncio
import logging
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from loader.deltas.batch import DeltaBatch
from loader.deltas.publisher import AsyncDeltaPublisher
from loader.errors import DeltaFormatError, DeltaGapError, RegistryUnavailableError
from loader.registry.directory import DirectoryRegistry
from loader.registry.fleet import delta_stream
from loader.registry.opening import open_registry
from loader.registry.registry import StreamBounds, StreamEntry
from loader.snapshot.reader import Snapshot
from shard_node.agent.delta_follower import FollowerConfig, Followers
from shard_node.engine.loading import load_tables
from shard_node.node import DeltaPosition, LoadedTables
from shardrank_testing.agents import plan_of
from shardrank_testing.card_engines import OnCards, engine_params
from shardrank_testing.deltas import (
    MODEL,
    assert_stored,
    delta_spec,
    divided_state,
    export_divided,
    export_state,
    follow,
    load_version,
    make_batch,
    register_version,
)
from shardrank_testing.registries import REGISTRY_KINDS, registry_of
from shardrank_testing.snapshots import make_spec, random_rows, random_tables, with_slices, write_snapshot

SPEC = delta_spec(rows=500)
STREAM = delta_stream(MODEL, 1)
TIMEOUT_S = 30.0
FAST = FollowerConfig(poll_s=0.002, retry_s=0.002, look_at_end_s=0.01)
ON_CARDS = (OnCards(1, "peers"), OnCards(4, "every tier"))


class Scene:
    """A published version on a node, its registry and a publisher."""

    def __init__(self, registry, store):
        self.registry = registry
        self.store = store
        self.state = random_tables(SPEC, 5)
        self.snapshot = export_state(store, SPEC, self.state, 1)
        self.tables = load_version(self.snapshot, cards=2)
        self.publisher = AsyncDeltaPublisher(registry, MODEL, 1)
        self.rng = np.random.default_rng(1)

    async def publish(self, count: int) -> int:
        sequence = 0
        for _ in range(count):
            table = SPEC.tables[int(self.rng.integers(len(SPEC.tables)))]
            rows = self.rng.choice(table.num_embeddings, 40, replace=False)
            values = random_rows(self.rng, 40, table.embedding_dim)
            self.state[table.name][rows] = values
            sequence = await self.publisher.publish(table.name, rows, values)
        return sequence

    def check(self, tables=None) -> None:
        """The rows are, byte for byte, those of a fresh export of what was published."""
        fresh = export_state(self.store, SPEC, self.state, len(list((self.store / MODEL).iterdir())) + 1)
        assert_stored((tables or self.tables).engine, fresh)


def play(kind, tmp_path, scenario):
    async def run(url):
        registry = open_registry(url)
        scene = Scene(registry, tmp_path / "store")
        try:
            await register_version(registry, scene.snapshot)
            await asyncio.wait_for(scenario(scene), TIMEOUT_S)
        finally:
            await registry.close()

    with registry_of(kind, tmp_path) as url:
        asyncio.run(run(url))


async def until(condition) -> None:
    while not condition():  # noqa: ASYNC110 - it happens in another thread
        await asyncio.sleep(0.002)


async def cancel(task) -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize("kind", REGISTRY_KINDS)
def test_published_deltas_are_applied(kind, tmp_path):
    async def scenario(scene):
        await scene.publish(5)
        follower = follow(scene.registry, scene.snapshot, scene.tables, config=FAST)
        task = asyncio.create_task(follower.run())
        await until(lambda: scene.tables.deltas.sequence == 5)
        await scene.publish(25)
        await until(lambda: scene.tables.deltas.sequence == 30)
        progress = scene.tables.deltas.snapshot()
        assert (progress.batches, progress.rows, progress.lag, progress.refused) == (30, 30 * 40, 0, 0)
        await cancel(task)
        scene.check()

    play(kind, tmp_path, scenario)


def test_a_stream_that_begins_too_late_is_a_gap(tmp_path):
    async def scenario(scene):
        await scene.publish(5)
        await scene.registry.trim(STREAM, 3)
        follower = follow(scene.registry, scene.snapshot, scene.tables, config=FAST)
        with pytest.raises(
            DeltaGapError, match=f"version 1 of model '{MODEL}' needs delta 1, but {STREAM} begins with 3"
        ):
            await follower.run()
        assert scene.tables.deltas.sequence == 0
        assert "begins with 3" in scene.tables.deltas.snapshot().reason

    play("directory", tmp_path, scenario)


def damaged(scene, **changes) -> bytes:
    return replace(make_batch(SPEC, "int8", 2, [1], np.ones((1, 4), np.float32)), **changes).encode()


BAD = {
    "a flipped bit": (lambda scene: damaged(scene)[:-1] + b"\xff", "does not have the checksum"),
    "no delta at all": (lambda scene: b"hello", "are no delta"),
    "another model's": (lambda scene: damaged(scene, model="other"), "in which delta 2 of 'other' from 1 must not be"),
    "another stream's": (lambda scene: damaged(scene, delta_base=9), "must not be"),
    "another number's": (lambda scene: damaged(scene, sequence=3), f"lies at 2 of {STREAM}"),
    "an unknown table's": (lambda scene: damaged(scene, table="nope"), "for table 'nope', which it does not have"),
    "another table's": (
        lambda scene: damaged(scene, table="fp32"),
        "table 'fp32' has fp32 rows of 10, the delta int8 of 4",
    ),
    "a row outside": (lambda scene: damaged(scene, rows=np.array([500])), r"row 500 is not in 0\.\.499"),
}


@pytest.mark.parametrize("bad", list(BAD))
def test_a_wrong_delta_is_refused_and_holds_up_later_ones(bad, tmp_path, caplog):
    make, message = BAD[bad]

    async def scenario(scene):
        await scene.publish(1)
        await scene.registry.append(STREAM, 2, make(scene))
        good = make_batch(SPEC, "int8", 3, [1], np.ones((1, 4), np.float32))
        await scene.registry.append(STREAM, 3, good.encode())
        follower = follow(scene.registry, scene.snapshot, scene.tables, config=FAST)
        task = asyncio.create_task(follower.run())
        await until(lambda: scene.tables.deltas.snapshot().refused >= 3)
        progress = scene.tables.deltas.snapshot()
        assert (progress.sequence, progress.batches) == (1, 1)
        assert progress.lag == 2
        assert message.replace("\\", "") in progress.reason
        assert caplog.text.count(progress.reason) == 1  # logged once, counted each time
        await cancel(task)
        scene.check()

    play("directory", tmp_path, scenario)


def test_duplicates_are_skipped_and_gaps_refused(tmp_path):
    async def scenario(scene):
        follower = follow(scene.registry, scene.snapshot, scene.tables)
        batches = [make_batch(SPEC, "int8", number, [number], np.ones((1, 4), np.float32)) for number in (1, 2, 3, 4)]
        first, second, third, fourth = [StreamEntry(batch.sequence, batch.encode()) for batch in batches]
        follower.apply([first, first, second])
        with pytest.raises(DeltaGapError, match="delta 4 came, 3 is next"):
            follower.apply([second, fourth, third])
        assert scene.tables.deltas.sequence == 2
        follower.apply([first, second, third, second, fourth])
        assert (scene.tables.deltas.sequence, scene.tables.deltas.snapshot().batches) == (4, 4)

    play("directory", tmp_path, scenario)


class Unsteady:
    """A registry that can be made silent, or say that it lost what it had."""

    def __init__(self, registry):
        self._registry = registry
        self.silent = False
        self.lost = False

    def __getattr__(self, name):
        return getattr(self._registry, name)

    async def read(self, *arguments):
        if self.silent:
            raise RegistryUnavailableError("nobody there")
        return await self._registry.read(*arguments)

    async def bounds(self, stream):
        found = await self._registry.bounds(stream)
        return StreamBounds(1, 1) if self.lost else found


def test_a_silent_registry_or_one_that_lost_deltas_is_waited_for(tmp_path, caplog):
    async def scenario(scene):
        registry = Unsteady(scene.registry)
        registry.silent = True
        await scene.publish(3)
        follower = follow(registry, scene.snapshot, scene.tables, config=FAST)
        with caplog.at_level(logging.INFO, logger="shard_node"):
            task = asyncio.create_task(follower.run())
            await until(lambda: "until the registry answers: nobody there" in caplog.text)
            registry.silent = False
            await until(lambda: scene.tables.deltas.sequence == 3)
        assert caplog.text.count("nobody there") == caplog.text.count("the registry answers again") == 1
        registry.lost = True
        await until(lambda: f"has delta 3, but {STREAM} ends with 1" in scene.tables.deltas.snapshot().reason)
        await scene.publish(1)
        for _ in range(5):
            await asyncio.sleep(0)
        assert scene.tables.deltas.sequence == 3
        registry.lost = False
        await until(lambda: scene.tables.deltas.sequence == 4)
        assert scene.tables.deltas.snapshot().reason == ""
        await cancel(task)
        scene.check()

    play("directory", tmp_path, scenario)


def test_lost_deltas_still_count_as_missing(tmp_path):
    class LosesItsStream(Unsteady):
        """Tells of three deltas, gives two, and is emptied after that."""

        emptied = False

        async def read(self, stream, after, *limits):
            return [] if self.emptied else (await super().read(stream, after, *limits))[: 2 - after]

        async def bounds(self, stream):
            return StreamBounds(0, 0) if self.emptied else await super().bounds(stream)

    async def scenario(scene):
        registry = LosesItsStream(scene.registry)
        await scene.publish(3)
        looks = iter(range(1, 10**9))
        follower = follow(registry, scene.snapshot, scene.tables, config=FAST, clock=lambda: 2e9 + next(looks))
        task = asyncio.create_task(follower.run())
        position = scene.tables.deltas
        await until(lambda: position.sequence == 2)
        assert (position.snapshot().stream_last, position.snapshot().lag) == (3, 1)
        registry.emptied = True
        fresh, now = position.snapshot().fresh_at, next(looks)
        await until(lambda: next(looks) > now + 50)
        # Nobody says that there is a delta 3 any more, but its rows were changed, and not here.
        assert (position.snapshot().lag, position.snapshot().fresh_at) == (1, fresh)
        registry.emptied = False
        registry.read = scene.registry.read
        await until(lambda: position.sequence == 3)
        await until(lambda: position.snapshot().fresh_at > 2e9)
        assert position.snapshot().lag == 0
        await cancel(task)

    play("directory", tmp_path, scenario)


def test_a_cancelled_follower_finishes_the_delta_it_writes(tmp_path):
    async def scenario(scene):
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

        follower = follow(scene.registry, scene.snapshot, replace(scene.tables, engine=Slow()), config=FAST)
        task = asyncio.create_task(follower.run())
        await until(entered.is_set)
        task.cancel()
        await asyncio.sleep(0)
        task.cancel()
        assert not task.done()
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        # The delta that was being written is whole; no other one was begun.
        assert len(finished) == 1
        assert scene.tables.deltas.sequence == 1

    play("directory", tmp_path, scenario)


@pytest.mark.parametrize("place", ["ram", "two cards", "mapped", *engine_params(ON_CARDS, ())], ids=str)
def test_deltas_of_a_sliced_table_reach_all_slices(place, tmp_path):
    spec = with_slices(SPEC, {"int8": (12, 4, 12), "int4": (2, 6), "fp32": (1, 3)})
    state, rng = random_tables(spec, 5), np.random.default_rng(2)
    snapshot = export_state(tmp_path, spec, state, 1)
    if isinstance(place, OnCards):
        tables = load_version(snapshot, card_set=place.card_set(spec))
    else:
        tables = load_version(snapshot, cards=2 if place == "two cards" else 1, budget=0 if place == "mapped" else None)
    entries = []
    for sequence in range(1, 9):
        table = spec.tables[sequence % len(spec.tables)]
        rows = np.sort(rng.choice(table.num_embeddings, 60, replace=False))
        state[table.name][rows] = random_rows(rng, 60, table.embedding_dim)
        batch = make_batch(spec, table.name, sequence, rows, state[table.name][rows])
        entries.append(StreamEntry(sequence, batch.encode()))
    follower = follow(None, snapshot, tables)
    follower.apply(entries)
    assert_stored(tables.engine, export_state(tmp_path, spec, state, 2))
    # What training publishes is of the table; a slice is no table of it.
    batch = replace(make_batch(spec, "int8", 9, [1], np.zeros((1, 28))), table="int8.c0")
    with pytest.raises(DeltaFormatError, match=r"for table 'int8\.c0', which it does not have"):
        follower.apply([StreamEntry(9, batch.encode())])
    tables.close()


@pytest.mark.parametrize("place", [{"cards": 2}, {"cards": 1, "budget": 0}])
def test_updates_of_divided_tables_equal_a_fresh_export(place, tmp_path):
    state, counts = divided_state(2)
    snapshot = export_divided(tmp_path / "store", state, counts, 1)
    rng = np.random.default_rng(3)

    async def scenario():
        registry = open_registry(tmp_path / "registry")
        await register_version(registry, snapshot)
        publisher = AsyncDeltaPublisher(registry, MODEL, 1, tmp_path / "store")
        sequence, updates = 0, []
        for _ in range(4):
            for name in state:
                rows = rng.integers(0, len(state[name]), 40)
                updates.append((name, rows, random_rows(rng, 40, state[name].shape[1])))
        # A trainer that did not hear of its last ones publishes them again.
        for name, rows, values in [*updates, *updates[-6:]]:
            sequence = await publisher.publish(name, rows, values)
            state[name][rows] = values
        for name, pruned in publisher.pruned_updates.items():
            # What the row that stands for pruned ones was made of.
            state[name][pruned.rows] = divided_state(2)[0][name][pruned.rows]
        tables = load_version(snapshot, **place)
        follower = follow(registry, snapshot, tables, config=FAST)
        entries = await registry.read(STREAM, 0, max_entries=1000)
        follower.apply(entries)
        follower.apply(entries[-3:])
        assert tables.deltas.sequence == sequence
        assert_stored(tables.engine, export_divided(tmp_path / "fresh", state, counts, 2))
        assert list(publisher.pruned_updates) == ["item", "film"]
        await registry.close()

    asyncio.run(scenario())


@pytest.fixture
def tables(tmp_path: Path) -> LoadedTables:
    folder, _ = write_snapshot(tmp_path / "store", make_spec("films"), seed=1, version=1)
    snapshot = Snapshot.open(folder)
    return load_tables(snapshot, *plan_of(snapshot))


def following() -> list[asyncio.Task[None]]:
    return [task for task in asyncio.all_tasks() if task.get_name() == "deltas films 1"]


def test_an_interrupted_stop_starts_no_second_follower(tmp_path, tables, monkeypatch):
    writing, go_on = threading.Event(), threading.Event()
    decode = DeltaBatch.decode

    def slow(payload: bytes) -> DeltaBatch:
        writing.set()
        go_on.wait()
        return decode(payload)

    monkeypatch.setattr(DeltaBatch, "decode", slow)

    async def main() -> None:
        registry = DirectoryRegistry(tmp_path / "registry")
        rows = np.full((1, 16), 1.0, np.float32)
        await registry.append(delta_stream("films", 1), 1, make_batch(make_spec(), "user", 1, [3], rows).encode())
        followers = Followers(registry)
        await followers.settle("films", {1: tables})
        await asyncio.to_thread(writing.wait)
        first = following()
        # As a settling that takes too long is.
        stopping = asyncio.create_task(followers.stop("films", 1))
        await asyncio.sleep(0)
        stopping.cancel()
        await asyncio.wait([stopping])
        await followers.settle("films", {1: tables})
        found = following()
        go_on.set()
        await asyncio.wait(first)
        assert found == first
        await followers.settle("films", {1: tables})
        assert len(following()) == 1
        await followers.close()
        assert following() == []
        await registry.close()

    asyncio.run(main())


def test_a_position_is_behind_until_all_deltas_are_applied():
    position = DeltaPosition(delta_base=3, last_delta=7)
    assert (position.sequence, position.snapshot().published_at) == (7, None)
    assert position.snapshot().staleness_s(100.0) is None
    position = DeltaPosition(1, 0)
    position.seen(2, 100.0)
    position.seen(3, 101.0)
    assert (position.snapshot().fresh_at, position.snapshot().lag) == (None, 3)
    for sequence in (1, 2, 3):
        position.applied(sequence, 90.0 + sequence, 10, 102.0)
    position.seen(3, 103.0)
    progress = position.snapshot()
    assert (progress.fresh_at, progress.lag, progress.batches, progress.rows) == (103.0, 0, 3, 30)
    assert progress.published_at == 93.0


def test_staleness_counts_from_the_last_complete_moment():
    position = DeltaPosition(1, 0)
    position.seen(0, 100.0)
    assert position.snapshot().staleness_s(100.5) == pytest.approx(0.5)
    position.seen(5, 110.0)
    assert position.snapshot().staleness_s(110.0) == pytest.approx(10.0)
    position.applied(1, 104.0, 1, 111.0)
    assert position.snapshot().staleness_s(111.0) == pytest.approx(7.0)
    # A publisher's clock that is ahead makes nothing fresher than now.
    position.applied(2, 500.0, 1, 112.0)
    assert position.snapshot().staleness_s(112.0) == 0.0
    assert position.snapshot().published_at == 500.0


def test_a_reason_stays_until_the_next_delta_is_applied():
    position = DeltaPosition(1, 0)
    position.seen(1, 100.0)
    position.refused("corrupt")
    position.seen(1, 101.0)
    assert (position.snapshot().reason, position.snapshot().refused) == ("corrupt", 1)
    position.applied(1, 100.0, 1, 102.0)
    assert position.snapshot().reason == ""
