"""The kernel and engine tests again, with kernels compiled under AddressSanitizer; and that it finds what is wrong.

A process has to be started with the sanitizer's library: each test here is a run of pytest in a fork of such a one.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from shardrank_testing.host_kernels import KERNEL_SOURCE, host_compiler

ROOT = Path(__file__).resolve().parents[3]
TIMEOUT_S = 900
# With which a process ends when the sanitizer has found something; pytest has no such code.
FOUND = 77

KERNEL_TESTS = ("tests/shard_node/cuda/test_kernels.py",)
ENGINE_TESTS = ("tests/shard_node/engine/test_engines.py", "tests/shard_node/engine/test_row_writes.py")
# Engines on cards whose work runs as late as it may, and on cards without access to each other.
ON_CARDS = "cards and not emulated and (late or access)"


class Fault(NamedTuple):
    """What to change in the kernels, which tests then have to run into it, and what the sanitizer has to call it."""

    right: str
    wrong: str
    tests: str
    found: str


OVERFLOW = "AddressSanitizer: heap-buffer-overflow"
FAULTS = {
    "a row read one chunk too late": Fault(
        "reinterpret_cast<const uint4*>(rows[i] + chunk_offset)",
        "reinterpret_cast<const uint4*>(rows[i] + chunk_offset + CHUNK_BYTES)",
        "test_each_row_alone",
        OVERFLOW,
    ),
    "an id that is not checked": Fault(
        "is_value && values[i] < table.num_rows",
        "is_value",
        "test_values_outside_their_table",
        "AddressSanitizer: (SEGV|heap-buffer-overflow)",
    ),
    "a row written behind the last": Fault(
        "if (row >= write.num_rows) return;",
        "",
        "test_a_card_writes_its_rows",
        OVERFLOW,
    ),
}


def libasan() -> Path:
    """The sanitizer's library; skips where there is none, but not in CI."""
    path = Path(subprocess.check_output([host_compiler(), "-print-file-name=libasan.so"], text=True).strip())
    # Not found: g++ gives the bare name back. Elsewhere the name is of a linker script, which can't be preloaded.
    if path.is_absolute() and path.read_bytes()[:4] == b"\x7fELF":
        return path
    if os.environ.get("CI"):
        raise RuntimeError(f"CI is set, but g++ has no libasan.so to preload (it says {path})")
    pytest.skip("needs libasan.so, which comes with g++")


# Loads the modules once, under the sanitizer, and runs pytest in a fork for each order that it reads.
PROGRAM = """
import json
import os
import sys

import pytest

sys.path.insert(0, "tests/support")
import shardrank_testing.deltas
import shardrank_testing.card_engines
import shardrank_testing.kernel_arena

for line in sys.stdin:
    order = json.loads(line)
    child = os.fork()
    if not child:
        for number in (1, 2):
            os.dup2(os.open(order["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
        os.environ["SHARDRANK_EMULATION_KERNELS"] = order["kernels"]
        os._exit(pytest.main(order["arguments"]))
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


class Done(NamedTuple):
    """How a run of tests ended, and all that it wrote."""

    returncode: int
    output: str


class Sanitized(NamedTuple):
    """A process that runs tests with sanitized kernels."""

    process: subprocess.Popen[str]

    def run_tests(self, folder: Path, paths: tuple[str, ...], only: str, kernels: Path = KERNEL_SOURCE) -> Done:
        """Runs tests; folder: an empty one, for what they write."""
        # Not captured, and no handler for signals: what the sanitizer itself writes would be lost with the process.
        plugins = ("-p", "no:cacheprovider", "-p", "no:faulthandler")
        arguments = ["-q", "-x", "-s", *plugins, "-m", "not gpu", *paths, *(["-k", only] if only else [])]
        output = folder / "output"
        order = {"arguments": arguments, "kernels": str(kernels), "output": str(output)}
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(json.dumps(order), file=self.process.stdin, flush=True)
        return Done(int(self.process.stdout.readline()), output.read_text())


@pytest.fixture(scope="module")
def sanitized() -> Iterator[Sanitized]:
    environment = {
        **os.environ,
        "LD_PRELOAD": str(libasan()),
        # Python frees little at its end, and that is no fault of the kernels.
        "ASAN_OPTIONS": f"detect_leaks=0:exitcode={FOUND}",
        "UBSAN_OPTIONS": f"exitcode={FOUND}",
        "SHARDRANK_EMULATION": "address",
    }
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM], cwd=ROOT, env=environment, stdin=pipe, stdout=pipe, text=True
    ) as process:
        yield Sanitized(process)


@pytest.mark.nightly
@pytest.mark.timeout(TIMEOUT_S + 30)
@pytest.mark.parametrize(("paths", "only"), [(KERNEL_TESTS, ""), (ENGINE_TESTS, ON_CARDS)], ids=["kernels", "engines"])
def test_nothing_is_read_or_written_outside_its_memory(sanitized, paths, only, tmp_path):
    done = sanitized.run_tests(tmp_path, paths, only)
    assert done.returncode == 0, done.output
    assert "passed" in done.output
    assert "skipped" not in done.output


@pytest.mark.nightly
@pytest.mark.timeout(TIMEOUT_S + 30)
@pytest.mark.parametrize("fault", list(FAULTS))
def test_a_fault_in_the_kernels_is_found(sanitized, fault, tmp_path):
    right, wrong, tests, found = FAULTS[fault]
    text = KERNEL_SOURCE.read_text()
    assert text.count(right) == 1
    faulty = tmp_path / "faulty.cu"
    faulty.write_text(text.replace(right, wrong))
    done = sanitized.run_tests(tmp_path, KERNEL_TESTS, tests, faulty)
    assert done.returncode == FOUND, done.output
    assert re.search(found, done.output), done.output
