"""Checks of bags that come from outside the process against the tables that they ask for."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from shard_node.bags import Int32Array, KeyedBags
from shard_node.errors import InvalidBagsError
from shard_node.table_layout import TableLayout


class TableLimits:
    """What a layout allows, in arrays that are made once per layout and used for every request.

    Attributes:
        layout: the tables.
    """

    def __init__(self, layout: TableLayout) -> None:
        self.layout = layout
        self._num_embeddings = np.array([table.num_embeddings for table in layout.tables], np.uint64)
        self._row_bytes = np.array([4 * table.embedding_dim for table in layout.tables], np.int64)

    def answer_bytes(self, keys: Int32Array, bags_per_key: npt.NDArray[np.integer[Any]], num_bags: int) -> int:
        """Bytes of the blocks that answer a request, from its two short arrays alone: before any memory is taken.

        Args:
            keys: int32 [S], tables.
            bags_per_key: [S], as claimed.
            num_bags: as claimed by the length of `offsets`.

        Raises:
            InvalidBagsError: for a key that is no table, or a count of bags that is not within 0..num_bags.
        """
        if keys.size != bags_per_key.size:
            raise InvalidBagsError(f"keys has {keys.size} entries, bags_per_key {bags_per_key.size}")
        if not keys.size:
            return 0
        self._check_keys(keys)
        counts = bags_per_key.astype(np.int64, copy=False)
        # A negative count is a huge unsigned one.
        if int(np.maximum.reduce(counts.view(np.uint64))) > max(num_bags, 0):
            raise InvalidBagsError(f"bags_per_key must be within 0..{num_bags}, the bags that offsets describes")
        return int(np.dot(self._row_bytes[keys], counts))

    def check(self, bags: KeyedBags) -> None:
        """Everything that `KeyedBags.validate` checks, that keys are tables, and that values are rows of them.

        Every request passes here, so the check is one run of few vector operations; only if it fails is it asked
        what is wrong.

        Raises:
            InvalidBagsError: naming the array, or the table, the row and the limit.
        """
        if self._is_right(bags):
            return
        bags.validate()
        self.check_rows(bags)
        raise InvalidBagsError("the arrays do not describe bags of this model's tables")

    def check_rows(self, bags: KeyedBags) -> None:
        """Checks that keys are tables and values are rows of them. `bags.validate()` has passed before.

        Raises:
            InvalidBagsError: naming the table, the row and the limit.
        """
        if not bags.keys.size:
            return
        self._check_keys(bags.keys)
        value_starts = bags.offsets[bags.bag_starts()]
        wrong = np.flatnonzero(~self._rows_are_right(bags, value_starts))
        if wrong.size:
            segment = int(wrong[0])
            raise self._first_wrong_row(bags, segment, int(value_starts[segment]), int(value_starts[segment + 1]))

    def _is_right(self, bags: KeyedBags) -> bool:
        keys, counts, offsets, weights = bags.keys, bags.bags_per_key, bags.offsets, bags.weights
        num_keys, num_bags, num_values = keys.size, offsets.size - 1, bags.values.size
        if counts.size != num_keys or num_bags < 0 or offsets[0] != 0 or offsets[num_bags] != num_values:
            return False
        if weights is not None and (weights.size != num_values or not np.isfinite(weights).all()):
            return False
        if not num_keys:
            return num_bags == 0
        # Each is checked before it is summed or used as an index: counts can't wrap around, offsets stay inside.
        if int(np.maximum.reduce(counts.view(np.uint64))) > num_bags or (offsets[1:] < offsets[:-1]).any():
            return False
        if keys[0] < 0 or keys[-1] >= len(self.layout.tables) or (keys[1:] <= keys[:-1]).any():
            return False
        bag_starts = np.zeros(num_keys + 1, np.int64)
        np.add.accumulate(counts, out=bag_starts[1:])
        if bag_starts[-1] != num_bags:
            return False
        return bool(self._rows_are_right(bags, offsets[bag_starts]).all())

    def _rows_are_right(self, bags: KeyedBags, value_starts: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Whether all values of a key are rows of its table, bool [S]."""
        right: npt.NDArray[np.bool_] = np.equal(value_starts[:-1], value_starts[1:])
        # reduceat gives an element, not a neutral value, for an empty segment: such keys are left out.
        filled = np.flatnonzero(~right)
        if filled.size:
            # A negative row is a huge unsigned one, so a single maximum finds both kinds of error.
            largest = np.maximum.reduceat(bags.values.view(np.uint64), value_starts[filled])
            right[filled] = largest < self._num_embeddings[bags.keys[filled]]
        return right

    def _check_keys(self, keys: Int32Array) -> None:
        num_tables = len(self.layout.tables)
        if int(np.maximum.reduce(keys.view(np.uint32))) >= num_tables:
            wrong = keys[(keys < 0) | (keys >= num_tables)]
            raise InvalidBagsError(f"key {int(wrong[0])} is no table, tables are 0..{num_tables - 1}")

    def _first_wrong_row(self, bags: KeyedBags, segment: int, start: int, end: int) -> InvalidBagsError:
        table = self.layout.tables[int(bags.keys[segment])]
        values = bags.values[start:end]
        position = int(np.flatnonzero((values < 0) | (values >= table.num_embeddings))[0])
        return InvalidBagsError(
            f"row {int(values[position])} (value {start + position}) is outside table {table.name!r}, "
            f"whose rows are 0..{table.num_embeddings - 1}"
        )


def check_rows(bags: KeyedBags, layout: TableLayout) -> None:
    """`TableLimits.check_rows` for a single call; a server keeps the limits of a layout instead."""
    TableLimits(layout).check_rows(bags)
