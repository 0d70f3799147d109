"""What the kernels take by value: the same structures as in `kernels.cu`, field by field.

Pointers are addresses in the unified address space, which every card and the host share. All integers little-endian.
"""

from __future__ import annotations

import ctypes
from typing import Literal, TypeAlias

from loader.snapshot.manifest import RowDtype

MAX_CARDS = 64
MAX_OWNERS = MAX_CARDS + 2
"""Who may own a row: one of the cards, every card (a hot row: each has a copy), or the host's pinned memory."""

NOT_HERE = 0xFFFFFFFF
"""The place of a row that another node holds."""

THREADS_PER_BLOCK = 256
CHUNK_BYTES = 16
"""What one thread loads of a row at a time; rows are aligned to it."""
MAX_LANES = 32
"""Threads that share a bag; a row of more chunks is done in several column tiles (`gridDim.y`)."""

NO_RUN = 0xFFFFFFFF
"""The run of a block that has nothing to do: graphs launch as many blocks as their largest batch needs."""

OutDtype: TypeAlias = Literal["fp32", "fp16", "bf16"]
OUT_DTYPES: dict[OutDtype, int] = {"fp32": 0, "fp16": 1, "bf16": 2}
OUT_BYTES: dict[OutDtype, int] = {"fp32": 4, "fp16": 2, "bf16": 2}

Mode: TypeAlias = Literal["sum", "mean", "none"]
MODES: dict[Mode, int] = {"sum": 0, "mean": 1, "none": 2}
"""`mean` divides by the length of the bag, whoever owns its rows. `none`: each value is a bag of its own."""

POOL_KERNELS: dict[RowDtype, str] = {dtype: f"pool_{dtype}" for dtype in ("int8", "int4", "fp16", "fp32")}
WRITE_KERNEL = "write_rows"


class TableParams(ctypes.Structure):
    """One table of an arena, 16 bytes.

    first_place: index, in the arena's places, of its row 0. num_rows: rows of the whole table.
    """

    _fields_ = (("first_place", ctypes.c_uint64), ("num_rows", ctypes.c_uint32), ("_pad", ctypes.c_uint32))


class ArenaParams(ctypes.Structure):
    """One arena (tables of one dim and dtype) as one card sees it. By value.

    rows: first byte of each owner's rows: cards 0 .. num_cards - 1, then, at num_cards, this card's own copies of the
    hot rows, and, at num_cards + 1, the host's pinned rows. 0 where an owner has none.
    places: uint32 [places]: slot << owner_bits | owner, or `NOT_HERE`.
    tables: TableParams [num_tables].
    starts: uint64 [num_tables, num_cards + 2]: the byte, behind `rows[owner]`, at which a table's slot 0 lies.
    """

    _fields_ = (
        ("rows", ctypes.c_uint64 * MAX_OWNERS),
        ("places", ctypes.c_uint64),
        ("tables", ctypes.c_uint64),
        ("starts", ctypes.c_uint64),
        ("num_tables", ctypes.c_uint32),
        ("num_cards", ctypes.c_uint32),
        ("owner_bits", ctypes.c_uint32),
        ("row_stride", ctypes.c_uint32),
        ("embedding_dim", ctypes.c_uint32),
        ("_pad", ctypes.c_uint32),
    )


class RunParams(ctypes.Structure):
    """Neighbouring bags of one table that are written with one stride, 32 bytes. Lies in the uploaded batch.

    table: in the arena. first: its first bag (of `offsets`), or with mode `none` its first value. num: how many.
    Bag i of the run is written to out[out_offset + i * out_stride + column], in elements.
    """

    _fields_ = (
        ("table", ctypes.c_uint32),
        ("first", ctypes.c_uint32),
        ("num", ctypes.c_uint32),
        ("mode", ctypes.c_uint32),
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
        ("values", ctypes.c_uint64),
        ("weights", ctypes.c_uint64),
        ("offsets", ctypes.c_uint64),
        ("runs", ctypes.c_uint64),
        ("blocks", ctypes.c_uint64),
        ("out", ctypes.c_uint64),
        ("counters", ctypes.c_uint64),
        ("num_blocks", ctypes.c_uint32),
        ("rotation", ctypes.c_uint32),
        ("out_dtype", ctypes.c_uint32),
        ("lanes_log2", ctypes.c_uint32),
    )


class WriteParams(ctypes.Structure):
    """Rows of one table that replace those on this card. By value; what it points to lies on the card.

    numbers: uint32 [num_rows], rows of the table. stored: uint8 [num_rows, row_stride], laid out as on the card.
    Written are rows of owner `card` (this one) and this card's copies of hot rows, and pinned rows if writes_host.
    One thread for each chunk: thread block b has chunks b * THREADS_PER_BLOCK and on of the [num_rows, chunks] there
    are.
    """

    _fields_ = (
        ("numbers", ctypes.c_uint64),
        ("stored", ctypes.c_uint64),
        ("num_rows", ctypes.c_uint32),
        ("table", ctypes.c_uint32),
        ("card", ctypes.c_uint32),
        ("writes_host", ctypes.c_uint32),
    )
