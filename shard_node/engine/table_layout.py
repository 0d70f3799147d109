"""The order of tables that router and shard nodes share: derived from the model, never sent.

Tables of one (embedding_dim, dtype) are neighbours, so that all their bags are one contiguous run of a batch, are
pooled in one call per arena, and come back as one block. A table's place in this order is its number on the wire.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from loader.snapshot.manifest import ModelSpec, RowDtype, TableSpec


@dataclass(frozen=True, slots=True)
class Group:
    """The tables [first_table, end_table) of one embedding_dim and dtype. A pooled answer has one block per group."""

    embedding_dim: int
    dtype: RowDtype
    first_table: int
    end_table: int


@dataclass(frozen=True)
class TableLayout:
    """All tables of a model in layout order, and their groups."""

    tables: tuple[TableSpec, ...]
    groups: tuple[Group, ...]

    @classmethod
    def of(cls, spec: ModelSpec) -> TableLayout:
        """Sorts the model's tables by (embedding_dim, dtype); within a group they keep the model's order."""
        tables = tuple(sorted(spec.tables, key=lambda table: (table.embedding_dim, table.dtype)))
        groups: list[Group] = []
        first = 0
        for end in range(1, len(tables) + 1):
            head = tables[first]
            if end == len(tables) or (tables[end].embedding_dim, tables[end].dtype) != (
                head.embedding_dim,
                head.dtype,
            ):
                groups.append(Group(head.embedding_dim, head.dtype, first, end))
                first = end
        return cls(tables, tuple(groups))

    @cached_property
    def index(self) -> dict[str, int]:
        """Table name to its number in layout order."""
        return {table.name: number for number, table in enumerate(self.tables)}
