"""Whole programs in tests: forked or run by exec, watched through /proc, never left behind."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TextIO, TypeAlias

import httpx

from serving.fleet.fork_server import (
    MAX_PACKET_BYTES,
    SERVED_MODULES,
    ForkedProcess,
    running_fork_server,
    send_request,
)

WAIT_S = 60.0
TESTED_MODULES = ("loadtest.cli",)
"""What more the processes of tests import."""


@functools.cache
def fork_server() -> str:
    """Start the fork server of this test process, which its first caller waits for. Returns its socket."""
    assert threading.current_thread() is threading.main_thread(), "the kernel would kill it with this thread"
    stack = contextlib.ExitStack()
    atexit.register(stack.close)
    path = f"{stack.enter_context(tempfile.TemporaryDirectory(prefix='shardrank-fork-'))}/socket"
    stack.enter_context(running_fork_server(path, (*SERVED_MODULES, *TESTED_MODULES)))
    return path


class Forked(ForkedProcess):
    """A process of the fork server with the methods of `subprocess.Popen` that tests call."""

    stdout: TextIO

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> int:
        """Raise subprocess.TimeoutExpired if it has not ended by then."""
        if self.returncode is None:
            pidfd = os.pidfd_open(self.pid)
            try:
                if not select.select([pidfd], [], [], timeout)[0]:
                    raise subprocess.TimeoutExpired(str(self.pid), timeout or 0)
            finally:
                os.close(pidfd)
            wait_until(lambda: self.poll() is not None, "the fork server to tell of an end")
        assert self.returncode is not None
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, None]:
        """Read the rest of the output, and wait for the end."""
        with self.stdout:
            rest = self.stdout.read()
        self.wait(timeout)
        return rest, None


Process: TypeAlias = "subprocess.Popen[str] | Forked"


def fork_module(
    server: str, module: str, *arguments: str, environment: Mapping[str, str] = os.environ, stderr: int | None = None
) -> Forked | None:
    """Have a fork server run a module; None if it refuses."""
    reading, writing = os.pipe()
    output = open(reading, encoding="utf-8")  # noqa: SIM115 - closed with the process
    try:
        errors = writing if stderr == subprocess.STDOUT else 2
        connection = send_request(server, (sys.executable, "-m", module, *arguments), (0, writing, errors), environment)
    finally:
        os.close(writing)
    connection.setblocking(True)
    reply = b""
    with contextlib.suppress(ConnectionResetError):
        reply = connection.recv(MAX_PACKET_BYTES)
    connection.setblocking(False)
    process = Forked.from_reply(connection, reply)
    if process is not None:
        process.stdout = output
    return process


def start_module(module: str, *arguments: str, is_forked: bool = True, stderr: int | None = None) -> Process:
    """Run `python -m MODULE` in a session of its own; its stdout is read, its stderr too if that is STDOUT."""
    if is_forked and (process := fork_module(fork_server(), module, *arguments, stderr=stderr)) is not None:
        return process
    # A terminal's Ctrl-C would reach the whole group; here a signal is for the program alone.
    return subprocess.Popen(
        (sys.executable, "-m", module, *arguments),
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        start_new_session=True,
    )


class Program:
    """A running `shardrank` command whose output is read line by line."""

    def __init__(self, *arguments: str, is_forked: bool = True) -> None:
        self.process = start_module("serving.cli", *arguments, is_forked=is_forked, stderr=subprocess.STDOUT)
        self.lines: list[str] = []

    def read_until(self, pattern: str) -> re.Match[str]:
        """Reads lines until one matches. Fails with all output if the program ends first."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            if match := re.search(pattern, line):
                return match
        raise AssertionError(f"the program ended without {pattern!r}:\n{''.join(self.lines)}")

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Signals it, reads what is left, and returns the exit code."""
        self.process.send_signal(number)
        rest, _ = self.process.communicate(timeout=WAIT_S)
        self.lines.append(rest)
        assert self.process.returncode is not None
        return self.process.returncode

    @property
    def output(self) -> str:
        """All that was read so far."""
        return "".join(self.lines)

    @functools.cached_property
    def url(self) -> str:
        """Read on to the address of its HTTP API, which it prints before that of gRPC."""
        return self.read_until(r"HTTP: (https?://127.0.0.1:\d+)")[1]

    @functools.cached_property
    def grpc_target(self) -> str:
        """Read on to the address of its gRPC API."""
        return self.read_until(r"gRPC: (127.0.0.1:\d+)")[1]

    def rank(self, model: str, request: object, connection: httpx.Client | None = None) -> httpx.Response:
        """Send a rank request, over a connection of its own if none is given: the kernel spreads these over workers."""
        return (connection or httpx).post(f"{self.url}/v1/models/{model}:rank", json=request, timeout=30)


@contextlib.contextmanager
def running(*arguments: str, is_forked: bool = True) -> Iterator[Program]:
    """A program that is killed, with all its descendants, when the block ends."""
    program = Program(*arguments, is_forked=is_forked)
    try:
        yield program
    finally:
        below = descendants(program.process.pid)
        program.process.kill()
        program.process.wait()
        for pid in below:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if program.process.stdout is not None:
            program.process.stdout.close()


def descendants(pid: int) -> list[int]:
    """All processes below one, at this moment."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):
                # The command's name may hold anything; the parent is the second field after its closing bracket.
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                parents.setdefault(parent, []).append(int(entry.name))
    found: list[int] = []
    waiting = [pid]
    while waiting:
        children = parents.get(waiting.pop(), [])
        found += children
        waiting += children
    return found


def command_line(pid: int) -> str:
    """The arguments of a process, or "" if it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that only waits to be reaped does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(condition: Callable[[], object], what: str, timeout_s: float = WAIT_S) -> None:
    """Poll a condition that no event announces."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout_s:g} s for {what}"
        time.sleep(0.02)
