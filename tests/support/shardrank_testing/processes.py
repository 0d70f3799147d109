"""Whole programs in tests: started from the command line, watched through /proc, never left behind."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

WAIT_S = 60.0


class Program:
    """A running `shardrank` command whose output is read line by line."""

    def __init__(self, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "serving.cli", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            # A terminal's Ctrl-C would reach the whole group; here a signal is for the program alone.
            start_new_session=True,
        )
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
        return self.process.returncode

    @property
    def output(self) -> str:
        """All that was read so far."""
        return "".join(self.lines)


@contextlib.contextmanager
def running(*arguments: str) -> Iterator[Program]:
    """A program that is killed, with all its descendants, when the block ends."""
    program = Program(*arguments)
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


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Asks again and again, for what no event tells. Fails after a minute."""
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, f"waited {WAIT_S:g} s for {what}"
        time.sleep(0.02)
