"""A batch on its way to a card: offsets, runs, blocks, values and weights, packed so that what it takes is one copy.

Packing is a fixed number of vector operations, whatever the number of keys, bags and values; values and offsets go from
int64 to uint32 on their way into pinned memory, in one pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt

from shard_node.bags import Bags, Int64Array, TableLayout
from shard_node.buckets import BucketCells, Partition
from shard_node.cuda import kernel_params
from shard_node.cuda.kernel_params import CHUNK_BYTES, ByteArray, UInt32Array
from shard_node.errors import InvalidBagsError

BoolArray = npt.NDArray[np.bool_]

MAX_BATCH_VALUES = 2**31 - 1
"""Positions are uint32 on cards, and kernels look some way ahead of the last one, which must not wrap around."""
RUN_DTYPE = np.dtype(kernel_params.RunParams)
GAP_BYTES = 1 << 15
"""Between two parts of a batch, such a gap is sent along: it takes the bus less time than one more copy does."""


@dataclass(frozen=True, slots=True, eq=False)
class OutputRuns:
    """What is pooled of the batches to come: one run for each key, or several, which pool its bags from several tables.

    Bag i of run k's key is written to elements out_offsets[k] + i * out_strides[k] and on, embedding_dim of them, all
    within the `out_elements` of the output. With mode `none` that is said of its values in place of its bags. Several
    runs may share a table. Arrays are int64 [S]; `modes` are of `kernel_params.MODES`; `keys` are the number of each
    run's key in the batch, in which every key has a run, None for one run for each key, in order.
    """

    tables: Int64Array
    modes: Int64Array
    out_offsets: Int64Array
    out_strides: Int64Array
    out_dtype: kernel_params.OutDtype
    out_elements: int
    keys: Int64Array | None = None

    def of_keys(self, by_key: Int64Array) -> Int64Array:
        """Pick what is known of each run's key, int64 [S], from what is known of all keys."""
        return by_key if self.keys is None else by_key[self.keys]

    @property
    def out_bytes(self) -> int:
        """Bytes of the output."""
        return self.out_elements * kernel_params.OUT_BYTES[self.out_dtype]


@dataclass(frozen=True, slots=True, eq=False)
class BatchSize:
    """The largest batch that something is made for: bags of each key, int64 [S], and values of all keys together.

    `weighted`: there may be weights; a batch without any then has all ones. `extra_bytes` the caller sends along.
    """

    bags_per_key: Int64Array
    num_values: int
    weighted: bool = False
    extra_bytes: int = 0


class ArenaShape(NamedTuple):
    """The kernel that pools an arena: log2 of the threads of a row, its column tiles (gridDim.y), a block's bags."""

    kernel: str
    lanes_log2: int
    column_tiles: int
    bags_per_block: int


