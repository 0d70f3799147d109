"""The loading of a partition, and a CPU engine's: tiers, arenas, and filling them from a snapshot's row files."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from loader.errors import SnapshotCorruptError, file_errors
from loader.memory import allocate_rows, populate
from loader.progress import PIECE_BYTES, Progress, no_progress
from loader.snapshot.buckets import FileOrder, RowBuckets, ranges, starts_of
from loader.snapshot.codecs import ByteArray, RowCodec
from loader.snapshot.reader import Snapshot
from loader.snapshot.tables import TableSpec
from shard_node.access_counts import TABLE_SHIFT, hottest_rows
from shard_node.bags import Group, Int64Array, TableLayout
from shard_node.buckets import ALL_BITS, Partition
from shard_node.engine.arena import NOT_HERE, Arena, Placement, TablePlace
from shard_node.engine.base import Engine
from shard_node.engine.cpu import CpuEngine
from shard_node.engine.key_index import index_bytes
from shard_node.engine.keyed_tables import KeyedTables, capacities_here, local_keys
from shard_node.engine.memory import SLOT_BYTES, Claim, RowMemory, choose_tiers
from shard_node.engine.row_files import RowFile, RowFiles
from shard_node.engine.tiered_rows import TieredRows
from shard_node.errors import InvalidBagsError, MemoryBudgetError
from shard_node.node import DeltaPosition, LoadedTables
from shard_node.planning.hotness import ObservedCounts, RowCounts

BoolArray = npt.NDArray[np.bool_]
# Of rows that are gathered at a time: what that takes beside them stays small, and within a processor's cache.
FILL_BYTES = 1 << 20


@dataclass(slots=True)
class _Filling:
    number: int
    rows: npt.NDArray[np.uint8]
    next_slot: int = 0


@dataclass(frozen=True, slots=True)
class _FileOnDisk:
    """A row file of a table: its rows' order, and the position of its first row among those of its group."""

    table: int
    index: int
    order: FileOrder
    first: int

    def local_positions(self, is_local: BoolArray, limit: int) -> Int64Array:
        """Return the positions of its first local rows, int64 [at most limit], ascending."""
        edges = np.flatnonzero(np.diff(is_local, prepend=False, append=False))
        begins, ends = self.order.starts[edges].reshape(-1, 2).T
        before = starts_of(ends - begins)[:-1]
        return self.first + ranges(begins, (limit - before).clip(0, ends - begins))


class TableLoad:
    """The loading of a partition's buckets, before it begins: what it will take is known, nothing is taken yet."""

    def __init__(self, snapshot: Snapshot, partition: Partition, plan_digest: str) -> None:
        self._snapshot = snapshot
        self._partition = partition
        self._plan_digest = plan_digest

    def take(self, memory: RowMemory) -> Sequence[Claim]:
        """Claim what the tables will take of this process's RAM, and of cards. Raises MemoryBudgetError."""
        raise NotImplementedError

    def build(self, progress: Progress) -> Engine:
        """Allocate and fill all that rows take, once; `progress` is given bytes.

        Raises SnapshotCorruptError if a row decodes to NaN or inf, or a file can't be read. Nothing is held then.
        """
        raise NotImplementedError

    def run(
        self, claims: Sequence[Claim], progress: Progress = no_progress, check: Callable[[], None] = lambda: None
    ) -> LoadedTables:
        """Load, once, after `check`; `claims`, of `take`, are given back if there will be no tables. Raises as both."""
        try:
            check()
            engine = self.build(progress)
        except BaseException:
            for claim in claims:
                claim.give_back()
            raise
        for claim in claims:
            claim.filled()
        position = DeltaPosition(*self._snapshot.manifest.delta_start)
        return LoadedTables(engine, self._snapshot.identity, self._plan_digest, position, self._partition, claims)


