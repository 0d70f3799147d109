"""The ceiling of pooling: a kernel that reads rows at random and computes their addresses by itself."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from loadtest.gpu.rows import MemoryStack, RowsOnCard, WrongAnswerError
from shard_node.cuda.kernel_params import MAX_LANES, THREADS_PER_BLOCK

SOURCE = Path(__file__).with_name("ceiling.cu")
GATHER_KERNELS = {4: "gather_4", 8: "gather_8"}
"""By the number of rows that a thread has in flight."""
CHECKED_GROUPS = 64


class GatherParams(ctypes.Structure):
    """The parameters of a launch, by value.

    rows, num_rows, row_stride: the table. chunks: of 16 bytes of a row, each read by a thread. tail_offset: of scale
    and bias. first: number of the first read; read i is of row `mixed(first + i) * num_rows >> 32`. num_reads: of the
    launch. rows_per_group: reads of a lane group of 1 << lanes_log2 threads. sums: uint32 [threads], of the words read.
    """

    _fields_ = (
        ("rows", ctypes.c_uint64),
        ("sums", ctypes.c_uint64),
        ("num_rows", ctypes.c_uint32),
        ("row_stride", ctypes.c_uint32),
        ("chunks", ctypes.c_uint32),
        ("tail_offset", ctypes.c_uint32),
        ("first", ctypes.c_uint32),
        ("num_reads", ctypes.c_uint32),
        ("rows_per_group", ctypes.c_uint32),
        ("lanes_log2", ctypes.c_uint32),
    )


class RandomGather(MemoryStack):
    """Launches that read `num_reads` random rows each, `num_sets` different ones.

    Args:
        rows: the table.
        num_reads: rows of a launch.
        num_sets: launches that differ.
        rows_per_group: rows that a lane group reads one after the other.
        in_flight: rows that a thread reads at a time, a key of GATHER_KERNELS.
    """

    def __init__(self, rows: RowsOnCard, num_reads: int, num_sets: int, rows_per_group: int, in_flight: int) -> None:
        super().__init__(rows.card, rows.stream)
        rows.cards.load_kernels(SOURCE, tuple(GATHER_KERNELS.values()))
        self.kernel = GATHER_KERNELS[in_flight]
        self._rows, self._num_reads, self._num_sets, self._rows_per_group = rows, num_reads, num_sets, rows_per_group
        self._chunks = min(rows.format.chunks, MAX_LANES)
        self._lanes_log2 = (self._chunks - 1).bit_length()
        groups = -(-num_reads // rows_per_group)
        self._blocks = -(-(groups << self._lanes_log2) // THREADS_PER_BLOCK)
        self._sums = self.allocate(4 * self._blocks * THREADS_PER_BLOCK)

    def launch(self, number: int) -> None:
        """Read the rows of a set."""
        rows = self._rows
        params = GatherParams(
            rows=rows.memory.address,
            sums=self._sums.address,
            num_rows=rows.count,
            row_stride=rows.format.stride,
            chunks=self._chunks,
            tail_offset=rows.format.tail_offset,
            first=number * self._num_reads & 0xFFFFFFFF,
            num_reads=self._num_reads,
            rows_per_group=self._rows_per_group,
            lanes_log2=self._lanes_log2,
        )
        self.card.launch(self.kernel, (self._blocks, 1), (params,), self.stream)

    def launch_all(self) -> None:
        """Read the rows of every set once."""
        for number in range(self._num_sets):
            self.launch(number)

    def check(self, number: int) -> None:
        """Read a set and compare the sums of some lane groups with those of the same rows, read by torch.

        Raises:
            WrongAnswerError: naming a sum that is wrong.
        """
        groups = -(-self._num_reads // self._rows_per_group)
        chosen = np.random.default_rng(0).integers(0, groups, CHECKED_GROUPS)
        chosen[-1] = groups - 1  # It may have fewer rows.
        reads = chosen[:, None] * self._rows_per_group + np.arange(self._rows_per_group)
        numbers = rows_read(reads + number * self._num_reads, self._rows.count)
        with self.card.torch_stream(self.stream):
            sums = self.card.tensor(self._sums, 0, (self._blocks * THREADS_PER_BLOCK,), torch.int32).fill_(-1)
            self.launch(number)
            lanes = sums.cpu().numpy().view(np.uint32).reshape(-1, 1 << self._lanes_log2)[chosen, : self._chunks]
            stored, _ = self._rows.stored(0, self._rows.count)
            words = stored[torch.from_numpy(numbers).to(self.card.torch_device)].cpu().numpy().view(np.uint32)
        words[reads >= self._num_reads] = 0
        codes = words[..., : 4 * self._chunks].reshape(*reads.shape, self._chunks, 4).sum((1, 3), np.uint32)
        tails = words[..., self._rows.format.tail_offset // 4 :][..., :2].sum((1, 2), np.uint32)
        if not np.array_equal(lanes, codes + tails[:, None]):
            raise WrongAnswerError(f"{self.kernel}: sums {lanes}, expected {codes + tails[:, None]}")


def rows_read(reads: npt.NDArray[np.int64], num_rows: int) -> npt.NDArray[np.int64]:
    """Return the rows, int64, of reads, int64, counted from 0 over all launches."""
    mixed = reads.astype(np.uint32)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        mixed = (mixed ^ mixed >> np.uint32(shift)) * np.uint32(factor)
    mixed ^= mixed >> np.uint32(16)
    return (mixed.astype(np.uint64) * np.uint64(num_rows) >> np.uint64(32)).astype(np.int64)
