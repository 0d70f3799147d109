"""A process that writes to a registry in a directory until it is killed."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import sys
import threading
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Any

from loader.registry import open_registry
from loader.registry.registry import Registry
from shardrank_testing.registries import with_open


def start_writer(path: str, fatal_call: int) -> tuple[BaseProcess, Connection]:
    """A process that is killed (-9) before its n-th call into the operating system's file functions.

    It sends the name of each write that has returned, and "end" if it lived. A fork of a small server process, which
    has no threads: a start takes a few milliseconds.
    """
    multiprocessing.set_forkserver_preload([__name__])
    context = multiprocessing.get_context("forkserver")
    here, there = context.Pipe()
    process = context.Process(target=_die_at_call, args=(there, path, fatal_call), daemon=True)
    process.start()
    there.close()
    return process, here


def _die_at_call(parent: Connection, path: str, fatal_call: int) -> None:
    calls = 0

    def watch(_: FrameType, event: str, function: Any) -> None:
        nonlocal calls
        if event == "c_call" and getattr(function, "__module__", None) in ("posix", "fcntl"):
            calls += 1
            if calls == fatal_call:
                os.kill(os.getpid(), signal.SIGKILL)

    async def write_everything(registry: Registry) -> None:
        revision = await registry.put("a/b", b"1", 0)
        parent.send("put")
        revision = await registry.put("a/b", b"2", revision)
        parent.send("replaced")
        for sequence in (255, 256, 257):
            await registry.append("s", sequence, b"%d" % sequence)
            parent.send(f"appended {sequence}")
        await registry.trim("s", 257)
        parent.send("trimmed")
        await registry.delete("a/b", revision)
        parent.send("deleted")
        await registry.announce("nodes/n", b"here", 3600.0)
        parent.send("announced")
        await registry.acquire("locks/l", "me", 3600.0)
        parent.send("acquired")

    # What is imported and made once is not counted.
    asyncio.run(open_registry(f"{path}-other").get("a"))
    threading.setprofile(watch)
    try:
        with_open(path, write_everything)
    finally:
        threading.setprofile(None)
        sys.setprofile(None)
    parent.send("end")
