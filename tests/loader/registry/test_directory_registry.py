"""What only a registry in a directory can show: its clock, its files, and the disk below it."""

from __future__ import annotations

import asyncio
import fcntl
import os
import shutil

import pytest

from loader.errors import RegistryConflictError, RegistryRecordError, RegistryUnavailableError
from loader.registry.directory import DirectoryRegistry
from loader.registry.registry import StreamBounds
from shardrank_testing.exhaustion import files_limited_to


class Clock:
    def __init__(self, now=1000.0):
        self.now = now

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def run(tmp_path, clock):
    """Runs a coroutine with a registry in a directory, by a clock that the test sets."""

    def run(scenario, **settings):
        async def program():
            registry = DirectoryRegistry(tmp_path / "registry", clock=clock, **settings)
            try:
                return await scenario(registry)
            finally:
                await registry.close()

        return asyncio.run(program())

    return run


def test_a_clock_that_was_set_back_does_not_keep_a_lock_or_a_node_for_ever(run, clock):
    async def scenario(registry):
        await registry.announce("nodes/a", b"1", 3.0)
        assert await registry.acquire("locks/a", "one", 5.0)
        clock.now -= 500.0
        assert await registry.announced("nodes/") == {}
        assert await registry.acquire("locks/a", "two", 5.0)

    run(scenario)


def test_revisions_rise_also_when_the_clock_does_not_and_when_the_directory_was_emptied(run, clock, tmp_path):
    async def scenario(registry):
        revisions = [await registry.put("a", b"", 0)]
        revisions.append(await registry.put("a", b"", revisions[-1]))
        clock.now -= 500.0
        revisions.append(await registry.put("a", b"", revisions[-1]))
        await registry.delete("a", revisions[-1])
        revisions.append(await registry.put("a", b"", 0))
        clock.now += 501.0
        shutil.rmtree(tmp_path / "registry")
        with pytest.raises(RegistryConflictError, match="has revision 0"):
            await registry.put("a", b"", revisions[-1])
        revisions.append(await registry.put("a", b"", 0))
        assert revisions == sorted(set(revisions))

    run(scenario)


def test_a_lock_file_that_a_process_does_not_give_back_is_unavailable_and_reading_goes_on(run, tmp_path):
    async def scenario(registry):
        await registry.put("a", b"1", 0)
        descriptor = os.open(tmp_path / "registry/keys/~lock", os.O_RDWR)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            with pytest.raises(RegistryUnavailableError, match=r"another process has held its lock for 0\.05 s"):
                await registry.put("b", b"", 0)
            assert (await registry.get("a")).value == b"1"
            await registry.announce("nodes/a", b"", 60.0)
            await registry.append("s", 1, b"")
        finally:
            os.close(descriptor)
        await registry.put("b", b"", 0)

    run(scenario, lock_timeout_s=0.05)


def test_a_disk_that_takes_no_more_is_unavailable_and_keeps_what_it_has(run):
    async def scenario(registry):
        revision = await registry.put("a", b"old", 0)
        await registry.append("s", 1, b"old")
        with files_limited_to(1000):
            for write in (
                registry.put("a", b"x" * 5000, revision),
                registry.append("s", 2, b"x" * 5000),
                registry.announce("n", b"x" * 5000, 60.0),
            ):
                with pytest.raises(RegistryUnavailableError, match="File too large"):
                    await write
        entry = await registry.get("a")
        assert (entry.value, entry.revision) == (b"old", revision)
        assert await registry.bounds("s") == StreamBounds(1, 1)
        assert await registry.announced("") == {}
        await registry.put("a", b"x" * 5000, revision)
        await registry.append("s", 2, b"x" * 5000)

    run(scenario)


def test_a_path_that_is_a_file_is_unavailable(run, tmp_path):
    (tmp_path / "registry").write_text("")

    async def scenario(registry):
        for call in (
            registry.get("a"),
            registry.entries(""),
            registry.put("a", b"", 0),
            registry.announced(""),
            registry.acquire("l", "me", 1.0),
            registry.append("s", 1, b""),
            registry.read("s", 0),
        ):
            with pytest.raises(RegistryUnavailableError, match="registry"):
                await call

    run(scenario)


@pytest.mark.parametrize("content", [b"", b"12", b"x\nvalue", b"-1\nvalue", b"\nvalue"])
def test_a_key_whose_file_was_damaged_is_named(run, tmp_path, content):
    async def scenario(registry):
        await registry.put("wanted/m", b"1", 0)
        (tmp_path / "registry/keys/wanted/m=").write_bytes(content)
        for call in (registry.get("wanted/m"), registry.entries("wanted/"), registry.put("wanted/m", b"", 0)):
            with pytest.raises(RegistryRecordError, match=r"wanted/m=: it does not begin with a line"):
                await call

    run(scenario)


def test_a_damaged_end_of_a_stream_is_named(run, tmp_path):
    async def scenario(registry):
        await registry.append("s", 1, b"")
        await registry.trim("s", 1)
        (tmp_path / "registry/streams/s=/ends").write_bytes(b"1")
        with pytest.raises(RegistryRecordError, match="ends: b'1'; two numbers are needed"):
            await registry.append("s", 2, b"")

    run(scenario)
