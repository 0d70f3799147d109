"""Processes that write to a registry while others do, or while they are killed. Started with `start_writer`."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import Any

from loader.errors import RegistryConflictError, StreamSequenceError
from loader.registry.opening import open_registry
from loader.registry.registry import Registry
from shardrank_testing.registries import with_open

LOOP_KEY, LOOP_STREAM = "wanted/m", "deltas/m/1"


def start_writer(work: Callable[..., None], *arguments: Any) -> tuple[BaseProcess, Connection]:
    """A process that runs `work(connection, *arguments)`, and this end of the connection.

    A fork of a small server process, which has no threads: a start takes a few milliseconds.
    """
    multiprocessing.set_forkserver_preload([__name__])
    context = multiprocessing.get_context("forkserver")
    here, there = context.Pipe()
    process = context.Process(target=work, args=(there, *arguments), daemon=True)
    process.start()
    there.close()
    return process, here


def add_many(told: Connection, url: str, key: str, times: int) -> None:
    """Adds 1 to the number in a key, so many times; tells the revisions that its writes got."""

    async def scenario(registry: Registry) -> list[int]:
        revisions: list[int] = []
        while len(revisions) < times:
            entry = await registry.get(key)
            value = int(entry.value) if entry is not None else 0
            try:
                revisions.append(
                    await registry.put(key, b"%d" % (value + 1), entry.revision if entry is not None else 0)
                )
            except RegistryConflictError:
                continue
        return revisions

    told.send(with_open(url, scenario))


def publish_many(told: Connection, url: str, stream: str, times: int) -> None:
    """Appends so many entries between those of others; tells the sequence numbers that it got."""

    async def scenario(registry: Registry) -> list[int]:
        sequences: list[int] = []
        while len(sequences) < times:
            following = (await registry.bounds(stream)).last + 1
            try:
                await registry.append(stream, following, b"%d %d" % (os.getpid(), following))
            except StreamSequenceError:
                continue
            sequences.append(following)
        return sequences

    told.send(with_open(url, scenario))


def enter_many(told: Connection, url: str, key: str, times: int, folder: str) -> None:
    """Takes a lock so many times and makes a file that must not be there; tells how often it was there."""
    owner = f"process-{os.getpid()}"
    inside = Path(folder) / "inside"

    async def scenario(registry: Registry) -> int:
        wrong = entered = 0
        while entered < times:
            if not await registry.acquire(key, owner, 60.0):
                continue
            entered += 1
            try:
                inside.touch(exist_ok=False)
            except FileExistsError:
                wrong += 1
            inside.unlink(missing_ok=True)
            await registry.release(key, owner)
        return wrong

    told.send(with_open(url, scenario))


def write_until_killed(told: Connection, url: str) -> None:
    """Goes on from what is there: a key that counts, a stream of as many entries, a trim now and then.

    Tells each number before it writes it, and again when the write has returned.
    """

    async def scenario(registry: Registry) -> None:
        while True:
            entry = await registry.get(LOOP_KEY)
            number = int(entry.value) + 1 if entry is not None else 1
            told.send(("put", number))
            await registry.put(LOOP_KEY, b"%d" % number, entry.revision if entry is not None else 0)
            told.send(("is put", number))
            sequence = (await registry.bounds(LOOP_STREAM)).last + 1
            told.send(("append", sequence))
            await registry.append(LOOP_STREAM, sequence, b"%d" % sequence * 300)
            told.send(("is appended", sequence))
            if sequence % 10 == 0:
                await registry.trim(LOOP_STREAM, sequence - 4)
            await registry.announce("nodes/n", b"%d" % number * 300, 60.0)

    with_open(url, scenario)


def steps_of_everything(path: str, do: Callable[[str], None]) -> None:
    """One of each kind of write to a registry in a directory; calls `do` with a name after each."""

    async def scenario(registry: Registry) -> None:
        revision = await registry.put("a/b", b"1", 0)
        do("put")
        revision = await registry.put("a/b", b"2", revision)
        do("replaced")
        for sequence in (255, 256, 257):
            await registry.append("s", sequence, b"%d" % sequence)
            do(f"appended {sequence}")
        await registry.trim("s", 257)
        do("trimmed")
        await registry.delete("a/b", revision)
        do("deleted")
        await registry.announce("nodes/n", b"here", 3600.0)
        do("announced")
        await registry.acquire("locks/l", "me", 3600.0)
        do("acquired")

    with_open(path, scenario)


def die_at_call(told: Connection, path: str, fatal_call: int) -> None:
    """Does `steps_of_everything`, and is killed (-9) before its n-th call into the operating system's file functions.

    Tells the name of each step that has ended, and "end" if it lived.
    """
    calls = 0

    def watch(_: FrameType, event: str, function: Any) -> None:
        nonlocal calls
        if event == "c_call" and getattr(function, "__module__", None) in ("posix", "fcntl"):
            calls += 1
            if calls == fatal_call:
                os.kill(os.getpid(), signal.SIGKILL)

    async def settle() -> None:
        # What is imported and made once is not counted.
        await open_registry(f"{path}-other").get("a")

    asyncio.run(settle())
    threading.setprofile(watch)
    try:
        steps_of_everything(path, told.send)
    finally:
        threading.setprofile(None)
        sys.setprofile(None)
    told.send("end")
