"""How rows lie on cards, and what launches are given: the structures are the compiled kernels'."""

from __future__ import annotations

import ctypes
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shard_node.cuda import kernel_params
from shard_node.cuda.kernel_params import (
    ArenaParams,
    BatchParams,
    RowFormat,
    RunParams,
    TableParams,
    WriteParams,
    pointers_to,
)
from shardrank_testing.card_bytes import restored
from shardrank_testing.card_plans import DTYPES
from shardrank_testing.device_compilers import ARCHITECTURES, resources
from shardrank_testing.host_kernels import KERNEL_SOURCE, KERNELS, host_kernels


def formats():
    dims = st.integers(1, 512)
    return st.builds(RowFormat.of, st.sampled_from(DTYPES[:1] + DTYPES[2:]), dims) | st.builds(
        RowFormat.of, st.just("int4"), dims.map(lambda dim: 2 * dim)
    )


def stored_rows(fmt, num_rows, seed):
    return np.random.default_rng(seed).integers(0, 256, (num_rows, fmt.row_bytes), np.uint8)


@given(fmt=formats(), num_rows=st.integers(0, 9), seed=st.integers(0, 2**32 - 1))
def test_rows_are_relaid_without_loss(fmt, num_rows, seed):
    stored = stored_rows(fmt, num_rows, seed)
    out = np.full((num_rows, fmt.stride), 0xAB, np.uint8)
    assert fmt.relay(stored, out) is out
    np.testing.assert_array_equal(restored(fmt, out), stored)
    # Padding is zero.
    assert (fmt.relay(np.maximum(stored, 1), out) != 0).sum(axis=1).tolist() == [fmt.row_bytes] * num_rows


@given(fmt=formats())
def test_rows_are_aligned_and_as_short_as_possible(fmt):
    assert fmt.stride % 16 == 0
    assert fmt.stride - 16 < fmt.tail_offset + fmt.tail_bytes <= fmt.stride
    assert fmt.tail_offset % (fmt.tail_bytes or 1) == 0
    assert 0 <= fmt.tail_offset - fmt.code_bytes < (fmt.tail_bytes or 1)
    assert 16 * (fmt.chunks - 1) < fmt.code_bytes <= 16 * fmt.chunks <= fmt.stride


KINDS = (ArenaParams, BatchParams, WriteParams)


@given(st.lists(st.sampled_from(KINDS).flatmap(lambda kind: st.tuples(st.just(kind), st.randoms())), max_size=5))
def test_a_launch_finds_every_structure_by_its_pointer(drawn):
    params = [kind.from_buffer_copy(random.randbytes(ctypes.sizeof(kind))) for kind, random in drawn]
    pointers = pointers_to(params)
    # As cuLaunchKernel reads them: an array of void *, without its length.
    found = ctypes.cast(ctypes.addressof(pointers), ctypes.POINTER(ctypes.c_void_p)) if params else []
    assert [ctypes.string_at(found[i], ctypes.sizeof(one)) for i, one in enumerate(params)] == list(map(bytes, params))


STRUCTURES = (TableParams, ArenaParams, RunParams, BatchParams, WriteParams)
BY_VALUE = {
    **dict.fromkeys(kernel_params.POOL_KERNELS.values(), (ArenaParams, BatchParams)),
    kernel_params.WRITE_KERNEL: (ArenaParams, WriteParams),
}
# 65,536 registers of a multiprocessor, for as many thread blocks at once as keep enough loads on their way.
MAX_REGISTERS = {"pool_int8": 80, "pool_int4": 128, "pool_fp16": 64, "pool_fp32": 64, "write_rows": 32}
# What every device and compiler has room for.
MAX_PARAMETER_BYTES = 4096


def assertions() -> str:
    """C++ that compiles only if both sides say the same."""
    # Without a header, NVRTC has no other word for it.
    lines = ["#define OFFSET_OF(structure, field) __INTADDR__(&((structure*)0)->field)"]
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
    }.items():
        lines.append(f'static_assert({constant} == {value}, "{constant}");')
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_kernels_keep_to_registers(architecture, tmp_path, capsys):
    source = tmp_path / "kernels.cu"
    source.write_text(KERNEL_SOURCE.read_text() + assertions())
    report = resources(source, architecture)
    assert set(report) == set(KERNELS)
    with capsys.disabled():
        counts = ", ".join(f"{kernel} {taken.registers}" for kernel, taken in sorted(report.items()))
        sys.stdout.write(f"\nregisters for {architecture}: {counts}\n")
    assert {kernel: taken.local_bytes for kernel, taken in report.items()} == dict.fromkeys(KERNELS, 0)
    assert {kernel for kernel, taken in report.items() if taken.registers > MAX_REGISTERS[kernel]} == set()


def test_kernels_take_what_python_passes_them():
    expected = {kernel: tuple(map(ctypes.sizeof, structures)) for kernel, structures in BY_VALUE.items()}
    assert host_kernels().param_sizes == expected
    assert all(sum(sizes) <= MAX_PARAMETER_BYTES for sizes in expected.values())
