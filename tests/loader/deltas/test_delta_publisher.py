"""Publishers on real registries: numbers without gaps, nothing lost, nothing twice, errors that say what to do."""

from __future__ import annotations

import asyncio
import contextlib
import math
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

from loader.deltas.batch import DeltaBatch
from loader.deltas.blocking_publisher import DeltaPublisher
from loader.deltas.chain import is_commit
from loader.deltas.publisher import SETTLED_S, AsyncDeltaPublisher
from loader.errors import (
    DeltaError,
    DeltaFormatError,
    DeltaLostError,
    PublisherSupersededError,
    RegistryRecordError,
    RegistryUnavailableError,
    StreamFullError,
    StreamSequenceError,
)
from loader.registry import open_registry
from loader.registry.directory import DirectoryRegistry
from loader.registry.fleet import (
    SPECS,
    FleetRegistry,
    NodeRecord,
    VersionReport,
    WantedModel,
    delta_stream,
    version_key,
)
from shardrank_testing.deltas import MODEL, delta_spec, encoded, export_state, read_entry, register_version
from shardrank_testing.errors import raises_kind
from shardrank_testing.interrupted_registry import InterruptedRegistry
from shardrank_testing.registries import redis_server, with_open
from shardrank_testing.snapshots import random_tables

SPEC = delta_spec(("int8", "fp32"), rows=20_000)
STREAM = delta_stream(MODEL, 1)
ONES = np.ones((1, 4), np.float32)


@pytest.fixture(scope="module")
def snapshot(tmp_path_factory):
    return export_state(tmp_path_factory.mktemp("store"), SPEC, random_tables(SPEC, 0), 1)


@pytest.fixture
async def stream(registry, snapshot):
    """A registry with version 1 on record."""
    await register_version(registry, snapshot)
    return registry


async def published(registry) -> list[DeltaBatch]:
    """All deltas of the stream, each checked to follow the one before."""
    batches, tail = list[DeltaBatch](), None
    for entry in await registry.read(STREAM, 0, max_entries=10_000, max_bytes=1 << 30):
        batch, tail = await read_entry(registry, STREAM, entry, tail)
        batches.append(batch)
    return batches


async def published_rows(registry) -> list[list[int]]:
    return [batch.rows.tolist() for batch in await published(registry)]


async def announce(registry, delta_sequence=0, **fields) -> None:
    """Make a node report what it has applied."""
    report = VersionReport(model=MODEL, version=1, state="ready", delta_sequence=delta_sequence)
    fields = {"delta_format": 2, **fields}
    node = NodeRecord(node_id="n", kind="shard", process_id=1, address="unix:x", versions=(report,), **fields)
    await FleetRegistry(registry).announce_node(node, 60)


async def no_wait(_seconds: float) -> None:
    await asyncio.sleep(0)


async def test_what_is_published_is_in_the_stream_in_order(stream):
    publisher = AsyncDeltaPublisher(stream, MODEL, 1, clock=lambda: 1234.5)
    values = np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)
    assert await publisher.publish("int8", [9, 2, 5], values) == 1
    assert await publisher.publish("fp32", [1], np.ones((1, 6), np.float32)) == 2
    assert await publisher.publish("fp32", [], np.ones((0, 6), np.float32)) == 2
    first, second = await published(stream)
    assert (first.table, first.rows.tolist()) == ("int8", [2, 5, 9])
    assert (second.table, second.rows.tolist()) == ("fp32", [1])
    np.testing.assert_array_equal(first.stored, encoded(SPEC.tables[0], values[[1, 2, 0]]))
    assert (first.model, first.delta_base, first.base_version, first.published_at) == (MODEL, 1, 1, 1234.5)


async def test_many_rows_are_cut_into_batches_of_8192(stream):
    values = np.random.default_rng(0).normal(size=(20_000, 4)).astype(np.float32)
    assert await AsyncDeltaPublisher(stream, MODEL, 1).publish("int8", np.arange(20_000), values) == 3
    batches = await published(stream)
    assert [batch.rows.size for batch in batches] == [8192, 8192, 3616]
    np.testing.assert_array_equal(np.concatenate([one.stored for one in batches]), encoded(SPEC.tables[0], values))