class ArenaLoad(TableLoad):
    """A load into a CPU engine: checks rows, and copies them or brings them into memory. As `prepare_load`."""

    def __init__(
        self,
        snapshot: Snapshot,
        partition: Partition,
        plan_digest: str,
        memory_budget_bytes: int | None = None,
        observed: ObservedCounts | None = None,
    ) -> None:
        super().__init__(snapshot, partition, plan_digest)
        self._layout = layout = layout_for(snapshot, partition)
        self._cards = partition.card_of_bucket
        self._files = {files.table: files for files in snapshot.manifest.tables}
        self._buckets = [RowBuckets.of(table) for table in layout.tables]
        self._bucket_rows = [buckets.rows_per_bucket() for buckets in self._buckets]
        self._local = local = local_keys(layout, partition)
        self._capacity = capacities_here(layout, local)
        self._key_bytes = index_bytes(self._capacity.values())
        self._keyed: KeyedTables | None = None
        # Which rows of each file are here, of tables with keys; then their rows by bucket are what there is.
        self._orders = {number: keyed_orders(snapshot, layout.tables[number]) for number in local}
        for number, orders in self._orders.items():
            self._bucket_rows[number] = np.add.reduce([np.diff(order.starts) for order in orders])
        rows = [int(of_table[cards >= 0].sum()) for of_table, cards in zip(self._bucket_rows, self._cards, strict=True)]
        for number in local:
            rows[number] += 1  # what missing keys get
        self._row_bytes = [RowCodec(table.dtype, table.embedding_dim).row_bytes for table in layout.tables]
        table_bytes = [count * size for count, size in zip(rows, self._row_bytes, strict=True)]
        self._tiers = self._choose_tiers(table_bytes, memory_budget_bytes)
        self._observed = {} if observed is None else observed
        self._arenas: list[Arena | TieredRows] = []
        self._row_files: list[RowFiles] = []
        self._claim_more: Callable[[int], object] = int
        self._progress: Progress = no_progress
        is_on_disk = np.array([tier == "disk" for tier in self._tiers])
        self._total_bytes = int(np.array(table_bytes)[~is_on_disk].sum())
        self._disk_bytes = sum(table_bytes) - self._total_bytes
        # What rows on disk would take in memory, by table, and what their hottest may.
        self._slot_bytes = np.array(self._row_bytes) + SLOT_BYTES
        self._cold_bytes = np.where(is_on_disk, np.array(rows) * self._slot_bytes, 0)
        budget_bytes = memory_budget_bytes or 0
        self._hot_bytes = min(max(0, budget_bytes - self._total_bytes - self._key_bytes), int(self._cold_bytes.sum()))
        self._done_bytes = self._checked_bytes = 0

    def take(self, memory: RowMemory) -> Sequence[Claim]:
        """As `TableLoad.take`."""
        claim = memory.take(self._total_bytes + self._key_bytes + self._hot_bytes)
        self._claim_more = partial(memory.take, into=claim)
        return [claim]

    def build(self, progress: Progress) -> CpuEngine:
        """As `TableLoad.build`."""
        try:
            return self._build(progress)
        except BaseException:
            for files in self._row_files:
                files.close()
            raise

    def _build(self, progress: Progress) -> CpuEngine:
        self._progress = progress
        progress("load", 0, self._total_bytes)
        self._keyed = KeyedTables(self._layout, self._local) if self._local else None
        places: list[TablePlace] = []
        group_arenas: list[range] = []
        hottest = self._hottest()
        for group in self._layout.groups:
            first_arena = len(self._arenas)
            filling, files = self._allocate(group.first_table, group.end_table), list[_FileOnDisk]()
            for number in range(group.first_table, group.end_table):
                if number in self._orders:
                    places.append(self._place_keyed(number, filling))
                elif self._tiers[number] == "ram":
                    places.append(self._place_in_ram(number, filling))
                else:
                    places.append(self._place_on_disk(number, files))
            if files:
                tables = slice(group.first_table, group.end_table)
                self._load_hottest(group, files, [*enumerate(places)][tables], hottest)
            group_arenas.append(range(first_arena, len(self._arenas)))
        # What was claimed was the most that it could be.
        self._claim_more(
            sum(rows.size_bytes for rows in self._arenas if isinstance(rows, TieredRows)) - self._hot_bytes
        )
        placement = Placement(self._layout, places)
        tiers, keyed = self._tiers, self._keyed
        return CpuEngine(self._layout, self._arenas, group_arenas, placement, tiers, self._claim_more, keyed)

    def _choose_tiers(self, table_bytes: list[int], budget_bytes: int | None) -> list[Literal["ram", "disk"]]:
        """Choose the tables in RAM: all that have keys, as they have to grow. Raises MemoryBudgetError."""
        if not self._local or budget_bytes is None:
            return choose_tiers(table_bytes, budget_bytes)
        needed = self._key_bytes + sum(table_bytes[number] for number in self._orders)
        if needed > budget_bytes:
            raise MemoryBudgetError(f"tables with keys take {needed} bytes of RAM, the memory budget is {budget_bytes}")
        others = [0 if number in self._orders else size for number, size in enumerate(table_bytes)]
        return choose_tiers(others, budget_bytes - needed)

    def _allocate(self, first_table: int, end_table: int) -> _Filling:
        """Allocate one arena for a group's rows in RAM, whichever cards they are for: RAM is one memory."""
        table, row_bytes = self._layout.tables[first_table], self._row_bytes[first_table]
        bytes_of_cards: dict[int, int] = {}
        spare_rows = 0
        for number in range(first_table, end_table):
            if self._tiers[number] != "ram":
                continue
            cards, rows = self._cards[number], self._bucket_rows[number]
            if number in self._orders:
                # Address space for all keys that there may be: memory is taken by those that come.
                spare_rows += 1 + self._capacity[number] - int(rows[cards >= 0].sum())
            is_local = cards >= 0
            of_cards = np.bincount(cards[is_local], rows[is_local]).astype(np.int64)
            for card in np.flatnonzero(of_cards).tolist():
                bytes_of_cards[card] = bytes_of_cards.get(card, 0) + int(of_cards[card]) * row_bytes
        num_rows = sum(bytes_of_cards.values()) // row_bytes + spare_rows
        filling = _Filling(len(self._arenas), allocate_rows(num_rows, row_bytes, is_reserved=spare_rows > 0))
        if num_rows:
            self._arenas.append(Arena(table.dtype, table.embedding_dim, filling.rows, bytes_of_cards))
        return filling

    def _place_in_ram(self, number: int, filling: _Filling) -> TablePlace:
        table, rows, is_local = self._layout.tables[number], self._bucket_rows[number], self._cards[number] >= 0
        buckets, files = self._buckets[number], self._files[table.name]
        if is_local[rows > 0].all():
            # In row order, so that a lookup needs no bucket.
            arena, base = np.full((1, 1), filling.number, np.uint16), np.full((1, 1), filling.next_slot)
            place = TablePlace(ALL_BITS, 0, arena, base)
            is_local = rows > 0
        else:
            local_rows = np.where(is_local, rows, 0)
            starts = filling.next_slot + np.cumsum(local_rows) - local_rows
            arena = np.where(is_local, np.uint16(filling.number), NOT_HERE)
            base = np.where(is_local, starts - buckets.first_slots(), 0)
            place = TablePlace(ALL_BITS, buckets.slot_shift, arena[None], base[None])
        for index in range(len(files.rows)):
            self._fill(table, index, buckets.in_file(files.rows_per_file, index), is_local, place, filling.rows)
        filling.next_slot += int(rows[is_local].sum())
        self._progress("load", self._done_bytes, self._total_bytes)
        return place

    def _place_keyed(self, number: int, filling: _Filling) -> TablePlace:
        table, is_local, keyed = self._layout.tables[number], self._cards[number] >= 0, self._keyed
        assert keyed is not None
        first = filling.next_slot
        filling.rows[first] = self._snapshot.missing_row(table.name)
        for index, order in enumerate(self._orders[number]):
            source, keys = self._snapshot.rows_file(table.name, index), self._snapshot.keys(table.name, index)
            file = self._snapshot.path / self._files[table.name].rows[index].path
            positions = order.positions_of(is_local)
            for begin, end in _pieces(0, positions.size, source.shape[1], FILL_BYTES):
                piece = positions[begin:end]
                of_rows, stored = keys.take(piece), source.take(piece, axis=0)
                check_finite(file, table, stored, of_rows)
                filling.rows[first + keyed.load(file, number, of_rows)] = stored
                self._done_bytes += stored.nbytes
                self._progress("load", self._done_bytes, self._total_bytes)
        filling.next_slot += 1 + keyed.capacity[number]
        return TablePlace(ALL_BITS, 0, np.full((1, 1), filling.number, np.uint16), np.full((1, 1), first))

    def _fill(
        self, table: TableSpec, index: int, order: FileOrder, is_local: BoolArray, place: TablePlace, target: ByteArray
    ) -> None:
        source = self._snapshot.rows_file(table.name, index)
        file = self._snapshot.path / self._files[table.name].rows[index].path
        positions = order.positions_of(is_local)
        if not positions.size:
            return
        # One item per row: NumPy copies such whole, several times faster than bytes.
        items, slots_of = source.view(f"V{source.shape[1]}").reshape(-1), target.view(f"V{target.shape[1]}").reshape(-1)
        for begin, end in _pieces(0, positions.size, source.shape[1], FILL_BYTES):
            piece = positions[begin:end]
            rows, stored = order.rows_at(piece), items.take(piece)
            check_finite(file, table, stored.view(np.uint8).reshape(piece.size, -1), rows)
            base = place.cell_base[0]
            if not place.is_undivided:
                base = base.take(order.buckets.of_rows(rows))
            rows >>= place.slot_shift
            rows += base
            slots_of[rows] = stored
            self._done_bytes += stored.nbytes
            self._progress("load", self._done_bytes, self._total_bytes)

    def _hottest(self) -> Int64Array:
        """Return the rows on disk that memory has room for, by counts: table << 32 | row, of this node, ascending."""
        counted: dict[int, tuple[RowCounts, float]] = {}
        tables = self._layout.tables
        exported = {
            table.name: counts for table in tables if (counts := self._snapshot.access_counts(table.name)) is not None
        }
        # Counts of one kind compare; observed ones may be of a version whose table had other rows.
        by_name: ObservedCounts = exported or self._observed
        for number in np.flatnonzero(self._cold_bytes).tolist():
            of_table = by_name.get(tables[number].name)
            if of_table is not None and of_table.shape == (tables[number].num_embeddings,):
                counted[number] = of_table, float(self._slot_bytes[number])
        if not counted or not self._hot_bytes:
            return np.zeros(0, np.int64)

        def is_local(number: int, rows: Int64Array) -> BoolArray:
            return self._cards[number].take(self._buckets[number].of_rows(rows)) >= 0

        return hottest_rows(counted, self._hot_bytes, is_local)

    def _place_on_disk(self, number: int, on_disk: list[_FileOnDisk]) -> TablePlace:
        """Place a table's rows at their positions in files, which follow those of the group that are there."""
        table, is_local = self._layout.tables[number], self._cards[number] >= 0
        files, buckets = self._files[table.name], self._buckets[number]
        arena = np.full((len(files.rows), buckets.count), NOT_HERE, np.uint16)
        base = np.zeros((len(files.rows), buckets.count), np.int64)
        first = on_disk[-1].first + on_disk[-1].order.num_rows if on_disk else 0
        for index in range(len(files.rows) if is_local.any() else 0):
            order = buckets.in_file(files.rows_per_file, index)
            on_disk.append(_FileOnDisk(number, index, order, first))
            arena[index, is_local] = len(self._arenas)
            in_file = order.starts[:-1] - (order.first_row >> buckets.slot_shift)
            base[index] = first + (in_file if buckets.slot_shift else -order.first_row)
            first += order.num_rows
        return TablePlace(files.rows_per_file.bit_length() - 1, buckets.slot_shift, arena, base)

    def _load_hottest(
        self, group: Group, files: list[_FileOnDisk], places: list[tuple[int, TablePlace]], hottest: Int64Array
    ) -> None:
        """Make a group's tiered rows: those that were counted, then any that memory has room for."""
        edges = hottest.searchsorted(np.arange(group.first_table, group.end_table + 1) << TABLE_SHIFT)
        positions = [np.zeros(0, np.int64)]
        for (number, place), (begin, end) in zip(places, pairwise(edges.tolist()), strict=True):
            rows = hottest[begin:end] & ((1 << TABLE_SHIFT) - 1)
            at = rows >> place.files_shift, self._buckets[number].of_rows(rows)
            positions.append(place.cell_base[at] + (rows >> place.slot_shift) if rows.size else rows)
        counted = np.sort(np.concatenate(positions))
        spare_bytes = self._hot_bytes - int(self._slot_bytes.take(hottest >> TABLE_SHIFT).sum())
        fraction = float(self._cold_bytes[group.first_table : group.end_table].sum() / self._cold_bytes.sum())
        num_more = int(spare_bytes * fraction / self._slot_bytes[group.first_table])
        more = np.zeros(0, np.int64)
        for file in files:
            local = file.local_positions(self._cards[file.table] >= 0, num_more + counted.size)
            more = np.append(more, np.setdiff1d(local, counted, assume_unique=True)[: num_more - more.size])
            if more.size >= num_more:
                break
        names = [self._layout.tables[file.table].name for file in files]
        stored = [self._snapshot.rows_at(name, file.index) for name, file in zip(names, files, strict=True)]
        rows_in = [RowFile(*at, file.order.num_rows) for at, file in zip(stored, files, strict=True)]
        row_files = RowFiles(rows_in, group.row_bytes)
        self._row_files.append(row_files)
        cards = self._cards[files[0].table]
        resident = np.sort(np.append(counted, more))
        self._arenas.append(tiered := TieredRows(group, row_files, resident, int(cards[(cards >= 0).argmax()])))
        for file in files:
            self._scan(file, tiered)
        row_files.forget_pages()

    def _scan(self, on_disk: _FileOnDisk, rows: TieredRows) -> None:
        """Check the local rows of a file, and load those of them that begin in memory."""
        table = self._layout.tables[on_disk.table]
        source, order = self._snapshot.rows_file(table.name, on_disk.index), on_disk.order
        file = self._snapshot.path / self._files[table.name].rows[on_disk.index].path
        edges = np.flatnonzero(np.diff(self._cards[on_disk.table] >= 0, prepend=False, append=False))
        for first, end in order.starts[edges].reshape(-1, 2).tolist():
            for begin, stop in _pieces(first, end, source.shape[1]):
                piece = source[begin:stop]
                with file_errors(file, "read"):
                    populate(piece)
                check_finite(file, table, piece, order.rows_at(np.arange(begin, stop)))
                rows.load(on_disk.first + begin, piece)
                self._checked_bytes += piece.nbytes
                self._progress("check rows on disk", self._checked_bytes, self._disk_bytes)