class BatchShapes:
    """What batches need to know of a layout, in arrays that are made once; arenas are the groups of the layout.

    `arena_of_table` and `dim_of_table` are int64 [tables], `table_in_arena` uint32 [tables], `bags_per_block` int64
    [arenas].
    """

    def __init__(self, layout: TableLayout) -> None:
        self.layout = layout
        sizes = [group.end_table - group.first_table for group in layout.groups]
        self.arena_of_table = np.repeat(np.arange(len(sizes), dtype=np.int64), sizes)
        self.table_in_arena = np.concatenate([np.arange(size, dtype=np.uint32) for size in sizes])
        self.dim_of_table = np.array([table.embedding_dim for table in layout.tables], np.int64)
        arenas = []
        for group in layout.groups:
            chunks = kernel_params.RowFormat.of(group.dtype, group.embedding_dim).chunks
            lanes_log2 = min((chunks - 1).bit_length(), kernel_params.MAX_LANES.bit_length() - 1)
            tiles, bags_per_block = -(-chunks // (1 << lanes_log2)), kernel_params.THREADS_PER_BLOCK >> lanes_log2
            arenas.append(ArenaShape(kernel_params.POOL_KERNELS[group.dtype], lanes_log2, tiles, bags_per_block))
        self.arenas = tuple(arenas)
        self.bags_per_block = np.array([arena.bags_per_block for arena in arenas], np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class Blocks:
    """The thread blocks of a batch, arena by arena; `edges` are where each arena's begin, then how many there are.

    Each run has `num` bags (values with mode `none`) from `first` on, int64 [S]. Each block has its `run`, uint32
    [blocks], and the `first_bag` of it within the run, int64 [blocks].
    """

    first: Int64Array
    num: Int64Array
    run: UInt32Array
    first_bag: Int64Array
    edges: tuple[int, ...]

    @property
    def counts(self) -> tuple[int, ...]:
        """Blocks of each arena."""
        return tuple(end - first for first, end in pairwise(self.edges))


class RunTable:
    """Output runs, prepared for a layout: what does not change from batch to batch.

    `tables`, int64 [keys], are those of each key's first run; `further` has, round by round, the keys that have another
    run, bool [keys], and the tables of these runs. `arena` is int64 [S]; `is_none`, bool [S], are the runs with mode
    `none`, None if there are none; `constant`, `RUN_DTYPE` [S], is what never changes of the runs.
    """

    def __init__(self, shapes: BatchShapes, runs: OutputRuns) -> None:
        self.shapes = shapes
        self.runs = runs
        self.tables, self.further = runs.tables, list[tuple[BoolArray, Int64Array]]()
        if runs.keys is not None:
            by_key, counts = np.argsort(runs.keys, kind="stable"), np.bincount(runs.keys)
            first = np.cumsum(counts) - counts
            self.tables = runs.tables[by_key[first]]
            for number in range(1, int(counts.max(initial=1))):
                has_run = counts > number
                self.further.append((has_run, runs.tables[by_key[first[has_run] + number]]))
        self.arena = shapes.arena_of_table[runs.tables]
        is_none = runs.modes == kernel_params.MODES["none"]
        self.is_none = is_none if is_none.any() else None
        order = np.argsort(self.arena, kind="stable")
        self._order = order.astype(np.uint32)
        self._per_block = shapes.bags_per_block[self.arena]
        self._per_block_in_order = self._per_block[order]
        self._arena_edges = np.searchsorted(self.arena[order], np.arange(len(shapes.arenas) + 1))
        self.constant = np.zeros(runs.tables.size, RUN_DTYPE)
        self.constant["table"] = shapes.table_in_arena[runs.tables]
        self.constant["mode"] = runs.modes
        self.constant["out_offset"] = runs.out_offsets
        self.constant["out_stride"] = runs.out_strides

    def blocks(self, bags: Bags) -> Blocks:
        """Cut a batch's runs into thread blocks."""
        of_keys = self.runs.of_keys
        first, num = of_keys(bags.bag_starts()[:-1]), of_keys(bags.bags_per_key)
        if self.is_none is not None:
            first = np.where(self.is_none, of_keys(bags.value_starts()[:-1]), first)
            num = np.where(self.is_none, of_keys(bags.values_per_key()), num)
        counts = (-(-num // self._per_block))[self._order]
        ends = np.zeros(counts.size + 1, np.int64)
        np.cumsum(counts, out=ends[1:])
        within = np.arange(ends[-1], dtype=np.int64)
        within -= np.repeat(ends[:-1], counts)
        within *= np.repeat(self._per_block_in_order, counts)
        return Blocks(first, num, np.repeat(self._order, counts), within, tuple(ends[self._arena_edges].tolist()))

    def max_blocks(self, size: BatchSize) -> tuple[int, ...]:
        """For each arena, the blocks of the largest batch of a size."""
        counts = -(-self.runs.of_keys(size.bags_per_key) // self._per_block)
        if self.is_none is not None:
            # However the values are divided among these runs, each rounds up once.
            counts = np.where(self.is_none, -(-size.num_values // self._per_block), counts)
        return tuple(np.bincount(self.arena, counts, len(self.shapes.arenas)).astype(np.int64).tolist())


class BatchLayout:
    """Where each part of a batch begins in its buffer, in bytes; all are aligned to 16.

    Each has one place for all batches up to a size, as a graph knows addresses. Offsets lie at the end of their part
    and values at the beginning of theirs, with all between that is always sent whole: so one range of bytes is all that
    a batch takes, however large it is. Only weights, which values push apart, may need a second one. Values are uint32,
    weights float32; thread blocks are counted by arena; `extra_bytes` are the caller's.
    """

    def __init__(
        self,
        num_values: int,
        num_bags: int,
        num_runs: int,
        num_blocks: tuple[int, ...],
        weighted: bool,
        extra_bytes: int = 0,
    ) -> None:
        self.num_values, self.num_bags, self.num_runs = num_values, num_bags, num_runs
        self.num_blocks, self.weighted, self.extra_bytes = num_blocks, weighted, extra_bytes
        sizes = (
            4 * (num_bags + 1),
            RUN_DTYPE.itemsize * num_runs,
            *(8 * blocks for blocks in num_blocks),
            extra_bytes,
            4 * num_values,
            4 * num_values if weighted else 0,
        )
        edges = [0, *accumulate(map(kernel_params.round_up, sizes))]
        self.offsets_at, self.runs_at, *self.blocks_at = edges[:-4]
        self.extra_at, self.values_at, self.weights_at, self.size_bytes = edges[-4:]

    @classmethod
    def tight(cls, bags: Bags, blocks: Blocks) -> Self:
        """For one batch and no larger one."""
        return cls(bags.num_values, bags.num_bags, blocks.num.size, blocks.counts, bags.weights is not None)

    def used(self, bags: Bags) -> tuple[tuple[int, int], ...]:
        """Say which bytes a batch takes, that fits: one range [first, end) or, with weights, up to two."""
        first = self.offsets_at + 4 * (self.num_bags - bags.num_bags) // CHUNK_BYTES * CHUNK_BYTES
        end = self.values_at + 4 * bags.num_values
        if not self.weighted or not bags.num_values:
            return ((first, end),)
        weights_end = self.weights_at + 4 * bags.num_values
        if self.weights_at - end <= GAP_BYTES:
            return ((first, weights_end),)
        return (first, end), (self.weights_at, weights_end)


class BatchViews:
    """The parts of a batch as arrays over its pinned buffer, uint8 [layout.size_bytes or more], aligned to 16 bytes."""

    def __init__(self, array: ByteArray, layout: BatchLayout) -> None:
        values, weighted = 4 * layout.num_values, layout.weighted
        self._has_bags: BoolArray = np.zeros(layout.num_runs, np.bool_)
        self.values: UInt32Array = _view(array, layout.values_at, values).view(np.uint32)
        self.weights = _view(array, layout.weights_at, values).view(np.float32) if weighted else None
        self.offsets: UInt32Array = _view(array, layout.offsets_at, 4 * (layout.num_bags + 1)).view(np.uint32)
        self.runs = _view(array, layout.runs_at, RUN_DTYPE.itemsize * layout.num_runs).view(RUN_DTYPE)
        self.blocks: Sequence[UInt32Array] = tuple(
            _view(array, at, 8 * count).view(np.uint32).reshape(-1, 2)
            for at, count in zip(layout.blocks_at, layout.num_blocks, strict=True)
        )
        self.extra: ByteArray = _view(array, layout.extra_at, layout.extra_bytes)

    def write_constant(self, runs: RunTable) -> None:
        """Write what never changes of the runs, and no bags. Once is enough, if `pack` is for the same runs."""
        self.runs[:] = runs.constant
        self._has_bags = self.runs["mode"] != kernel_params.MODES["none"]
        for target in self.blocks:
            target[:, 0] = kernel_params.NO_RUN

    def write_values(self, bags: Bags) -> None:
        """Write the values alone; bags are those that are packed."""
        np.copyto(self.values[: bags.num_values], bags.values, casting="unsafe")

    def pack(self, bags: Bags, blocks: Blocks) -> None:
        """Write what changes from batch to batch. The batch is known to fit."""
        num_values, first_offset = bags.num_values, self.offsets.size - bags.offsets.size
        self.write_values(bags)
        np.copyto(self.offsets[first_offset:], bags.offsets, casting="unsafe")
        if self.weights is not None:
            self.weights[:num_values] = 1.0 if bags.weights is None else bags.weights
        # A run's first bag is where its offset lies, its first value, with mode `none`, is not.
        self.runs["first"] = blocks.first + first_offset * self._has_bags
        self.runs["num"] = blocks.num
        for target, (first, end) in zip(self.blocks, pairwise(blocks.edges), strict=True):
            target[: end - first, 0] = blocks.run[first:end]
            target[: end - first, 1] = blocks.first_bag[first:end]
            target[end - first :, 0] = kernel_params.NO_RUN


def _view(array: ByteArray, first: int, size_bytes: int) -> ByteArray:
    return array[first : first + size_bytes]


def check_fits(bags: Bags, size: BatchSize) -> None:
    """Raise InvalidBagsError, with the numbers, for a batch that is larger than a size."""
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


class RowChecks:
    """Checks of batches and row writes against a layout and a partition.

    A node that holds all rows, which is the usual one, looks no bucket up.
    """

    def __init__(self, layout: TableLayout, partition: Partition) -> None:
        self.layout = layout
        is_local = [cards >= 0 for cards in partition.card_of_bucket]
        self._is_divided: BoolArray = np.array([not of_buckets.all() for of_buckets in is_local])
        self._any_divided = bool(self._is_divided.any())
        self._cells = BucketCells(layout, ~self._is_divided)
        self._is_local: BoolArray = self._cells.spread(is_local, 0, np.bool_)

    def check(self, bags: Bags, tables: Int64Array | None = None) -> None:
        """Check a batch as `TableLayout.check`, and that each row is on this node. Raises InvalidBagsError."""
        self.layout.check(bags, tables)
        if not self._any_divided:
            return
        if tables is None:
            tables = bags.keys.astype(np.int64)
        if not self._is_divided[tables].any():
            return
        values_per_key = bags.values_per_key()
        by_table = Bags(tables.astype(np.int32), bags.bags_per_key, bags.offsets, bags.values)
        is_local = self._is_local[self._cells.of(by_table, values_per_key)]
        if not is_local.all():
            wrong = int(is_local.argmin())
            name = self.layout.tables[int(np.repeat(tables, values_per_key)[wrong])].name
            raise InvalidBagsError(f"row {int(bags.values[wrong])} of table {name!r} is not on this node")

    def local(self, table: int, rows: Int64Array) -> BoolArray:
        """Return which of a table's rows are on this node, bool [n]."""
        if not self._is_divided[table]:
            return np.ones(rows.size, np.bool_)
        return self._is_local[self._cells.of_rows(table, rows)]
