"""Whether a batch may be handed to the kernels: that it is of this layout's tables, and asks for rows of this node."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from loader.snapshot.layout import bucket_shift
from loader.snapshot.manifest import NUM_BUCKETS
from shard_node.bags import Int64Array, KeyedBags, TableLayout
from shard_node.errors import InvalidBagsError
from shard_node.node import Partition

BoolArray = npt.NDArray[np.bool_]


class RowChecks:
    """Checks of batches and row writes against a layout and a partition.

    A node that holds all rows, which is the usual one, looks no bucket up.

    Args:
        layout: the tables.
        partition: -1 for a bucket of another node.
    """

    def __init__(self, layout: TableLayout, partition: Partition) -> None:
        self.limits = layout
        self._layout = layout
        self._is_here: BoolArray = np.asarray(partition.card_of_bucket >= 0)
        self._is_divided: BoolArray = np.asarray(~self._is_here.all(axis=1))
        self._any_divided = bool(self._is_divided.any())
        self._shift = np.array([bucket_shift(one.bucketing, one.num_embeddings) for one in layout.tables], np.int64)

    def check(self, bags: KeyedBags, tables: Int64Array | None = None) -> None:
        """Checks a batch, as `TableLayout.check`, and that each row is on this node.

        Raises:
            InvalidBagsError: naming what is wrong, with table and row.
        """
        self.limits.check(bags, tables)
        if not self._any_divided:
            return
        if tables is None:
            tables = bags.keys.astype(np.int64)
        if self._is_divided[tables].any():
            self._check_here(bags, tables)

    def here(self, table: int, rows: Int64Array) -> BoolArray | None:
        """Bool [n], which of a table's rows are on this node; None for all."""
        if not self._is_divided[table]:
            return None
        here: BoolArray = self._is_here[table][(rows >> self._shift[table]) & (NUM_BUCKETS - 1)]
        return here

    def _check_here(self, bags: KeyedBags, tables: Int64Array) -> None:
        table = np.repeat(tables, bags.values_per_key())
        here = self._is_here[table, (bags.values >> self._shift[table]) & (NUM_BUCKETS - 1)]
        if not here.all():
            wrong = int(here.argmin())
            name = self._layout.tables[int(table[wrong])].name
            raise InvalidBagsError(f"row {int(bags.values[wrong])} of table {name!r} is not on this node")
