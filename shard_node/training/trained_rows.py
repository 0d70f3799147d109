"""Rows that are trained: float32 rows of a CPU engine, an optimizer's state beside each, and which ones have changed.

Rows of tables with keys come with their first gradient: numbers between -scale and scale by the key and the column,
the same on each replay (splitmix64: Steele, Lea and Flood, 2014).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from loader.errors import ConfigError
from loader.snapshot.buckets import splitmix64
from shard_node.bags import Float32Array, Int64Array
from shard_node.engine.cpu import CpuEngine
from shard_node.engine.key_index import ABSENT
from shard_node.engine.keyed_tables import MISSING_ROW
from shard_node.errors import PushRefusedError
from shard_node.training.push import Push
from shard_node.training.row_optimizers import RowOptimizer, summed

MAX_GRADIENT: Final = 1e9
"""Sums of squares of a step's gradients stay finite in float32."""


def initial_rows(keys: Int64Array, dim: int, scale: float) -> Float32Array:
    """Return the rows that keys begin with: float32 [n, dim] within -scale and scale, by key and column."""
    mixed = splitmix64(np.add.outer(splitmix64(keys.view(np.uint64)), np.arange(dim, dtype=np.uint64)))
    share = (mixed >> np.uint64(40)).astype(np.float32) * np.float32(2**-23) - np.float32(1)
    return np.float32(scale) * share


@dataclass(slots=True, eq=False)
class _TableState:
    """Beside the rows of a table, by row of the engine: pages that nobody writes take no memory.

    `keys` are those that training has inserted or changed, by row, where the table has keys. `is_changed` is since the
    snapshot, `is_new` since `pop_changed`.
    """

    state: Float32Array
    is_changed: npt.NDArray[np.bool_]
    is_new: npt.NDArray[np.bool_]
    keys: Int64Array = field(default_factory=lambda: np.zeros(0, np.int64))


