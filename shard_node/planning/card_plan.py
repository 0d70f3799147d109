"""Where rows go: pure, from budgets and hotness, before any memory is reserved.

Buckets of tables are dealt to owners (`deal`), so that none has much more load or bytes than another. The largest goes
first, to the owner with the least. A model has millions of buckets and most of them are cold and alike, so only the hot
ones are given one by one; the others by the run.

On a node (`CardPlan`) each card's rows of a table are ranked by hotness and cut twice: the first are hot (every card
has a copy), then come those that this card alone has, and the others are in the host's pinned memory. Where to cut is
decided for all tables at once, by lookups per byte. So memory is filled to the last row, what each card and tier needs
is known to the byte, and no row has been read one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from loader.snapshot.buckets import RowBuckets
from shard_node.bags import Int32Array, Int64Array, TableLayout
from shard_node.buckets import Partition
from shard_node.cuda.kernel_params import MAX_CARDS, RowFormat, max_slots
from shard_node.errors import MemoryBudgetError
from shard_node.planning.hotness import Float64Array, Hotness, RowHotness

# Tiers of one card's rows of a table, from the hottest on.
HOT, CARD, HOST = range(3)
NUM_TIERS = 3

PLACE_BYTES = 4
BUCKET_BYTES = 8
# Of a card, for hot rows, where not everything fits on the cards.
DEFAULT_HOT_SHARE = 16

MAX_RUNS = 8192
"""Of buckets that are given together: each costs about 10 us, and is one in so many of all, or one bucket."""


@dataclass(frozen=True, slots=True)
class CardBudget:
    """The memory for one version on a node.

    Attributes:
        card_bytes: of each card, for rows and places.
        pinned_bytes: of the host's pinned memory, for rows.
        hot_bytes: of each card, for copies of hot rows, which go before its other rows. None: what is left on the
            fullest card when all rows are on cards; a sixteenth of a card if they can't be; all of a card without
            access to peers.
        peer_access: whether each card reads every other's memory. If not, rows are hot or in pinned memory.
    """

    card_bytes: tuple[int, ...]
    pinned_bytes: int
    hot_bytes: int | None = None
    peer_access: bool = True


class TablePlaces(NamedTuple):
    """How the rows of one table are addressed on cards.

    Attributes:
        only_owner: of all rows of the table, whose slots then are the row numbers; None if there are places.
        rows: places on each card; 0 with an only owner.
        buckets: entries on each card that say where the places of a bucket begin, if there is a place for each row of
            this node. 0: there is one for each row of the table, in the order of rows, which is less for a table
            that the node has all of, or a small one.
    """

    only_owner: int | None
    rows: int
    buckets: int

    @property
    def bytes(self) -> int:
        """Of places and entries, on each card."""
        return self.rows * PLACE_BYTES + self.buckets * BUCKET_BYTES


class CardBytes(NamedTuple):
    """Bytes on one card: copies of hot rows, rows that it alone has, places."""

    hot: int
    card: int
    places: int

    @property
    def total(self) -> int:
        """Of all three."""
        return self.hot + self.card + self.places


@dataclass(frozen=True, eq=False)
class CardPlan:
    """A plan. Made by `CardPlan.make`.

    Attributes:
        level_rows: for each table, int64 [levels, cards]: its rows of each level in each card's buckets.
        tier_rows: int64 [tables, cards, 3]: of the rows in each card's buckets, those that are hot, that the card alone
            holds, and that are in pinned memory.
    """

    layout: TableLayout
    partition: Partition
    hotness: tuple[RowHotness, ...]
    level_rows: tuple[Int64Array, ...]
    tier_rows: Int64Array
    places: tuple[TablePlaces, ...]

    @classmethod
    def make(
        cls, layout: TableLayout, partition: Partition, budget: CardBudget, hotness: Hotness | Sequence[RowHotness]
    ) -> CardPlan:
        """Decide where rows go. The same inputs give the same plan.

        `partition` has the card of each bucket, -1 for another node's; `hotness` is by table in layout order where it
        is known already.

        Raises MemoryBudgetError if places do not fit on a card, rows are left over, or there are more cards than the
        kernel knows. Rows can be left over where there is memory, too: a place's 32 bits say `max_slots` rows of one
        table at one owner.
        """
        if not 1 <= partition.num_cards <= MAX_CARDS:
            raise MemoryBudgetError(f"{partition.num_cards} cards; allowed: 1 to {MAX_CARDS}")
        rows = hotness.of(layout) if isinstance(hotness, Hotness) else tuple(hotness)
        num_cards = partition.num_cards
        pairs = zip(rows, partition.card_of_bucket, strict=True)
        level_rows = [table.rows_by_owner(of_bucket, num_cards) for table, of_bucket in pairs]
        # A table that is undivided at one owner needs no places, and which are is known when rows are given out. So at
        # first only those have places of which this node has a part, then each that turned out to be divided.
        num_rows = np.array([table.num_embeddings for table in layout.tables])
        have_places = np.array([of_level.sum() for of_level in level_rows]) < num_rows
        # Places leave less room for hot copies, which may leave more for rows: what is left over counts at the end.
        left_over: MemoryBudgetError | None = None
        while True:
            places = _places(layout, level_rows, have_places)
            filling = _Filling(layout, rows, level_rows, num_cards, places)
            try:
                tier_rows = filling.fill(budget)
            except MemoryBudgetError as no_room_for_places:
                raise left_over or no_room_for_places from None
            slots = _slots(tier_rows)
            left_over = left_over or filling.left_over(budget)
            is_divided = slots.max(axis=1) < num_rows
            if not (is_divided & ~have_places).any():
                break
            have_places |= is_divided
        if filling.left_over(budget) is not None:
            assert left_over is not None
            raise left_over
        owners = zip(places, slots.argmax(axis=1).tolist(), have_places.tolist(), strict=True)
        places = tuple(of_table._replace(only_owner=None if many else owner) for of_table, owner, many in owners)
        return cls(layout, partition, rows, tuple(level_rows), tier_rows, places)

    @property
    def num_cards(self) -> int:
        """Cards of the node."""
        return self.partition.num_cards

    @cached_property
    def slots(self) -> Int64Array:
        """Slots that each table has at each owner, int64 [tables, num_cards + 2]."""
        return _slots(self.tier_rows)

    @cached_property
    def strides(self) -> Int64Array:
        """Bytes of a row on a card, int64 [tables]."""
        return _strides(self.layout)

    @property
    def places_bytes(self) -> int:
        """Of the places of all tables, on each card."""
        return sum(places.bytes for places in self.places)

    @property
    def all_on_cards_bytes(self) -> int:
        """Of the fullest card, if each row were on its own card alone: rows and places."""
        rows = self.tier_rows.sum(axis=2)
        is_divided = rows.max(axis=1) < [table.num_embeddings for table in self.layout.tables]
        places = _places(self.layout, self.level_rows, is_divided)
        return int((rows.T @ self.strides).max()) + sum(of_table.bytes for of_table in places)

    @property
    def pinned_bytes(self) -> int:
        """Of the rows in the host's pinned memory."""
        return int(self.slots[:, self.num_cards + 1] @ self.strides)

    def bytes(self, card: int) -> CardBytes:
        """Return what one card holds."""
        hot, local = self.slots[:, self.num_cards], self.slots[:, card]
        return CardBytes(int(hot @ self.strides), int(local @ self.strides), self.places_bytes)


