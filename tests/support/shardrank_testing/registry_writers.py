"""Processes that write to a registry while others do, or while they are killed. Started with `start_writer`."""

from __future__ import annotations

import asyncio
import contextlib
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


def compete(told: Connection, url: str, times: int, folder: str) -> None:
    """Count a key up, append to a stream and enter a lock, so many times each, against other processes.

    Sends the revisions and the sequence numbers that it got, and how often it met another process within the lock.
    """
    owner, inside = f"process-{os.getpid()}", Path(folder) / "inside"

    async def scenario(registry: Registry) -> tuple[list[int], list[int], int]:
        revisions: list[int] = []
        sequences: list[int] = []
        intruders = 0
        while len(revisions) < times:
            entry = await registry.get("counter")
            value, revision = (int(entry.value), entry.revision) if entry is not None else (0, 0)
            with contextlib.suppress(RegistryConflictError):
                revisions.append(await registry.put("counter", b"%d" % (value + 1), revision))
        while len(sequences) < times:
            following = (await registry.bounds("stream")).last + 1
            with contextlib.suppress(StreamSequenceError):
                await registry.append("stream", following, b"%d" % following)
                sequences.append(following)
        for _ in range(times):
            while not await registry.acquire("lock", owner, 60.0):
                pass
            try:
                inside.touch(exist_ok=False)
            except FileExistsError:
                intruders += 1
            inside.unlink(missing_ok=True)
            await registry.release("lock", owner)
        return revisions, sequences, intruders

    told.send(with_open(url, scenario))


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
