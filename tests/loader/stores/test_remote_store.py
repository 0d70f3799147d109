"""Stores at URLs, against a real S3 server: what is read is what was written, whole and checked, or nothing."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from loader.errors import (
    ExportError,
    SnapshotCorruptError,
    SnapshotExistsError,
    SnapshotNotFoundError,
    is_passing,
)
from loader.registry.directory import DirectoryRegistry
from loader.registry.fleet import FleetRegistry
from loader.snapshot.manifest import CHECKSUM_NAME, MANIFEST_NAME, read_manifest
from loader.snapshot.publishing import publish, retain
from loader.snapshot.reader import Snapshot
from loader.snapshot.store import Store
from loader.stores import remote as remote_module
from loader.stores.cache import StoreUrl
from loader.stores.remote import RemoteStore
from shardrank_testing.errors import raises_kind
from shardrank_testing.exhaustion import files_limited_to
from shardrank_testing.processes import wait_until
from shardrank_testing.s3_server import Bucket
from shardrank_testing.snapshots import files_of, make_spec, one_table_spec, rewrite_manifest, write_snapshot
from shardrank_testing.tcp_proxy import CountedProxy, threaded_proxy

SPEC = one_table_spec(8000, 32, dtype="fp32")
"""One row file of 1 MB."""
ROWS = "tables/items/rows-00000-of-00001.safetensors"
RANGE_BYTES = 64 << 10


@pytest.fixture(autouse=True)
def small_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_module, "RANGE_BYTES", RANGE_BYTES)


@dataclass(frozen=True)
class Remote:
    """A bucket, whose clients have one cache and reach the server through a proxy."""

    bucket: Bucket
    proxy: CountedProxy
    cache: Path
    made: Path
    """Folder of versions 1 to 4 of `small`, which are not in the bucket."""

    @property
    def place(self) -> StoreUrl:
        return StoreUrl(url=self.bucket.url, cache=self.cache)

    def store(self, **options: Any) -> RemoteStore:
        return RemoteStore(self.place.model_copy(update=options))

    def cached(self) -> list[Path]:
        """Files of rows that are in their places in the cache."""
        return list(self.cache.rglob("rows-*"))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    store = tmp_path_factory.mktemp("made")
    for version in range(1, 5):
        write_snapshot(store, SPEC, seed=version, version=version)
    return store / "small"


@pytest.fixture
def remote(
    bucket: Bucket, s3_port: int, made: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[Remote]:
    with threaded_proxy(s3_port) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{proxy.port}")
        yield Remote(bucket, proxy, tmp_path / "cache", made)


def put(store: Store, folder: Path) -> tuple[str, bool]:
    return store.put(folder, read_manifest(folder)[1])


def flip_last_bit(content: bytes) -> bytes:
    return content[:-1] + bytes([content[-1] ^ 1])


def test_a_version_is_put_listed_and_read_as_it_was_written(remote: Remote, tmp_path: Path) -> None:
    store = remote.store()
    folder, _ = write_snapshot(tmp_path / "made", make_spec(), rows_per_file=4096)
    assert store.models() == []
    with pytest.raises(SnapshotNotFoundError, match=f"{remote.bucket.url} has no model"):
        store.latest("films")
    assert put(store, folder) == (f"{remote.bucket.url}/films/1", True)
    assert put(store, folder) == (f"{remote.bucket.url}/films/1", False)
    assert (store.models(), store.versions("films"), store.next_version("films")) == (["films"], [1], 2)
    assert store.unfinished() == []
    with store.hold("films") as held:
        assert held.is_checked
        assert files_of(held.path) == files_of(folder)
        assert Snapshot.open(held.path).identity == read_manifest(folder)[1]
    with pytest.raises(SnapshotNotFoundError, match=r"no version 2 of model 'films'; it has \[1\]"):
        store.hold("films", 2)


def test_the_cache_serves_without_the_store_what_is_not_damaged(remote: Remote) -> None:
    store = remote.store()
    identity = read_manifest(remote.made / "1")[1]
    put(store, remote.made / "1")
    store.hold("small", 1, identity=identity).close()
    before = remote.proxy.replies.passed_bytes
    with store.hold("small", 1, identity=identity) as held:
        assert remote.proxy.replies.passed_bytes == before
    (held.path / ROWS).write_bytes(flip_last_bit((held.path / ROWS).read_bytes()))
    with store.hold("small", 1, identity=identity) as held:
        assert (held.path / ROWS).read_bytes() == (remote.made / "1" / ROWS).read_bytes()
    assert remote.proxy.replies.passed_bytes - before > (held.path / ROWS).stat().st_size


def test_a_version_is_immutable_and_two_who_write_it_never_mix(
    remote: Remote, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = remote.store()
    other, _ = write_snapshot(tmp_path / "other", SPEC, seed=9, version=1)
    create, write = store._create, store.write_file

    def dies(path: str, content: bytes) -> bool:
        if path.endswith(MANIFEST_NAME):
            raise KeyboardInterrupt
        return create(path, content)

    monkeypatch.setattr(store, "_create", dies)
    with pytest.raises(KeyboardInterrupt):
        put(store, remote.made / "1")
    monkeypatch.setattr(store, "_create", create)
    assert (store.versions("small"), store.unfinished()) == ([], [("small", 1)])
    with pytest.raises(ExportError, match=r"small/\.export-1: a snapshot of identity .* is being published"):
        put(store, other)
    # Run again it goes on: what is there is not written a second time.
    written: list[str] = []
    monkeypatch.setattr(store, "write_file", lambda path, content: (written.append(path), write(path, content)))
    assert put(store, remote.made / "1")[1]
    assert written == [f"small/1/{CHECKSUM_NAME}"]
    with pytest.raises(SnapshotExistsError, match="a version is immutable"):
        put(store, other)
    with store.hold("small") as held:
        assert files_of(held.path) == files_of(remote.made / "1")


KILLED = """
    import sys
    from pathlib import Path
    from loader.stores import remote
    from loader.stores.cache import StoreUrl

    remote.FILES_AT_A_TIME = 1
    remote.RemoteStore(StoreUrl(url=sys.argv[1], cache=Path(sys.argv[2]))).hold("small", 1)
