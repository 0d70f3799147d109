"""Say in which part of a divided table each row lies, and as which row there: a chain of bitmaps with ranks.

Bitmap 0 has a bit for each row of the table: set, the row is of class 0. Bitmap 1 has one for each row that is left,
in order: set, it is of class 1; and so on. What is left at last is the last class. A row's place within its class is
the number of rows of that class before it: for every 512 bits the number of ones before them is stored as uint32, so
that a bitmap takes 1.0625 bits a row (the layout is that of Jacobson, "Space-efficient Static Trees and Graphs", 1989,
with one level).

In `row-classes.safetensors` bitmap i is the tensors `bits.i`, U8 [64 * blocks], low bits first, and `ranks.i`, U32
[blocks].
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from loader.errors import ExportError, SnapshotCorruptError
from loader.snapshot.tables import DividedTable, TableSpec
from loader.snapshot.tensor_files import TensorInfo, expect_tensors

BLOCK_BITS = 512
_BLOCK_BYTES = BLOCK_BITS // 8
_BLOCK_SHIFT = BLOCK_BITS.bit_length() - 1
_WORDS = BLOCK_BITS // 64
_CHUNK_ROWS = 1 << 20


@dataclass(frozen=True, slots=True, eq=False)
class RankedBits:
    """A bitmap that counts: how many bits before one are set.

    Attributes:
        words: uint64 [blocks, 8], bit b of block k is bit b % 64 of word b // 64; behind the last bit zeros.
        ranks: uint32 [blocks], ones before each block.
        within: uint16 [blocks, 8], ones before each word of its block: not stored, a quarter of a bit for each bit.
        size: bits.
    """

    words: npt.NDArray[np.uint64]
    ranks: npt.NDArray[np.uint32]
    within: npt.NDArray[np.uint16]
    size: int

    @classmethod
    def of(cls, bits: npt.NDArray[np.bool_]) -> Self:
        """Pack bool [size], below 2^32 of them."""
        packed = np.zeros(-(-bits.size // BLOCK_BITS) * _BLOCK_BYTES, np.uint8)
        packed[: -(-bits.size // 8)] = np.packbits(bits, bitorder="little")
        words = packed.view(np.uint64).reshape(-1, _WORDS)
        return cls(words, *_counts(words), bits.size)

    @property
    def num_ones(self) -> int:
        """Count the bits that are set."""
        if not self.ranks.size:
            return 0
        return int(self.ranks[-1]) + int(np.bitwise_count(self.words[-1]).sum())


def _counts(words: npt.NDArray[np.uint64]) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint16]]:
    ones = np.cumsum(np.bitwise_count(words), axis=1, dtype=np.uint16)
    ranks, within = np.zeros(len(words), np.uint32), np.zeros_like(ones)
    np.cumsum(ones[:-1, -1], out=ranks[1:], dtype=np.uint32)
    within[:, 1:] = ones[:, :-1]
    return ranks, within


def find_bits(
    words: npt.NDArray[np.uint64],
    ranks: npt.NDArray[np.uint32],
    within: npt.NDArray[np.uint16],
    rows: npt.NDArray[np.int64],
    first_bit: npt.NDArray[np.int64] | int = 0,
) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.int64]]:
    """Look rows [n] up in one bitmap, or in several whose blocks are joined: there, each one's begins at `first_bit`.

    Returns whether each row's bit is set, bool [n], and how many bits before it in its bitmap are as it is, int64 [n].
    """
    bits = rows + first_bit
    at, bit = bits >> 6, (bits & 63).view(np.uint64)
    word = words.reshape(-1).take(at)
    before = np.bitwise_count(word & ((np.uint64(1) << bit) - np.uint64(1))).astype(np.int64)
    before += within.reshape(-1).take(at)
    before += ranks.take(bits >> _BLOCK_SHIFT)
    is_set = ((word >> bit) & np.uint64(1)).astype(np.bool_)
    return is_set, np.where(is_set, before, rows - before)


@dataclass(frozen=True, slots=True, eq=False)
class RowClasses:
    """The classes of a table's rows: `bitmaps`, one fewer than there are classes."""

    bitmaps: tuple[RankedBits, ...]

    @classmethod
    def of(cls, classes: npt.NDArray[np.integer[Any]], num_classes: int) -> Self:
        """Make them from the class of each row, [num_embeddings], 0..num_classes-1."""
        bitmaps = []
        for number in range(num_classes - 1):
            is_of = classes == number
            bitmaps.append(RankedBits.of(is_of))
            classes = classes[~is_of]
        return cls(tuple(bitmaps))

    def classes(self) -> npt.NDArray[np.uint8]:
        """Return the class of each row, uint8 [num_embeddings]."""
        size = self.bitmaps[0].size
        chunks = (np.arange(first, min(first + _CHUNK_ROWS, size)) for first in range(0, size, _CHUNK_ROWS))
        return np.concatenate([self.find(rows)[0] for rows in chunks])

    def find(self, rows: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
        """Return of rows [n], all within the table, the class, uint8 [n], and the place within it, int64 [n]."""
        classes, places = np.full(rows.size, len(self.bitmaps), np.uint8), rows.copy()
        left = np.arange(rows.size)
        for number, bitmap in enumerate(self.bitmaps):
            is_of, places[left] = find_bits(bitmap.words, bitmap.ranks, bitmap.within, places[left])
            classes[left[is_of]] = number
            left = left[~is_of]
        return classes, places

    def check(self, table: DividedTable, parts: Sequence[TableSpec]) -> None:
        """Raise ExportError unless there are as many rows of each class as the parts have."""
        ones = [bitmap.num_ones for bitmap in self.bitmaps]
        # What is left after each bitmap, of all rows that the first has.
        size = self.bitmaps[0].size if self.bitmaps else table.num_embeddings
        sizes = [size - count for count in accumulate(ones, initial=0)]
        rows, expected = (*ones, sizes[-1]), table.class_rows(parts)
        if [bitmap.size for bitmap in self.bitmaps] != sizes[:-1] or size != table.num_embeddings or rows != expected:
            raise ExportError(f"divided table {table.name!r}: classes of {rows} rows; its parts have {expected}")

    def tensors(self) -> dict[str, npt.NDArray[Any]]:
        """Make the tensors of `row-classes.safetensors`."""
        tensors: dict[str, npt.NDArray[Any]] = {}
        for number, bitmap in enumerate(self.bitmaps):
            tensors |= {f"bits.{number}": bitmap.words.reshape(-1).view(np.uint8), f"ranks.{number}": bitmap.ranks}
        return tensors

    @classmethod
    def of_tensors(
        cls, path: Path, table: DividedTable, parts: Sequence[TableSpec], tensors: Mapping[str, npt.NDArray[Any]]
    ) -> Self:
        """Make them from a file's tensors, mapped or not. Raises SnapshotCorruptError if they are not the table's."""
        bitmaps, size = [], table.num_embeddings
        for number, rows in enumerate(table.class_rows(parts)[:-1]):
            words = tensors[f"bits.{number}"].view(np.uint64).reshape(-1, _WORDS)
            bitmap, ranks = RankedBits(words, *_counts(words), size), tensors[f"ranks.{number}"]
            # Behind the last bit; of an empty bitmap there is no last block.
            tail = np.unpackbits(words[-1:].view(np.uint8), bitorder="little")[(size - 1) % BLOCK_BITS + 1 :]
            if not np.array_equal(bitmap.ranks, ranks) or bitmap.num_ones != rows or tail.any():
                raise SnapshotCorruptError(f"{path}: bitmap {number} does not count the {rows} rows of its class")
            bitmaps.append(bitmap)
            size -= rows
        return cls(tuple(bitmaps))


def classes_bytes(table: DividedTable, parts: Sequence[TableSpec]) -> int:
    """Return the stored bytes of a table's bitmaps, with their ranks; a router holds 1.24 times as much."""
    if table.num_classes == 1:
        return 0
    # Of each bitmap: the rows that no class before has.
    sizes = table.num_embeddings - np.cumsum([0, *table.class_rows(parts)[:-2]])
    return int((-(-sizes // BLOCK_BITS)).sum()) * (_BLOCK_BYTES + np.dtype(np.uint32).itemsize)


def check_classes_header(
    table: DividedTable, parts: Sequence[TableSpec], path: Path, tensors: Mapping[str, TensorInfo]
) -> None:
    """Raise SnapshotCorruptError if dtypes or shapes in a file of row classes do not fit the table."""
    expected: dict[str, tuple[str, tuple[int, ...]]] = {}
    size = table.num_embeddings
    for number, rows in enumerate(table.class_rows(parts)[:-1]):
        blocks = -(-size // BLOCK_BITS)
        expected |= {f"bits.{number}": ("U8", (_BLOCK_BYTES * blocks,)), f"ranks.{number}": ("U32", (blocks,))}
        size -= rows
    expect_tensors(path, tensors, expected)
