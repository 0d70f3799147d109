"""Rows that a plan leaves in the mapped snapshot: found on the host, pooled by the CPU engine, added on the card.

Cards take such rows for zeros. Only tables that have any are looked through; of each, one bit a row says which.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shard_node.bags import Float32Array, Int64Array, KeyedBags
from shard_node.cuda.batch import RunTable
from shard_node.cuda.kernel_params import MAPPED, MODES
from shard_node.cuda.placer import Placer
from shard_node.cuda.places import MAPPED_TIER
from shard_node.engine.cpu import CpuEngine
from shard_node.planning.card_plan import CardPlan

BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class MappedSums:
    """What is to be added to one arena's pooled bags.

    Attributes:
        arena: its number.
        positions: int64 [n], ascending, none twice: the first element of each bag in the output.
        sums: float32 [n, embedding_dim].
    """

    arena: int
    positions: Int64Array
    sums: Float32Array


class MappedRows:
    """The mapped rows of one plan. Thread-safe.

    Args:
        plan: says which rows.
        engine: pools them; all of the plan's mapped rows are there. It belongs to these.

    Attributes:
        size_bytes: of the mapped rows, as stored.
    """

    def __init__(self, plan: CardPlan, engine: CpuEngine) -> None:
        self._engine = engine
        self.size_bytes = plan.mapped_bytes
        mapped = plan.tier_rows[:, :, MAPPED_TIER].sum(axis=1)
        here = plan.tier_rows.sum(axis=(1, 2))
        self._has: BoolArray = np.asarray(mapped > 0)
        # A table with no other rows needs but one bit, which is asked for all of them.
        self._by_row = (self._has & (mapped < here)).astype(np.int64)
        self._first_byte = np.zeros(len(plan.layout.tables), np.int64)
        placer = Placer(plan)
        parts = [np.array([0x80], np.uint8)]
        size = 1
        for table in np.flatnonzero(self._by_row).tolist():
            self._first_byte[table] = size
            # Whole bytes at a time: pieces of the placer are multiples of eight rows, but for the last.
            for _, places in placer.pieces(table):
                parts.append(np.packbits(places == MAPPED))
                size += parts[-1].size
        self._bits = np.concatenate(parts)

    @property
    def tables(self) -> BoolArray:
        """Bool [tables], those that have any."""
        return self._has

    def which(self, table: int, rows: Int64Array) -> BoolArray | None:
        """Bool [n], which of a table's rows on this node are mapped; None for none."""
        return self._is_mapped(np.array([table]), rows) if self._has[table] else None

    def touch(self, table: int, rows: Int64Array) -> None:
        """Has the pages of these rows in memory, so that `write` is but a copy. One thread at a time."""
        self._engine.touch_rows(table, rows)

    def write(self, table: int, rows: Int64Array, stored: npt.NDArray[np.uint8]) -> None:
        """As `Engine.write_rows`, of mapped rows only."""
        self._engine.write_rows(table, rows, stored)

    def pool(self, bags: KeyedBags, runs: RunTable) -> list[MappedSums]:
        """Pools the mapped rows of a batch, for a moment at which no row is written.

        Args:
            bags: checked.
            runs: where its bags go.
        """
        tables = runs.runs.tables
        has = self._has[tables]
        if not has.any():
            return []
        counts = bags.values_per_key()
        positions = np.flatnonzero(np.repeat(has, counts))
        key = np.repeat(np.flatnonzero(has), counts[has])
        mapped = self._is_mapped(tables[key], bags.values[positions])
        positions, key = positions[mapped], key[mapped]
        return self._pool(bags, runs, positions, key) if positions.size else []

    def close(self) -> None:
        """Frees the engine."""
        self._engine.close()

    def _is_mapped(self, table: Int64Array, rows: Int64Array) -> BoolArray:
        bit = rows * self._by_row[table]
        byte = self._bits[self._first_byte[table] + (bit >> 3)]
        mapped: BoolArray = ((byte << (bit & 7).astype(np.uint8)) & np.uint8(0x80)).astype(np.bool_)
        return mapped

    def _pool(self, bags: KeyedBags, runs: RunTable, positions: Int64Array, key: Int64Array) -> list[MappedSums]:
        tables = runs.runs.tables
        if (tables[1:] < tables[:-1]).any():
            # The engine's keys are tables. Stable: the bags of a key stay together, in their order.
            order = np.argsort(tables[key], kind="stable")
            positions, key = positions[order], key[order]
        bag = np.searchsorted(bags.offsets, positions, side="right") - 1
        item = bag if runs.is_none is None else np.where(runs.is_none[key], positions, bag)
        begins = np.empty(key.size, np.bool_)
        begins[0] = True
        np.logical_or(key[1:] != key[:-1], item[1:] != item[:-1], out=begins[1:])
        starts = np.flatnonzero(begins)
        key, item = key[starts], item[starts]
        keys, bags_per_key = np.unique(tables[key], return_counts=True)
        weights = None if bags.weights is None else bags.weights[positions]
        offsets = np.append(starts, positions.size)
        part = KeyedBags(keys.astype(np.int32), bags_per_key, offsets, bags.values[positions], weights)
        first, _ = runs.spans(bags)
        out = runs.runs.out_offsets[key] + (item - first[key]) * runs.runs.out_strides[key]
        is_mean = runs.runs.modes[key] == MODES["mean"]
        factors = None
        if is_mean.any():
            factors = np.where(is_mean, 1.0 / bags.lengths[bag[starts]], 1.0).astype(np.float32)
        return _by_arena(runs.arena[key], out, factors, self._engine.pool(part))


def _by_arena(
    arena: Int64Array, out: Int64Array, factors: Float32Array | None, blocks: list[Float32Array]
) -> list[MappedSums]:
    edges = np.searchsorted(arena, np.arange(len(blocks) + 1)).tolist()
    parts = []
    for number, block in enumerate(blocks):
        first, end = edges[number], edges[number + 1]
        if first == end:
            continue
        sums = block if factors is None else block * factors[first:end, None]
        positions = out[first:end]
        if (positions[1:] < positions[:-1]).any():
            order = np.argsort(positions)
            positions, sums = positions[order], sums[order]
        parts.append(MappedSums(number, positions, sums))
    return parts
