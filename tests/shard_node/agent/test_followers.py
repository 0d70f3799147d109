"""One follower a version, whatever interrupts its being stopped."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import numpy as np
import pytest

from loader.deltas.batch import DeltaBatch
from loader.registry.directory import DirectoryRegistry
from loader.registry.fleet import delta_stream
from loader.snapshot.reader import Snapshot
from shard_node.agent.delta_follower import Followers
from shard_node.engine.loading import load_tables
from shard_node.node import LoadedTables
from shardrank_testing.agents import plan_of
from shardrank_testing.deltas import make_batch
from shardrank_testing.snapshots import make_spec, write_snapshot


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
