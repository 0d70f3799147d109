"""Rows of one generation on cards: their memory, what finds them there, and the order of row writes and lookups.

An arena holds all tables of one (embedding_dim, dtype). On each card lie its own rows, its copies of the hot rows, the
places of this node's rows (4 bytes each; none for a table that lies whole at one owner), and, per table, where its
places and its rows begin; pinned rows lie on the host.
Nothing here decides where a row goes: `Placer` does.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from loader.snapshot.buckets import RowBuckets, ranges, starts_of
from shard_node.access_counts import LookupSampler
from shard_node.bags import Bags, Group, Int64Array, TableLayout
from shard_node.cuda import kernel_params
from shard_node.cuda.batch import BatchShapes, RowChecks
from shard_node.cuda.kernel_params import ArenaParams, TableParams, UInt8Array, UInt32Array, UInt64Array, encode_places
from shard_node.engine.keyed_tables import KeyedTables
from shard_node.generation import RowLock
from shard_node.planning.card_plan import BUCKET_BYTES, CARD, HOST, HOT, NUM_TIERS, CardPlan
from shard_node.planning.hotness import RowHotness

if TYPE_CHECKING:
    from shard_node.cuda.cupy_cards import Cards, Event, Memory, Stream
PIECE_ROWS = 1 << 20
"""Rows that are placed at a time; what that takes beside the places themselves is some 50 bytes a row."""
# Beside the tiers of a plan.
_ELSEWHERE, _SPLIT = NUM_TIERS, NUM_TIERS + 1


class Placer:
    """The places of all rows of a plan: the same for the same plan, each row at exactly one place."""

    def __init__(self, plan: CardPlan) -> None:
        self.plan = plan

    def pieces(self, table: int, piece_rows: int = PIECE_ROWS) -> Iterator[tuple[int, UInt32Array]]:
        """Return the places of a table's rows in row order, a piece at a time: (first row, uint32 [rows])."""
        num_rows = self.plan.layout.tables[table].num_embeddings
        owner = self.plan.places[table].only_owner
        walk = _Walk(self.plan, table) if owner is None else None
        for first in range(0, num_rows, piece_rows):
            end = min(first + piece_rows, num_rows)
            if walk is not None:
                yield first, walk.place(first, end)
            else:
                yield first, encode_places(np.array(owner), np.arange(first, end, dtype=np.uint32), self.plan.num_cards)

    def bucket_places(self, table: int) -> UInt64Array:
        """Say where the places of each bucket begin, of a table with `TablePlaces.buckets`: uint64 [buckets].

        The place of a row is number (entry + (row >> slot_shift)) modulo 2^64 of the table's; `NO_BUCKET` for another
        node's. The table's places lie by bucket, and within one by row.
        """
        buckets = RowBuckets.of(self.plan.layout.tables[table])
        is_local = self.plan.partition.card_of_bucket[table] >= 0
        rows = np.where(is_local, buckets.rows_per_bucket(), 0)
        begins = (np.cumsum(rows) - rows - buckets.first_slots()).view(np.uint64)
        return np.where(is_local, begins, np.uint64(kernel_params.NO_BUCKET))

    def starts(self, group: Group) -> UInt64Array:
        """uint64 [tables of the group, num_cards + 2]: the byte, of an owner's rows, at which a table's slot 0 lies."""
        sizes = self._slot_bytes(group)
        starts = np.zeros(sizes.shape, np.uint64)
        np.cumsum(sizes[:-1], axis=0, out=starts[1:])
        return starts

    def rows_bytes(self, group: Group) -> list[int]:
        """For each owner the bytes of the rows of a group's tables; on each card, if it is the owner of hot rows."""
        return list(self._slot_bytes(group).sum(axis=0).tolist())

    def _slot_bytes(self, group: Group) -> UInt64Array:
        stride = kernel_params.RowFormat.of(group.dtype, group.embedding_dim).stride
        return self.plan.slots[group.first_table : group.end_table].astype(np.uint64) * np.uint64(stride)