class TrainedRows:
    """The rows of one engine, as an optimizer changes them. For one thread, beside lookups.

    Raises ConfigError for tables that can't be trained: not in float32, in slices by columns, not in RAM.
    """

    def __init__(self, engine: CpuEngine, optimizer: RowOptimizer, init_scale: float) -> None:
        self._engine, self._optimizer, self._init_scale = engine, optimizer, init_scale
        self._tables: dict[int, _TableState] = {}
        sliced = {number for _, numbers in engine.layout.sliced for number in numbers}
        tiers = {count.table: count.tier for count in engine.rows_looked_up()}
        for number, table in enumerate(engine.layout.tables):
            if table.dtype != "fp32" or number in sliced or tiers[table.name] != "ram":
                raise ConfigError(
                    f"table {table.name!r} is {table.dtype}{' in slices' if number in sliced else ''}, in "
                    f"{tiers[table.name]}: rows are trained as fp32, whole, in ram"
                )
            is_keyed = bool(engine.layout.is_keyed[number])
            count = table.num_embeddings + is_keyed
            self._tables[number] = _TableState(
                np.zeros((count, optimizer.state_width(table.embedding_dim)), np.float32),
                np.zeros(count, np.bool_),
                np.zeros(count, np.bool_),
                np.zeros(count if is_keyed else 0, np.int64),
            )

    def check(self, push: Push, pending: Iterable[Push]) -> None:
        """Raise PushRefusedError, InvalidBagsError or DeltaError if gradients can't be applied after pending ones."""
        for number, (ids, gradients) in push.gradients.items():
            if number not in self._tables:
                raise PushRefusedError(f"table {number} is none of 0..{len(self._tables) - 1}")
            table = self._engine.layout.tables[number]
            if gradients.shape[1] != table.embedding_dim:
                raise PushRefusedError(
                    f"gradients of table {table.name!r} have {gradients.shape[1]} columns, rows {table.embedding_dim}"
                )
            # NaN is not, either.
            is_allowed = (np.abs(gradients) <= MAX_GRADIENT).all(axis=1)
            if not is_allowed.all():
                raise PushRefusedError(
                    f"the gradient of id {int(ids[is_allowed.argmin()])} of table {table.name!r} has numbers that "
                    f"are not within {MAX_GRADIENT:g} of 0"
                )
            # New keys count to the capacity together with those that wait.
            waiting = pending if self._engine.layout.is_keyed[number] else ()
            of_others = [other.gradients[number][0] for other in waiting if number in other.gradients]
            self._engine.check_ids(number, np.concatenate([ids, *of_others]))

    def apply(self, pushes: Sequence[Push]) -> None:
        """Update rows by the gradients of pushes that were checked, of all of them together.

        A row's gradients are added up in the order of the pushes, and of the ids in them.
        """
        for number in dict.fromkeys(number for push in pushes for number in push.gradients):
            parts = [push.gradients[number] for push in pushes if number in push.gradients]
            ids = np.concatenate([ids for ids, _ in parts])
            if ids.size:
                self._apply(number, *summed(ids, np.concatenate([gradients for _, gradients in parts])))

    def _apply(self, number: int, ids: Int64Array, gradients: Float32Array) -> None:
        of_table, at = self._tables[number], self._engine.rows_of_ids(number, ids)
        # New keys have no row yet: that of missing ones stands in.
        is_new = at == ABSENT
        known = np.where(is_new, MISSING_ROW, at)
        values, state = self._engine.read_rows(number, known).view(np.float32), of_table.state[known]
        values[is_new], state[is_new] = initial_rows(ids[is_new], gradients.shape[1], self._init_scale), 0
        self._optimizer.update(values, state, gradients)
        self._put(number, of_table, ids, values, state)

    def _put(
        self, number: int, of_table: _TableState, ids: Int64Array, values: Float32Array, state: Float32Array
    ) -> None:
        """Write rows and their state; `ids` ascend."""
        stored = values.view(np.uint8)
        if self._engine.layout.is_keyed[number]:
            self._engine.update_keys((number,), ids, stored)
        else:
            self._engine.write_rows(number, ids, stored)
        at = self._engine.rows_of_ids(number, ids)
        of_table.state[at], of_table.is_changed[at], of_table.is_new[at] = state, True, True
        if of_table.keys.size:
            of_table.keys[at] = ids

    def tensors(self) -> dict[str, npt.NDArray[Any]]:
        """Return what has changed since the snapshot, by table: ids, rows and state."""
        tensors: dict[str, npt.NDArray[Any]] = {}
        for name, number, of_table in self._named():
            at = of_table.is_changed.nonzero()[0]
            tensors[f"{name}.ids"], tensors[f"{name}.rows"] = self._read(number, of_table, at)
            tensors[f"{name}.state"] = of_table.state[at]
        return tensors

    def pop_changed(self, *, everything: bool) -> dict[str, tuple[Int64Array, Float32Array]]:
        """Return ids and rows that have changed since the snapshot, or this was called last, by table."""
        changed = {}
        for name, number, of_table in self._named():
            is_due = of_table.is_changed if everything else of_table.is_new
            changed[name] = self._read(number, of_table, is_due.nonzero()[0])
            of_table.is_new[:] = False
        return changed

    def _read(self, number: int, of_table: _TableState, at: Int64Array) -> tuple[Int64Array, Float32Array]:
        ids = of_table.keys[at] if of_table.keys.size else at
        return ids, self._engine.read_rows(number, at).view(np.float32)

    def restore(self, tensors: dict[str, npt.NDArray[Any]]) -> None:
        """Put back what `tensors` returned, over the rows of the same snapshot."""
        for name, number, of_table in self._named():
            order = np.argsort(tensors[f"{name}.ids"])
            if order.size:
                ids, rows, state = (tensors[f"{name}.{what}"][order] for what in ("ids", "rows", "state"))
                self._put(number, of_table, ids, rows, state)

    def _named(self) -> Iterator[tuple[str, int, _TableState]]:
        for number, of_table in self._tables.items():
            yield self._engine.layout.tables[number].name, number, of_table
