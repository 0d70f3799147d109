"""The NumPy reference: what the answer is, by definition. Slow and plain; every engine is tested against it."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from loader.snapshot.codecs import RowCodec
from loader.snapshot.manifest import ModelSpec
from shard_node.access_counts import LookupSampler
from shard_node.answer import Answer
from shard_node.bags import Bags, Float32Array, Int64Array, TableLayout
from shard_node.engine.base import CardsUse, LookupCount, MemoryUse
from shard_node.generation import RowLock


class ReferenceEngine:
    """Pools by a loop over bags, in float64, from whole float32 tables.

    Args:
        spec: the model.
        tables: name of each of the model's tables to its decoded rows, float32 [num_embeddings, embedding_dim]; copied.
    """

    def __init__(self, spec: ModelSpec, tables: Mapping[str, Float32Array]) -> None:
        self._layout = TableLayout.of(spec)
        columns: dict[str, Float32Array] = {}
        for table in spec.tables:
            cut = np.split(tables[table.name], list(itertools.accumulate(table.slice_dims))[:-1], axis=1)
            columns |= {one.name: part.copy() for one, part in zip(table.slices, cut, strict=True)}
        self._tables = [columns[table.name] for table in self._layout.tables]
        self._lock = RowLock()
        self._counts = [0] * len(self._tables)
        self._access = LookupSampler(self._layout, sample_every=1)

    @property
    def layout(self) -> TableLayout:
        """The tables in layout order."""
        return self._layout

    def pool(self, bags: Bags) -> list[Float32Array]:
        """As `Engine.pool`: sum over the bag of weight * row."""
        self._layout.check(bags)
        self._lock.begin_read()
        try:
            return self._pool(bags)
        finally:
            self._lock.end_read()
            self._access.observe(bags.keys, bags.values_per_key(), bags.values)

    def answer(self, bags: Bags, *, stored: bool = True) -> Answer:
        """As `Engine.answer`, of sums: its rows are not stored."""
        return Answer(self.pool(bags))

    def write_rows(self, table: int | tuple[int, ...], rows: Int64Array, stored: npt.NDArray[np.uint8]) -> int:
        """As `Engine.write_rows`: every row is here."""
        parts = self._layout.rows_by_table(table, rows, stored)
        self._lock.begin_write()
        try:
            for number, part in parts:
                spec = self._layout.tables[number]
                self._tables[number][rows] = RowCodec(spec.dtype, spec.embedding_dim).decode(part)
        finally:
            self._lock.end_write()
        return rows.size * len(parts)

    def update_keys(
        self, tables: Sequence[int], keys: Int64Array, stored: npt.NDArray[np.uint8] | None
    ) -> tuple[int, int]:
        """It has no keys."""
        raise NotImplementedError

    def _pool(self, bags: Bags) -> list[Float32Array]:
        starts = bags.bag_starts()
        blocks = []
        for group in self._layout.groups:
            pooled: list[Float32Array] = []
            for segment, key in enumerate(bags.keys.tolist()):
                if group.first_table <= key < group.end_table:
                    edges = bags.offsets[starts[segment] : starts[segment + 1] + 1].tolist()
                    pooled += [self._pool_bag(bags, key, start, end) for start, end in itertools.pairwise(edges)]
            blocks.append(np.stack(pooled) if pooled else np.zeros((0, group.embedding_dim), np.float32))
        return blocks

    def _pool_bag(self, bags: Bags, key: int, start: int, end: int) -> Float32Array:
        table = self._tables[key]
        total = np.zeros(table.shape[1], np.float64)
        for position in range(start, end):
            row = int(bags.values[position])
            weight = 1.0 if bags.weights is None else float(bags.weights[position])
            total += weight * table[row].astype(np.float64)
        self._counts[key] += end - start
        return total.astype(np.float32)

    def memory(self) -> tuple[MemoryUse, ...]:
        """All of it in RAM, on one card."""
        return (MemoryUse(0, "ram", sum(table.nbytes for table in self._tables)),)

    def rows_looked_up(self) -> tuple[LookupCount, ...]:
        """Counters by table."""
        return tuple(
            LookupCount(table.name, "ram", count)
            for table, count in zip(self._layout.tables, self._counts, strict=True)
        )

    @property
    def access(self) -> LookupSampler:
        """As `Engine.access`, of every batch."""
        return self._access

    def disk_use(self) -> None:
        """Return None: all rows are in memory."""

    def cards(self) -> CardsUse | None:
        """None: it pools on the CPU."""
        return None

    def close(self) -> None:
        """Drop the tables."""
        self._tables = []
