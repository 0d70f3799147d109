"""Stores at URLs, against a real S3 server: what is read is what was written, whole and checked, or nothing."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import pytest

from loader.errors import (
    ExportError,
    SnapshotCorruptError,
    SnapshotExistsError,
    SnapshotNotFoundError,
    SnapshotPathError,
    StoreAccessError,
    StoreCacheError,
    StoreUnavailableError,
)
from loader.registry.directory import DirectoryRegistry
from loader.registry.fleet import FleetRegistry
from loader.snapshot.manifest import CHECKSUM_NAME, MANIFEST_NAME, read_manifest
from loader.snapshot.publishing import publish, retain
from loader.snapshot.reader import Snapshot
from loader.stores import fetching
from loader.stores.place import StoreUrl
from loader.stores.remote import RemoteStore
from shardrank_testing.processes import wait_until
from shardrank_testing.s3_server import Bucket
from shardrank_testing.snapshots import make_spec, one_table_spec, rewrite_manifest, write_snapshot
from shardrank_testing.tcp_proxy import threaded_proxy

SPEC = one_table_spec(8000, 32, dtype="fp32")
"""One row file of 1 MB."""
ROWS = "tables/items/rows-00000-of-00001.safetensors"
PART_BYTES = 64 << 10


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "PART_BYTES", PART_BYTES)


@pytest.fixture(scope="module")
def snapshots(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Versions 1 to 4 of `small`, each with rows of its own."""
    store = tmp_path_factory.mktemp("made")
    for version in range(1, 5):
        write_snapshot(store, SPEC, seed=version, version=version)
    return store / "small"


def store_of(bucket: Bucket, tmp_path: Path, **more: Any) -> RemoteStore:
    return RemoteStore(StoreUrl(url=bucket.url, cache=tmp_path / "cache", **more))


def put(store: RemoteStore, folder: Path) -> tuple[str, bool]:
    return store.put(folder, read_manifest(folder)[1])


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def in_place(tmp_path: Path, name: str = "*.safetensors") -> list[Path]:
    """Files of snapshots that are in their places in the cache."""
    return [path for path in (tmp_path / "cache").rglob(name) if "parts" not in path.parts]


def test_a_version_is_put_up_listed_and_read_as_it_was_written(bucket: Bucket, tmp_path: Path) -> None:
    folder, _ = write_snapshot(tmp_path / "made", make_spec(), rows_per_file=4096)
    store = store_of(bucket, tmp_path)
    assert store.models() == []
    with pytest.raises(SnapshotNotFoundError, match=f"{bucket.url} has no model"):
        store.latest("films")
    assert put(store, folder) == (f"{bucket.url}/films/1", True)
    assert put(store, folder) == (f"{bucket.url}/films/1", False)
    assert (store.models(), store.versions("films"), store.next_version("films")) == (["films"], [1], 2)
    assert store.unfinished() == []
    with store.hold("films") as held:
        assert held.is_checked
        assert files_of(held.path) == files_of(folder)
        assert Snapshot.open(held.path).identity == read_manifest(folder)[1]
    with pytest.raises(SnapshotNotFoundError, match=r"no version 2 of model 'films'; it has \[1\]"):
        store.hold("films", 2)


