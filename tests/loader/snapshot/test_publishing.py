"""Publishing into real stores and real directory registries, by processes that are really killed."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import pytest

from loader.errors import (
    DeltaBaseError,
    DeltaGapError,
    RegistryConflictError,
    SnapshotCorruptError,
    SnapshotExistsError,
)
from loader.registry.directory import DirectoryRegistry
from loader.registry.fleet import FleetRegistry, delta_stream
from loader.snapshot.codecs import codec_for
from loader.snapshot.publishing import Publication, publish
from loader.snapshot.reader import Snapshot, verify_snapshot
from loader.snapshot.row_source import rows_of
from loader.snapshot.store import Store
from loader.snapshot.writer import export_snapshot
from shardrank_testing.snapshots import make_spec, one_table_spec, random_tables, write_snapshot

T = TypeVar("T")


def on(registry: Path, work: Callable[[FleetRegistry], Awaitable[T]]) -> T:
    async def program() -> T:
        opened = DirectoryRegistry(registry)
        try:
            return await work(FleetRegistry(opened))
        finally:
            await opened.close()

    return asyncio.run(program())


def published(root: Path, folder: Path, at: float = 7.0, **options: object) -> Publication:
    return on(root / "registry", lambda fleet: publish(fleet, folder, root / "store", clock=lambda: at, **options))


def snapshot_of_lineage(root: Path, version: int, last_delta: int | None, delta_base: int | None) -> Path:
    spec = one_table_spec(300)
    return export_snapshot(
        root,
        spec,
        rows={name: rows_of(rows) for name, rows in random_tables(spec, 0).items()},
        dense={},
        version=version,
        last_delta=last_delta,
        delta_base=delta_base,
    )


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_published_version_lies_in_the_store_and_on_record(tmp_path: Path) -> None:
    spec = make_spec()
    folder, _ = write_snapshot(tmp_path / "training", spec, version=4)
    done = published(tmp_path, folder)
    assert (done.copied, done.is_new) == (True, True)
    assert Path(done.where) == tmp_path / "store" / "films" / "4"
    assert files_of(Path(done.where)) == files_of(folder)
    assert verify_snapshot(Path(done.where)).ok
    record = on(tmp_path / "registry", lambda fleet: fleet.version("films", 4))
    assert record == done.record
    assert record.identity == Snapshot.open(folder).identity
    assert (record.delta_base, record.last_delta, record.published_at) == (4, 0, 7.0)
    sizes = [one.num_embeddings * codec_for(one.dtype, one.embedding_dim).row_bytes for one in spec.tables]
    assert record.rows_bytes == sum(sizes)
    assert on(tmp_path / "registry", lambda fleet: fleet.spec("films", 4)) == spec.model_dump_json()


def test_publishing_again_changes_nothing(tmp_path: Path) -> None:
    folder, _ = write_snapshot(tmp_path / "training", one_table_spec(300))
    first = published(tmp_path, folder)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "store").rglob("*")}
    second = published(tmp_path, folder, at=9.0)
    assert (second.copied, second.is_new, second.record) == (False, False, first.record)
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "store").rglob("*")} == before


def test_a_lost_registry_is_filled_again_from_the_store(tmp_path: Path) -> None:
    folder, _ = write_snapshot(tmp_path / "store", one_table_spec(300))
    first = published(tmp_path, folder)
    shutil.rmtree(tmp_path / "registry")
    assert published(tmp_path, folder).record == first.record


def test_a_damaged_snapshot_is_refused_and_leaves_no_trace(tmp_path: Path) -> None:
    folder, _ = write_snapshot(tmp_path / "training", one_table_spec(300))
    rows = next(folder.glob("tables/*/rows-*"))
    content = bytearray(rows.read_bytes())
    content[-3] ^= 4
    rows.write_bytes(content)
    with pytest.raises(SnapshotCorruptError, match=rf"must not be served: .*{rows.name}: SHA-256 is"):
        published(tmp_path, folder)
    assert not (tmp_path / "store").exists()
    assert on(tmp_path / "registry", lambda fleet: fleet.versions()) == []


def test_another_snapshot_of_a_published_version_is_refused(tmp_path: Path) -> None:
    folder, _ = write_snapshot(tmp_path / "training", one_table_spec(300), seed=1)
    other, _ = write_snapshot(tmp_path / "elsewhere", one_table_spec(300), seed=2)
    first = published(tmp_path, folder)
    with pytest.raises(RegistryConflictError, match="a version is immutable, export this one with another number"):
        published(tmp_path, other)
    shutil.rmtree(tmp_path / "registry")
    with pytest.raises(SnapshotExistsError, match=first.record.identity):
        published(tmp_path, other)
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


def test_a_killed_publisher_leaves_no_version_and_the_next_one_goes_on_where_it_stopped(tmp_path: Path) -> None:
    folder, _ = write_snapshot(tmp_path / "training", make_spec())
    work = tmp_path / "store" / "films" / ".export-1" / "snapshot"
    kept: dict[Path, int] = {}
    for calls in (4, 9):
        command = [sys.executable, "-c", PUBLISH_AND_DIE, str(folder), str(tmp_path), str(calls)]
        assert subprocess.run(command, check=False, timeout=60).returncode == -signal.SIGKILL
        assert Store(tmp_path / "store").versions("films") == []
        assert on(tmp_path / "registry", lambda fleet: fleet.versions()) == []
        assert kept.items() <= {path: path.stat().st_ino for path in work.rglob("*.safetensors")}.items()
        # The last one was not yet on record.
        journal = (work.parent / "export-state.jsonl").read_text().splitlines()[1:]
        kept = {path: path.stat().st_ino for path in work.rglob("*.safetensors") if path.name in str(journal)}
        assert kept
    done = published(tmp_path, folder)
    assert files_of(Path(done.where)) == files_of(folder)
    for path, inode in kept.items():
        assert (Path(done.where) / path.relative_to(work)).stat().st_ino == inode
    assert os.listdir(tmp_path / "store" / "films") == ["1"]


def test_a_version_may_contain_no_delta_that_its_stream_does_not_have(tmp_path: Path) -> None:
    base = snapshot_of_lineage(tmp_path / "training", 1, None, None)
    fresh = snapshot_of_lineage(tmp_path / "training", 2, 3, 1)
    published(tmp_path, base)
    with pytest.raises(DeltaBaseError, match=r"last_delta 3 of delta_base 1 lies beyond the end of that stream, 0"):
        published(tmp_path, fresh)
    assert Store(tmp_path / "store").versions("small") == [1]

    async def three_deltas(fleet: FleetRegistry) -> None:
        for sequence in (1, 2, 3):
            await fleet.registry.append(delta_stream("small", 1), sequence, b"rows")

    on(tmp_path / "registry", three_deltas)
    record = published(tmp_path, fresh).record
    assert (record.delta_base, record.last_delta) == (1, 3)


def test_a_version_that_no_replay_can_bring_up_to_date_is_refused(tmp_path: Path) -> None:
    published(tmp_path, snapshot_of_lineage(tmp_path / "training", 1, None, None))

    async def five_deltas(fleet: FleetRegistry) -> None:
        for sequence in range(1, 6):
            await fleet.registry.append(delta_stream("small", 1), sequence, b"rows")
        await fleet.registry.trim(delta_stream("small", 1), 4)

    on(tmp_path / "registry", five_deltas)
    with pytest.raises(DeltaGapError, match=r"last_delta 2 of delta_base 1: the stream begins with 4"):
        published(tmp_path, snapshot_of_lineage(tmp_path / "training", 2, 2, 1))
    assert published(tmp_path, snapshot_of_lineage(tmp_path / "training", 3, 3, 1)).is_new
