"""Drawn requests to a model: ids by a distribution, in bags around a feature's hotness or of exactly that length."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

import numpy as np

from loader.snapshot.manifest import ModelSpec
from loadtest.workloads.candidates import CandidateCounts
from loadtest.workloads.errors import WorkloadError
from loadtest.workloads.ids import IdDistribution, RowScatter
from loadtest.workloads.workload import WorkloadRequest
from router.feature_schema import FeatureSchema
from shard_node.bags import Int64Array, KeyedBags


class SyntheticWorkload:
    """Drawn requests.

    Features that share a table share its popular rows. Dense inputs are normally distributed.

    Args:
        name: what reports show.
        spec: the model. Ids are rows, so every table needs the identity mapping.
        hotness: by feature, ids in a bag; their mean if bags are ragged.
        ids: which rows.
        candidates: how many candidates.
        ragged: whether bags have drawn lengths: around a hotness h above 1, each of 1 to 2h - 1 alike; around 1, an
            eighth of the bags is empty, as many have two ids, all others one.

    Raises:
        WorkloadError: a feature without hotness, or a table whose ids are not rows.
    """

    def __init__(
        self,
        name: str,
        spec: ModelSpec,
        hotness: Mapping[str, int],
        ids: IdDistribution,
        candidates: CandidateCounts,
        *,
        ragged: bool,
    ) -> None:
        self.name = name
        self.spec = spec
        self.schema = FeatureSchema.of(spec)
        names = [feature.name for feature in self.schema.features]
        for table in spec.tables:
            if table.id_mapping.kind != "identity":
                raise WorkloadError(f"table {table.name!r}: id mapping {table.id_mapping.kind!r} is not 'identity'")
        if wrong := [feature for feature in names if hotness.get(feature, 0) < 1]:
            raise WorkloadError(f"feature {wrong[0]!r}: hotness {hotness.get(wrong[0])} is not 1 or more")
        self._hotness = np.array([hotness[feature] for feature in names], np.int64)
        self._ids = ids
        self._candidates = candidates
        self._ragged = ragged

    @cached_property
    def _scatter(self) -> RowScatter:
        return RowScatter.of(np.array([table.num_embeddings for table in self.schema.layout.tables], np.int64))

    def request(self, rng: np.random.Generator) -> WorkloadRequest:
        """As `Workload.request`."""
        schema, dense_inputs = self.schema, self.spec.dense_inputs
        num_candidates = self._candidates.draw(rng)
        bags_per_key = np.where(schema.is_context, 1, num_candidates).astype(np.int64)
        lengths = self._lengths(rng, np.repeat(self._hotness, bags_per_key))
        table = np.repeat(np.repeat(schema.table_index, bags_per_key), lengths)
        values: Int64Array = self._scatter.rows(self._ids.ranks(rng, self._scatter.num_rows[table]), table)
        return WorkloadRequest(
            bags=KeyedBags.from_lengths(
                np.arange(bags_per_key.size, dtype=np.int32),
                bags_per_key,
                lengths,
                values,
            ),
            num_candidates=num_candidates,
            context_dense=rng.standard_normal(dense_inputs.context, dtype=np.float32),
            candidate_dense=rng.standard_normal((num_candidates, dense_inputs.candidate), dtype=np.float32),
        )

    def _lengths(self, rng: np.random.Generator, hotness: Int64Array) -> Int64Array:
        """int64 [bags], the ids of each bag around its hotness."""
        if not self._ragged:
            return hotness
        around = rng.integers(1, 2 * hotness)
        eighth = rng.integers(0, 8, hotness.size)
        lengths: Int64Array = np.where(hotness > 1, around, 1 + (eighth == 7) - (eighth == 0))
        return lengths
