"""The flat order of a model's features: the order in which a request's ids are laid out, once, at parsing.

Features stand in the order of their tables (`TableLayout`), so that a batch's values for one arena are one contiguous
run, and neighbouring features of one table become one segment of a shard's request without moving a value.

A feature of a table that is stored in slices of its columns is looked up in every slice: its `Lookups`.
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
from shard_node.bags import Int32Array, Int64Array, TableLayout


@dataclass(frozen=True)
class Lookups:
    """What is asked for the features: each one's rows of the table that it is looked up in, or of every slice of it.

    They stand in the order of stored tables, and those of one table in that of the features. Where no table is sliced,
    they are the features, number by number.

    Attributes:
        feature: int32 [L], the flat index of the feature.
        table: int32 [L], the stored table, in layout order; ascending.
        column: int64 [L], where its columns begin in the feature's embedding.
        group: int64 [L], the group of tables that it is in.
        group_starts: int64 [groups + 1], the first lookup of each group of the layout, then L.
        of_feature: of each feature its lookups, in column order.
    """

    feature: Int32Array
    table: Int32Array
    column: Int64Array
    group: Int64Array
    group_starts: Int64Array
    of_feature: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, layout: TableLayout, slices: Sequence[tuple[int, ...]]) -> Lookups:
        """Derive them from the stored tables of each feature, in flat order, each feature's in column order."""
        found = sorted(
            (table, feature, number) for feature, tables in enumerate(slices) for number, table in enumerate(tables)
        )
        place = {(feature, number): at for at, (_, feature, number) in enumerate(found)}
        starts = [[0, *accumulate(layout.tables[table].embedding_dim for table in tables)] for tables in slices]
        table = np.array([table for table, _, _ in found], np.int32)
        edges = [group.first_table for group in layout.groups] + [len(layout.tables)]
        group_starts = np.searchsorted(table, edges).astype(np.int64)
        return cls(
            feature=np.array([feature for _, feature, _ in found], np.int32),
            table=table,
            column=np.array([starts[feature][number] for _, feature, number in found], np.int64),
            group=np.searchsorted(group_starts, np.arange(table.size), side="right") - 1,
            group_starts=group_starts,
            of_feature=tuple(
                tuple(place[feature, number] for number in range(len(tables))) for feature, tables in enumerate(slices)
            ),
        )


@dataclass(frozen=True)
class FeatureSchema:
    """A model's features in flat order, and its stored tables in layout order."""

    spec: ModelSpec
    layout: TableLayout
    features: tuple[FeatureSpec, ...]

    @classmethod
    def of(cls, spec: ModelSpec) -> FeatureSchema:
        """Sorts the model's features by table; those of one table keep the model's order."""
        layout = TableLayout.of(spec)
        number = {name: layout.slices[table.name][0] for table in spec.tables for name in table.feature_names}
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
        """int32 [F], the table of each feature, or its first slice, in layout order; ascending."""
        return np.array([slices[0] for slices in self._slices], np.int32)

    @cached_property
    def lookups(self) -> Lookups:
        """What is asked of stored tables for the features."""
        return Lookups.of(self.layout, self._slices)

    @cached_property
    def _slices(self) -> list[tuple[int, ...]]:
        """Of each feature, the stored tables that it is looked up in, in column order."""
        return [self.layout.slices[self.spec.table_of(feature.name).name] for feature in self.features]

    @cached_property
    def is_none(self) -> npt.NDArray[np.bool_]:
        """Bool [F], True for features whose rows are returned one by one."""
        return np.array([self.spec.pooling_of(feature.name) == "none" for feature in self.features])

    @cached_property
    def is_mean(self) -> npt.NDArray[np.bool_]:
        """Bool [F], True for features whose sum is divided by the bag's length."""
        return np.array([self.spec.pooling_of(feature.name) == "mean" for feature in self.features])

    @cached_property
    def string_features(self) -> frozenset[str]:
        """Features whose ids are strings in a request."""
        return frozenset(
            feature.name
            for feature in self.features
            if getattr(self.spec.table_of(feature.name).id_mapping, "id_type", "integer") == "string"
        )

    @cached_property
    def digest(self) -> str:
        """32 hex digits that change with everything that the layout of a packed request depends on.

        The first half of the SHA-256 of a JSON document: name, side, id type and weights of each feature in flat order,
        and the widths of the dense inputs.
        """
        features = [[one.name, one.side, one.name in self.string_features, one.weighted] for one in self.features]
        widths = [self.spec.dense_inputs.context, self.spec.dense_inputs.candidate]
        return hashlib.sha256(json.dumps([features, widths]).encode()).hexdigest()[:32]
