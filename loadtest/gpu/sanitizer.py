"""Run the tests that need a device under compute-sanitizer's memcheck."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from loadtest.gpu.parts import Work, wait_or_kill

ROOT = Path(__file__).resolve().parents[2]
TESTS = "tests/shard_node/cuda"
FOUND_ERRORS = 99
INVALID = "========= Invalid"
"""How a report of a bad access begins; told as it happens, where the summary comes at the end."""
PLACES = ("/usr/local/cuda/bin/compute-sanitizer", "/usr/local/cuda/compute-sanitizer/compute-sanitizer")
_SUMMARY = re.compile(r"ERROR SUMMARY: (\d+) error")
_PASSED = re.compile(r"(\d+) passed")
_LAST_LINES = 25


class SanitizerError(AssertionError):
    """It found an error, or the tests did not pass under it."""


def find_tool() -> str | None:
    """Find the command, if it is installed."""
    return shutil.which("compute-sanitizer") or next((place for place in PLACES if Path(place).is_file()), None)


def command_for(tool: str) -> list[str]:
    """Make the command that runs the tests marked `gpu` under it."""
    # Not calls that fail: libraries ask the driver for functions that it may not have, and tests for too much memory.
    options = ["--report-api-errors", "no", "--error-exitcode", str(FOUND_ERRORS), "--target-processes", "all"]
    sanitizer = [tool, "--tool", "memcheck", *options]
    # Under it, a test takes many times as long.
    pytest = ["-m", "pytest", "-q", "-x", "-m", "gpu", "-p", "no:cacheprovider", "-o", "timeout=0"]
    return [*sanitizer, sys.executable, *pytest, TESTS]


def measure(work: Work, command: list[str] | None = None) -> None:
    """Run it until it ends or the time is spent.

    Raises:
        SanitizerError: errors were found, or tests failed.
    """
    if command is None:
        tool = find_tool()
        if tool is None or not (ROOT / TESTS).is_dir():
            work.part.status = "not run"
            work.note("compute-sanitizer is not installed." if tool is None else f"{TESTS} is not here.")
            return
        command = command_for(tool)
    work.say(" ".join(command[:3]))
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output:
        # A group of its own: the tests' processes end with it.
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            # What it said before it was stopped is to be here.
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
        code = wait_or_kill(process, max(1.0, work.seconds_left))
        output.seek(0)
        text = output.read()
    errors, passed = _SUMMARY.findall(text), _PASSED.findall(text)
    work.part.facts |= {
        "command": command,
        "exit_code": code,
        "errors": sum(map(int, errors)) if errors else None,
        "invalid_accesses_told": text.count(INVALID),
        "tests_passed": int(passed[-1]) if passed else None,
        "last_lines": text.splitlines()[-_LAST_LINES:],
    }
    if code is None and INVALID not in text:
        work.part.status = "stopped"
        work.note("compute-sanitizer was still running when its time was spent; run the part alone for longer.")
    elif INVALID in text or code == FOUND_ERRORS or any(map(int, errors)):
        raise SanitizerError(f"memcheck found {max(text.count(INVALID), sum(map(int, errors)))} errors")
    elif code != 0:
        raise SanitizerError(f"the tests under memcheck ended with {code}")
    elif not passed:
        raise SanitizerError("no test ran: are they all skipped?")
