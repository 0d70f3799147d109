"""A batch on its way to a card: values, weights, offsets, runs and blocks, packed one after another for a single copy.

Packing is a fixed number of vector operations, whatever the number of keys, bags and values; values and offsets go from
int64 to uint32 on their way into pinned memory, in one pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

import numpy as np
import numpy.typing as npt

from shard_node.bags import Int64Array, KeyedBags, TableLayout
from shard_node.cuda.kernel_params import (
    CHUNK_BYTES,
    MAX_LANES,
    MODES,
    NO_RUN,
    POOL_KERNELS,
    THREADS_PER_BLOCK,
    RunParams,
)
from shard_node.cuda.output_runs import BatchSize, OutputRuns
from shard_node.cuda.row_format import RowFormat
from shard_node.errors import InvalidBagsError

ByteArray = npt.NDArray[np.uint8]
UInt32Array = npt.NDArray[np.uint32]

RUN_DTYPE = np.dtype(RunParams)


@dataclass(frozen=True, slots=True)
class ArenaShape:
    """How the bags of one arena are spread over threads.

    Attributes:
        kernel: that pools it.
        embedding_dim: elements of a row.
        lanes_log2: log2 of the threads that share a bag.
        bags_per_block: of a thread block.
        column_tiles: of a row, gridDim.y.
    """

    kernel: str
    embedding_dim: int
    lanes_log2: int
    bags_per_block: int
    column_tiles: int


class BatchShapes:
    """What batches need to know of a layout, in arrays that are made once.

    Attributes:
        layout: the tables.
        arenas: one for each group of the layout.
        arena_of_table: int64 [tables].
        table_in_arena: uint32 [tables].
        dim_of_table: int64 [tables].
        bags_per_block: int64 [arenas].
    """

    def __init__(self, layout: TableLayout) -> None:
        self.layout = layout
        sizes = [group.end_table - group.first_table for group in layout.groups]
        self.arena_of_table = np.repeat(np.arange(len(sizes), dtype=np.int64), sizes)
        self.table_in_arena = np.concatenate([np.arange(size, dtype=np.uint32) for size in sizes])
        self.dim_of_table = np.array([table.embedding_dim for table in layout.tables], np.int64)
        arenas = []
        for group in layout.groups:
            chunks = RowFormat.of(group.dtype, group.embedding_dim).chunks
            lanes_log2 = min((chunks - 1).bit_length(), MAX_LANES.bit_length() - 1)
            arenas.append(
                ArenaShape(
                    POOL_KERNELS[group.dtype],
                    group.embedding_dim,
                    lanes_log2,
                    THREADS_PER_BLOCK >> lanes_log2,
                    -(-chunks // (1 << lanes_log2)),
                )
            )
        self.arenas = tuple(arenas)
        self.bags_per_block = np.array([arena.bags_per_block for arena in arenas], np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class Blocks:
    """The thread blocks of a batch, arena by arena.

    Attributes:
        first: int64 [S], each run's first bag, or first value with mode `none`.
        num: int64 [S], how many.
        run: uint32 [blocks], the run of each block.
        first_bag: int64 [blocks], the first of its bags, within the run.
        edges: where each arena's blocks begin, then how many there are.
    """

    first: Int64Array
    num: Int64Array
    run: UInt32Array
    first_bag: Int64Array
    edges: tuple[int, ...]

    @property
    def counts(self) -> tuple[int, ...]:
        """Blocks of each arena."""
        return tuple(end - first for first, end in zip(self.edges[:-1], self.edges[1:], strict=True))


class RunTable:
    """Output runs, prepared for a layout: what does not change from batch to batch.

    Args:
        shapes: of the layout.
        runs: checked.

    Attributes:
        runs: as given.
        arena: int64 [S], of each run.
        is_none: bool [S], the runs with mode `none`; None if there are none.
    """

    def __init__(self, shapes: BatchShapes, runs: OutputRuns) -> None:
        self.shapes = shapes
        self.runs = runs
        self.arena = shapes.arena_of_table[runs.tables]
        is_none = runs.modes == MODES["none"]
        self.is_none = is_none if is_none.any() else None
        order = np.argsort(self.arena, kind="stable")
        self._order = order.astype(np.uint32)
        self._per_block = shapes.bags_per_block[self.arena]
        self._per_block_in_order = self._per_block[order]
        self._arena_edges = np.searchsorted(self.arena[order], np.arange(len(shapes.arenas) + 1))
        self._constant = np.zeros(runs.tables.size, RUN_DTYPE)
        self._constant["table"] = shapes.table_in_arena[runs.tables]
        self._constant["mode"] = runs.modes
        self._constant["out_offset"] = runs.out_offsets
        self._constant["out_stride"] = runs.out_strides

    @property
    def size(self) -> int:
        """The number of runs, S."""
        return self.runs.tables.size

    def spans(self, bags: KeyedBags) -> tuple[Int64Array, Int64Array]:
        """Each run's first bag and how many it has, int64 [S]; with mode `none`, values."""
        first, num = bags.bag_starts()[:-1], bags.bags_per_key
        if self.is_none is not None:
            first = np.where(self.is_none, bags.value_starts()[:-1], first)
            num = np.where(self.is_none, bags.values_per_key(), num)
        return first, num

    def blocks(self, bags: KeyedBags) -> Blocks:
        """Cuts a batch's runs into thread blocks."""
        first, num = self.spans(bags)
        counts = (-(-num // self._per_block))[self._order]
        ends = np.zeros(counts.size + 1, np.int64)
        np.cumsum(counts, out=ends[1:])
        within = np.arange(ends[-1], dtype=np.int64)
        within -= np.repeat(ends[:-1], counts)
        within *= np.repeat(self._per_block_in_order, counts)
        return Blocks(first, num, np.repeat(self._order, counts), within, tuple(ends[self._arena_edges].tolist()))

    def most_blocks(self, size: BatchSize) -> tuple[int, ...]:
        """For each arena, the blocks of the largest batch of a size."""
        counts = -(-size.bags_per_key // self._per_block)
        if self.is_none is not None:
            # However the values are divided among these runs, each rounds up once.
            counts = np.where(self.is_none, -(-size.num_values // self._per_block), counts)
        return tuple(np.bincount(self.arena, counts, len(self.shapes.arenas)).astype(np.int64).tolist())

    @property
    def constant(self) -> npt.NDArray[np.void]:
        """`RUN_DTYPE` [S], what never changes of the runs."""
        return self._constant


@dataclass(frozen=True, slots=True)
class BatchLayout:
    """Where each part of a batch begins in its buffer, in bytes; all are aligned to 16.

    Attributes:
        num_values: uint32 values, and float32 weights if `weighted`.
        num_bags: bags; there is one more offset.
        num_runs: runs.
        num_blocks: thread blocks, by arena.
        weighted: whether there are weights.
        extra_bytes: of the caller's own.
    """

    num_values: int
    num_bags: int
    num_runs: int
    num_blocks: tuple[int, ...]
    weighted: bool
    extra_bytes: int = 0
    values_at: int = field(init=False)
    weights_at: int = field(init=False)
    offsets_at: int = field(init=False)
    runs_at: int = field(init=False)
    blocks_at: tuple[int, ...] = field(init=False)
    extra_at: int = field(init=False)
    size_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        sizes = {
            "values_at": 4 * self.num_values,
            "weights_at": 4 * self.num_values if self.weighted else 0,
            "offsets_at": 4 * (self.num_bags + 1),
            "runs_at": RUN_DTYPE.itemsize * self.num_runs,
        }
        at = 0
        for name, size in sizes.items():
            object.__setattr__(self, name, at)
            at += _round_up(size)
        blocks_at = []
        for blocks in self.num_blocks:
            blocks_at.append(at)
            at += _round_up(8 * blocks)
        object.__setattr__(self, "blocks_at", tuple(blocks_at))
        object.__setattr__(self, "extra_at", at)
        object.__setattr__(self, "size_bytes", at + _round_up(self.extra_bytes))

    @classmethod
    def tight(cls, bags: KeyedBags, blocks: Blocks) -> Self:
        """For one batch and no larger one."""
        return cls(bags.num_values, bags.num_bags, blocks.num.size, blocks.counts, bags.weights is not None)


class BatchViews:
    """The parts of a batch as arrays over its pinned buffer.

    Args:
        array: uint8 [at least layout.size_bytes], aligned to 16 bytes.
        layout: where they are.
    """

    def __init__(self, array: ByteArray, layout: BatchLayout) -> None:
        self.values: UInt32Array = _view(array, layout.values_at, 4 * layout.num_values).view(np.uint32)
        self.weights = (
            _view(array, layout.weights_at, 4 * layout.num_values).view(np.float32) if layout.weighted else None
        )
        self.offsets: UInt32Array = _view(array, layout.offsets_at, 4 * (layout.num_bags + 1)).view(np.uint32)
        self.runs = _view(array, layout.runs_at, RUN_DTYPE.itemsize * layout.num_runs).view(RUN_DTYPE)
        self.blocks: Sequence[UInt32Array] = tuple(
            _view(array, at, 8 * count).view(np.uint32).reshape(-1, 2)
            for at, count in zip(layout.blocks_at, layout.num_blocks, strict=True)
        )
        self.extra: ByteArray = _view(array, layout.extra_at, layout.extra_bytes)

    def write_constant(self, runs: RunTable) -> None:
        """Writes what never changes of the runs, and no bags. Once is enough, if `pack` is for the same runs."""
        self.runs[:] = runs.constant
        for target in self.blocks:
            target[:, 0] = NO_RUN

    def pack(self, bags: KeyedBags, blocks: Blocks) -> None:
        """Writes what changes from batch to batch. The batch is known to fit."""
        num_values, num_offsets = bags.num_values, bags.offsets.size
        np.copyto(self.values[:num_values], bags.values, casting="unsafe")
        np.copyto(self.offsets[:num_offsets], bags.offsets, casting="unsafe")
        if self.weights is not None:
            self.weights[:num_values] = 1.0 if bags.weights is None else bags.weights
        self.runs["first"] = blocks.first
        self.runs["num"] = blocks.num
        for target, first, end in zip(self.blocks, blocks.edges[:-1], blocks.edges[1:], strict=True):
            target[: end - first, 0] = blocks.run[first:end]
            target[: end - first, 1] = blocks.first_bag[first:end]
            target[end - first :, 0] = NO_RUN


def check_fits(bags: KeyedBags, size: BatchSize) -> None:
    """Raises InvalidBagsError, with the numbers, for a batch that is larger than a size."""
    if bags.num_values > size.num_values:
        raise InvalidBagsError(f"the batch has {bags.num_values} values, but there is room for {size.num_values}")
    over = bags.bags_per_key > size.bags_per_key
    if over.any():
        key = int(over.argmax())
        raise InvalidBagsError(
            f"key {key} has {int(bags.bags_per_key[key])} bags, but there is room for {int(size.bags_per_key[key])}"
        )
    if bags.weights is not None and not size.weighted:
        raise InvalidBagsError("the batch has weights, but there is no room for any")


def _view(array: ByteArray, first: int, size_bytes: int) -> ByteArray:
    return array[first : first + size_bytes]


def _round_up(size_bytes: int) -> int:
    return -(-size_bytes // CHUNK_BYTES) * CHUNK_BYTES