def test_what_is_in_the_cache_is_served_without_the_store_and_what_the_disk_damaged_is_fetched_again(
    bucket: Bucket, snapshots: Path, tmp_path: Path, s3_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    identity = read_manifest(snapshots / "1")[1]
    with threaded_proxy(s3_port) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{proxy.port}")
        store = store_of(bucket, tmp_path)
        put(store, snapshots / "1")
        store.hold("small", 1, identity=identity).close()
        before = proxy.answer_bytes
        with store.hold("small", 1, identity=identity) as held:
            assert proxy.answer_bytes == before
        damaged = bytearray((held.path / ROWS).read_bytes())
        damaged[-1] ^= 1
        (held.path / ROWS).write_bytes(damaged)
        with store.hold("small", 1, identity=identity) as held:
            assert (held.path / ROWS).read_bytes() == (snapshots / "1" / ROWS).read_bytes()
        assert proxy.answer_bytes - before > (held.path / ROWS).stat().st_size


def test_a_version_is_immutable_and_two_who_write_it_never_mix(
    bucket: Bucket, snapshots: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = store_of(bucket, tmp_path)
    other, _ = write_snapshot(tmp_path / "other", SPEC, seed=9, version=1)
    # The first one is killed before its manifest.
    written: list[str] = []

    def dies(path: str, content: bytes) -> bool:
        if path.endswith(MANIFEST_NAME):
            raise KeyboardInterrupt
        return create(path, content)

    create, write = store.objects.create, store.objects.write
    monkeypatch.setattr(store.objects, "create", dies)
    with pytest.raises(KeyboardInterrupt):
        put(store, snapshots / "1")
    assert (store.versions("small"), store.unfinished()) == ([], [("small", 1)])
    monkeypatch.setattr(store.objects, "create", create)
    with pytest.raises(ExportError, match=r"small/\.export-1: a snapshot of identity .* is being published"):
        put(store, other)
    # Run again it goes on: what is there is not written a second time.
    monkeypatch.setattr(store.objects, "write", lambda path, content: (written.append(path), write(path, content)))
    assert put(store, snapshots / "1")[1]
    assert written == [f"small/1/{CHECKSUM_NAME}"]
    with pytest.raises(SnapshotExistsError, match="a version is immutable"):
        put(store, other)
    with store.hold("small") as held:
        assert files_of(held.path) == files_of(snapshots / "1")


KILLED = """
    import sys
    from pathlib import Path
    from loader.stores import fetching
    from loader.stores.place import StoreUrl
    from loader.stores.remote import RemoteStore

    fetching.PART_BYTES, fetching.PARTS_AT_A_TIME = int(sys.argv[3]), 2
    RemoteStore(StoreUrl(url=sys.argv[1], cache=Path(sys.argv[2]))).hold("small", 1)
"""


def test_a_process_that_dies_in_the_middle_goes_on_where_it_was(
    bucket: Bucket, snapshots: Path, tmp_path: Path, s3_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(store_of(bucket, tmp_path), snapshots / "1")
    size = (snapshots / "1" / ROWS).stat().st_size
    with threaded_proxy(s3_port) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{proxy.port}")
        # All that is held back is of two parts at most.
        proxy.hold_after = size // 2

        def journals() -> list[Path]:
            found = (tmp_path / "cache").rglob("*.journal")
            return [path for path in found if path.read_text().count("\n") > 4]

        environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
        command = [sys.executable, "-c", textwrap.dedent(KILLED), bucket.url, str(tmp_path / "cache"), str(PART_BYTES)]
        process = subprocess.Popen(command, env=environment)
        try:
            wait_until(lambda: bool(journals()), "some of its parts to be on record")
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()
        assert not in_place(tmp_path, "rows-*")
        (journal,) = journals()
        parts = [json.loads(line)[0] for line in journal.read_text().splitlines()[1:]]
        # One part was written and then lost by the disk: it is fetched again.
        with journal.with_suffix("").open("r+b") as file:
            file.seek(parts[0] * PART_BYTES)
            file.write(b"lost")
        proxy.hold_after = None
        wait_until(lambda: not proxy.is_in_use, "what was on its way to the dead process to end")
        proxy.answer_bytes = 0
        with store_of(bucket, tmp_path).hold("small", 1) as held:
            assert files_of(held.path) == files_of(snapshots / "1")
            Snapshot.open(held.path)
    assert proxy.answer_bytes < size - (len(parts) - 1) * PART_BYTES + (64 << 10)
    assert not list((tmp_path / "cache").rglob("*.journal"))


@pytest.mark.parametrize("after_bytes", [0, 200_000])
def test_a_store_that_stalls_is_unavailable_within_its_limit_and_nothing_of_it_is_in_place(
    bucket: Bucket, snapshots: Path, tmp_path: Path, s3_port: int, monkeypatch: pytest.MonkeyPatch, after_bytes: int
) -> None:
    put(store_of(bucket, tmp_path), snapshots / "1")
    with threaded_proxy(s3_port) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{proxy.port}")
        proxy.hold_after = after_bytes
        with pytest.raises(StoreUnavailableError, match=r"can't be (read|listed)"):
            store_of(bucket, tmp_path, timeout_s=0.6).hold("small", 1)
        assert not in_place(tmp_path, "rows-*")


def test_an_object_that_changes_while_it_is_fetched_is_noticed_and_never_mixed(
    bucket: Bucket, snapshots: Path, tmp_path: Path, s3_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(store_of(bucket, tmp_path), snapshots / "1")
    right, other = (snapshots / "1" / ROWS).read_bytes(), (snapshots / "2" / ROWS).read_bytes()
    assert len(right) == len(other)
    monkeypatch.setattr(fetching, "PARTS_AT_A_TIME", 1)
    with threaded_proxy(s3_port) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{proxy.port}")
        proxy.hold_after = len(right) // 2

        def change() -> None:
            wait_until(lambda: proxy.answer_bytes >= len(right) // 2, "half of it to come")
            bucket.put(f"small/1/{ROWS}", other)
            proxy.hold_after = None

        thread = threading.Thread(target=change)
        thread.start()
        with pytest.raises(SnapshotCorruptError, match=f"{ROWS}: changed or went away while it was fetched"):
            store_of(bucket, tmp_path).hold("small", 1)
        thread.join()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{s3_port}")
    # What was fetched of the first object is not gone on with, and the second one is not what the manifest says.
    with pytest.raises(SnapshotCorruptError, match="the manifest says"):
        store_of(bucket, tmp_path).hold("small", 1)
    assert not in_place(tmp_path, "rows-*")
    bucket.put(f"small/1/{ROWS}", right)
    with store_of(bucket, tmp_path).hold("small", 1) as held:
        assert files_of(held.path) == files_of(snapshots / "1")


@pytest.mark.parametrize(
    ("damage", "error", "message"),
    [
        ("flip", SnapshotCorruptError, "SHA-256 is .*, the manifest says"),
        ("cut", SnapshotCorruptError, f"{ROWS}: .* bytes, the manifest says"),
        ("missing", SnapshotCorruptError, f"{ROWS}: missing"),
        ("manifest", SnapshotCorruptError, "SHA-256 is not the one in manifest.json.sha256"),
        ("path", SnapshotPathError, "is not a plain relative path"),
        ("bucket", StoreAccessError, "NoSuchBucket"),
    ],
)
def test_what_is_damaged_in_the_store_is_refused_by_name(
    bucket: Bucket, tmp_path: Path, damage: str, error: type[Exception], message: str
) -> None:
    folder, _ = write_snapshot(tmp_path / "made", one_table_spec(300))
    store, rows = store_of(bucket, tmp_path), (folder / ROWS).read_bytes()
    put(store, folder)
    if damage == "flip":
        bucket.put(f"small/1/{ROWS}", rows[:-1] + bytes([rows[-1] ^ 1]))
    elif damage == "cut":
        bucket.put(f"small/1/{ROWS}", rows[:-1])
    elif damage == "missing":
        bucket.delete(f"small/1/{ROWS}")
    elif damage == "manifest":
        bucket.put(f"small/1/{MANIFEST_NAME}", (folder / MANIFEST_NAME).read_bytes() + b"\n")
    elif damage == "path":
        rewrite_manifest(folder, lambda one: one["dense"].update(path="../../../../evil.safetensors"))
        bucket.put("small/evil.safetensors", (folder / "dense.safetensors").read_bytes())
        for name in (MANIFEST_NAME, CHECKSUM_NAME):
            bucket.put(f"small/1/{name}", (folder / name).read_bytes())
    else:
        store = RemoteStore(StoreUrl(url="s3://no-such-bucket", cache=tmp_path / "cache"))
    with pytest.raises(error, match=message):
        store.hold("small", 1)
    assert not in_place(tmp_path, "rows-*")
    assert not list(tmp_path.rglob("evil*"))


def test_the_cache_keeps_within_its_bound_and_never_drops_what_is_in_use(
    bucket: Bucket, snapshots: Path, tmp_path: Path
) -> None:
    one = sum(map(len, files_of(snapshots / "1").values()))
    store = store_of(bucket, tmp_path, cache_bytes=2 * one + one // 2)
    for version in range(1, 5):
        put(store, snapshots / str(version))

    def here() -> list[int]:
        return sorted(int(path.parents[2].name) for path in in_place(tmp_path, "rows-*"))

    first = store.hold("small", 1)
    store.hold("small", 2).close()
    assert here() == [1, 2]
    store.hold("small", 3).close()
    assert here() == [1, 3]
    third = store.hold("small", 3)
    with pytest.raises(StoreCacheError, match=r"of small version 4 are needed, \d+ bytes are in use, and it may hold"):
        store.hold("small", 4)
    assert here() == [1, 3]
    first.close()
    # Another process with the same folder counts the same.
    with store_of(bucket, tmp_path, cache_bytes=2 * one + one // 2).hold("small", 4) as held:
        assert files_of(held.path) == files_of(snapshots / "4")
        assert here() == [3, 4]
        assert sum(path.stat().st_size for path in (tmp_path / "cache").rglob("*")) <= 3 * one
    third.close()


def test_versions_are_published_and_retired_at_a_url_and_what_was_set_aside_by_others_is_left_to_them(
    bucket: Bucket, snapshots: Path, tmp_path: Path
) -> None:
    place = StoreUrl(url=bucket.url, cache=tmp_path / "cache")
    store = RemoteStore(place)

    async def program() -> None:
        fleet = FleetRegistry(DirectoryRegistry(tmp_path / "registry"))
        for version in range(1, 5):
            done = await publish(fleet, snapshots / str(version), place, clock=lambda: 1.0)
            assert (done.where, done.copied) == (f"{bucket.url}/small/{version}", True)
        again = await publish(fleet, snapshots / "4", place, clock=lambda: 1.0)
        assert (again.copied, again.is_new) == (False, False)
        bucket.put("small/.trash-4", b"")  # another run's, that may bring it back
        assert (await retain(fleet, place, "small", 2)).dropped == (1, 2)
        await fleet.registry.close()

    asyncio.run(program())
    assert {one.path for one in store.objects.listed("small") if one.path.startswith(("small/1/", "small/2/"))} == set()
    assert (store.versions("small"), store.next_version("small")) == ([3], 5)
    with pytest.raises(ExportError, match="is being deleted"):
        put(store, snapshots / "4")  # though all of it is still there
    bucket.delete(f"small/4/{MANIFEST_NAME}")
    with pytest.raises(ExportError, match="is being deleted"):
        put(store, snapshots / "4")
    assert store.unfinished() == []
    bucket.put(f"small/4/{MANIFEST_NAME}", (snapshots / "4" / MANIFEST_NAME).read_bytes())
    store.bring_back("small", 4)
    assert store.versions("small") == [3, 4]
