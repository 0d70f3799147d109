"""The kernel and engine tests again, with kernels compiled under AddressSanitizer; and that it finds what is wrong.

A process has to be started with the sanitizer's library: each test here is a run of pytest in such a one.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

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


OVERFLOW = "AddressSanitizer: heap-buffer-overflow"
# By name: what to change in the kernels, which tests then have to run into it, and what the sanitizer has to call it.
FAULTS = {
    "a row read one chunk too late": (
        "reinterpret_cast<const uint4*>(rows[i] + chunk_offset)",
        "reinterpret_cast<const uint4*>(rows[i] + chunk_offset + CHUNK_BYTES)",
        "test_each_row_alone",
        OVERFLOW,
    ),
    "an id that is not checked": (
        "is_value && values[i] < table.num_rows",
        "is_value",
        "test_values_outside_their_table",
        "AddressSanitizer: (SEGV|heap-buffer-overflow)",
    ),
    "a row written behind the last": (
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


def run_tests(folder: Path, paths: tuple[str, ...], only: str, kernels: Path = KERNEL_SOURCE) -> tuple[int, str]:
    """Run tests with sanitized kernels; return the exit status, and all that was written."""
    environment = {
        **os.environ,
        "LD_PRELOAD": str(libasan()),
        # Python frees little at its end, and that is no fault of the kernels.
        "ASAN_OPTIONS": f"detect_leaks=0:exitcode={FOUND}",
        "UBSAN_OPTIONS": f"exitcode={FOUND}",
        "SHARDRANK_EMULATION": "address",
        "SHARDRANK_EMULATION_KERNELS": str(kernels),
    }
    # Not captured, and no handler for signals: what the sanitizer itself writes would be lost with the process.
    options = ["-q", "-x", "-s", "-p", "no:cacheprovider", "-p", "no:faulthandler", "-m", "not gpu"]
    command = [sys.executable, "-m", "pytest", *options, *paths, *(["-k", only] if only else [])]
    with open(folder / "output", "w+") as output:
        done = subprocess.run(command, cwd=ROOT, env=environment, stdout=output, stderr=output, check=False)
        output.seek(0)
        return done.returncode, output.read()


@pytest.mark.nightly
@pytest.mark.timeout(TIMEOUT_S + 30)
@pytest.mark.parametrize(("paths", "only"), [(KERNEL_TESTS, ""), (ENGINE_TESTS, ON_CARDS)], ids=["kernels", "engines"])
def test_nothing_is_read_or_written_outside_its_memory(paths, only, tmp_path):
    status, output = run_tests(tmp_path, paths, only)
    assert status == 0, output
    assert "passed" in output
    assert "skipped" not in output


@pytest.mark.nightly
@pytest.mark.timeout(TIMEOUT_S + 30)
@pytest.mark.parametrize("fault", list(FAULTS))
def test_a_fault_in_the_kernels_is_found(fault, tmp_path):
    right, wrong, tests, found = FAULTS[fault]
    text = KERNEL_SOURCE.read_text()
    assert text.count(right) == 1
    faulty = tmp_path / "faulty.cu"
    faulty.write_text(text.replace(right, wrong))
    status, output = run_tests(tmp_path, KERNEL_TESTS, tests, faulty)
    assert status == FOUND, output
    assert re.search(found, output), output
