"""The place of each row, by a plan: a table's rows are ranked by hotness, card by card, and put where the plan cuts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from loader.snapshot.buckets import RowBuckets
from shard_node.bags import Group, Int64Array
from shard_node.cuda.kernel_params import (
    NO_BUCKET,
    NOT_HERE,
    RowFormat,
    UInt8Array,
    UInt32Array,
    UInt64Array,
    encode_places,
    hot_owner,
    pinned_owner,
)
from shard_node.planning.card_plan import CARD, HOST, HOT, NUM_TIERS, CardPlan
from shard_node.planning.hotness import RowHotness

PIECE_ROWS = 1 << 20
"""Rows that are placed at a time; what that takes beside the places themselves is some 50 bytes a row."""
# Beside the tiers of a plan.
_ELSEWHERE, _SPLIT = NUM_TIERS, NUM_TIERS + 1


class Placer:
    """The places of all rows of a plan: the same for the same plan, each row at exactly one place.

    Attributes:
        plan: how many rows of each table go where.
    """

    def __init__(self, plan: CardPlan) -> None:
        self.plan = plan
        self._num_cards = plan.num_cards

    def places(self, table: int) -> UInt32Array:
        """uint32 [num_embeddings], the place of each row of a table, by its number in the layout."""
        places = np.empty(self.plan.layout.tables[table].num_embeddings, np.uint32)
        for first, piece in self.pieces(table):
            places[first : first + piece.size] = piece
        return places

    def pieces(self, table: int, piece_rows: int = PIECE_ROWS) -> Iterator[tuple[int, UInt32Array]]:
        """Return the same in row order, a piece at a time: (first row, uint32 [rows of the piece])."""
        num_rows = self.plan.layout.tables[table].num_embeddings
        owner = self.plan.places[table].only_owner
        walk = None if owner is not None else _Walk(self.plan, table)
        for first in range(0, num_rows, piece_rows):
            end = min(first + piece_rows, num_rows)
            if walk is not None:
                yield first, walk.place(first, end)
            else:
                slots = np.arange(first, end, dtype=np.uint32)
                yield first, encode_places(np.array(owner), slots, self._num_cards)

    def bucket_places(self, table: int) -> UInt64Array:
        """Say where the places of each bucket begin, of a table with `TablePlaces.buckets`: uint64 [buckets].

        The place of a row is number (entry + (row >> slot_shift)) modulo 2^64 of the table's; `NO_BUCKET` for another
        node's. The table's places lie by bucket, and within one by row.
        """
        buckets = RowBuckets.of(self.plan.layout.tables[table])
        is_here = self.plan.partition.card_of_bucket[table] >= 0
        rows = np.where(is_here, buckets.rows_per_bucket(), 0)
        begins = (np.cumsum(rows) - rows - buckets.first_slots()).view(np.uint64)
        return np.where(is_here, begins, np.uint64(NO_BUCKET))

    def starts(self, group: Group) -> UInt64Array:
        """uint64 [tables of the group, num_cards + 2]: the byte, of an owner's rows, at which a table's slot 0 lies."""
        sizes = self._slot_bytes(group)
        starts = np.zeros(sizes.shape, np.uint64)
        np.cumsum(sizes[:-1], axis=0, out=starts[1:])
        return starts

    def rows_bytes(self, group: Group) -> list[int]:
        """For each owner the bytes of the rows of a group's tables; on each card, if it is the owner of hot rows."""
        sizes: list[int] = self._slot_bytes(group).sum(axis=0).tolist()
        return sizes

    def _slot_bytes(self, group: Group) -> UInt64Array:
        stride = RowFormat.of(group.dtype, group.embedding_dim).stride
        slots = self.plan.slots[group.first_table : group.end_table]
        sizes: UInt64Array = slots.astype(np.uint64) * np.uint64(stride)
        return sizes


@dataclass(frozen=True, slots=True)
class _Tiers:
    """Which tier each (level, card) of a table is in.

    A card's rows are ranked by (level, row); `bounds` cut the ranks into tiers. A level that a bound cuts is `_SPLIT`.

    Attributes:
        of_key: uint8 [levels * (num_cards + 1)], by key = level * (num_cards + 1) + card; card num_cards: not here.
        split_of_key: uint8, the same shape, the number of a split key.
        bounds: int64 [splits, 2], the ranks at which `CARD` and `HOST` begin.
        first_rank: int64 [splits], of the key's first row.
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
        spec = plan.layout.tables[table]
        cards = plan.num_cards
        self._num_cards = cards
        self._hotness: RowHotness = plan.hotness[table]
        self._buckets = RowBuckets.of(spec)
        self._tiers = _Tiers.of(plan.level_rows[table], plan.tier_rows[table])
        # Key and owner of another node's rows: as of a card more.
        card_of_bucket = plan.partition.card_of_bucket[table].astype(np.int64)
        self._card_of_bucket = np.where(card_of_bucket < 0, cards, card_of_bucket).astype(np.uint16)
        owner = np.empty((_ELSEWHERE + 1, cards + 1), np.uint8)
        owner[HOT], owner[CARD], owner[HOST] = hot_owner(cards), np.arange(cards + 1), pinned_owner(cards)
        owner[_ELSEWHERE] = cards + 2
        self._owner_of = owner.reshape(-1)
        self._next_slot = np.zeros(cards + 3, np.int64)
        self._next_rank = self._tiers.first_rank.copy()

    def place(self, first: int, end: int) -> UInt32Array:
        """uint32 [end - first], the places of these rows."""
        card = self._card_of_bucket[self._buckets.of_rows(np.arange(first, end))]
        tier = self._tier_of(card, self._hotness.levels(first, end))
        owner = self._owner_of[tier.astype(np.uint16) * np.uint16(self._num_cards + 1) + card]
        rank, counts = _ranks(owner, self._next_slot)
        self._next_slot += counts
        places = encode_places(owner, rank, self._num_cards)
        places[owner == self._num_cards + 2] = NOT_HERE
        return places

    def _tier_of(self, card: npt.NDArray[np.uint16], level: npt.NDArray[np.uint16]) -> UInt8Array:
        key = level.astype(np.uint32)
        key *= np.uint32(self._num_cards + 1)
        key += card
        tier = self._tiers.of_key[key]
        split = np.flatnonzero(tier == _SPLIT)
        if split.size:
            tier[split] = self._tier_of_split(self._tiers.split_of_key[key[split]])
        return tier

    def _tier_of_split(self, number: UInt8Array) -> UInt8Array:
        """uint8 [n], the tiers of the next rows of split keys. Most pieces have no bound in them, and need no ranks."""
        counts: Int64Array = np.bincount(number, minlength=self._next_rank.size)
        first = _tier_at(self._next_rank, self._tiers.bounds)
        last = _tier_at(self._next_rank + np.maximum(counts - 1, 0), self._tiers.bounds)
        tier = first[number]
        cut = np.flatnonzero((first != last)[number])
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
    firsts = np.cumsum(counts) - counts
    ranks = np.empty(kinds.size, np.int64)
    ranks[order] = np.arange(kinds.size) + np.repeat(next_rank - firsts, counts)
    return ranks, counts
