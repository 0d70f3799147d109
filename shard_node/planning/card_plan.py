"""How many rows of each table go to which tier of which card: pure, from budgets and hotness, before anything is taken.

Each card's rows of a table are ranked by hotness and cut twice: the first are hot (every card has a copy), then come
those that this card alone holds, and the rest is in the host's pinned memory. Where to cut is decided for all tables at
once, by lookups per byte. So memory is filled to the last row, what each card and tier will take is known to the byte,
and no row has been looked at one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from loader.snapshot.buckets import RowBuckets
from shard_node.bags import Int64Array, TableLayout
from shard_node.buckets import Partition
from shard_node.cuda.kernel_params import MAX_CARDS, RowFormat, max_slots
from shard_node.errors import InvalidBagsError, MemoryBudgetError
from shard_node.planning.hotness import Hotness, RowHotness

# Tiers of one card's rows of a table, from the hottest on.
HOT, CARD, HOST = range(3)
NUM_TIERS = 3

PLACE_BYTES = 4
BUCKET_BYTES = 8
# Of a card, for hot rows, where not everything fits on the cards.
DEFAULT_HOT_SHARE = 16


@dataclass(frozen=True, slots=True)
class CardBudget:
    """What a plan may take.

    Attributes:
        card_bytes: of each card, for rows and places.
        pinned_bytes: of the host's pinned memory, for rows.
        hot_bytes: of each card, for copies of hot rows; they go before the card's own rows. None: what is left on the
            fullest card when all rows are on cards; a sixteenth of a card if they can't be; all of a card without
            access to peers.
        peer_access: whether each card reads every other's memory. If not, rows are hot or in pinned memory.
    """

    card_bytes: tuple[int, ...]
    pinned_bytes: int
    hot_bytes: int | None = None
    peer_access: bool = True


class TableSplit(NamedTuple):
    """Rows of one table on this node: those that every card has a copy of, that one card has, in pinned memory."""

    hot_rows: int
    card_rows: int
    host_rows: int


class TablePlaces(NamedTuple):
    """How the rows of one table are found on cards.

    Attributes:
        only_owner: of all rows of the table, whose slots then are the row numbers; None if there are places.
        rows: places on each card; 0 with an only owner.
        buckets: entries on each card that say where the places of a bucket begin, if there is a place for each row that
            this node holds. 0: there is one for each row of the table, in the order of rows, which is less for a table
            that the node holds whole, or a small one.
    """

    only_owner: int | None
    rows: int
    buckets: int

    @property
    def bytes(self) -> int:
        """Of places and entries, on each card."""
        return self.rows * PLACE_BYTES + self.buckets * BUCKET_BYTES


class CardBytes(NamedTuple):
    """Bytes on one card: copies of hot rows, rows of its own, places."""

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
        cls,
        layout: TableLayout,
        partition: Partition,
        budget: CardBudget,
        hotness: Hotness | Sequence[RowHotness],
        level_rows: Sequence[Int64Array] | None = None,
    ) -> CardPlan:
        """Decide where rows go. The same inputs give the same plan.

        `partition` has the card of each bucket, -1 for another node's; `hotness` is by table in layout order where it
        is known already; `level_rows` are as the attribute, where it is known.

        Raises InvalidBagsError if partition, budget or hotness are of another model or number of cards,
        MemoryBudgetError if places do not fit on a card, rows are left over, or there are more cards than the kernel
        knows. Rows can be left over where there is memory, too: a place's 32 bits say `max_slots` rows of one table at
        one owner.
        """
        if not 1 <= partition.num_cards <= MAX_CARDS:
            raise MemoryBudgetError(f"{partition.num_cards} cards; allowed: 1 to {MAX_CARDS}")
        if len(partition.card_of_bucket) != len(layout.tables):
            raise InvalidBagsError(
                f"the partition is for {len(partition.card_of_bucket)} tables, the model has {len(layout.tables)}"
            )
        if len(budget.card_bytes) != partition.num_cards:
            raise InvalidBagsError(
                f"card_bytes is for {len(budget.card_bytes)} cards, the partition for {partition.num_cards}"
            )
        if min(*budget.card_bytes, budget.pinned_bytes, budget.hot_bytes or 0) < 0:
            raise InvalidBagsError(f"{budget}: bytes can't be negative")
        rows = hotness.of(layout) if isinstance(hotness, Hotness) else tuple(hotness)
        num_cards = partition.num_cards
        if level_rows is None:
            level_rows = [
                table.rows_by_owner(of_bucket, num_cards)
                for table, of_bucket in zip(rows, partition.card_of_bucket, strict=True)
            ]
        # A table that lies whole at one owner needs no places, and which do is known when rows are given out. So at
        # first only those have places that are not whole on this node, then each that turned out to be divided.
        have_places = np.array(
            [one.sum() < table.num_embeddings for table, one in zip(layout.tables, level_rows, strict=True)]
        )
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
            is_divided = slots.max(axis=1) < [table.num_embeddings for table in layout.tables]
            if not (is_divided & ~have_places).any():
                break
            have_places |= is_divided
        if filling.left_over(budget) is not None:
            assert left_over is not None
            raise left_over
        only = np.where(have_places, -1, slots.argmax(axis=1)).tolist()
        places = tuple(one._replace(only_owner=None if at < 0 else at) for one, at in zip(places, only, strict=True))
        return cls(layout, partition, rows, tuple(level_rows), tier_rows, places)

    @property
    def num_cards(self) -> int:
        """Cards of the node."""
        return self.partition.num_cards

    @cached_property
    def splits(self) -> tuple[TableSplit, ...]:
        """In layout order."""
        return tuple(TableSplit(*map(int, tiers)) for tiers in self.tier_rows.sum(axis=1))

    @cached_property
    def slots(self) -> Int64Array:
        """int64 [tables, num_cards + 2], slots that each table has at each owner."""
        return _slots(self.tier_rows)

    @cached_property
    def strides(self) -> Int64Array:
        """int64 [tables], bytes of a row on a card."""
        return _strides(self.layout)

    @property
    def places_bytes(self) -> int:
        """Of the places of all tables, on each card."""
        return sum(one.bytes for one in self.places)

    @property
    def all_on_cards_bytes(self) -> int:
        """Of the fullest card, if each row were on its own card alone: rows and places."""
        rows = self.tier_rows.sum(axis=2)
        is_divided = rows.max(axis=1) < [table.num_embeddings for table in self.layout.tables]
        places = _places(self.layout, self.level_rows, is_divided)
        return int((rows.T @ self.strides).max()) + sum(one.bytes for one in places)

    @property
    def pinned_bytes(self) -> int:
        """Of the rows in the host's pinned memory."""
        return int(self.slots[:, self.num_cards + 1] @ self.strides)

    def bytes(self, card: int) -> CardBytes:
        """Return what one card holds."""
        hot, own = self.slots[:, self.num_cards], self.slots[:, card]
        return CardBytes(int(hot @ self.strides), int(own @ self.strides), self.places_bytes)


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
        table = np.repeat(np.arange(len(rows)), [one.lookups.size for one in rows])
        lookups = np.concatenate([one.lookups for one in rows])
        # Stable: among equals the earlier table comes first, and its hotter level.
        order = np.argsort(-lookups / strides[table], kind="stable")
        self._table = table[order]
        self._stride = strides[self._table]
        self._looked_up = lookups[order] > 0
        self._left = np.concatenate(level_rows)[order]
        self._places_bytes = sum(one.bytes for one in places)
        self._tiers = np.zeros((len(rows), num_cards, NUM_TIERS), np.int64)
        self._num_cards = num_cards
        self._max_slots = max_slots(num_cards)

    def fill(self, budget: CardBudget) -> Int64Array:
        """Return rows by tier, int64 [tables, cards, 3], as far as they fit. Raises MemoryBudgetError."""
        free = np.array(budget.card_bytes, np.int64) - self._places_bytes
        if free.min() < 0:
            raise MemoryBudgetError(
                f"card {int(free.argmin())} may take {min(budget.card_bytes)} bytes, but places take "
                f"{self._places_bytes}, {PLACE_BYTES} for each row of this shard on each card"
            )
        hot_bytes = 0
        if self._num_cards > 1:
            hot_bytes = self._give(HOT, self._hot(free, budget))
        if self._num_cards == 1 or budget.peer_access:
            own = [
                _first_rows(self._within_max(self._left[:, card]), self._stride, int(free[card]) - hot_bytes)
                for card in range(self._num_cards)
            ]
            self._give(CARD, np.column_stack(own))
        total = self._within_max(self._left.sum(axis=1))
        self._give(HOST, _share_out(self._left, _first_rows(total, self._stride, budget.pinned_bytes)))
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
            f"{int(left.sum())} rows are left over. Give more pinned memory, more cards or shards, or smaller rows. "
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

    def _give(self, tier: int, taken: Int64Array) -> int:
        """Move rows, int64 [entries, cards], to a tier; tell their bytes."""
        np.add.at(self._tiers[:, :, tier], self._table, taken)
        self._left -= taken
        return int(taken.sum(axis=1) @ self._stride)

    def _hot(self, free: Int64Array, budget: CardBudget) -> Int64Array:
        """Return the rows to be hot, int64 [entries, cards]."""
        total = self._within_max(np.where(self._looked_up, self._left.sum(axis=1), 0))
        limit = int(free.min())
        if budget.hot_bytes is not None:
            return _share_out(self._left, _first_rows(total, self._stride, min(budget.hot_bytes, limit)))
        if not budget.peer_access:
            return _share_out(self._left, _first_rows(total, self._stride, limit))
        unused = free - self._stride @ self._left
        if unused.min() < 0:
            return _share_out(self._left, _first_rows(total, self._stride, limit // DEFAULT_HOT_SHARE))
        hot = [self._hot_beside(card, int(unused[card]), total) for card in range(self._num_cards)]
        return _share_out(self._left, np.minimum.reduce(hot))

    def _hot_beside(self, card: int, unused: int, total: Int64Array) -> Int64Array:
        """int64 [entries]: as many of the first of `total` as can be hot in the unused bytes of a card with all rows.

        A row that becomes hot takes its bytes on every card but the one that has it already.
        """
        new = total - _share_out(self._left, total)[:, card]
        ends = np.cumsum(new * self._stride)
        cut = int(np.searchsorted(ends, unused, side="right"))
        hot = np.where(np.arange(total.size) < cut, total, 0)
        if cut < total.size:
            spare = (unused - (int(ends[cut - 1]) if cut else 0)) // int(self._stride[cut])
            here, own = int(self._left[cut].sum()), int(self._left[cut, card])
            # Of x rows, this card's are x * own / here, less at most one for rounding. No row, if all are its own.
            shared = max(0, spare - 1) * here // max(1, here - own)
            hot[cut] = min(max(spare, shared), int(total[cut]))
        return hot


def _first_rows(rows: Int64Array, stride: Int64Array, size_bytes: int) -> Int64Array:
    """int64 [entries]: as many of the first of `rows`, int64 [entries], as fit in size_bytes."""
    ends = np.cumsum(rows * stride)
    taken = np.where(ends <= size_bytes, rows, 0)
    cut = int(np.searchsorted(ends, size_bytes, side="right"))
    if cut < rows.size:
        begin = int(ends[cut - 1]) if cut else 0
        taken[cut] = max(0, size_bytes - begin) // int(stride[cut])
    return taken


def _share_out(rows: Int64Array, taken: Int64Array) -> Int64Array:
    """int64 [entries, cards]: taken[e] of rows[e, :], the same share of each card's as far as whole rows go."""
    ends = np.cumsum(rows, axis=1)
    total = np.maximum(ends[:, -1:], 1)
    # Each card's run is cut at the same share of all. A table has less than 2^32 rows, so the product fits.
    share = (ends.astype(np.uint64) * taken[:, None].astype(np.uint64) // total.astype(np.uint64)).astype(np.int64)
    return np.diff(share, axis=1, prepend=0)


def _strides(layout: TableLayout) -> Int64Array:
    return np.array([RowFormat.of(one.dtype, one.embedding_dim).stride for one in layout.tables], np.int64)


def _places(
    layout: TableLayout, level_rows: Sequence[Int64Array], have_places: npt.NDArray[np.bool_]
) -> tuple[TablePlaces, ...]:
    found = []
    for table, of_level, has_places in zip(layout.tables, level_rows, have_places.tolist(), strict=True):
        in_order = TablePlaces(None, table.num_embeddings, 0)
        by_bucket = TablePlaces(None, int(of_level.sum()), RowBuckets.of(table).count)
        least = min(in_order, by_bucket, key=lambda one: one.bytes)
        found.append(least if has_places else TablePlaces(None, 0, 0))
    return tuple(found)


def _slots(tier_rows: Int64Array) -> Int64Array:
    hot, host = tier_rows[:, :, HOT].sum(axis=1), tier_rows[:, :, HOST].sum(axis=1)
    return np.column_stack([tier_rows[:, :, CARD], hot, host])
