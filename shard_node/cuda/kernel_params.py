"""What the kernels of `kernels.cu` read: structures by value, field by field, the places of rows, and rows themselves.

Pointers are addresses in the unified address space, which every card and the host share. All integers little-endian.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, Self, TypeAlias

import numpy as np
import numpy.typing as npt

from loader.snapshot.codecs import RowCodec
from loader.snapshot.tables import RowDtype

ByteArray = npt.NDArray[np.uint8]
UInt8Array = npt.NDArray[np.uint8]
UInt32Array = npt.NDArray[np.uint32]
UInt64Array = npt.NDArray[np.uint64]

MAX_CARDS = 64
MAX_OWNERS = MAX_CARDS + 2
"""Who may own a row: one of the cards, every card (a hot row: each has a copy), or the host's pinned memory."""

NOT_HERE = 0xFFFFFFFF
"""The place of a row that another node holds."""

NO_BUCKET = 2**63
"""Where the places of a bucket begin that another node holds: no sum of places comes near it."""

THREADS_PER_BLOCK = 256
CHUNK_BYTES = 16
"""What one thread loads of a row at a time; rows are aligned to it."""
MAX_LANES = 32
"""Threads that share a bag; a row of more chunks is done in several column tiles (`gridDim.y`)."""

NO_RUN = 0xFFFFFFFF
"""The run of a block that has nothing to do: graphs launch as many blocks as their largest batch needs."""

OutDtype: TypeAlias = Literal["fp32", "bf16"]
OUT_DTYPES: dict[OutDtype, int] = {"fp32": 0, "bf16": 1}
OUT_BYTES: dict[OutDtype, int] = {"fp32": 4, "bf16": 2}

Mode: TypeAlias = Literal["sum", "mean", "none"]
MODES: dict[Mode, int] = {"sum": 0, "mean": 1, "none": 2}
"""`mean` divides by the length of the bag, whoever owns its rows. `none`: each value is a bag of its own."""

POOL_KERNELS: dict[RowDtype, str] = {dtype: f"pool_{dtype}" for dtype in ("int8", "int4", "fp16", "fp32")}
WRITE_KERNEL = "write_rows"


def _uint64(*names: str) -> Iterator[tuple[str, type[ctypes.c_uint64]]]:
    return ((name, ctypes.c_uint64) for name in names)


def _uint32(*names: str) -> Iterator[tuple[str, type[ctypes.c_uint32]]]:
    return ((name, ctypes.c_uint32) for name in names)


class TableParams(ctypes.Structure):
    """One table of an arena, 32 bytes: how the place of a row is found. Three ways.

    owner_after: 1 + the owner of all rows; then the slot of a row is its number, and there are no places. 0: there are.
    bucket_after: 1 + the index, in the arena's buckets, of the table's first bucket. 0: places are in the order of
    rows, from `begin` on.
    begin: index, in the arena's places, of the table's first; what a bucket says is counted from there, too. With
    owner_after: the byte, behind `rows[owner]`, at which row 0 lies.
    num_rows: rows of the whole table.
    seed, shifts: as `RowBuckets`; shifts has bucket_shift, slot_shift << 8 and log2(count) << 16.
    """

    _fields_ = (*_uint64("begin", "seed"), *_uint32("num_rows", "owner_after", "bucket_after", "shifts"))


class ArenaParams(ctypes.Structure):
    """One arena (tables of one dim and dtype) as one card sees it. By value.

    rows: first byte of each owner's rows: cards 0 .. num_cards - 1, then, at num_cards, this card's own copies of the
    hot rows, and, at num_cards + 1, the host's pinned rows. 0 where an owner has none.
    places: uint32 [places]: slot << owner_bits | owner, or `NOT_HERE`.
    tables: TableParams [num_tables].
    starts: uint64 [num_tables, num_cards + 2]: the byte, behind `rows[owner]`, at which a table's slot 0 lies.
    buckets: uint64 [...], of each bucket of each table with `bucket_after`: the place of a row of it is at
    begin + buckets[bucket] + (row >> slot_shift), modulo 2^64; `NO_BUCKET` for another node's.
    """

    _fields_ = (
        ("rows", ctypes.c_uint64 * MAX_OWNERS),
        *_uint64("places", "tables", "starts", "buckets"),
        *_uint32("num_tables", "num_cards", "owner_bits", "row_stride", "embedding_dim", "_pad"),
    )


class RunParams(ctypes.Structure):
    """Neighbouring bags of one table that are written with one stride, 32 bytes. Lies in the uploaded batch.

    table: in the arena. first: its first bag (of `offsets`), or with mode `none` its first value. num: how many.
    Bag i of the run is written to out[out_offset + i * out_stride + column], in elements.
    """

    _fields_ = (
        *_uint32("table", "first", "num", "mode"),
        ("out_offset", ctypes.c_int64),
        ("out_stride", ctypes.c_int64),
    )


class BatchParams(ctypes.Structure):
    """The bags that one launch pools. By value; what it points to lies on the card.

    values: uint32 [n]. weights: float32 [n], or 0 for all ones. offsets: uint32 [bags + 1], into values.
    runs: RunParams [...]. blocks: uint32 [num_blocks, 2]: the run of each thread block, and the first of its bags,
    counted within the run. out: of out_dtype. counters: uint64 [2], added to: values outside their table, values
    whose row is `NOT_HERE`; both pool as zeros.
    num_blocks: gridDim.x. rotation: block b does the work of (b + rotation) % num_blocks, so that cards which pool the
    same tables do not all begin at the same peer. lanes_log2: log2 of the threads of a bag; a thread block has
    THREADS_PER_BLOCK >> lanes_log2 bags.
    """

    _fields_ = (
        *_uint64("values", "weights", "offsets", "runs", "blocks", "out", "counters"),
        *_uint32("num_blocks", "rotation", "out_dtype", "lanes_log2"),
    )