@dataclass(frozen=True, slots=True)
class _Tiers:
    """Which tier each (level, card) of a table is in.

    A card's rows are ranked by (level, row); `bounds`, int64 [splits, 2], cut the ranks at which `CARD` and `HOST`
    begin. A level that a bound cuts is `_SPLIT`, and has a number, of which `first_rank` is the first row's. Both are
    by key = level * (num_cards + 1) + card, uint8 [levels * (num_cards + 1)]; card num_cards: not here.
    """

    of_key: UInt8Array
    split_of_key: UInt8Array
    bounds: Int64Array
    first_rank: Int64Array

    @classmethod
    def of(cls, level_rows: Int64Array, tier_rows: Int64Array) -> _Tiers:
        """From rows by level and card, int64 [levels, cards], and by card and tier, int64 [cards, NUM_TIERS]."""
        levels, cards = level_rows.shape
        ends = np.cumsum(level_rows, axis=0)
        firsts = ends - level_rows
        bounds = np.cumsum(tier_rows, axis=1)[:, : NUM_TIERS - 1]
        tier = np.full((levels, cards + 1), _ELSEWHERE, np.uint8)
        for card in range(cards):
            first = np.searchsorted(bounds[card], firsts[:, card], side="right")
            last = np.searchsorted(bounds[card], np.maximum(ends[:, card] - 1, firsts[:, card]), side="right")
            tier[:, card] = np.where(first == last, first, _SPLIT)
        level, card_of_split = np.nonzero(tier == _SPLIT)
        split = np.zeros(tier.shape, np.uint8)
        split[level, card_of_split] = np.arange(level.size)
        return cls(tier.reshape(-1), split.reshape(-1), bounds[card_of_split], firsts[level, card_of_split])


class _Walk:
    """Places a table's rows in row order, each piece once: slots and ranks count on from piece to piece."""

    def __init__(self, plan: CardPlan, table: int) -> None:
        cards = plan.num_cards
        self._num_cards = cards
        self._hotness: RowHotness = plan.hotness[table]
        self._buckets = RowBuckets.of(plan.layout.tables[table])
        self._tiers = _Tiers.of(plan.level_rows[table], plan.tier_rows[table])
        # Key and owner of another node's rows: as of a card more.
        card_of_bucket = plan.partition.card_of_bucket[table].astype(np.int64)
        self._card_of_bucket = np.where(card_of_bucket < 0, cards, card_of_bucket).astype(np.uint16)
        owner = np.empty((_ELSEWHERE + 1, cards + 1), np.uint8)
        owner[HOT], owner[CARD], owner[HOST] = cards, np.arange(cards + 1), cards + 1
        owner[_ELSEWHERE] = cards + 2
        self._owner_of = owner.reshape(-1)
        self._next_slot = np.zeros(cards + 3, np.int64)
        self._next_rank = self._tiers.first_rank.copy()

    def place(self, first: int, end: int) -> UInt32Array:
        """uint32 [end - first], the places of these rows."""
        card = self._card_of_bucket[self._buckets.of_rows(np.arange(first, end))]
        key = self._hotness.levels(first, end).astype(np.uint32)
        key *= np.uint32(self._num_cards + 1)
        key += card
        tier = self._tiers.of_key[key]
        split = np.flatnonzero(tier == _SPLIT)
        if split.size:
            tier[split] = self._tier_of_split(self._tiers.split_of_key[key[split]])
        owner = self._owner_of[tier.astype(np.uint16) * np.uint16(self._num_cards + 1) + card]
        rank, counts = _ranks(owner, self._next_slot)
        self._next_slot += counts
        places = encode_places(owner, rank, self._num_cards)
        places[owner == self._num_cards + 2] = kernel_params.NOT_HERE
        return places

    def _tier_of_split(self, number: UInt8Array) -> UInt8Array:
        """uint8 [n], the tiers of the next rows of split keys. Most pieces have no bound in them, and need no ranks."""
        counts: Int64Array = np.bincount(number, minlength=self._next_rank.size)
        first = _tier_at(self._next_rank, self._tiers.bounds)
        last = _tier_at(self._next_rank + np.maximum(counts - 1, 0), self._tiers.bounds)
        tier, cut = first[number], np.flatnonzero((first != last)[number])
        if cut.size:
            rank, _ = _ranks(number[cut], self._next_rank)
            tier[cut] = _tier_at(rank, self._tiers.bounds[number[cut]])
        self._next_rank += counts
        return tier


def _tier_at(rank: Int64Array, bounds: Int64Array) -> UInt8Array:
    """uint8 [n], the tier of each rank, int64 [n], by the ranks at which tiers begin, int64 [n, 2]."""
    tier: UInt8Array = (rank[:, None] >= bounds).sum(axis=1, dtype=np.uint8)
    return tier


def _ranks(kinds: UInt8Array, next_rank: Int64Array) -> tuple[Int64Array, Int64Array]:
    """Numbers what is of one kind in order, from next_rank[kind] on: the numbers int64 [n], and how many of each kind.

    A stable sort of bytes is a radix sort: a fixed number of passes.
    """
    counts: Int64Array = np.bincount(kinds, minlength=next_rank.size)
    order = np.argsort(kinds, kind="stable")
    ranks = np.empty(kinds.size, np.int64)
    ranks[order] = ranges(next_rank, counts)
    return ranks, counts