class _Filling:
    """The rows of all tables and levels, the hottest per byte first, as they are given to tiers."""

    def __init__(
        self,
        layout: TableLayout,
        rows: Sequence[RowHotness],
        level_rows: Sequence[Int64Array],
        num_cards: int,
        places: Sequence[TablePlaces],
    ) -> None:
        self._table_stride = strides = _strides(layout)
        table = np.repeat(np.arange(len(rows)), [of_table.lookups.size for of_table in rows])
        lookups = np.concatenate([of_table.lookups for of_table in rows])
        # Stable: among equals the earlier table comes first, and its hotter level.
        order = np.argsort(-lookups / strides[table], kind="stable")
        self._table = table[order]
        self._stride = strides[self._table]
        self._looked_up = lookups[order] > 0
        self._left = np.concatenate(level_rows)[order]
        self._places_bytes = sum(of_table.bytes for of_table in places)
        self._tiers = np.zeros((len(rows), num_cards, NUM_TIERS), np.int64)
        self._num_cards, self._max_slots = num_cards, max_slots(num_cards)

    def fill(self, budget: CardBudget) -> Int64Array:
        """Return rows by tier, int64 [tables, cards, 3], as far as they fit. Raises MemoryBudgetError."""
        free = np.array(budget.card_bytes, np.int64) - self._places_bytes
        if free.min() < 0:
            raise MemoryBudgetError(
                f"card {int(free.argmin())} may take {min(budget.card_bytes)} bytes, but places take "
                f"{self._places_bytes}, {PLACE_BYTES} for each row of this shard on each card"
            )
        hot_bytes = self._give(HOT, self._hot(free, budget)) if self._num_cards > 1 else 0
        if self._num_cards == 1 or budget.peer_access:
            local = [
                _first_rows(self._within_max(self._left[:, card]), self._stride, int(free[card]) - hot_bytes)
                for card in range(self._num_cards)
            ]
            self._give(CARD, np.column_stack(local))
        total = self._within_max(self._left.sum(axis=1))
        self._give(HOST, _shared(self._left, _first_rows(total, self._stride, budget.pinned_bytes)))
        return self._tiers

    def left_over(self, budget: CardBudget) -> MemoryBudgetError | None:
        if not self._left.any():
            return None
        left = self._left.sum(axis=1)
        left_bytes = int(left @ self._stride)
        needed = left_bytes + int(self._tiers.sum(axis=(1, 2)) @ self._table_stride)
        peers = "" if budget.peer_access or self._num_cards == 1 else " (without peer access, a copy on each)"
        return MemoryBudgetError(
            f"rows take {needed} bytes, beside {self._places_bytes} of places on each card, but cards may take "
            f"{list(budget.card_bytes)}{peers} and pinned memory {budget.pinned_bytes}: {left_bytes} bytes of "
            f"{int(left.sum())} rows are left over. Give more pinned memory, which is the last tier of cards (only "
            "nodes without them have rows on disk), more cards or shards, or smaller rows. "
            f"One card or pinned memory holds at most {self._max_slots} rows of one table"
        )

    def _within_max(self, rows: Int64Array) -> Int64Array:
        """Return of `rows`, int64 [entries], the first of each table that can have slots at one owner."""
        by_table = np.argsort(self._table, kind="stable")
        ends = np.cumsum(rows[by_table])
        first = np.searchsorted(self._table[by_table], self._table[by_table], side="left")
        before = ends - rows[by_table] - (ends - rows[by_table])[first]
        within = np.empty_like(rows)
        within[by_table] = np.clip(self._max_slots - before, 0, rows[by_table])
        return within

    def _give(self, tier: int, rows: Int64Array) -> int:
        """Move rows, int64 [entries, cards], to a tier; return their bytes."""
        np.add.at(self._tiers[:, :, tier], self._table, rows)
        self._left -= rows
        return int(rows.sum(axis=1) @ self._stride)

    def _hot(self, free: Int64Array, budget: CardBudget) -> Int64Array:
        """Return the rows to be hot, int64 [entries, cards]."""
        total = self._within_max(np.where(self._looked_up, self._left.sum(axis=1), 0))
        limit = int(free.min())
        if budget.hot_bytes is not None:
            limit = min(budget.hot_bytes, limit)
        elif budget.peer_access:
            unused = free - self._stride @ self._left
            if unused.min() >= 0:
                hot = [self._hot_among(card, int(unused[card]), total) for card in range(self._num_cards)]
                return _shared(self._left, np.minimum.reduce(hot))
            limit //= DEFAULT_HOT_SHARE
        return _shared(self._left, _first_rows(total, self._stride, limit))

    def _hot_among(self, card: int, unused: int, total: Int64Array) -> Int64Array:
        """Return as many of the first of `total` as can be hot in the unused bytes of a card with all rows: [entries].

        A row that becomes hot needs its bytes on every card but the one that has it already.
        """
        new = total - _shared(self._left, total)[:, card]
        ends = np.cumsum(new * self._stride)
        cut = int(np.searchsorted(ends, unused, side="right"))
        hot = np.where(np.arange(total.size) < cut, total, 0)
        if cut < total.size:
            spare = (unused - (int(ends[cut - 1]) if cut else 0)) // int(self._stride[cut])
            on_node, local = int(self._left[cut].sum()), int(self._left[cut, card])
            # Of x rows, this card's are x * local / on_node, less at most one for rounding. No row, if all are local.
            shared = max(0, spare - 1) * on_node // max(1, on_node - local)
            hot[cut] = min(max(spare, shared), int(total[cut]))
        return hot


