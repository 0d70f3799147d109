"""Versions come into real stores and registries and go from them; what ended anywhere, the next run ends."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from loader.errors import (
    RegistryConflictError,
    RegistryUnavailableError,
    SnapshotCorruptError,
    SnapshotExistsError,
)
from loader.registry.directory import DirectoryRegistry
from loader.registry.fleet import (
    Canary,
    FleetRegistry,
    NodeRecord,
    VersionReport,
    WantedModel,
    delta_stream,
    rollout_key,
)
from loader.registry.registry import StreamBounds
from loader.snapshot.codecs import RowCodec
from loader.snapshot.publishing import Publication, Retained, publish, retain
from loader.snapshot.reader import Snapshot, verify_snapshot
from loader.snapshot.store import Store
from shardrank_testing.errors import raises_kind
from shardrank_testing.interrupted_registry import InterruptedRegistry
from shardrank_testing.rollout_fleet import rollout_record
from shardrank_testing.snapshots import files_of, make_spec, one_table_spec, write_snapshot

MODEL = "small"
SPEC = one_table_spec(260)


@dataclass(frozen=True)
class Shop:
    """A store and a registry, both empty, and a folder for snapshots from training."""

    folder: Path
    fleet: FleetRegistry

    @property
    def store(self) -> Path:
        return self.folder / "store"

    def train(self, seed: int = 0, **options: Any) -> Path:
        """Write a small snapshot, by default of the next version."""
        return write_snapshot(self.folder, SPEC, seed, **options)[0]

    async def publish(self, snapshot: Path, at: float = 7.0) -> Publication:
        return await publish(self.fleet, snapshot, self.store, clock=lambda: at)

    async def append_deltas(self, base: int, count: int) -> None:
        for sequence in range(1, count + 1):
            await self.fleet.registry.append(delta_stream(MODEL, base), sequence, b"rows")

    async def retain(self, keep: int) -> Retained:
        """What a run reports, of which the store and the records must be."""
        done = await retain(self.fleet, self.store, MODEL, keep)
        recorded = [record.version for record in await self.fleet.versions(MODEL)]
        assert Store(self.store).versions(MODEL) == recorded == list(done.kept)
        assert set(os.listdir(self.store / MODEL)) - {".retention-lock"} == set(map(str, done.kept))
        return done


@pytest.fixture
def shop(directory: DirectoryRegistry, tmp_path: Path) -> Shop:
    return Shop(tmp_path, FleetRegistry(directory))


@pytest.fixture
async def stocked(shop: Shop) -> Shop:
    """With five published versions."""
    for seed in range(5):
        await shop.publish(shop.train(seed))
    return shop


def changes_below(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


# Publishing


async def test_a_published_version_is_in_the_store_and_on_record(shop: Shop) -> None:
    spec = make_spec()
    folder, _ = write_snapshot(shop.folder, spec, version=4)
    done = await shop.publish(folder)
    assert (done.copied, done.is_new) == (True, True)
    assert Path(done.where) == shop.store / "films" / "4"
    assert files_of(Path(done.where)) == files_of(folder)
    assert verify_snapshot(Path(done.where)).ok
    record = await shop.fleet.version("films", 4)
    assert record == done.record
    assert record.identity == Snapshot.open(folder).identity
    assert (record.delta_base, record.last_delta, record.published_at) == (4, 0, 7.0)
    sizes = [table.num_embeddings * RowCodec(table.dtype, table.embedding_dim).row_bytes for table in spec.tables]
    assert record.rows_bytes == sum(sizes)
    assert await shop.fleet.spec("films", 4) == spec.model_dump_json()


async def test_publishing_again_changes_nothing_or_restores_the_record(shop: Shop) -> None:
    folder = shop.train()
    first = await shop.publish(folder)
    before = changes_below(shop.store)
    second = await shop.publish(folder, at=9.0)
    assert (second.copied, second.is_new, second.record) == (False, False, first.record)
    assert changes_below(shop.store) == before
    shutil.rmtree(shop.fleet.registry.path)
    assert (await shop.publish(Path(first.where))).record == first.record


async def test_a_damaged_snapshot_is_refused_and_leaves_no_trace(shop: Shop) -> None:
    folder = shop.train()
    rows = next(folder.glob("tables/*/rows-*"))
    content = bytearray(rows.read_bytes())
    content[-3] ^= 4
    rows.write_bytes(content)
    with pytest.raises(SnapshotCorruptError, match=rf"must not be served: .*{rows.name}: SHA-256 is"):
        await shop.publish(folder)
    assert shop.store.name not in os.listdir(shop.folder)
    assert await shop.fleet.versions() == []


async def test_another_snapshot_of_a_published_version_is_refused(shop: Shop) -> None:
    folder, (other, _) = shop.train(), write_snapshot(shop.folder / "elsewhere", SPEC, seed=2)
    first = await shop.publish(folder)
    with pytest.raises(RegistryConflictError, match="a version is immutable; `publish --next` makes a new one of it"):
        await shop.publish(other)
    shutil.rmtree(shop.fleet.registry.path)
    with pytest.raises(SnapshotExistsError, match=first.record.identity):
        await shop.publish(other)
    assert files_of(Path(first.where)) == files_of(folder)


PUBLISH_AND_DIE = """
import asyncio, os, signal, sys, time
from pathlib import Path
from loader.snapshot.publishing import publish
from loader.registry.directory import DirectoryRegistry
from loader.registry.fleet import FleetRegistry
left = int(sys.argv[3])
def progress(what, done, total):
    global left
    if what == "copying into the store":
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
async def main():
    fleet = FleetRegistry(DirectoryRegistry(sys.argv[2] + "/registry"))
    await publish(fleet, Path(sys.argv[1]), Path(sys.argv[2]) / "store", clock=time.time, progress=progress)