async def test_several_publishers_share_a_stream_and_lose_nothing(stream):
    publishers = [AsyncDeltaPublisher(stream, MODEL, 1, sleep=no_wait) for _ in range(4)]

    async def publish(number):
        return [await publishers[number].publish("int8", [100 * number + row], ONES) for row in range(10)]

    sequences = await asyncio.gather(*map(publish, range(4)))
    assert sorted(np.concatenate(sequences)) == list(range(1, 41))
    assert all(numbers == sorted(numbers) for numbers in sequences)
    assert sorted(await published_rows(stream)) == [[100 * n + row] for n in range(4) for row in range(10)]


async def test_an_append_whose_answer_is_lost_is_there_once(stream):
    publisher = AsyncDeltaPublisher(InterruptedRegistry(stream, answers_to_lose=12), MODEL, 1, sleep=no_wait)
    assert [await publisher.publish("int8", [row], ONES) for row in range(6)] == [1, 2, 3, 4, 5, 6]
    assert await published_rows(stream) == [[row] for row in range(6)]


async def test_an_append_whose_answer_is_lost_and_from_which_another_went_on_is_there_once(stream):
    other = AsyncDeltaPublisher(stream, MODEL, 1)
    await other.open()

    class Overtaken(InterruptedRegistry):
        async def commit(self, *arguments, **options):
            await self.registry.commit(*arguments, **options)
            if await other.publish("int8", [9], ONES) == 2:
                raise RegistryUnavailableError("the answer is lost")

    publisher = AsyncDeltaPublisher(Overtaken(stream), MODEL, 1, sleep=no_wait)
    assert await publisher.publish("int8", [1], ONES) == 1
    assert await published_rows(stream) == [[1], [9]]


async def test_a_publisher_goes_on_where_the_last_one_stopped(stream):
    """Also above what nodes have and the registry has lost, which the first call tells."""
    for expected in (1, 2, 3):
        assert await AsyncDeltaPublisher(stream, MODEL, 1).publish("int8", [expected], ONES) == expected
    await announce(stream, delta_sequence=5)
    publisher = AsyncDeltaPublisher(stream, MODEL, 1)
    with pytest.raises(DeltaLostError, match=f"{STREAM}: the registry has lost 2 of the deltas 4 to 5") as lost:
        await publisher.publish("int8", [7], ONES)
    assert lost.value.sequences == (4, 5)
    assert await publisher.publish("int8", [7], ONES) == 6
    batches = await published(stream)
    assert [batch.sequence for batch in batches] == [1, 2, 3, 6]


@contextlib.contextmanager
def earlier_state(registry, then):
    """Set a directory back to what it was, as a failover does that loses the last writes."""
    shutil.copytree(registry.path, then)
    yield
    shutil.rmtree(registry.path)
    shutil.copytree(then, registry.path)


async def test_what_was_acknowledged_and_lost_is_told_once_to_each_who_published_it(directory, snapshot, tmp_path):
    await register_version(directory, snapshot)
    first, second = (AsyncDeltaPublisher(directory, MODEL, 1) for _ in range(2))
    await first.publish("int8", [0], ONES)
    with earlier_state(directory, tmp_path / "then"):
        for publisher, row in ((first, 1), (second, 2), (first, 3)):
            await publisher.publish("int8", [row], ONES)
    with pytest.raises(DeltaLostError) as lost:
        await first.publish("int8", [9], ONES)
    assert lost.value.sequences == (2, 4)
    assert [await first.publish("int8", [row], ONES) for row in (1, 3)] == [5, 6]
    with pytest.raises(DeltaLostError) as lost:
        await second.publish("int8", [9], ONES)
    assert lost.value.sequences == (3,)
    assert await second.publish("int8", [2], ONES) == 7
    # Each names the one before, whatever its number.
    assert await published_rows(directory) == [[0], [1], [3], [2]]


async def test_a_stream_that_lost_its_end_and_was_written_to_the_same_number_does_not_fork(
    directory, snapshot, tmp_path
):
    await register_version(directory, snapshot)
    publisher = AsyncDeltaPublisher(directory, MODEL, 1)
    await publisher.publish("int8", [0], ONES)
    with earlier_state(directory, tmp_path / "then"):
        await publisher.publish("int8", [1], ONES)
    # Nobody that this one could ask knows of 2.
    assert await AsyncDeltaPublisher(directory, MODEL, 1).publish("int8", [5], ONES) == 2
    with pytest.raises(DeltaLostError) as lost:
        await publisher.publish("int8", [2], ONES)
    assert lost.value.sequences == (2,)
    assert await publisher.publish("int8", [1], ONES) == 3
    assert await published_rows(directory) == [[0], [5], [1]]