def _first_rows(rows: Int64Array, stride: Int64Array, size_bytes: int) -> Int64Array:
    """Return as many of the first of `rows`, int64 [entries], as fit in size_bytes."""
    ends = np.cumsum(rows * stride)
    fitting = np.where(ends <= size_bytes, rows, 0)
    cut = int(np.searchsorted(ends, size_bytes, side="right"))
    if cut < rows.size:
        fitting[cut] = max(0, size_bytes - (int(ends[cut - 1]) if cut else 0)) // int(stride[cut])
    return fitting


def _shared(rows: Int64Array, counts: Int64Array) -> Int64Array:
    """Return counts[e] of rows[e, :], the same share of each card's as far as whole rows go: [entries, cards]."""
    ends = np.cumsum(rows, axis=1)
    total = np.maximum(ends[:, -1:], 1)
    # Each card's run is cut at the same share of all. A table has less than 2^32 rows, so the product fits.
    share = (ends.astype(np.uint64) * counts[:, None].astype(np.uint64) // total.astype(np.uint64)).astype(np.int64)
    return np.diff(share, axis=1, prepend=0)


def _strides(layout: TableLayout) -> Int64Array:
    return np.array([RowFormat.of(table.dtype, table.embedding_dim).stride for table in layout.tables], np.int64)


def _places(
    layout: TableLayout, level_rows: Sequence[Int64Array], have_places: npt.NDArray[np.bool_]
) -> tuple[TablePlaces, ...]:
    places = []
    for table, of_level, has_places in zip(layout.tables, level_rows, have_places.tolist(), strict=True):
        in_order = TablePlaces(None, table.num_embeddings, 0)
        by_bucket = TablePlaces(None, int(of_level.sum()), RowBuckets.of(table).count)
        least = min(in_order, by_bucket, key=lambda kind: kind.bytes)
        places.append(least if has_places else TablePlaces(None, 0, 0))
    return tuple(places)


def _slots(tier_rows: Int64Array) -> Int64Array:
    hot, host = tier_rows[:, :, HOT].sum(axis=1), tier_rows[:, :, HOST].sum(axis=1)
    return np.column_stack([tier_rows[:, :, CARD], hot, host])


@dataclass(slots=True, eq=False)
class Owners:
    """What owners have so far, [owners]: their load (float64), bytes that are free and used (int64)."""

    load: Float64Array
    free: Int64Array
    used: Int64Array

    @classmethod
    def empty(cls, free_bytes: Sequence[int]) -> Owners:
        """Return owners that have nothing, with so many free bytes each."""
        free = np.array(free_bytes, np.int64)
        return cls(np.zeros(free.size), free, np.zeros_like(free))

    def give(self, owners: int | Int64Array, load: float, size_bytes: int) -> None:
        """Let owners, none of them twice, have so much more each."""
        self.load[owners] += load
        self.free[owners] -= size_bytes
        self.used[owners] += size_bytes


def deal(
    loads: Sequence[Float64Array], sizes: Sequence[Int64Array], owners: Owners, among: Sequence[int]
) -> tuple[Int32Array, ...]:
    """Give every bucket of some tables to one of the owners `among`; the same arguments always give the same answer.

    Of each table, `loads` are float64 [buckets], `sizes` int64 [buckets], bytes of each bucket's rows; a bucket without
    rows costs nobody anything. Runs of buckets, the largest first, go to who has least of what weighs most in them,
    load or bytes. `owners` are changed to what they have then. Returns the owners, int32 [buckets] of each table.
    Raises MemoryBudgetError if the bytes do not fit.
    """
    chosen = np.array(among)
    mean_load = max(float(owners.load[chosen].sum() + sum(load.sum() for load in loads)) / chosen.size, 1e-300)
    mean_bytes = max(float(owners.used[chosen].sum() + sum(size.sum() for size in sizes)) / chosen.size, 1.0)
    runs: list[tuple[float, float, int, int, npt.NDArray[np.intp]]] = []
    for table, (load, size) in enumerate(zip(loads, sizes, strict=True)):
        with_rows = np.flatnonzero(size > 0)
        buckets = with_rows[np.argsort(-load[with_rows], kind="stable")]
        weights = np.cumsum(load[buckets] / mean_load + size[buckets] / mean_bytes)
        starts = np.flatnonzero(np.diff(np.floor(weights * (MAX_RUNS / chosen.size)), prepend=-1.0))
        for run in np.split(buckets, starts[1:]) if buckets.size else ():
            share, size_bytes = float(load[run].sum()) / mean_load, int(size[run].sum())
            runs.append((share + size_bytes / mean_bytes, share, size_bytes, table, run))
    owner_of_bucket = [np.full(load.size, -1, np.int32) for load in loads]
    for _, share, size_bytes, table, run in sorted(runs, key=lambda of_run: -of_run[0]):
        crowd = owners.load[chosen] * (share / mean_load)
        crowd += owners.used[chosen] * (size_bytes / mean_bytes**2)
        crowd[owners.free[chosen] < size_bytes] = np.inf
        if not np.isfinite(crowd[nearest := int(crowd.argmin())]):
            free = owners.free[chosen].tolist()
            raise MemoryBudgetError(f"buckets of {size_bytes} bytes are left over: owners have room for {free}")
        owners.give(int(chosen[nearest]), share * mean_load, size_bytes)
        owner_of_bucket[table][run] = chosen[nearest]
    # Buckets without rows have the owner of the one before them, so that none is missing.
    for of_table in owner_of_bucket:
        known = np.flatnonzero(of_table >= 0)
        before = np.searchsorted(known, np.arange(of_table.size), side="right") - 1
        of_table[:] = of_table[known[np.maximum(before, 0)]] if known.size else chosen[0]
    return tuple(owner_of_bucket)
