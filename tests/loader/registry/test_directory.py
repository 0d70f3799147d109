"""What only a registry in a directory can show: its clock, its files, the disk below it, and killed writers."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import shutil

import pytest

from loader.errors import RegistryConflictError, RegistryRecordError, RegistryUnavailableError
from loader.registry.directory import DirectoryRegistry
from loader.registry.registry import StreamBounds
from shardrank_testing.exhaustion import files_limited_to
from shardrank_testing.registries import with_open
from shardrank_testing.registry_writers import start_writer
from shardrank_testing.rollout_fleet import Clock

WAIT_S = 60.0


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
async def registry(tmp_path, clock):
    """A registry by a clock that the test sets, which waits 50 ms for a lock."""
    opened = DirectoryRegistry(tmp_path / "registry", clock=clock, lock_timeout_s=0.05)
    yield opened
    await opened.close()


async def test_a_clock_set_back_keeps_no_lock_and_no_node_for_ever(registry, clock):
    await registry.announce("nodes/a", b"1", 3.0)
    assert await registry.acquire("locks/a", "one", 5.0)
    clock.now -= 500.0
    assert await registry.announced("nodes/") == {}
    assert await registry.acquire("locks/a", "two", 5.0)


async def test_revisions_rise_when_the_clock_does_not(registry, clock, tmp_path):
    """Also after the directory was emptied."""
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


async def test_while_another_process_keeps_the_lock_only_writes_fail(registry, tmp_path):
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


async def test_a_full_disk_is_unavailable_and_keeps_what_it_has(registry):
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


async def test_a_path_that_is_a_file_is_unavailable(registry, tmp_path):
    (tmp_path / "registry").write_text("")
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


@pytest.mark.parametrize("content", [b"", b"12", b"x\nvalue", b"-1\nvalue", b"\nvalue"])
async def test_a_damaged_file_of_a_key_is_named(registry, tmp_path, content):
    await registry.put("wanted/m", b"1", 0)
    (tmp_path / "registry/keys/wanted/m=").write_bytes(content)
    for call in (registry.get("wanted/m"), registry.entries("wanted/"), registry.put("wanted/m", b"", 0)):
        with pytest.raises(RegistryRecordError, match=r"wanted/m=: it does not begin with a line"):
            await call


async def test_a_damaged_end_of_a_stream_is_named(registry, tmp_path):
    await registry.append("s", 1, b"")
    await registry.trim("s", 1)
    (tmp_path / "registry/streams/s=/ends").write_bytes(b"1")
    with pytest.raises(RegistryRecordError, match="ends: b'1'; two numbers are needed"):
        await registry.append("s", 2, b"")


NOTHING = (None, StreamBounds(0, 0), [], {}, None)
# What a registry holds after each write of that process.
AFTER = {
    "put": (b"1", StreamBounds(0, 0), [], {}, None),
    "replaced": (b"2", StreamBounds(0, 0), [], {}, None),
    "appended 255": (b"2", StreamBounds(255, 255), [255], {}, None),
    "appended 256": (b"2", StreamBounds(255, 256), [255, 256], {}, None),
    "appended 257": (b"2", StreamBounds(255, 257), [255, 256, 257], {}, None),
    "trimmed": (b"2", StreamBounds(257, 257), [257], {}, None),
    "deleted": (None, StreamBounds(257, 257), [257], {}, None),
    "announced": (None, StreamBounds(257, 257), [257], {"nodes/n": b"here"}, None),
    "acquired": (None, StreamBounds(257, 257), [257], {"nodes/n": b"here"}, "me"),
}
STEPS = list(AFTER)


async def state_of(registry):
    """All that a registry holds."""
    entry = await registry.get("a/b")
    return (
        entry.value if entry is not None else None,
        await registry.bounds("s"),
        [entry.sequence for entry in await registry.read("s", 0)],
        await registry.announced(""),
        await registry.holder("locks/l"),
    )


async def use_after(registry):
    """Write everything again, whatever was left there; return what is there then, and the stream's end."""
    entry = await registry.get("a/b")
    await registry.put("a/b", b"3", entry.revision if entry is not None else 0)
    last = (await registry.bounds("s")).last + 1
    await registry.append("s", last, b"next")
    await registry.trim("s", last)
    await registry.announce("nodes/n", b"there", 3600.0)
    await registry.release("locks/l", "me")
    assert await registry.acquire("locks/l", "you", 3600.0)
    return await state_of(registry), last


@pytest.mark.timeout(300)
@pytest.mark.nightly
def test_a_kill_before_any_file_call_leaves_a_step_done_or_not(tmp_path):
    for fatal_call in itertools.count(1):
        path = tmp_path / str(fatal_call)
        process, connection = start_writer(str(path), fatal_call)
        reported = []
        with contextlib.suppress(EOFError):
            while connection.poll(WAIT_S):
                reported.append(connection.recv())
        process.join(WAIT_S)
        ended = [step for step in reported if step in AFTER]
        assert ended == STEPS[: len(ended)]
        before = AFTER[ended[-1]] if ended else NOTHING
        following = AFTER[STEPS[len(ended)]] if len(ended) < len(STEPS) else before
        assert with_open(str(path), state_of) in (before, following), (fatal_call, ended)
        state, last = with_open(str(path), use_after)
        assert state == (b"3", StreamBounds(last, last), [last], {"nodes/n": b"there"}, "you")
        # Whatever a killed writer left is written over or known: one work file and one lock for each area at most.
        assert sum(not file.is_dir() for file in path.rglob("*")) <= 14
        if reported and reported[-1] == "end":
            assert process.exitcode == 0
            break
        assert process.exitcode == -9
    assert fatal_call > 100
