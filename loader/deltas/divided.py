"""Cut changed rows of a table that is stored as parts into those of its parts. See docs/deltas.md.

The stream has rows of stored tables only, so that who follows it needs to know of no others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, TypeAlias

import numpy as np

from loader.access_counts import AccessCounter
from loader.deltas.batch import Int64Array, checked_rows, encode_checked, encode_rows
from loader.errors import DeltaFormatError
from loader.snapshot.codecs import ByteArray
from loader.snapshot.manifest import ModelSpec
from loader.snapshot.row_classes import RowClasses
from loader.snapshot.tables import MAX_NUM_EMBEDDINGS, TableSpec

_MERGED_ROWS: Final = 1 << 20
_NONE: Final = np.zeros(0, np.int64)

StoredRows: TypeAlias = tuple[TableSpec, Int64Array, ByteArray]
"""A stored table, rows of it, int64 [n], ascending, none twice, and what they are now, uint8 [n, row_bytes]."""


def stored_updates(
    spec: ModelSpec, name: str, rows: Any, values: Any, classes: RowClasses | None
) -> tuple[list[StoredRows], Int64Array]:
    """Encode changed rows of a table as features see it, or of a part, as rows of stored tables.

    `rows` and `values` are as `encode_rows` takes them; of a divided table its own rows, not those of its parts, which
    must all have its dim, or be one part only. `classes` are of the table, if it has classes.

    Returns the rows of each stored table, and those of the table that are pruned, int64 [k], and so are stored nowhere.
    Raises DeltaFormatError as `encode_rows`; if there is no such table; if its parts are trained as such; or if it is
    the row that stands for pruned ones.
    """
    divided = next((one for one in spec.divided if one.name == name), None)
    if divided is None:
        table = next((one for one in spec.tables if one.name == name), None)
        if table is None:
            names = sorted({one.name for one in spec.tables} | {one.name for one in spec.divided})
            raise DeltaFormatError(f"model {spec.model!r} has no table {name!r}; tables: {names}")
        numbers, stored = encode_rows(table, rows, values)
        whole, last = spec.divided_of(name), table.num_embeddings - 1
        if whole is not None and whole.pruned and name == whole.parts[-1] and last in numbers[-1:]:
            raise DeltaFormatError(
                f"table {name!r}: row {last} is what pruned rows of {whole.name!r} get, which no update changes; "
                f"allowed is 0..{last - 1}"
            )
        return [(table, numbers, stored)], _NONE
    parts = spec.parts(divided)
    if len(parts) > 1 and (
        divided.by == "quotient_remainder" or any(part.embedding_dim != divided.embedding_dim for part in parts)
    ):
        allowed = ", ".join(f"{part.name!r} [n, {part.embedding_dim}]" for part in parts)
        raise DeltaFormatError(
            f"table {divided.name!r}: its parts are trained as such: publish rows of each by its name, by the part's "
            f"own row numbers: {allowed}"
        )
    numbers, floats = checked_rows(name, divided.num_embeddings, parts[0].embedding_dim, rows, values)
    if classes is None:
        return [(parts[0], numbers, encode_checked(parts[0], floats, f"table {name!r}", numbers))], _NONE
    class_of_row, places = classes.find(numbers)
    found: list[StoredRows] = []
    for number, part in enumerate(parts):
        here = class_of_row == number
        if here.any():
            stored = encode_checked(part, floats[here], f"table {name!r}, part {part.name!r}", numbers[here])
            found.append((part, places[here], stored))
    return found, numbers[class_of_row == len(parts)]


@dataclass(frozen=True, slots=True, eq=False)
class PrunedRows:
    """Rows of a table, int64 [n], ascending, that were published though it is pruned of them, and how often each."""

    rows: Int64Array
    counts: Int64Array

    @property
    def count(self) -> int:
        """How many updates were not written."""
        return int(self.counts.sum())


class PrunedUpdates:
    """Counts the updates of pruned rows, by table. Takes 16 bytes for each row that was named."""

    def __init__(self) -> None:
        self._counters: dict[str, AccessCounter] = {}

    def add(self, table: str, rows: Int64Array) -> bool:
        """Count rows. Returns whether they are the table's first."""
        is_first = table not in self._counters
        counter = self._counters.setdefault(table, AccessCounter(MAX_NUM_EMBEDDINGS, _MERGED_ROWS))
        counter.add(rows)
        if counter.is_full:
            counter.fold()
        return is_first

    def by_table(self) -> Mapping[str, PrunedRows]:
        """Return what was counted, of tables of which anything was."""
        counted = {table: counter.fold() for table, counter in list(self._counters.items())}
        return MappingProxyType({table: PrunedRows(one.keys, one.counts) for table, one in counted.items()})
