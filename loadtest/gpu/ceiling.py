"""Measure how fast rows can be read at random by a kernel that knows their addresses: the ceiling of pooling."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from loadtest.gpu.rows import OwnedMemory
from shard_node.cuda.cards import Card, Cards, Memory, Stream
from shard_node.cuda.kernel_params import CHUNK_BYTES, MAX_LANES, THREADS_PER_BLOCK, RowFormat, round_up
from shard_node.planning.cost_model import SECTOR_BYTES, mean_pieces

SOURCE = Path(__file__).with_name("ceiling.cu")
GATHER_KERNELS = {4: "gather_4", 8: "gather_8"}
"""By how many rows a thread has on their way at a time."""
CHECKED_GROUPS = 64


class WrongCeilingError(AssertionError):
    """The ceiling's kernel read other rows than it should have, or other bytes."""


class GatherParams(ctypes.Structure):
    """What a launch reads. By value.

    rows, num_rows, row_stride: where rows lie. chunks: pieces of 16 bytes of a row, each read by a thread of its own.
    tail_offset: of 8 bytes more of a row, which each of its threads reads; 0 for none. first: number of the first read:
    read i is of row `mixed(first + i) * num_rows >> 32`. num_reads: of the launch. rows_per_group: reads of a lane
    group, which has 1 << lanes_log2 threads. sums: uint32 [threads], of the words that a thread read.
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


@dataclass(frozen=True, slots=True)
class GatheredRows:
    """Which bytes of rows are read: chunks of 16, and 8 bytes at `tail_offset`, 0 for none."""

    stride: int
    chunks: int
    tail_offset: int = 0

    @classmethod
    def of(cls, row: RowFormat) -> GatheredRows:
        """Read what the pooling kernel reads of an int8 row."""
        return cls(row.stride, min(row.chunks, MAX_LANES), row.tail_offset)

    @classmethod
    def around(cls, dim: int) -> list[GatheredRows]:
        """List the layouts that int8 rows of a dim could have: without a tail, as they are, and in whole sectors."""
        row = cls.of(RowFormat.of("int8", dim))
        bare = cls(row.chunks * CHUNK_BYTES, row.chunks)
        return list(dict.fromkeys((bare, row, cls(round_up(row.stride, SECTOR_BYTES), row.chunks, row.tail_offset))))

    @property
    def read_bytes(self) -> int:
        """Count the bytes from the first to the last that is read."""
        return max(self.chunks * CHUNK_BYTES, self.tail_offset + 8 if self.tail_offset else 0)

    @property
    def sector_bytes(self) -> float:
        """Count the bytes of the sectors of a row, in the mean."""
        return SECTOR_BYTES * mean_pieces(self.stride, self.read_bytes, SECTOR_BYTES)


class RandomGather(OwnedMemory):
    """Launches that read `num_reads` rows each, out of memory that others hold; `num_sets` of them are different.

    Args:
        cards: have the kernels.
        card: launches.
        stream: on which.
        table: rows begin at its first byte.
        num_rows: of the table.
        rows: which bytes of them.
        num_reads: of a launch.
        num_sets: of launches.
        rows_per_group: reads of a lane group.
        in_flight: rows that a thread has on their way at a time, one of GATHER_KERNELS.
    """

    def __init__(
        self,
        cards: Cards,
        card: Card,
        stream: Stream,
        table: Memory,
        num_rows: int,
        rows: GatheredRows,
        num_reads: int,
        num_sets: int,
        rows_per_group: int,
        in_flight: int,
    ) -> None:
        super().__init__(stream)
        cards.load_kernels(SOURCE, tuple(GATHER_KERNELS.values()))
        self._card, self._table, self._rows, self._num_rows = card, table, rows, num_rows
        self._num_reads, self.num_sets, self._rows_per_group = num_reads, num_sets, rows_per_group
        self._kernel = GATHER_KERNELS[in_flight]
        self._lanes_log2 = (rows.chunks - 1).bit_length()
        groups = -(-num_reads // rows_per_group)
        self._blocks = -(-(groups << self._lanes_log2) // THREADS_PER_BLOCK)
        self._sums = self.own(card.allocate(4 * self._blocks * THREADS_PER_BLOCK))

    def launch(self, number: int) -> None:
        """Read the rows of one set."""
        params = GatherParams(
            self._table.address, self._sums.address, self._num_rows, self._rows.stride, self._rows.chunks,
            self._rows.tail_offset, number * self._num_reads & 0xFFFFFFFF, self._num_reads, self._rows_per_group,
            self._lanes_log2,
        )  # fmt: skip
        self._card.launch(self._kernel, (self._blocks, 1), (params,), self.stream)

    def launch_all(self) -> None:
        """Launch every set once."""
        for number in range(self.num_sets):
            self.launch(number)

    def check(self, number: int, seed: int = 0) -> None:
        """Read a set and compare sums of some lane groups with those of the same rows, read by torch.

        Raises:
            WrongCeilingError: naming a sum that is wrong.
        """
        card, rows = self._card, self._rows
        sums = card.tensor(self._sums, 0, (self._blocks * THREADS_PER_BLOCK,), torch.int32)
        with card.torch_stream(self.stream):
            sums.fill_(-1)
        self.launch(number)
        groups = -(-self._num_reads // self._rows_per_group)
        chosen = np.random.default_rng(seed).integers(0, groups, min(CHECKED_GROUPS, groups))
        chosen[-1] = groups - 1  # which may have fewer rows
        with card.torch_stream(self.stream):
            found = sums.cpu().numpy().view(np.uint32)
        for group in chosen.tolist():
            begin = group * self._rows_per_group
            reads = np.arange(begin, min(begin + self._rows_per_group, self._num_reads), dtype=np.uint64)
            numbers = rows_read(reads + np.uint64(number * self._num_reads), self._num_rows)
            lanes = found[group << self._lanes_log2 :][: rows.chunks]
            expected = self._expected(numbers)
            if not np.array_equal(lanes, expected):
                raise WrongCeilingError(f"{self._kernel}, {rows}: group {group} has sums {lanes}, not {expected}")

    def _expected(self, numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.uint32]:
        """uint32 [chunks]: the sum of all words that each thread of a group reads."""
        rows, card = self._rows, self._card
        with card.torch_stream(self.stream):
            table = card.tensor(self._table, 0, (self._num_rows, rows.stride // 4), torch.int32)
            words = table[torch.from_numpy(numbers).to(card.torch_device)].cpu().numpy().view(np.uint32)
        tail = words[:, rows.tail_offset // 4 :][:, : 2 if rows.tail_offset else 0]
        codes = words[:, : 4 * rows.chunks].reshape(-1, rows.chunks, 4)
        total: npt.NDArray[np.uint32] = codes.sum(axis=(0, 2), dtype=np.uint32) + tail.sum(dtype=np.uint32)
        return total


def rows_read(reads: npt.NDArray[np.uint64], num_rows: int) -> npt.NDArray[np.int64]:
    """Return the rows int64 [n] that the kernel reads at reads [n], counted from 0 over all launches."""
    mixed = reads.astype(np.uint32)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        mixed = (mixed ^ mixed >> np.uint32(shift)) * np.uint32(factor)
    mixed ^= mixed >> np.uint32(16)
    return (mixed.astype(np.uint64) * np.uint64(num_rows) >> np.uint64(32)).astype(np.int64)
