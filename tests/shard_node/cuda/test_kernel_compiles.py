"""The kernels compile for the cards that they are for, keep to registers, and take the structures that Python fills."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

import pytest

from shard_node.cuda import kernel_params
from shard_node.cuda.kernel_params import (
    ArenaParams,
    BatchParams,
    RunParams,
    TableParams,
    WriteParams,
)
from shardrank_testing.device_compilers import ARCHITECTURES, resources
from shardrank_testing.host_kernels import KERNEL_SOURCE, KERNELS, host_kernels

STRUCTURES = (TableParams, ArenaParams, RunParams, BatchParams, WriteParams)
BY_VALUE = {
    **dict.fromkeys(kernel_params.POOL_KERNELS.values(), (ArenaParams, BatchParams)),
    kernel_params.WRITE_KERNEL: (ArenaParams, WriteParams),
}
# 65,536 registers of a multiprocessor, for as many thread blocks at once as keep enough loads on their way.
MAX_REGISTERS = {"pool_int8": 80, "pool_int4": 128, "pool_fp16": 64, "pool_fp32": 64, "write_rows": 32}
# What every device and compiler has room for.
MAX_PARAMETER_BYTES = 4096


# Without a header, NVRTC has no other word for it.
OFFSET_OF = """
#ifdef __CUDACC_RTC__
#define OFFSET_OF(structure, field) __INTADDR__(&((structure*)0)->field)
#else
#define OFFSET_OF(structure, field) __builtin_offsetof(structure, field)
#endif
"""


def assertions() -> str:
    """C++ that compiles only if both sides say the same."""
    lines = [OFFSET_OF]
    for structure in STRUCTURES:
        name = structure.__name__
        lines.append(f'static_assert(sizeof({name}) == {ctypes.sizeof(structure)}, "{name}");')
        for field, kind in structure._fields_:
            offset, size = getattr(structure, field).offset, ctypes.sizeof(kind)
            lines.append(f'static_assert(OFFSET_OF({name}, {field}) == {offset}, "{name}.{field}");')
            lines.append(f'static_assert(sizeof({name}::{field}) == {size}, "{name}.{field}");')
    for constant in ("MAX_OWNERS", "THREADS_PER_BLOCK", "CHUNK_BYTES", "NOT_HERE", "NO_RUN"):
        lines.append(f'static_assert({constant} == {getattr(kernel_params, constant)}ll, "{constant}");')
    for constant, value in {
        "MODE_MEAN": kernel_params.MODES["mean"],
        "MODE_NONE": kernel_params.MODES["none"],
        "OUT_FP32": kernel_params.OUT_DTYPES["fp32"],
        "OUT_FP16": kernel_params.OUT_DTYPES["fp16"],
    }.items():
        lines.append(f'static_assert({constant} == {value}, "{constant}");')
    return "\n".join(lines) + "\n"


@pytest.fixture
def asserting_source(tmp_path) -> Path:
    path = tmp_path / "kernels.cu"
    path.write_text(KERNEL_SOURCE.read_text() + assertions())
    return path


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("compiler", ["nvcc", "nvrtc"])
def test_kernels_keep_to_registers(compiler, architecture, asserting_source, tmp_path, capsys):
    report = resources(compiler, asserting_source, architecture, tmp_path)
    assert set(report) == set(KERNELS)
    with capsys.disabled():
        counts = ", ".join(f"{kernel} {taken.registers}" for kernel, taken in sorted(report.items()))
        sys.stdout.write(f"\nregisters by {compiler} for {architecture}: {counts}\n")
    assert {kernel: taken.local_bytes for kernel, taken in report.items()} == dict.fromkeys(KERNELS, 0)
    assert {kernel for kernel, taken in report.items() if taken.registers > MAX_REGISTERS[kernel]} == set()


def test_kernels_take_what_python_passes_them():
    expected = {kernel: tuple(map(ctypes.sizeof, structures)) for kernel, structures in BY_VALUE.items()}
    assert host_kernels().param_sizes == expected
    assert all(sum(sizes) <= MAX_PARAMETER_BYTES for sizes in expected.values())
