"""The flat order of a model's features: the order in which a request's ids are laid out, once, at parsing.

Features stand in the order of their tables (`TableLayout`), so that a batch's values for one arena are one contiguous
run, and neighbouring features of one table become one segment of a shard's request without moving a value.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from loader.snapshot.manifest import FeatureSpec, ModelSpec
from shard_node.bags import Int32Array, Int64Array, TableLayout


@dataclass(frozen=True)
class FeatureSchema:
    """A model's features in flat order, and its tables in layout order."""

    spec: ModelSpec
    layout: TableLayout
    features: tuple[FeatureSpec, ...]

    @classmethod
    def of(cls, spec: ModelSpec) -> FeatureSchema:
        """Sorts the model's features by table; those of one table keep the model's order."""
        layout = TableLayout.of(spec)
        number = {name: layout.index[table.name] for table in spec.tables for name in table.feature_names}
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
        """int32 [F], the table of each feature, in layout order; ascending."""
        names = [self.spec.table_of(feature.name).name for feature in self.features]
        return np.array([self.layout.index[name] for name in names], np.int32)

    @cached_property
    def is_none(self) -> npt.NDArray[np.bool_]:
        """Bool [F], True for features whose rows are returned one by one."""
        return np.array([self.spec.pooling_of(feature.name) == "none" for feature in self.features])

    @cached_property
    def is_mean(self) -> npt.NDArray[np.bool_]:
        """Bool [F], True for features whose sum is divided by the bag's length."""
        return np.array([self.spec.pooling_of(feature.name) == "mean" for feature in self.features])

    @cached_property
    def group_starts(self) -> Int64Array:
        """int64 [groups + 1], the first flat index of each group of the layout, then F."""
        edges = [group.first_table for group in self.layout.groups] + [len(self.layout.tables)]
        return np.searchsorted(self.table_index, edges).astype(np.int64)

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
