"""The rows of tables that name them by keys: which row a key has, new rows and freed ones.

To the rest of an engine such a table is one that lies in row order in one arena: row 0 is what a missing key gets, keys
have rows from 1 on, in the order in which rows were free. How many keys a node takes follows from the table's capacity
and the buckets that it holds, so that all replicas of a shard refuse the same delta.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from loader.errors import DeltaError, SnapshotCorruptError
from loader.snapshot.buckets import key_buckets
from shard_node.bags import Bags, Int64Array, TableLayout
from shard_node.buckets import Partition
from shard_node.engine.key_index import ABSENT, KeyIndex
from shard_node.errors import InvalidBagsError

MISSING_ROW: Final = 0
KEYS_PER_WRITE: Final = 512
"""That are inserted or deleted while lookups wait: in some tenths of a millisecond."""
RowWrite: TypeAlias = tuple[int, Int64Array, npt.NDArray[np.uint8]]
"""A table, rows of it, int64 [n], and what they become, as stored, uint8 [n, row_bytes]."""
_CHANCE_SIGMAS, _CHANCE_KEYS = 6, 16
MAX_KEYS: Final = 2**32 - 3


def capacity_here(capacity: int, num_local: int, num_buckets: int) -> int:
    """Return how many keys a node takes that has so many of a table's buckets.

    That is their share of the capacity, and six standard deviations, since keys fall into buckets by chance.
    """
    share = math.ceil(capacity * num_local / num_buckets)
    chance = _CHANCE_KEYS + math.ceil(_CHANCE_SIGMAS * math.sqrt(share))
    return min(capacity, MAX_KEYS, share + chance) if num_local else 0


def capacities_here(layout: TableLayout, is_local: Mapping[int, npt.NDArray[np.bool_]]) -> dict[int, int]:
    """Return how many keys a node takes of each table with keys, by number; `is_local`, bool [buckets], is by table."""
    return {
        table: capacity_here(layout.tables[table].num_embeddings, int(local.sum()), local.size)
        for table, local in is_local.items()
    }


def local_keys(layout: TableLayout, partition: Partition) -> dict[int, npt.NDArray[np.bool_]]:
    """Return which buckets of each table with keys are here, bool [buckets], by number."""
    return {number: partition.card_of_bucket[number] >= 0 for number in layout.is_keyed.nonzero()[0].tolist()}


def slot_tables(
    layout: TableLayout, partition: Partition, capacity: Mapping[int, int]
) -> tuple[TableLayout, Partition]:
    """Return the layout and partition of what cards hold: tables with keys, by number, are ones of so many rows.

    All of their rows are on this node, divided over the cards that its buckets of keys are for.
    """
    tables, cards = list(layout.tables), list(partition.card_of_bucket)
    for table, count in capacity.items():
        # The row of missing keys, and one for each key.
        tables[table] = tables[table].model_copy(update={"num_embeddings": 1 + count, "keys": None, "missing": "zeros"})
        # Zeros if no bucket is here.
        cards[table] = np.resize(cards[table][cards[table] >= 0], cards[table].size)
    return TableLayout(tuple(tables), layout.groups, layout.sliced), Partition(partition.num_cards, tuple(cards))


class Upsert(NamedTuple):
    """Where rows of one table go: int64 [n]; which of their keys are new to it, bool [n]."""

    rows: Int64Array
    is_new: npt.NDArray[np.bool_]

    def piece(self, chosen: slice) -> Upsert:
        """Return some of it."""
        return Upsert(self.rows[chosen], self.is_new[chosen])


class KeyedTables:
    """The keys of an engine's tables, by number in the layout. One thread changes them, while none finds.

    `is_local`, bool [buckets] for each table with keys, are the buckets that are here.
    """

    def __init__(self, layout: TableLayout, is_local: Mapping[int, npt.NDArray[np.bool_]]) -> None:
        self.layout, self.is_local = layout, dict(is_local)
        # The number of each table among those with keys; 0 of others, for which nobody asks.
        self._number = np.zeros(len(layout.tables), np.int64)
        self._number[list(is_local)] = np.arange(len(is_local))
        self._local_buckets = np.stack(list(is_local.values()))
        self.capacity = capacities_here(layout, is_local)
        self._index = KeyIndex(list(self.capacity.values()))
        # Rows that were ever used, the one for missing keys among them, and those of them that are free again.
        self.used = dict.fromkeys(self.capacity, 1)
        self._free = {table: _Rows() for table in self.capacity}

    @property
    def size_bytes(self) -> int:
        """Memory that the keys take, whatever they are."""
        return self._index.size_bytes

    def num_keys(self, table: int) -> int:
        """Count a table's keys."""
        return self.used[table] - 1 - self._free[table].size

    def rows_of(self, bags: Bags, values_per_key: Int64Array) -> tuple[Bags, Int64Array]:
        """Return bags of tables with rows in place of keys, and the positions of values whose key is missing."""
        keyed = self.layout.is_keyed[bags.keys]
        if not keyed.any():
            return bags, np.zeros(0, np.int64)
        wide = bags.values.astype(np.int64, copy=False)
        if keyed.all():
            rows = self._index.find(self._number[bags.keys], values_per_key, wide)
            missing = _replace_absent(rows)
            self._check_local(bags, missing)
            return bags.with_values(rows, bags.weights), missing
        at = keyed.repeat(values_per_key).nonzero()[0]
        found = self._index.find(self._number[bags.keys[keyed]], values_per_key[keyed], wide.take(at))
        missing = at.take(_replace_absent(found))
        self._check_local(bags, missing)
        rows = wide.copy() if wide is bags.values else wide
        rows[at] = found
        return bags.with_values(rows, bags.weights), missing

    def _check_local(self, bags: Bags, missing: Int64Array) -> None:
        """Raise InvalidBagsError if a missing key is another node's, which alone can say that it is missing."""
        if not missing.size:
            return
        tables = bags.keys[np.searchsorted(bags.value_starts(), missing, side="right") - 1]
        keys = bags.values.take(missing)
        elsewhere = ~self._local_buckets[self._number[tables], key_buckets(keys)]
        if elsewhere.any():
            which = int(elsewhere.argmax())
            table = self.layout.tables[int(tables[which])].name
            raise InvalidBagsError(f"key {int(keys[which])} of table {table!r} is not on this node")

    def find(self, table: int, keys: Int64Array) -> Int64Array:
        """Return the row of each key of one table, int64 [n]; `ABSENT` for one that is missing."""
        return self._index.find(self._number[table : table + 1], np.array([keys.size]), keys)

    def local(self, table: int, keys: Int64Array) -> npt.NDArray[np.bool_]:
        """Return which keys are in buckets that are here, bool [n]."""
        return self.is_local[table].take(key_buckets(keys))

    def plan_upsert(self, table: int, keys: Int64Array) -> Upsert:
        """Find the rows for keys of this node, int64 [n], none twice; nothing changes.

        Raises DeltaError (`key_capacity`) if there are more keys than the node takes.
        """
        rows = self.find(table, keys)
        is_new = rows == ABSENT
        num_new = int(is_new.sum())
        if (total := self.num_keys(table) + num_new) > self.capacity[table]:
            spec = self.layout.tables[table]
            raise DeltaError(
                f"table {spec.name!r}: {total} keys with {num_new} new ones, but at most {self.capacity[table]} are "
                f"allowed here, of its capacity {spec.num_embeddings}: export it with more",
                kind="key_capacity",
            )
        # The last freed first, then rows that were never used.
        again = self._free[table].last(num_new)
        rows[is_new] = np.concatenate([again, np.arange(num_new - again.size) + self.used[table]])
        return Upsert(rows, is_new)

    def load(self, file: Path, table: int, keys: Int64Array) -> Int64Array:
        """Return the rows for keys, int64 [n], of a file, which it then has. Raises SnapshotCorruptError."""
        try:
            planned = self.plan_upsert(table, keys)
        except DeltaError as error:
            raise SnapshotCorruptError(f"{file}: {error}") from error
        if not (planned.is_new.all() and self.local(table, keys).all()):
            raise SnapshotCorruptError(
                f"{file}: table {self.layout.tables[table].name!r}: keys twice, or not by bucket"
            )
        self.insert(table, keys, planned)
        return planned.rows

    def update(
        self,
        tables: Sequence[int],
        keys: Int64Array,
        stored: npt.NDArray[np.uint8] | None,
        change: Callable[[Sequence[RowWrite], Sequence[Callable[[], object]]], object],
        claim: Callable[[Sequence[Upsert]], object] = lambda plans: None,
    ) -> tuple[int, int]:
        """Change keys and rows of an engine, as `Engine.update_keys`. One thread at a time.

        `claim` claims memory for rows, table by table, if there are any. `change` writes some of them and makes the
        calls, which change their keys: all while no lookup is between finding its rows and reading them.
        """
        if not self.layout.is_keyed[list(tables)].all():
            raise InvalidBagsError(f"tables {[self.layout.tables[table].name for table in tables]} have no keys")
        by_table = [] if stored is None else self.layout.rows_by_table(tuple(tables), keys, stored)
        # Slices of a table may be on different nodes.
        of_tables = dict(zip(tables, (self.local(table, keys).nonzero()[0] for table in tables), strict=True))
        plans = [self.plan_upsert(table, keys[of_tables[table]]) for table, _ in by_table]
        # Deletions have no plans.
        present = [at[~plan.is_new] for at, plan in zip(of_tables.values(), plans, strict=False)]
        present = present or [at[self.find(table, keys[at]) != ABSENT] for table, at in of_tables.items()]
        claim(plans)
        here = functools.reduce(np.union1d, of_tables.values())
        for begin in range(0, here.size, KEYS_PER_WRITE):
            edges = here[begin], here[min(begin + KEYS_PER_WRITE, here.size) - 1] + 1
            writes, calls = list[RowWrite](), list[Callable[[], object]]()
            for number, (table, at) in enumerate(of_tables.items()):
                piece = slice(*at.searchsorted(edges).tolist())
                if plans:
                    plan = plans[number].piece(piece)
                    writes.append((table, plan.rows, by_table[number][1][at[piece]]))
                    calls.append(functools.partial(self.insert, table, keys[at[piece]], plan))
                else:
                    calls.append(functools.partial(self.remove, table, keys[at[piece]]))
            change(writes, calls)
        return here.size, functools.reduce(np.union1d, present).size

    def insert(self, table: int, keys: Int64Array, planned: Upsert) -> None:
        """Give planned keys their rows: all of a plan, or pieces of it one after the other. No lookup may run."""
        rows = planned.rows[planned.is_new]
        self._index.insert(int(self._number[table]), keys[planned.is_new], rows)
        never = int((rows >= self.used[table]).sum())
        self.used[table] += never
        self._free[table].size -= rows.size - never

    def remove(self, table: int, keys: Int64Array) -> npt.NDArray[np.bool_]:
        """Take out keys, int64 [n], none twice, and free their rows; return which were there. No lookup may run."""
        rows = self.find(table, keys)
        was_here: npt.NDArray[np.bool_] = rows != ABSENT
        self._index.remove(int(self._number[table]), keys[was_here])
        self._free[table].add(rows[was_here])
        return was_here

    def close(self) -> None:
        """Give the memory of the keys back. Nobody may need it."""
        self._index.free()


class _Rows:
    """A stack of rows."""

    def __init__(self) -> None:
        self._rows, self.size = np.zeros(0, np.int64), 0

    def add(self, rows: Int64Array) -> None:
        if (size := self.size + rows.size) > self._rows.size:
            self._rows = np.resize(self._rows, 2 * size)
        self._rows[self.size : size] = rows
        self.size = size

    def last(self, count: int) -> Int64Array:
        """Return so many of them, if there are, the last first."""
        return self._rows[max(0, self.size - count) : self.size][::-1]


def _replace_absent(rows: Int64Array) -> Int64Array:
    # Mostly none is: one pass.
    if not rows.size or np.minimum.reduce(rows) >= 0:
        return np.zeros(0, np.int64)
    missing: Int64Array = (rows == ABSENT).nonzero()[0]
    rows[missing] = MISSING_ROW
    return missing