class WriteParams(ctypes.Structure):
    """Rows of one table that replace those on this card. By value; what it points to lies on the card.

    numbers: uint32 [num_rows], rows of the table. stored: uint8 [num_rows, row_stride], laid out as on the card.
    Written are rows of owner `card` (this one) and this card's copies of hot rows, and pinned rows if writes_host.
    One thread for each chunk: thread block b has chunks b * THREADS_PER_BLOCK and on of the [num_rows, chunks] there
    are.
    """

    _fields_ = (*_uint64("numbers", "stored"), *_uint32("num_rows", "table", "card", "writes_host"))


def pointers_to(params: Sequence[ctypes.Structure]) -> ctypes.Array[ctypes.c_void_p]:
    """Return what `cuLaunchKernel` takes: the addresses of the structures, which must live until it has returned."""
    return (ctypes.c_void_p * len(params))(*map(ctypes.addressof, params))


# Places: one uint32 a row, `slot << owner_bits | owner`. Owners: cards 0 .. N - 1; N, every card (a hot row: each has a
# copy, at the same slot); N + 1, the host's pinned memory. Slots count from 0 for each table and owner. The last slot
# that the bits could say is never used, so that no place is `NOT_HERE`.


def owner_bits(num_cards: int) -> int:
    """Return how many low bits of a place say the owner: the smallest b with 2^b >= num_cards + 3."""
    return (num_cards + 2).bit_length()


def max_slots(num_cards: int) -> int:
    """Return how many slots one table can have at one owner."""
    return (1 << (32 - owner_bits(num_cards))) - 1


def encode_places(owners: npt.NDArray[np.integer], slots: npt.NDArray[np.integer], num_cards: int) -> UInt32Array:
    """Return places uint32 [n] of owners [n] and slots [n], both in range."""
    places: UInt32Array = slots.astype(np.uint32)
    places <<= np.uint32(owner_bits(num_cards))
    places |= owners.astype(np.uint32)
    return places


def owners_of(places: UInt32Array, num_cards: int) -> UInt8Array:
    """Return the owner uint8 [n] of each place; num_cards + 2 for `NOT_HERE`."""
    owners = (places & np.uint32((1 << owner_bits(num_cards)) - 1)).astype(np.uint8)
    owners[places == NOT_HERE] = num_cards + 2
    return owners


# Rows: the stored numbers, moved apart so that every row begins at a multiple of 16 bytes; nothing is quantised anew.


_TAIL_BYTES: dict[RowDtype, int] = {"int8": 8, "int4": 4, "fp16": 0, "fp32": 0}


@dataclass(frozen=True, slots=True)
class RowFormat:
    """The layout of one dtype and dim on cards. Made by `RowFormat.of`. Padding is zero.

    | dtype | from byte 0 | tail | stride, before it is rounded up to 16 |
    |---|---|---|---|
    | int8 | D codes | at D rounded up to 8: float32 scale, float32 bias | tail + 8 |
    | int4 | D/2 bytes of codes, the low 4 bits first | at D/2 rounded up to 4: float16 scale, float16 bias | tail + 4 |
    | fp16 | D float16 | none | 2D |
    | fp32 | D float32 | none | 4D |

    `row_bytes` are of a stored row; `code_bytes` of its codes or elements, `tail_bytes` of scale and bias, which lie at
    byte `tail_offset`. `stride` is from one row to the next. `chunks` of 16 bytes have codes or elements in them, the
    first ones of a row; a tail may share the last.
    """

    dtype: RowDtype
    embedding_dim: int
    row_bytes: int
    code_bytes: int
    tail_offset: int
    tail_bytes: int
    stride: int
    chunks: int

    @classmethod
    @lru_cache(maxsize=256)
    def of(cls, dtype: RowDtype, embedding_dim: int) -> Self:
        """Return the format of rows of `embedding_dim` elements stored as `dtype`."""
        row_bytes, tail_bytes = RowCodec(dtype, embedding_dim).row_bytes, _TAIL_BYTES[dtype]
        code_bytes = row_bytes - tail_bytes
        tail_offset = round_up(code_bytes, tail_bytes) if tail_bytes else code_bytes
        stride, chunks = round_up(tail_offset + tail_bytes), -(-code_bytes // CHUNK_BYTES)
        return cls(dtype, embedding_dim, row_bytes, code_bytes, tail_offset, tail_bytes, stride, chunks)

    def relay(self, stored: ByteArray, target: ByteArray) -> ByteArray:
        """Lay rows, uint8 [n, row_bytes], out as on a card, in `target`, uint8 [n, stride]; return that."""
        tail_end = self.tail_offset + self.tail_bytes
        target[:, : self.code_bytes] = stored[:, : self.code_bytes]
        target[:, self.code_bytes : self.tail_offset] = 0
        target[:, self.tail_offset : tail_end] = stored[:, self.code_bytes :]
        target[:, tail_end:] = 0
        return target


def round_up(size: int, multiple: int = CHUNK_BYTES) -> int:
    """Return the next multiple, of 16 if nothing is said, from `size` on."""
    return -(-size // multiple) * multiple