class CheckedLoad(ArenaLoad):
    """A load of rows that were checked, with a budget of 0 or none: those on disk are read once they are looked up."""

    def _scan(self, *_: object) -> None:
        """Leave them where they are."""


def layout_for(snapshot: Snapshot, partition: Partition) -> TableLayout:
    """Return the layout of a snapshot's tables. Raises InvalidBagsError unless the partition has as many tables."""
    layout = TableLayout.of(snapshot.spec)
    if len(partition.card_of_bucket) != len(layout.tables):
        raise InvalidBagsError(
            f"the partition is for {len(partition.card_of_bucket)} tables, the model has {len(layout.tables)}"
        )
    return layout


def keyed_orders(snapshot: Snapshot, table: TableSpec) -> list[FileOrder]:
    """Return the order of each file of a stored table with keys."""
    files = next(files for files in snapshot.manifest.tables if files.table == table.name)
    buckets, firsts = RowBuckets.of(table), range(0, files.num_rows(table), files.rows_per_file)
    return [buckets.of_keys(first, snapshot.keys(table.name, at)) for at, first in enumerate(firsts)]


def check_finite(file: Path, table: TableSpec, stored: ByteArray, rows: Int64Array) -> None:
    """Raise SnapshotCorruptError, naming the row, if a stored one of these rows of a file decodes to NaN or inf."""
    if (bad := RowCodec(table.dtype, table.embedding_dim).first_non_finite(stored)) is not None:
        raise SnapshotCorruptError(f"{file}: table {table.name!r}, row {rows[bad]}: decodes to NaN or inf")


def _pieces(begin: int, end: int, row_bytes: int, piece_bytes: int = PIECE_BYTES) -> Iterator[tuple[int, int]]:
    rows = max(1, piece_bytes // row_bytes)
    for first in range(begin, end, rows):
        yield first, min(first + rows, end)
