"""What every workload is, the requests that it makes, and the workload that draws them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import numpy as np

from loader.snapshot.manifest import FeatureSpec, ModelSpec
from loadtest.errors import WorkloadError
from loadtest.workloads.distributions import CandidateCounts, IdDistribution, RowScatter
from router.feature_schema import FeatureSchema
from shard_node.bags import Float32Array, Int64Array, KeyedBags


@dataclass(frozen=True, slots=True, eq=False)
class WorkloadRequest:
    """One rank request before an API makes bytes of it: the very arrays that a server's parser must give back.

    Attributes:
        bags: raw ids. Keys are all the model's flat feature indices (`FeatureSchema`); a context feature has 1 bag, a
            candidate feature num_candidates. String ids are their fingerprints.
        num_candidates: N, at least 1.
        context_dense: float32 [Kc].
        candidate_dense: float32 [N, Kd].
        texts: by feature with string ids, those strings in the order of its values.
    """

    bags: KeyedBags
    num_candidates: int
    context_dense: Float32Array
    candidate_dense: Float32Array
    texts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


class Workload(Protocol):
    """Makes requests to one model."""

    @property
    def name(self) -> str:
        """Say everything that was chosen, for reports."""

    @property
    def spec(self) -> ModelSpec:
        """Describe the model that is asked."""

    @property
    def schema(self) -> FeatureSchema:
        """List the model's features in the order of `WorkloadRequest.bags`."""

    def request(self, rng: np.random.Generator) -> WorkloadRequest:
        """Make one more request; the same one for a generator in the same state."""


@dataclass(frozen=True, slots=True, eq=False)
class FeatureBags:
    """One feature's part of a request, as views of its arrays.

    Attributes:
        values: int64 [n], ids bag by bag.
        lengths: int64 [bags].
        weights: float32 [n], or None for all ones.
        texts: the strings behind the values, if ids are strings; else None.
    """

    name: str
    is_context: bool
    values: Int64Array
    lengths: Int64Array
    weights: Float32Array | None
    texts: tuple[str, ...] | None

    @property
    def is_single(self) -> bool:
        """Tell whether every bag has exactly one id."""
        return bool((self.lengths == 1).all())


class Described(Protocol):
    """What the numbers of a request mean: a model's `FeatureSchema`, or what was recorded of one."""

    @property
    def features(self) -> tuple[FeatureSpec, ...]:
        """List the features in the order of a request's bags."""

    @property
    def string_features(self) -> frozenset[str]:
        """Name those whose ids are strings."""

    @property
    def digest(self) -> str:
        """Tell schemas apart, as packed requests do."""


def features_of(schema: Described, request: WorkloadRequest) -> Iterator[FeatureBags]:
    """Go through the features of a request one by one, for formats that name each."""
    bags = request.bags
    bag_starts, value_starts, lengths = bags.bag_starts().tolist(), bags.value_starts().tolist(), bags.lengths
    for number, feature in enumerate(schema.features):
        values = slice(value_starts[number], value_starts[number + 1])
        yield FeatureBags(
            name=feature.name,
            is_context=feature.side == "context",
            values=bags.values[values],
            lengths=lengths[bag_starts[number] : bag_starts[number + 1]],
            weights=bags.weights[values] if feature.weighted and bags.weights is not None else None,
            texts=request.texts.get(feature.name),
        )


class SyntheticWorkload:
    """Drawn requests. Features that share a table share its popular rows; dense inputs are normally distributed.

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
        """Draw a request."""
        schema, dense_inputs = self.schema, self.spec.dense_inputs
        num_candidates = self._candidates.draw(rng)
        bags_per_key = np.where(schema.is_context, 1, num_candidates).astype(np.int64)
        lengths = self._lengths(rng, np.repeat(self._hotness, bags_per_key))
        table = np.repeat(np.repeat(schema.table_index, bags_per_key), lengths)
        values: Int64Array = self._scatter.rows(self._ids.ranks(rng, self._scatter.num_rows[table]), table)
        keys = np.arange(bags_per_key.size, dtype=np.int32)
        return WorkloadRequest(
            bags=KeyedBags.from_lengths(keys, bags_per_key, lengths, values),
            num_candidates=num_candidates,
            context_dense=rng.standard_normal(dense_inputs.context, dtype=np.float32),
            candidate_dense=rng.standard_normal((num_candidates, dense_inputs.candidate), dtype=np.float32),
        )

    def _lengths(self, rng: np.random.Generator, hotness: Int64Array) -> Int64Array:
        """Draw int64 [bags], the ids of each bag around its hotness."""
        if not self._ragged:
            return hotness
        around = rng.integers(1, 2 * hotness)
        eighth = rng.integers(0, 8, hotness.size)
        lengths: Int64Array = np.where(hotness > 1, around, 1 + (eighth == 7) - (eighth == 0))
        return lengths