class ArenaOnCards:
    """One arena on all cards of a process. Memory is taken when it is made, and not zeroed; `params` are by card.

    Whoever makes it then uploads every table's places to every card (`places_address`) and writes its rows (`write`).
    Only after that may it be pooled from. Raises MemoryBudgetError if a card or the host has not as much.
    """

    def __init__(self, cards: Cards, group: Group, placer: Placer) -> None:
        self.group = group
        numbers = range(group.first_table, group.end_table)
        self._placer, self._tables = placer, placer.plan.layout.tables[group.first_table : group.end_table]
        self.format = kernel_params.RowFormat.of(group.dtype, group.embedding_dim)
        self._cards = cards.cards
        places_of = placer.plan.places[group.first_table : group.end_table]
        self._first_place = starts_of(np.array([places.rows for places in places_of]))
        *card_bytes, hot_bytes, host_bytes = placer.rows_bytes(group)
        with ExitStack() as memories:

            def allocate(make: Callable[[int], Memory], size_bytes: int) -> int:
                if not size_bytes:
                    return 0
                memory = make(size_bytes)
                memories.callback(memory.free)
                return memory.address

            local = [allocate(card.allocate, size) for card, size in zip(self._cards, card_bytes, strict=True)]
            host = allocate(cards.allocate_pinned, host_bytes)
            params = []
            for card in self._cards:
                places = allocate(card.allocate, 4 * int(self._first_place[-1]))
                finders = allocate(card.allocate, finder_bytes(placer.plan, numbers))
                params.append(self._params(places, finders, [*local, allocate(card.allocate, hot_bytes), host]))
            self.params: tuple[ArenaParams, ...] = tuple(params)
            self._upload_finders(cards)
            self._memories = memories.pop_all()

    def places_address(self, card: int, table: int, first: int = 0) -> int:
        """Return the address, on a card, of one of a table's places (uint32); the later ones follow."""
        return int(self.params[card].places) + 4 * (int(self._first_place[table]) + first)

    def write(
        self, card: int, table: int, numbers: int, stored: int, num_rows: int, stream: Stream, *, writes_host: bool
    ) -> None:
        """Put on the stream: of these rows, write those that this card owns, its copies of hot ones, and pinned ones.

        Rows of other owners are passed over, so all cards may be given all rows; exactly one of them writes the pinned
        rows. `table` is its number within the group; `numbers` and `stored` are addresses on the card of uint32
        [num_rows], rows of the table, and, aligned to 16 bytes, of uint8 [num_rows, format.stride].
        """
        if not num_rows:
            return
        chunks = self.format.stride // kernel_params.CHUNK_BYTES
        params = kernel_params.WriteParams(numbers, stored, num_rows, table, card, int(writes_host))
        grid = (-(-num_rows * chunks // kernel_params.THREADS_PER_BLOCK), 1)
        self._cards[card].launch(kernel_params.WRITE_KERNEL, grid, (self.params[card], params), stream)

    def free(self) -> None:
        """Give all memory back. Nothing that uses it may be under way. Idempotent."""
        self._memories.close()

    def _params(self, places: int, finders: int, rows: Sequence[int]) -> ArenaParams:
        num_tables, num_cards = self._first_place.size - 1, len(self._cards)
        starts = finders + num_tables * ctypes.sizeof(TableParams)
        params = ArenaParams(
            places=places,
            tables=finders,
            starts=starts,
            buckets=starts + 8 * num_tables * (num_cards + 2),
            num_tables=num_tables,
            num_cards=num_cards,
            owner_bits=kernel_params.owner_bits(num_cards),
            row_stride=self.format.stride,
            embedding_dim=self.group.embedding_dim,
        )
        params.rows[: len(rows)] = rows
        return params

    def _finders(self) -> bytes:
        """Return TableParams of each table, then `ArenaParams.starts`, then `ArenaParams.buckets`."""
        tables, begins = (TableParams * len(self._tables))(), list[UInt64Array]()
        starts = np.ascontiguousarray(self._placer.starts(self.group), np.uint64)
        num_buckets = 0
        for number, (table, params) in enumerate(zip(self._tables, tables, strict=True)):
            buckets, places = RowBuckets.of(table), self._placer.plan.places[self.group.first_table + number]
            params.begin, params.num_rows = int(self._first_place[number]), table.num_embeddings
            if places.only_owner is not None:
                params.begin, params.owner_after = int(starts[number, places.only_owner]), places.only_owner + 1
            elif places.buckets:
                params.bucket_after, params.seed = num_buckets + 1, buckets.seed or 0
                log2_count = buckets.count.bit_length() - 1
                params.shifts = buckets.bucket_shift | buckets.slot_shift << 8 | log2_count << 16
                begins.append(self._placer.bucket_places(self.group.first_table + number))
                num_buckets += places.buckets
        return bytes(tables) + starts.tobytes() + b"".join(begin.tobytes() for begin in begins)

    def _upload_finders(self, cards: Cards) -> None:
        finders = self._finders()
        pinned = cards.allocate_pinned(len(finders))
        try:
            pinned.array[:] = np.frombuffer(finders, np.uint8)
            for card, params in zip(self._cards, self.params, strict=True):
                stream = card.stream()
                card.copy_to_card(params.tables, pinned, 0, pinned.size_bytes, stream)
                stream.synchronize()
        finally:
            pinned.free()


def finder_bytes(plan: CardPlan, tables: range) -> int:
    """Return what an arena of these tables takes of each card beside rows and places: where each table's begin."""
    buckets = sum(plan.places[number].buckets for number in tables) * BUCKET_BYTES
    return len(tables) * (ctypes.sizeof(TableParams) + 8 * (plan.num_cards + 2)) + buckets


class Reader:
    """A stream on which rows are looked up. Made by `WriteOrder.reader`; used by one thread at a time."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.last_launch: Event | None = None
        self.last_write: Event | None = None


class WriteOrder:
    """Row writes and lookups of one engine in one order on all cards, kept by events: no host thread waits for a card.

    A lock covers only the moments in which work is *put* on streams. A write goes behind all that any lane has put on
    its stream; whatever a lane puts there later goes behind the write. So a batch sees all rows of a write as they were
    before, or all as they are after it, on whichever card they lie. Thread-safe. Rows are written on `streams`, one of
    each card.
    """

    def __init__(self, streams: Sequence[Stream]) -> None:
        self.streams = tuple(streams)
        self._lock = RowLock()
        self._readers_lock = threading.Lock()
        self._readers: dict[int, Reader] = {}
        self._last_write: Event | None = None

    def reader(self, stream: Stream) -> Reader:
        """Make a reader, which writes wait for from now on."""
        reader = Reader(stream)
        with self._readers_lock:
            self._readers[id(reader)] = reader
        return reader

    def forget(self, reader: Reader) -> None:
        """End a reader; all that it has launched must be done. Idempotent."""
        with self._readers_lock:
            self._readers.pop(id(reader), None)

    def readers(self) -> tuple[Reader, ...]:
        """All that there are."""
        with self._readers_lock:
            return tuple(self._readers.values())

    def read(self, reader: Reader, work: Callable[[], None]) -> None:
        """Run `work`, which puts lookups on the reader's stream: all of them before, or all after, any write."""
        self._lock.begin_read()
        try:
            write = self._last_write
            if write is not None and write is not reader.last_write:
                reader.stream.wait(write)
                reader.last_write = write
            try:
                work()
            finally:
                # Also if it failed: what it put there before may still be reading rows.
                reader.last_launch = reader.stream.record()
        finally:
            self._lock.end_read()

    def write(self, work: Callable[[], None]) -> None:
        """Run `work`, which puts writes of rows on `streams`."""
        self._lock.begin_write()
        try:
            head, *others = self.streams
            # The first card's stream joins all launches, so that the others have one event to wait for, and so later
            # has each lane: waits are as many as lanes and cards together, not their product.
            for reader in self.readers():
                if reader.last_launch is not None:
                    head.wait(reader.last_launch)
            if others:
                launched = head.record()
                for stream in others:
                    stream.wait(launched)
            try:
                work()
            finally:
                for stream in others:
                    head.wait(stream.record())
                self._last_write = head.record()
        finally:
            self._lock.end_write()


class LookupCounts:
    """Rows looked up in each table, and, of some batches, which (`access`). Thread-safe."""

    def __init__(self, layout: TableLayout) -> None:
        self.access = LookupSampler(layout)
        self._counts = np.zeros(len(layout.tables), np.int64)
        self._lock = threading.Lock()

    def add(self, tables: Int64Array, bags: Bags) -> None:
        """Add a checked batch, whose keys are tables [S], which may name a table twice."""
        values_per_key = bags.values_per_key()
        with self._lock:
            np.add.at(self._counts, tables, values_per_key)
        self.access.observe(tables, values_per_key, bags.values)

    def read(self) -> Int64Array:
        """int64 [tables]."""
        with self._lock:
            return self._counts.copy()


@dataclass(frozen=True, slots=True, eq=False)
class CardRows:
    """Rows of one generation on cards, as lanes see them; `counters` are as `BatchParams.counters`, on each card.

    `keyed` has the keys of tables that have such. They are found within `order.read`, in which their lookup is put on a
    stream, and changed within `order.write`.
    """

    cards: Cards
    shapes: BatchShapes
    arenas: tuple[ArenaOnCards, ...]
    order: WriteOrder
    checks: RowChecks
    counters: tuple[Memory, ...]
    lookups: LookupCounts
    keyed: KeyedTables | None
