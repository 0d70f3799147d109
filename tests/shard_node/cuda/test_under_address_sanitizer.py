"""The kernel and engine tests again, with kernels compiled under AddressSanitizer; and that it finds what is wrong.

A process has to be started with the sanitizer's library, so each test here is a run of pytest of its own.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from shardrank_testing.host_kernels import KERNEL_SOURCE, host_compiler

ROOT = Path(__file__).resolve().parents[3]
TIMEOUT_S = 900
# With which a process ends when the sanitizer has found something; pytest has no such code.
FOUND = 77

KERNEL_TESTS = ("tests/shard_node/cuda/test_kernels.py", "tests/shard_node/cuda/test_row_kernels.py")
ENGINE_TESTS = ("tests/shard_node/engine/test_engines.py", "tests/shard_node/engine/test_write_rows.py")
# Engines on cards of every kind that there is without a GPU.
ON_CARDS = "cards and (emulated or late or access)"


class Fault(NamedTuple):
    """What to change in the kernels, which tests then have to run into it, and what the sanitizer has to call it."""

    right: str
    wrong: str
    tests: str
    found: str


OVERFLOW = "AddressSanitizer: heap-buffer-overflow"
FAULTS = {
    "a row read one chunk too late": Fault(
        "reinterpret_cast<const uint4*>(row + chunk_offset)",
        "reinterpret_cast<const uint4*>(row + chunk_offset + CHUNK_BYTES)",
        "test_each_row_alone",
        OVERFLOW,
    ),
    "a tail read from the wrong byte": Fault(
        "u32 tail_offset(u32 dim) { return (dim + 7u) & ~7u; }",
        "u32 tail_offset(u32 dim) { return dim; }",
        "test_every_dtype_and_dim and int8-20",
        "misaligned address",
    ),
    "a value read behind the last": Fault(
        "load_if(first + i < end, batch.values + first + i, 0)",
        "load_if(first + i <= end, batch.values + first + i, 0)",
        "test_bags_of_every_hotness and 1000",
        OVERFLOW,
    ),
    "an id that is not checked": Fault(
        "is_value && values[i] < table.num_rows",
        "is_value",
        "test_values_outside_their_table",
        "AddressSanitizer: (SEGV|heap-buffer-overflow)",
    ),
    "a vector written where only part of it belongs": Fault(
        "if (left >= N && aligned(out, 16))",
        "if (aligned(out, 16))",
        "test_every_dtype_and_dim and int8-20",
        OVERFLOW,
    ),
    "a row written behind the last": Fault(
        "if (row >= write.num_rows) return;",
        "",
        "test_a_card_writes_its_own_rows",
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


def run_tests(paths: tuple[str, ...], only: str, kernels: Path = KERNEL_SOURCE) -> subprocess.CompletedProcess[str]:
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
    plugins = ("-p", "no:cacheprovider", "-p", "no:faulthandler")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-s", *plugins, "-m", "not gpu"]
    return subprocess.run(
        [*command, *paths, *(["-k", only] if only else [])],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT_S,
    )


@pytest.mark.timeout(TIMEOUT_S + 30)
@pytest.mark.parametrize(("paths", "only"), [(KERNEL_TESTS, ""), (ENGINE_TESTS, ON_CARDS)], ids=["kernels", "engines"])
def test_nothing_is_read_or_written_outside_its_memory(paths, only):
    done = run_tests(paths, only)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "passed" in done.stdout
    assert "skipped" not in done.stdout


@pytest.mark.timeout(TIMEOUT_S + 30)
@pytest.mark.parametrize("fault", list(FAULTS))
def test_a_fault_in_the_kernels_is_found(fault, tmp_path):
    right, wrong, tests, found = FAULTS[fault]
    text = KERNEL_SOURCE.read_text()
    assert text.count(right) == 1
    faulty = tmp_path / "faulty.cu"
    faulty.write_text(text.replace(right, wrong))
    done = run_tests(KERNEL_TESTS, tests, faulty)
    assert done.returncode == FOUND, done.stdout + done.stderr
    assert re.search(found, done.stderr), done.stdout + done.stderr
