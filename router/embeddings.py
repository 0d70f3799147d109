"""What a lookup answers: pooled embeddings of a batch, by group and feature."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from router.feature_schema import FeatureSchema
from router.id_mapping import RejectedIds
from shard_node.bags import Float32Array, Int32Array, Int64Array, KeyedBags


@dataclass(slots=True, eq=False)
class LookupTimes:
    """Where the time of one lookup went, in seconds.

    Attributes:
        map_s: ids to rows, features to tables.
        split_s: whose rows they are, and the bags that each shard is asked for.
        shard_wait_s: until all shards have answered; of rows in this process the pooling itself.
        add_s: the shards' sums added, means divided.
    """

    map_s: float = 0.0
    split_s: float = 0.0
    shard_wait_s: float = 0.0
    add_s: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class Embeddings:
    """Pooled embeddings of the features that were asked for.

    Attributes:
        schema: the model's features.
        keys: int32 [S], flat indices of the features, ascending.
        blocks: one for each group of the table layout, float32 [rows, embedding_dim]: the rows of the group's
            features in flat order. A pooled feature has one row for each bag, one with pooling `none` one for each id.
        row_starts: int64 [S], the row, in its group's block, at which each feature begins.
        num_rows: int64 [S], how many rows each feature has.
        bags: the rows that were asked for, by feature, after `skip` has left out unknown ids.
        rejected: ids that have no row, under `unknown_id: reject`; what is here for their bags must not be used.
        times: where the time went.
    """

    schema: FeatureSchema
    keys: Int32Array
    blocks: list[Float32Array]
    row_starts: Int64Array
    num_rows: Int64Array
    bags: KeyedBags
    rejected: RejectedIds
    times: LookupTimes = field(default_factory=LookupTimes)

    def feature(self, index: int) -> Float32Array:
        """A view of one feature, float32 [bags, embedding_dim], or [ids, embedding_dim] with pooling `none`.

        Args:
            index: the feature's flat index. KeyError if it was not asked for.
        """
        segment = self._segment(index)
        group = int(np.searchsorted(self.schema.group_starts, index, side="right")) - 1
        start = int(self.row_starts[segment])
        return self.blocks[group][start : start + int(self.num_rows[segment])]

    def lengths(self, index: int) -> Int64Array:
        """int64 [bags], how many ids each bag of a feature had. KeyError if the feature was not asked for."""
        segment = self._segment(index)
        starts = self.bags.bag_starts()
        return np.diff(self.bags.offsets[int(starts[segment]) : int(starts[segment + 1]) + 1])

    def _segment(self, index: int) -> int:
        segment = int(np.searchsorted(self.keys, index))
        if segment == self.keys.size or int(self.keys[segment]) != index:
            raise KeyError(self.schema.features[index].name)
        return segment