@pytest.mark.parametrize("calls", range(4, 12))
async def test_losses_are_told_though_the_registry_fails_while_they_are_looked_for(
    directory, snapshot, tmp_path, calls
):
    await register_version(directory, snapshot)
    registry = InterruptedRegistry(directory)

    async def mend(_seconds):
        registry.calls_left = math.inf

    publisher = AsyncDeltaPublisher(registry, MODEL, 1, sleep=mend)
    with earlier_state(directory, tmp_path / "then"):
        assert [await publisher.publish("int8", [row], ONES) for row in (1, 2)] == [1, 2]
    other = AsyncDeltaPublisher(directory, MODEL, 1)
    assert [await other.publish("int8", [row], ONES) for row in (3, 4)] == [1, 2]
    registry.calls_left = calls
    with pytest.raises(DeltaLostError) as lost:
        await publisher.publish("int8", [5], ONES)
    assert registry.calls_left == math.inf
    assert lost.value.sequences == (1, 2)


async def test_what_two_lost_with_the_whole_stream_is_told_to_both(directory, snapshot):
    """Also to the one that comes after the other has gone on."""
    await register_version(directory, snapshot)
    first, second = (AsyncDeltaPublisher(directory, MODEL, 1) for _ in range(2))
    for publisher, row in ((first, 1), (second, 2), (first, 3)):
        await publisher.publish("int8", [row], ONES)
    shutil.rmtree(directory.path / "streams")
    await announce(directory, delta_sequence=3)
    for publisher, lost, following in ((second, (2,), 4), (first, (1, 3), 5)):
        with pytest.raises(DeltaLostError) as told:
            await publisher.publish("int8", [9], ONES)
        assert told.value.sequences == lost
        assert await publisher.publish("int8", [9], ONES) == following


async def test_a_superseded_publisher_stays_so_in_a_registry_that_was_set_back(directory, snapshot, tmp_path):
    await register_version(directory, snapshot)
    zombie = AsyncDeltaPublisher(directory, MODEL, 1, name="trainer")
    await zombie.publish("int8", [0], ONES)
    with earlier_state(directory, tmp_path / "then"):
        restarted = AsyncDeltaPublisher(directory, MODEL, 1, name="trainer")
        await restarted.publish("int8", [1], ONES)
    with pytest.raises(DeltaLostError):
        await restarted.publish("int8", [1], ONES)
    await restarted.publish("int8", [1], ONES)
    with pytest.raises(PublisherSupersededError):
        await zombie.publish("int8", [2], ONES)


async def test_numbers_that_were_lost_fill_no_stream(stream):
    await announce(stream, delta_sequence=200)
    publisher = AsyncDeltaPublisher(stream, MODEL, 1, max_stream_entries=4)
    with pytest.raises(DeltaLostError):
        await publisher.publish("int8", [0], ONES)
    assert [await publisher.publish("int8", [row], ONES) for row in range(3)] == [201, 202, 203]
    await announce(stream, delta_sequence=300)
    publisher = AsyncDeltaPublisher(stream, MODEL, 1, max_stream_entries=4)
    with pytest.raises(DeltaLostError):
        await publisher.publish("int8", [0], ONES)
    assert [publisher.sequence, await publisher.publish("int8", [4], ONES)] == [203, 301]


async def test_an_emptied_redis_loses_what_its_publisher_published(tmp_path, snapshot):
    with redis_server(tmp_path) as server:
        registry = open_registry(server.url)
        await register_version(registry, snapshot)
        publisher = AsyncDeltaPublisher(registry, MODEL, 1)
        for row in range(3):
            await publisher.publish("int8", [row], ONES)
        server.flush()
        with pytest.raises(DeltaLostError) as lost:
            await publisher.publish("int8", [3], ONES)
        assert lost.value.sequences == (1, 2, 3)
        assert await publisher.publish("int8", [3], ONES) == 4
        assert await published_rows(registry) == [[3]]
        await registry.close()


