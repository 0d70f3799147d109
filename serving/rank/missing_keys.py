"""Keys that tables do not have: counted by feature, and told the requests that ask for them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from router.feature_schema import FeatureSchema
from router.id_mapping import BagIds
from serving.observe.calls import VersionCounter
from serving.observe.metrics import ServingMetrics
from serving.results import MissingKeys
from shard_node.bags import Bags, Int64Array

FLUSH_S = 1.0


class KeyCounter:
    """Counts keys that were looked up in one version, found or not; metrics and counter are told about once a second.

    It belongs to one event loop.
    """

    def __init__(self, metrics: ServingMetrics, counter: VersionCounter, schema: FeatureSchema, version: int) -> None:
        self._metrics, self._counter = metrics, counter
        names = [feature.name for feature in schema.features]
        tables = [schema.spec.table_of(name) for name in names]
        named = zip(tables, names, strict=True)
        self._labels = [(schema.spec.model, version, table.name, name) for table, name in named]
        self._is_keyed = schema.layout.is_keyed[schema.table_index]
        # By feature: found, and missing.
        self._counts = np.zeros((2, len(names)), np.int64)
        self._is_due = False

    def add(self, bags: Bags, missing: BagIds) -> None:
        """Count a batch, whose `bags` are by feature, as they were asked for."""
        self._counts[0, bags.keys] += bags.values_per_key()
        if len(missing):
            absent = np.bincount(missing.feature, minlength=self._is_keyed.size)
            self._counts[1] += absent
            self._counts[0] -= absent
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_later(FLUSH_S, self.flush)

    def close(self) -> None:
        """Tell what is left, and nothing any more: the version's metrics are dropped."""
        self.flush()
        self._is_due = True

    def flush(self) -> None:
        """Tell the metrics and the counter."""
        counts, self._is_due = self._counts, False
        self._counts = np.zeros_like(counts)
        counts[:, ~self._is_keyed] = 0
        self._counter.looked_up(int(counts.sum()), int(counts[1].sum()))
        for found, of_features in zip(("true", "false"), counts, strict=True):
            for feature in of_features.nonzero()[0].tolist():
                self._metrics.count("keys", *self._labels[feature], found, by=int(of_features[feature]))


def missing_of(
    schema: FeatureSchema, missing: BagIds, chosen: npt.NDArray[np.bool_], bags: Int64Array
) -> Mapping[str, MissingKeys]:
    """Return some of the missing keys, bool [k], by feature; `bags`, int64 [k], are their numbers in their request."""
    feature, bags, keys = missing.feature[chosen], bags[chosen], missing.id[chosen]
    return {
        schema.features[number].name: MissingKeys(bags[feature == number], keys[feature == number])
        for number in np.unique(feature).tolist()
    }
