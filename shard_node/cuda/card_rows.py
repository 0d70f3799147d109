"""What all lanes of an engine share: its rows, their order, and what is counted of lookups."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import numpy as np

from shard_node.bags import Int64Array, KeyedBags, TableLayout
from shard_node.cuda.access_counts import AccessCounts
from shard_node.cuda.arena_on_card import ArenaOnCards
from shard_node.cuda.batch import BatchShapes
from shard_node.cuda.cards import Cards, Memory
from shard_node.cuda.mapped_rows import MappedRows
from shard_node.cuda.row_checks import RowChecks
from shard_node.cuda.write_order import WriteOrder

COUNTER_BYTES = 16
"""Of a card's counters: uint64 [2], values outside their table and values whose row is not here."""


class LookupCounts:
    """Rows looked up in each table, and, of some batches, which. Thread-safe.

    Args:
        layout: the tables.

    Attributes:
        access: how often each row was looked up, for the placement of the next version.
    """

    def __init__(self, layout: TableLayout) -> None:
        self.access = AccessCounts.of(layout)
        self._counts = np.zeros(len(layout.tables), np.int64)
        self._lock = threading.Lock()

    def add(self, tables: Int64Array, bags: KeyedBags) -> None:
        """Adds a checked batch, whose keys are tables [S], which may name a table twice."""
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
    """Rows of one generation on cards, as lanes see them.

    Attributes:
        cards: all cards.
        shapes: of batches of the layout.
        arenas: one for each group.
        order: of row writes and lookups.
        checks: that a batch passes before it is packed.
        mapped: rows that no card has; None if there are none.
        counters: uint64 [2] on each card, as `BatchParams.counters`.
        lookups: by table.
    """

    cards: Cards
    shapes: BatchShapes
    arenas: tuple[ArenaOnCards, ...]
    order: WriteOrder
    checks: RowChecks
    mapped: MappedRows | None
    counters: tuple[Memory, ...]
    lookups: LookupCounts