async def test_a_publisher_that_began_again_supersedes_the_one_before(stream):
    zombie = AsyncDeltaPublisher(stream, MODEL, 1, name="trainer")
    other = AsyncDeltaPublisher(stream, MODEL, 1, name="other")
    await zombie.publish("int8", [0], ONES)
    await other.publish("int8", [1], ONES)
    restarted = AsyncDeltaPublisher(stream, MODEL, 1, name="trainer")
    await restarted.open()
    with pytest.raises(PublisherSupersededError, match="publisher 'trainer' began again, with token"):
        await zombie.publish("int8", [2], ONES)
    assert [await publisher.publish("int8", [3], ONES) for publisher in (restarted, other)] == [3, 4]
    assert await published_rows(stream) == [[0], [1], [3], [3]]


async def test_format_1_is_written_until_every_node_reads_format_2(stream):
    now = 0.0
    publisher, older = (AsyncDeltaPublisher(stream, MODEL, 1, monotonic=lambda: now) for _ in range(2))
    await announce(stream, delta_format=1)
    assert await publisher.publish("int8", [0], ONES) == 1
    assert await older.publish("int8", [1], ONES) == 2
    await announce(stream, delta_format=2)
    assert await publisher.publish("int8", [2], ONES) == 3
    # A registry that was away knows of no node for a moment: nobody says that it reads format 2.
    await FleetRegistry(stream).withdraw_node("n")
    now += 60
    assert await publisher.publish("int8", [3], ONES) == 4
    await announce(stream, delta_format=2)
    for row, wait_s in ((4, SETTLED_S), (5, 0.1), (6, 0)):
        await publisher.publish("int8", [row], ONES)
        now += wait_s
    entries = await stream.read(STREAM, 0)
    assert [is_commit(entry.payload) for entry in entries] == [False] * 5 + [True] * 2
    assert await published_rows(stream) == [[row] for row in range(7)]
    # What a release appends that knows only format 1 fails, and is not lost without a word.
    batch = replace((await published(stream))[0], sequence=8)
    with pytest.raises(StreamSequenceError, match="ends with 7: format 1 is over"):
        await stream.append(STREAM, 8, batch.encode())


async def test_format_1_does_not_go_on_after_a_loss(stream):
    """Nodes of an older release would take the same number for the same delta."""
    await announce(stream, delta_format=1, delta_sequence=3)
    publisher = AsyncDeltaPublisher(stream, MODEL, 1)
    with pytest.raises(DeltaLostError):
        await publisher.publish("int8", [0], ONES)
    assert await publisher.publish("int8", [0], ONES) == 4  # a stream may begin anywhere
    await announce(stream, delta_format=1, delta_sequence=6)
    assert publisher.sequence == 4
    with raises_kind("delta_gap", match="ends with 4, but deltas up to 6 were published"):
        await AsyncDeltaPublisher(stream, MODEL, 1).open()


async def test_a_delta_that_too_few_replicas_of_redis_have_is_not_published(tmp_path, snapshot):
    with redis_server(tmp_path, tcp=True) as server:
        registry = open_registry(server.url)
        await register_version(registry, snapshot)
        publisher = AsyncDeltaPublisher(registry, MODEL, 1, min_replicas=1, retry_s=0.1)
        with pytest.raises(RegistryUnavailableError, match=r"1 is on 0 replicas of Redis, min_replicas is 1"):
            await publisher.publish("int8", [0], ONES)
        (tmp_path / "replica").mkdir()
        with redis_server(tmp_path / "replica") as replica:
            replica.command("REPLICAOF", "127.0.0.1", str(server.port))
            publisher = AsyncDeltaPublisher(registry, MODEL, 1, min_replicas=1)
            assert await publisher.publish("int8", [1], ONES) == 2
        await registry.close()


async def test_a_directory_has_no_replicas_to_wait_for(directory, snapshot):
    await register_version(directory, snapshot)
    with pytest.raises(RegistryRecordError, match=r"min_replicas 1: registry .* has none; only Redis has"):
        await AsyncDeltaPublisher(directory, MODEL, 1, min_replicas=1).publish("int8", [0], ONES)