asyncio.run(main())
"""


@pytest.mark.nightly
async def test_a_killed_publisher_leaves_no_version_for_the_next(shop: Shop) -> None:
    folder, _ = write_snapshot(shop.folder, make_spec())
    work = shop.store / "films" / ".export-1" / "snapshot"
    kept: dict[Path, int] = {}
    for calls in (2, 4):
        command = [sys.executable, "-c", PUBLISH_AND_DIE, str(folder), str(shop.folder), str(calls)]
        killed = await asyncio.to_thread(subprocess.run, command, check=False, timeout=60)
        assert killed.returncode == -signal.SIGKILL
        assert Store(shop.store).versions("films") == []
        assert await shop.fleet.versions() == []
        assert kept.items() <= {path: path.stat().st_ino for path in work.rglob("*.safetensors")}.items()
        # Each file that was copied is on record before the next one is begun.
        journal = (work.parent / "export-state.jsonl").read_text().splitlines()[1:]
        kept = {path: path.stat().st_ino for path in work.rglob("*.safetensors") if path.name in str(journal)}
        assert kept
    done = await shop.publish(folder)
    assert files_of(Path(done.where)) == files_of(folder)
    for path, inode in kept.items():
        assert (Path(done.where) / path.relative_to(work)).stat().st_ino == inode
    assert os.listdir(shop.store / "films") == ["1"]


async def test_a_version_has_no_delta_that_its_stream_does_not_have(shop: Shop) -> None:
    base, fresh = shop.train(), shop.train(version=2, last_delta=3, delta_base=1)
    await shop.publish(base)
    with raises_kind("delta_base", match=r"last_delta 3 of delta_base 1 lies beyond the end of that stream, 0"):
        await shop.publish(fresh)
    assert Store(shop.store).versions(MODEL) == [1]
    await shop.append_deltas(1, 3)
    record = (await shop.publish(fresh)).record
    assert (record.delta_base, record.last_delta) == (1, 3)


async def test_a_version_that_no_replay_brings_up_to_date_is_refused(shop: Shop) -> None:
    await shop.publish(shop.train())
    await shop.append_deltas(1, 5)
    await shop.fleet.registry.trim(delta_stream(MODEL, 1), 4)
    behind, fresh = (shop.train(version=last, last_delta=last, delta_base=1) for last in (2, 3))
    with raises_kind("delta_gap", match=r"last_delta 2 of delta_base 1: the stream begins with 4"):
        await shop.publish(behind)
    assert (await shop.publish(fresh)).is_new


# Retention


async def test_the_highest_versions_stay_and_the_others_go(stocked: Shop) -> None:
    assert await stocked.retain(2) == Retained(kept=(4, 5), dropped=(1, 2, 3))
    assert await stocked.fleet.spec(MODEL, 1) is None
    assert Snapshot.open(stocked.store / MODEL / "4").version == 4
    assert await stocked.retain(2) == Retained(kept=(4, 5), dropped=())


@pytest.mark.parametrize(
    "wanted",
    [
        {"live": 1},
        {"hold": (1,)},
        {"serve": (1,)},
        {"follow": (1,)},
        {"canary": Canary(version=1, share=0.1)},
        {"node_hold": {"shard-0-0": (1,)}},
    ],
)
async def test_a_wanted_version_is_never_dropped(stocked: Shop, wanted: dict[str, Any]) -> None:
    await stocked.fleet.put_wanted(WantedModel(model=MODEL, epoch=1, **wanted), None)
    assert await stocked.retain(1) == Retained(kept=(1, 5), dropped=(2, 3, 4))


async def test_versions_of_the_last_rollout_stay(stocked: Shop) -> None:
    """So that a rollback has somewhere to go."""
    rollout = rollout_record(
        model=MODEL, from_version=2, to_version=3, previous_version=1, state="done", steps=("flip",), delta_base=3
    )
    await stocked.fleet.registry.put(rollout_key(MODEL), rollout.encode(), 0)
    assert await stocked.retain(1) == Retained(kept=(1, 2, 3, 5), dropped=(4,))


async def test_a_version_that_a_node_holds_stays_though_unwanted(stocked: Shop) -> None:
    report = VersionReport(model=MODEL, version=2, state="draining")
    node = NodeRecord(node_id="n", kind="serving", process_id=1, address="h:1", live={MODEL: 3}, versions=(report,))
    await stocked.fleet.announce_node(node, 60)
    assert await stocked.retain(1) == Retained(kept=(2, 3, 5), dropped=(1, 4))


async def test_wherever_a_run_ends_the_next_one_does_the_rest(stocked: Shop) -> None:
    for calls in range(1000):
        failing: Any = InterruptedRegistry(stocked.fleet.registry, calls_left=calls)
        try:
            ended = await retain(FleetRegistry(failing), stocked.store, MODEL, 2)
            break
        except RegistryUnavailableError:
            # Whatever is on record and in sight is complete, and the two that stay always are.
            assert {"4", "5"} <= set(os.listdir(stocked.store / MODEL))
    assert calls > 5
    assert ended.kept == (4, 5)
    assert (await stocked.retain(2)).dropped == ()


async def test_streams_are_trimmed_to_what_kept_versions_replay(stocked: Shop) -> None:
    fleet = stocked.fleet
    for base in (1, 4):
        await stocked.append_deltas(base, 10)
    fourth = await fleet.version(MODEL, 4)
    for version, last_delta in ((6, 5), (7, 8)):
        await fleet.put_version(fourth.model_copy(update={"version": version, "last_delta": last_delta}))
    assert (await retain(fleet, stocked.store, MODEL, 2)).kept == (6, 7)
    assert await fleet.registry.bounds(delta_stream(MODEL, 4)) == StreamBounds(6, 10)
    assert await fleet.registry.bounds(delta_stream(MODEL, 1)) == StreamBounds(11, 10)
