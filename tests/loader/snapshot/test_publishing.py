"""Versions come into real stores and registries and go from them; what ended anywhere, the next run ends."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from loader.errors import (
    DeltaBaseError,
    DeltaGapError,
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
from loader.rollout.plan import Rollout, encode_rollout
from loader.snapshot.codecs import codec_for
from loader.snapshot.publishing import Publication, Retained, publish, retain
from loader.snapshot.reader import Snapshot, verify_snapshot
from loader.snapshot.store import Store
from shardrank_testing.interrupted_registry import InterruptedRegistry
from shardrank_testing.snapshots import files_of, make_spec, one_table_spec, write_snapshot

pytestmark = pytest.mark.anyio

MODEL = "small"
SPEC = one_table_spec(260)
Publish = Callable[..., Awaitable[Publication]]


@pytest.fixture
def fleet(directory: DirectoryRegistry) -> FleetRegistry:
    return FleetRegistry(directory)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def published(fleet: FleetRegistry, store: Path) -> Publish:
    """Publish a snapshot into the store."""
    return lambda folder, at=7.0: publish(fleet, folder, store, clock=lambda: at)


async def append_deltas(fleet: FleetRegistry, base: int, count: int) -> None:
    for sequence in range(1, count + 1):
        await fleet.registry.append(delta_stream(MODEL, base), sequence, b"rows")


def changes_below(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


# Publishing


async def test_a_published_version_is_in_the_store_and_on_record(
    fleet: FleetRegistry, published: Publish, tmp_path: Path, store: Path
) -> None:
    spec = make_spec()
    folder, _ = write_snapshot(tmp_path, spec, version=4)
    done = await published(folder)
    assert (done.copied, done.is_new) == (True, True)
    assert Path(done.where) == store / "films" / "4"
    assert files_of(Path(done.where)) == files_of(folder)
    assert verify_snapshot(Path(done.where)).ok
    record = await fleet.version("films", 4)
    assert record == done.record
    assert record.identity == Snapshot.open(folder).identity
    assert (record.delta_base, record.last_delta, record.published_at) == (4, 0, 7.0)
    sizes = [table.num_embeddings * codec_for(table.dtype, table.embedding_dim).row_bytes for table in spec.tables]
    assert record.rows_bytes == sum(sizes)
    assert await fleet.spec("films", 4) == spec.model_dump_json()


async def test_publishing_again_changes_nothing_or_restores_the_record(
    fleet: FleetRegistry, published: Publish, tmp_path: Path, store: Path
) -> None:
    folder, _ = write_snapshot(tmp_path, SPEC)
    first = await published(folder)
    before = changes_below(store)
    second = await published(folder, at=9.0)
    assert (second.copied, second.is_new, second.record) == (False, False, first.record)
    assert changes_below(store) == before
    shutil.rmtree(fleet.registry.path)
    assert (await published(Path(first.where))).record == first.record


async def test_a_damaged_snapshot_is_refused_and_leaves_no_trace(
    fleet: FleetRegistry, published: Publish, tmp_path: Path, store: Path
) -> None:
    folder, _ = write_snapshot(tmp_path, SPEC)
    rows = next(folder.glob("tables/*/rows-*"))
    content = bytearray(rows.read_bytes())
    content[-3] ^= 4
    rows.write_bytes(content)
    with pytest.raises(SnapshotCorruptError, match=rf"must not be served: .*{rows.name}: SHA-256 is"):
        await published(folder)
    assert store.name not in os.listdir(tmp_path)
    assert await fleet.versions() == []


async def test_another_snapshot_of_a_published_version_is_refused(
    fleet: FleetRegistry, published: Publish, tmp_path: Path
) -> None:
    folder, _ = write_snapshot(tmp_path, SPEC, seed=1)
    other, _ = write_snapshot(tmp_path / "elsewhere", SPEC, seed=2)
    first = await published(folder)
    with pytest.raises(RegistryConflictError, match="a version is immutable, export this one with another number"):
        await published(other)
    shutil.rmtree(fleet.registry.path)
    with pytest.raises(SnapshotExistsError, match=first.record.identity):
        await published(other)
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


async def test_a_killed_publisher_leaves_no_version_and_the_next_goes_on(
    fleet: FleetRegistry, published: Publish, tmp_path: Path, store: Path
) -> None:
    folder, _ = write_snapshot(tmp_path, make_spec())
    work = store / "films" / ".export-1" / "snapshot"
    kept: dict[Path, int] = {}
    for calls in (4, 9):
        command = [sys.executable, "-c", PUBLISH_AND_DIE, str(folder), str(tmp_path), str(calls)]
        killed = await asyncio.to_thread(subprocess.run, command, check=False, timeout=60)
        assert killed.returncode == -signal.SIGKILL
        assert Store(store).versions("films") == []
        assert await fleet.versions() == []
        assert kept.items() <= {path: path.stat().st_ino for path in work.rglob("*.safetensors")}.items()
        # The last one was not yet on record.
        journal = (work.parent / "export-state.jsonl").read_text().splitlines()[1:]
        kept = {path: path.stat().st_ino for path in work.rglob("*.safetensors") if path.name in str(journal)}
        assert kept
    done = await published(folder)
    assert files_of(Path(done.where)) == files_of(folder)
    for path, inode in kept.items():
        assert (Path(done.where) / path.relative_to(work)).stat().st_ino == inode
    assert os.listdir(store / "films") == ["1"]


async def test_a_version_contains_no_delta_that_its_stream_does_not_have(
    fleet: FleetRegistry, published: Publish, tmp_path: Path, store: Path
) -> None:
    base, _ = write_snapshot(tmp_path, SPEC)
    fresh, _ = write_snapshot(tmp_path, SPEC, version=2, last_delta=3, delta_base=1)
    await published(base)
    with pytest.raises(DeltaBaseError, match=r"last_delta 3 of delta_base 1 lies beyond the end of that stream, 0"):
        await published(fresh)
    assert Store(store).versions(MODEL) == [1]
    await append_deltas(fleet, 1, 3)
    record = (await published(fresh)).record
    assert (record.delta_base, record.last_delta) == (1, 3)


async def test_a_version_that_no_replay_can_bring_up_to_date_is_refused(
    fleet: FleetRegistry, published: Publish, tmp_path: Path
) -> None:
    await published(write_snapshot(tmp_path, SPEC)[0])
    await append_deltas(fleet, 1, 5)
    await fleet.registry.trim(delta_stream(MODEL, 1), 4)
    late, early = (write_snapshot(tmp_path, SPEC, version=n, last_delta=n, delta_base=1)[0] for n in (2, 3))
    with pytest.raises(DeltaGapError, match=r"last_delta 2 of delta_base 1: the stream begins with 4"):
        await published(late)
    assert (await published(early)).is_new


# Retention


@pytest.fixture
async def five(published: Publish, tmp_path: Path) -> None:
    """Five published versions in the store."""
    for seed in range(5):
        await published(write_snapshot(tmp_path, SPEC, seed=seed)[0])


async def kept_and_dropped(fleet: FleetRegistry, store: Path, keep: int) -> Retained:
    """What a run reports, of which the store and the records must be."""
    done = await retain(fleet, store, MODEL, keep)
    assert Store(store).versions(MODEL) == [record.version for record in await fleet.versions(MODEL)] == list(done.kept)
    assert set(os.listdir(store / MODEL)) - {".retention-lock"} == set(map(str, done.kept))
    return done


@pytest.mark.usefixtures("five")
async def test_the_highest_versions_stay_and_the_others_go(fleet: FleetRegistry, store: Path) -> None:
    assert await kept_and_dropped(fleet, store, 2) == Retained(kept=(4, 5), dropped=(1, 2, 3))
    assert await fleet.spec(MODEL, 1) is None
    assert Snapshot.open(store / MODEL / "4").version == 4
    assert await kept_and_dropped(fleet, store, 2) == Retained(kept=(4, 5), dropped=())


@pytest.mark.usefixtures("five")
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
async def test_a_wanted_version_is_never_dropped(fleet: FleetRegistry, store: Path, wanted: dict[str, Any]) -> None:
    await fleet.put_wanted(WantedModel(model=MODEL, epoch=1, **wanted), None)
    assert await kept_and_dropped(fleet, store, 1) == Retained(kept=(1, 5), dropped=(2, 3, 4))


@pytest.mark.usefixtures("five")
async def test_versions_of_the_last_rollout_and_of_nodes_stay(fleet: FleetRegistry, store: Path) -> None:
    """So that a rollback has somewhere to go; and what a node holds, though nothing wants it any more."""
    report = VersionReport(model=MODEL, version=2, state="draining")
    node = NodeRecord(node_id="n", kind="serving", process_id=1, address="h:1", live={MODEL: 3}, versions=(report,))
    await fleet.announce_node(node, 60)
    assert (await kept_and_dropped(fleet, store, 2)).dropped == (1,)
    rollout = Rollout(
        model=MODEL, epoch=3, rollout_id="0" * 32, from_version=4, to_version=3, previous_version=2, state="done",
        steps=("flip",), started_at=0, step_began_at=0, delta_base=3, last_delta=0,
    )  # fmt: skip
    await fleet.withdraw_node("n")
    await fleet.registry.put(rollout_key(MODEL), encode_rollout(rollout), 0)
    assert await kept_and_dropped(fleet, store, 1) == Retained(kept=(2, 3, 4, 5), dropped=())


@pytest.mark.usefixtures("five")
async def test_wherever_a_run_ends_the_next_one_does_the_rest(fleet: FleetRegistry, store: Path) -> None:
    for calls in range(1000):
        failing: Any = InterruptedRegistry(fleet.registry, calls_left=calls)
        try:
            ended = await retain(FleetRegistry(failing), store, MODEL, 2)
            break
        except RegistryUnavailableError:
            # Whatever is on record and in sight is complete, and the two that stay always are.
            assert {"4", "5"} <= set(os.listdir(store / MODEL))
    assert calls > 5
    assert ended.kept == (4, 5)
    assert (await kept_and_dropped(fleet, store, 2)).dropped == ()


@pytest.mark.usefixtures("five")
async def test_streams_are_trimmed_to_what_kept_versions_replay(fleet: FleetRegistry, store: Path) -> None:
    for base in (1, 4):
        await append_deltas(fleet, base, 10)
    fourth = await fleet.version(MODEL, 4)
    for version, last_delta in ((6, 5), (7, 8)):
        await fleet.put_version(fourth.model_copy(update={"version": version, "last_delta": last_delta}))
    assert (await retain(fleet, store, MODEL, 2)).kept == (6, 7)
    continued, ended = [await fleet.registry.bounds(delta_stream(MODEL, base)) for base in (4, 1)]
    assert (continued.first, continued.last) == (6, 10)
    assert (ended.first, ended.last) == (11, 10)