@pytest.mark.parametrize("limit", [{"max_stream_entries": 4}, {"max_stream_bytes": 220_000}])
async def test_a_full_stream_drops_only_what_no_held_version_needs(stream, tmp_path, limit):
    rows, values = np.arange(2000), np.ones((2000, 4), np.float32)
    fleet = FleetRegistry(stream)
    await fleet.put_wanted(WantedModel(model=MODEL, epoch=1, live=1, hold=(1,)), None)
    publisher = AsyncDeltaPublisher(stream, MODEL, 1, **limit)
    for _ in range(4):
        await publisher.publish("int8", rows, values)
    with pytest.raises(
        StreamFullError, match=r"holds 4 deltas, max_stream_entries is .* needs all from 1 on: roll out"
    ):
        await publisher.publish("int8", rows, values)
    await register_version(stream, export_state(tmp_path, SPEC, random_tables(SPEC, 0), 2, 3, 1))
    await fleet.update_wanted(MODEL, lambda now: now.model_copy(update={"live": 2, "hold": (2,)}))
    for another in (publisher, AsyncDeltaPublisher(stream, MODEL, 1, **limit)):
        assert await another.publish("int8", rows, values) == 5 + (another is not publisher)
    assert [batch.sequence for batch in await published(stream)] == [3, 4, 5, 6]


@pytest.mark.parametrize(
    ("table", "rows", "values", "message"),
    [
        ("nope", [0], ONES, rf"model '{MODEL}' has no table 'nope'; tables: \['fp32', 'int8'\]"),
        ("int8", [20_000], ONES, r"row 20000 is not in 0\.\.19999"),
        ("int8", [0], np.ones((1, 5), np.float32), r"values are \[1, 5\], expected \[1, 4\]"),
        ("int8", [3], np.full((1, 4), np.nan, np.float32), "row 3 holds NaN"),
    ],
)
async def test_what_can_not_be_a_delta_is_refused(directory, snapshot, table, rows, values, message):
    await register_version(directory, snapshot)
    with pytest.raises(DeltaFormatError, match=message):
        await AsyncDeltaPublisher(directory, MODEL, 1).publish(table, rows, values)
    assert await published(directory) == []


async def test_a_version_that_is_not_published_has_no_publisher(directory):
    with raises_kind("delta_base", match=f"version 1 of model '{MODEL}' is not published"):
        await AsyncDeltaPublisher(directory, MODEL, 1).open()


def test_a_registry_that_never_answers_is_unavailable(tmp_path):
    with pytest.raises(RegistryUnavailableError):
        DeltaPublisher(f"unix://{tmp_path}/nobody.sock", MODEL, 1, retry_s=0.1)


async def test_a_version_without_a_spec_must_be_published_again(directory, snapshot):
    await register_version(directory, snapshot)
    entry = await directory.get(version_key(MODEL, 1, SPECS))
    await directory.delete(version_key(MODEL, 1, SPECS), entry.revision)
    with pytest.raises(DeltaError, match=f"no spec of '{MODEL}' version 1: publish it again"):
        await AsyncDeltaPublisher(directory, MODEL, 1).open()


async def test_what_a_publisher_was_not_given_is_named(directory, snapshot):
    await register_version(directory, snapshot)
    assert await directory.max_stream_bytes() == 4 << 30
    for name in ("max_stream_entries", "max_stream_bytes"):
        with pytest.raises(DeltaError, match=f"{name}: 0; at least 1 is needed"):
            await AsyncDeltaPublisher(directory, MODEL, 1, **{name: 0}).open()
    with pytest.raises(DeltaError, match="dense weights lie in the store: give the publisher `store`"):
        await AsyncDeltaPublisher(directory, MODEL, 1).publish_dense(1, {})


def test_closing_ends_what_other_threads_publish(tmp_path, snapshot, monkeypatch):
    begun = threading.Event()

    async def append(*_, **__):
        begun.set()
        await asyncio.Event().wait()

    url = str(tmp_path / "registry")
    with_open(url, lambda registry: register_version(registry, snapshot))
    monkeypatch.setattr(DirectoryRegistry, "commit", append)
    with DeltaPublisher(url, MODEL, 1) as publisher, ThreadPoolExecutor(1) as thread:
        publishing = thread.submit(publisher.publish, "int8", [1], ONES)
        assert begun.wait(60)
        publisher.close()
        with pytest.raises(DeltaError, match="was closed while it published rows of table 'int8'; they may be"):
            publishing.result()
    with pytest.raises(DeltaError, match="the publisher is closed"):
        publisher.publish("int8", [1], ONES)
