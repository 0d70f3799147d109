"""The flat order of a model's features: the order in which a request's ids are laid out, once, at parsing.

Features stand in the order of their tables (`TableLayout`), so that a batch's values for one arena are one contiguous
run, and neighbouring features of one table become one segment of a shard's request without moving a value.

A feature of a table that is stored in slices of its columns, or in parts, is looked up in all of them: its `Lookups`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from loader.snapshot.manifest import FeatureSpec, ModelSpec
from loader.snapshot.tables import TableSpec
from loader.snapshot.vocabularies_and_counts import id_type_is_string
from shard_node.bags import Int32Array, Int64Array, TableLayout


@dataclass(frozen=True)
class Lookups:
    """What is asked for the features: each one's rows of the table that it is looked up in, or of every part and slice.

    They stand in the order of stored tables, and those of one table in that of the features. Where no table is sliced
    or divided, they are the features, number by number.

    Attributes:
        feature: int32 [L], the flat index of the feature.
        table: int32 [L], the stored table, in layout order; ascending.
        part: int64 [L], the number of the part of a divided table; 0 of others. Parts of a feature are added.
        column: int64 [L], where its columns begin in the part's rows.
        group: int64 [L], the group of tables that it is in.
        group_starts: int64 [groups + 1], the first lookup of each group of the layout, then L.
        of_feature: of each feature its lookups, part by part in column order.
    """

    feature: Int32Array
    table: Int32Array
    part: Int64Array
    column: Int64Array
    group: Int64Array
    group_starts: Int64Array
    of_feature: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, layout: TableLayout, stored: Sequence[Sequence[tuple[int, ...]]]) -> Lookups:
        """Derive them from the stored tables of each feature, in flat order: of each part its slices."""
        found = []
        for number, parts in enumerate(stored):
            for place, tables in enumerate(parts):
                columns = accumulate((layout.tables[table].embedding_dim for table in tables), initial=0)
                found += [(one, number, place, column) for one, column in zip(tables, columns, strict=False)]
        found.sort()
        table, feature, part, column = np.array(found, np.int64).reshape(-1, 4).T
        order = np.lexsort((column, part, feature))
        edges = [group.first_table for group in layout.groups] + [len(layout.tables)]
        group_starts = np.searchsorted(table, edges).astype(np.int64)
        counts = np.bincount(feature, minlength=len(stored))
        return cls(
            feature=feature.astype(np.int32),
            table=table.astype(np.int32),
            part=part.copy(),
            column=column.copy(),
            group=np.searchsorted(group_starts, np.arange(table.size), side="right") - 1,
            group_starts=group_starts,
            of_feature=tuple(tuple(one.tolist()) for one in np.split(order, np.cumsum(counts)[:-1])),
        )


@dataclass(frozen=True)
class FeatureSchema:
    """A model's features in flat order, and its stored tables in layout order."""

    spec: ModelSpec
    layout: TableLayout
    features: tuple[FeatureSpec, ...]

    @classmethod
    def of(cls, spec: ModelSpec) -> FeatureSchema:
        """Return the features by table; those of one table keep the order of the model."""
        layout = TableLayout.of(spec)
        first = {table.name: layout.slices[spec.parts(table)[0].name][0] for table in spec.logical_tables}
        number = {name: first[table.name] for table in spec.logical_tables for name in table.feature_names}
        return cls(spec, layout, tuple(sorted(spec.features, key=lambda feature: number[feature.name])))

    @cached_property
    def index(self) -> dict[str, int]:
        """Feature name to its flat index."""
        return {feature.name: number for number, feature in enumerate(self.features)}

    @cached_property
    def is_context(self) -> npt.NDArray[np.bool_]:
        """Bool [F], True for context features."""
        return np.array([feature.side == "context" for feature in self.features])

    @cached_property
    def table_index(self) -> Int32Array:
        """int32 [F], the table of each feature, or its first part and slice, in layout order; ascending."""
        return np.array([parts[0][0] for parts in self._stored], np.int32)

    @cached_property
    def lookups(self) -> Lookups:
        """What is asked of stored tables for the features."""
        return Lookups.of(self.layout, self._stored)

    @cached_property
    def _stored(self) -> list[list[tuple[int, ...]]]:
        # Of each feature, part by part, the stored tables that it is looked up in, in column order.
        return [
            [self.layout.slices[part.name] for part in self.spec.parts(self.spec.table_of(feature.name))]
            for feature in self.features
        ]

    @cached_property
    def is_none(self) -> npt.NDArray[np.bool_]:
        """Bool [F], True for features whose rows are returned one by one."""
        return np.array([self.spec.pooling_of(feature.name) == "none" for feature in self.features])

    @cached_property
    def is_mean(self) -> npt.NDArray[np.bool_]:
        """Bool [F], True for features whose sum is divided by the bag's length."""
        return np.array([self.spec.pooling_of(feature.name) == "mean" for feature in self.features])

    @cached_property
    def skips_missing(self) -> npt.NDArray[np.bool_]:
        """Bool [F], True for features that leave keys without a row out of their bags."""
        tables = [self.spec.table_of(feature.name) for feature in self.features]
        return np.array([isinstance(table, TableSpec) and table.missing == "skip" for table in tables])

    @cached_property
    def string_features(self) -> frozenset[str]:
        """Features whose ids are strings in a request."""
        tables = {feature.name: self.spec.table_of(feature.name) for feature in self.features}
        strings = {table.name for table in self.spec.tables if table.keys == "string"}
        return frozenset(name for name, table in tables.items() if table.name in strings or id_type_is_string(table))

    @cached_property
    def digest(self) -> str:
        """Return 32 hex digits that change with all that the layout of a packed request depends on.

        The first half of the SHA-256 of a JSON document: name, side, id type and weights of each feature in flat order,
        and the widths of the dense inputs.
        """
        features = [[one.name, one.side, one.name in self.string_features, one.weighted] for one in self.features]
        widths = [self.spec.dense_inputs.context, self.spec.dense_inputs.candidate]
        return hashlib.sha256(json.dumps([features, widths]).encode()).hexdigest()[:32]
