"""Publishers on real registries: numbers without gaps, nothing lost, nothing twice, errors that say what to do."""

from __future__ import annotations

import asyncio
import logging
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from loader.deltas.batch import DeltaBatch
from loader.deltas.publisher import AsyncDeltaPublisher, DeltaPublisher
from loader.errors import DeltaError, DeltaFormatError, RegistryUnavailableError, StreamFullError
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
from shardrank_testing.deltas import MODEL, delta_spec, encoded, export_state, register_version
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
    found = await registry.read(STREAM, 0, max_entries=10_000, max_bytes=1 << 30)
    batches = [DeltaBatch.decode(entry.payload) for entry in found]
    assert [batch.sequence for batch in batches] == [entry.sequence for entry in found]
    return batches


async def published_rows(registry) -> list[list[int]]:
    return [batch.rows.tolist() for batch in await published(registry)]


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


async def test_a_publisher_goes_on_where_the_last_one_stopped(stream):
    """But not where the registry lost deltas that nodes have applied."""
    for expected in (1, 2, 3):
        assert await AsyncDeltaPublisher(stream, MODEL, 1).publish("int8", [expected], ONES) == expected
    report = VersionReport(model=MODEL, version=1, state="ready", delta_sequence=5)
    node = NodeRecord(node_id="n", kind="shard", process_id=1, address="unix:x", versions=(report,))
    await FleetRegistry(stream).announce_node(node, 60)
    with raises_kind("delta_gap", match=f"{STREAM} ends with 3, but deltas up to 5 were published"):
        await AsyncDeltaPublisher(stream, MODEL, 1).publish("int8", [7], ONES)


async def test_a_publisher_restores_what_a_redis_lost(tmp_path, snapshot, caplog):
    with redis_server(tmp_path) as server:
        registry = open_registry(server.url)
        await register_version(registry, snapshot)
        publisher = AsyncDeltaPublisher(registry, MODEL, 1)
        for row in range(3):
            await publisher.publish("int8", [row], ONES)
        server.flush()
        with caplog.at_level(logging.WARNING):
            assert await publisher.publish("int8", [3], ONES) == 4
        assert "the registry had lost deltas 1 to 3: restored" in caplog.text
        assert await published_rows(registry) == [[0], [1], [2], [3]]
        await registry.close()


@pytest.mark.parametrize("limit", [{"max_stream_entries": 4}, {"max_stream_bytes": 184_000}])
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


@pytest.mark.parametrize(("authors", "remembered_bytes"), [("aba", 1 << 20), ("aaba", 1 << 20), ("aa", 0)])
async def test_lost_deltas_are_not_restored_with_a_gap(
    directory, snapshot, tmp_path, monkeypatch, authors, remembered_bytes
):
    """Deltas of others, or that are remembered no more, are missing after the first."""
    monkeypatch.setattr("loader.deltas.publisher.MAX_REMEMBERED_BYTES", remembered_bytes)
    await register_version(directory, snapshot)
    by_name = {name: AsyncDeltaPublisher(directory, MODEL, 1) for name in "ab"}
    for number, name in enumerate(authors):
        await by_name[name].publish("int8", [number], ONES)
        if number == 0:
            shutil.copytree(directory.path, tmp_path / "then")
    shutil.rmtree(directory.path)
    shutil.copytree(tmp_path / "then", directory.path)
    with raises_kind("delta_gap", match=f"{STREAM} ends with 1, but deltas up to {len(authors)} were published"):
        await by_name["a"].publish("int8", [9], ONES)
    assert await published_rows(directory) == [[0]]


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

    async def append(*_):
        begun.set()
        await asyncio.Event().wait()

    url = str(tmp_path / "registry")
    with_open(url, lambda registry: register_version(registry, snapshot))
    monkeypatch.setattr(DirectoryRegistry, "append", append)
    with DeltaPublisher(url, MODEL, 1) as publisher, ThreadPoolExecutor(1) as thread:
        publishing = thread.submit(publisher.publish, "int8", [1], ONES)
        assert begun.wait(60)
        publisher.close()
        with pytest.raises(DeltaError, match="was closed while it published rows of table 'int8'; they may be"):
            publishing.result()
    with pytest.raises(DeltaError, match="the publisher is closed"):
        publisher.publish("int8", [1], ONES)
