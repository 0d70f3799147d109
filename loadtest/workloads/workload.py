"""What every workload is, and the requests that it makes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from loader.snapshot.manifest import ModelSpec
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
        """As `open_workload` reads it, with everything that was chosen; what reports show."""

    @property
    def spec(self) -> ModelSpec:
        """The model that is asked."""

    @property
    def schema(self) -> FeatureSchema:
        """The model's features in the order of `WorkloadRequest.bags`."""

    def request(self, rng: np.random.Generator) -> WorkloadRequest:
        """One more request; the same one for a generator in the same state."""


@dataclass(frozen=True, slots=True, eq=False)
class FeatureBags:
    """One feature's part of a request, as views of its arrays.

    Attributes:
        name: the feature's.
        is_context: whether it comes once.
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
        """Whether every bag has exactly one id."""
        return bool((self.lengths == 1).all())


def features_of(schema: FeatureSchema, request: WorkloadRequest) -> Iterator[FeatureBags]:
    """The features of a request one by one, for formats that name each."""
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