"""


def test_a_killed_fetch_goes_on_with_the_files_it_lacks(remote: Remote, tmp_path: Path) -> None:
    folder, _ = write_snapshot(tmp_path / "made", SPEC, rows_per_file=4096)
    put(remote.store(), folder)
    first, second = sorted(folder.rglob("rows-*"))
    remote.proxy.replies.hold_after = (
        remote.proxy.replies.passed_bytes + first.stat().st_size + second.stat().st_size // 2
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", textwrap.dedent(KILLED), remote.bucket.url, str(remote.cache)]
    process = subprocess.Popen(command, env=environment)
    try:
        wait_until(lambda: bool(remote.cached()), "its first file of rows to be in place")
    finally:
        process.kill()
        process.wait()
    assert [path.name for path in remote.cached()] == [first.name]
    remote.proxy.replies.hold_after = None
    wait_until(lambda: not remote.proxy.serving, "what was on its way to the dead process to end")
    remote.proxy.replies.passed_bytes = 0
    with remote.store().hold("small", 1) as held:
        assert files_of(held.path) == files_of(folder)
        Snapshot.open(held.path)
    assert remote.proxy.replies.passed_bytes < second.stat().st_size + first.stat().st_size // 2


@pytest.mark.parametrize("after_bytes", [0, 200_000])
def test_a_store_that_stalls_is_unavailable_within_its_limit(remote: Remote, after_bytes: int) -> None:
    put(remote.store(), remote.made / "1")
    remote.proxy.replies.hold_after = remote.proxy.replies.passed_bytes + after_bytes
    with raises_kind("store_unavailable", r"can't be (read|listed)"):
        remote.store(timeout_s=0.6).hold("small", 1)
    assert not remote.cached()


def test_an_object_that_changes_during_its_fetch_is_never_mixed(
    remote: Remote, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = remote.store()
    put(store, remote.made / "1")
    right, other = (remote.made / "1" / ROWS).read_bytes(), (remote.made / "2" / ROWS).read_bytes()
    assert len(right) == len(other)
    half = remote.proxy.replies.hold_after = remote.proxy.replies.passed_bytes + len(right) // 2

    def change() -> None:
        wait_until(lambda: remote.proxy.replies.passed_bytes >= half, "half of it to come")
        remote.bucket.put(f"small/1/{ROWS}", other)
        remote.proxy.replies.hold_after = None

    with ThreadPoolExecutor(1) as thread:
        thread.submit(change)
        with pytest.raises(SnapshotCorruptError, match=f"{ROWS}: SHA-256 is .*, the manifest says"):
            store.hold("small", 1)
    # What was fetched of the first object is not gone on with, and the second one is not what the manifest says.
    with pytest.raises(SnapshotCorruptError, match="the manifest says"):
        store.hold("small", 1)
    assert not remote.cached()
    remote.bucket.put(f"small/1/{ROWS}", right)
    with store.hold("small", 1) as held:
        assert files_of(held.path) == files_of(remote.made / "1")


def test_what_is_damaged_in_the_store_is_refused_by_name(remote: Remote, tmp_path: Path) -> None:
    folder, _ = write_snapshot(tmp_path / "made", one_table_spec(300))
    put(remote.store(), folder)
    for relative, change, message in (
        (MANIFEST_NAME, lambda text: text + b"\n", "SHA-256 is not the one in manifest.json.sha256"),
        (ROWS, flip_last_bit, "SHA-256 is .*, the manifest says"),
        (ROWS, lambda rows: rows[:-1], f"{ROWS}: .* bytes, the manifest says"),
        (ROWS, None, f"{ROWS}: missing"),
        (CHECKSUM_NAME, None, f"small/1/{CHECKSUM_NAME}: missing"),
    ):
        right = (folder / relative).read_bytes()
        if change is None:
            remote.bucket.delete(f"small/1/{relative}")
        else:
            remote.bucket.put(f"small/1/{relative}", change(right))
        with pytest.raises(SnapshotCorruptError, match=message) as refused:
            remote.store().hold("small", 1)
        # A bucket that is replicated may have it later.
        assert is_passing(refused.value) == (change is None)
        assert not remote.cached()
        remote.bucket.put(f"small/1/{relative}", right)
    remote.store().hold("small", 1).close()


def test_what_is_not_in_the_store_is_refused_by_name(remote: Remote) -> None:
    store = remote.store()
    put(store, remote.made / "1")
    assert store.versions("../small") == []
    with pytest.raises(SnapshotCorruptError, match=r"identity .* is [0-9a-f]{64}, published was f{64}"):
        store.hold("small", 1, identity="f" * 64)
    store.hold("small", 1, verify=False).close()
    with pytest.raises(SnapshotNotFoundError, match=r"no version 1 of model '\.\./small'; it has \[\]"):
        store.hold("../small", 1)


@pytest.fixture(params=["folder", "bucket"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    """An empty store of each kind."""
    return Store(tmp_path / "store") if request.param == "folder" else request.getfixturevalue("remote").store()


def test_small_files_are_written_listed_and_deleted(store: Store) -> None:
    store.write_file("dense/1", b"12345")
    assert list(store.list_files("dense")) == ["dense/1"]
    assert store.read_file("dense/1", 5) == b"12345"
    for path, message in (("dense/1", "dense/1: .*4"), ("dense/2", "dense/2: missing")):
        with pytest.raises(SnapshotCorruptError, match=message):
            store.read_file(path, 4)
    store.delete_files(["dense/1", "dense/2"])
    store.delete_files([])
    assert store.list_files("dense") == {}


def test_a_version_that_was_set_aside_comes_back_or_is_deleted(store: Store, made: Path) -> None:
    for version in (1, 2, 3):
        put(store, made / str(version))
        store.set_aside("small", version)
    assert store.versions("small") == []
    assert store.next_version("small") == 4
    store.bring_back("small", 1)
    store.delete_set_aside("small", staying=[2])
    assert store.versions("small") == [1, 2]
    assert put(store, made / "3")[1]


def test_a_manifest_whose_paths_leave_the_snapshot_is_refused(remote: Remote, tmp_path: Path) -> None:
    store = remote.store()
    folder, _ = write_snapshot(tmp_path / "made", one_table_spec(300))
    put(store, folder)
    rewrite_manifest(folder, lambda manifest: manifest["dense"].update(path="../../../../evil.safetensors"))
    remote.bucket.put("small/evil.safetensors", (folder / "dense.safetensors").read_bytes())
    for name in (MANIFEST_NAME, CHECKSUM_NAME):
        remote.bucket.put(f"small/1/{name}", (folder / name).read_bytes())
    with pytest.raises(SnapshotCorruptError, match="is not a plain relative path"):
        store.hold("small", 1)
    assert not remote.cached()
    assert not list(tmp_path.rglob("evil*"))


def test_a_bucket_that_is_not_there_is_refused(remote: Remote) -> None:
    with raises_kind("store_access", "NoSuchBucket"):
        remote.store(url="s3://no-such-bucket").hold("small", 1)


def test_the_cache_keeps_its_bound_and_drops_nothing_in_use(remote: Remote) -> None:
    one = sum(map(len, files_of(remote.made / "1").values()))
    store = remote.store(cache_bytes=2 * one + one // 2)
    for version in range(1, 5):
        put(store, remote.made / str(version))

    def here() -> list[int]:
        return sorted(int(path.parents[2].name) for path in remote.cached())

    first = store.hold("small", 1)
    store.hold("small", 2).close()
    assert here() == [1, 2]
    store.hold("small", 3).close()
    assert here() == [1, 3]
    third = store.hold("small", 3)
    for full, passes in ((store, True), (remote.store(cache_bytes=one // 2), False)):
        with raises_kind("store_cache", r"of small version 4 are needed, \d+ bytes are in use, and it may") as refused:
            full.hold("small", 4)
        assert is_passing(refused.value) == passes
    assert here() == [1, 3]
    first.close()
    # Another process with the same folder counts the same.
    with remote.store(cache_bytes=2 * one + one // 2).hold("small", 4) as held:
        assert files_of(held.path) == files_of(remote.made / "4")
        assert here() == [3, 4]
        assert sum(path.stat().st_size for path in remote.cache.rglob("*")) <= 3 * one
    third.close()


def test_a_cache_on_a_full_disk_may_pass(remote: Remote) -> None:
    store = remote.store()
    put(store, remote.made / "1")
    with files_limited_to(100_000), raises_kind("store_cache", "File too large") as refused:
        store.hold("small", 1)
    assert is_passing(refused.value)
    store.hold("small", 1).close()


async def test_versions_are_published_and_retired_at_a_url(remote: Remote, directory: DirectoryRegistry) -> None:
    """And what others set aside is left to them."""
    store = remote.store()
    fleet, place = FleetRegistry(directory), remote.place
    for version in range(1, 5):
        done = await publish(fleet, remote.made / str(version), place, clock=lambda: 1.0)
        assert (done.where, done.copied) == (f"{remote.bucket.url}/small/{version}", True)
    again = await publish(fleet, remote.made / "4", place, clock=lambda: 1.0)
    assert (again.copied, again.is_new) == (False, False)
    remote.bucket.put("small/.trash-4", b"")  # another run's, that may bring it back
    assert (await retain(fleet, place, "small", 2)).dropped == (1, 2)
    assert store.list_files("small/1") == store.list_files("small/2") == {}
    assert (store.versions("small"), store.next_version("small")) == ([3], 5)
    with pytest.raises(ExportError, match="is being deleted"):
        put(store, remote.made / "4")  # though all of it is still there
    remote.bucket.delete(f"small/4/{MANIFEST_NAME}")
    with pytest.raises(ExportError, match="is being deleted"):
        put(store, remote.made / "4")
    assert store.unfinished() == []
    remote.bucket.put(f"small/4/{MANIFEST_NAME}", files_of(remote.made / "4")[MANIFEST_NAME])
    store.bring_back("small", 4)
    assert store.versions("small") == [3, 4]
