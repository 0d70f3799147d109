"""Batches for the trainer: requests chosen from flat arrays, as tensors of rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from loader.golden import GoldenRequests
from loader.manifest import ModelSpec
from loader.vocabulary import Vocabulary
from serving.training.ragged import offsets_of, positions_in
from serving.training.row_mapping import map_requests
from shard_node.bags import Float32Array, Int64Array


@dataclass(frozen=True, slots=True, eq=False)
class RowBags:
    """Bags of rows of one feature: rows int64 [nnz], offsets int64 [B + 1], weights float32 [nnz] or None."""

    rows: Tensor
    offsets: Tensor
    weights: Tensor | None


@dataclass(frozen=True, slots=True, eq=False)
class RowBatch:
    """R requests with N candidates.

    Attributes:
        bags: by feature; R bags for a context feature, N for a candidate feature.
        context_dense: float32 [R, Kc].
        candidate_dense: float32 [N, Kd].
        request_of_candidate: int64 [N].
        candidates: int64 [N], positions of the candidates among those of all requests.
    """

    bags: Mapping[str, RowBags]
    context_dense: Tensor
    candidate_dense: Tensor
    request_of_candidate: Tensor
    candidates: Tensor


class RequestBatches:
    """Requests whose ids have been mapped to rows once, to be taken in any order.

    Args:
        spec: their model.
        vocabularies: of its tables.
        requests: the requests.

    Raises:
        TrainingError: for an id without a row, in a table that rejects it.
    """

    def __init__(self, spec: ModelSpec, vocabularies: Mapping[str, Vocabulary], requests: GoldenRequests) -> None:
        self._sides = {feature.name: feature.side for feature in spec.features}
        self._mapped = map_requests(spec, vocabularies, requests)
        self._weights: Mapping[str, Float32Array] = requests.weights
        self._requests = requests
        self._offsets = offsets_of(requests.num_candidates)

    @property
    def num_requests(self) -> int:
        """R of all requests."""
        return self._requests.num_requests

    def take(self, chosen: Int64Array) -> RowBatch:
        """The chosen requests, int64 [C], as a batch."""
        counts, candidates = positions_in(self._offsets, chosen)
        bags = {
            name: self._take_bags(name, chosen if side == "context" else candidates)
            for name, side in self._sides.items()
        }
        return RowBatch(
            bags=bags,
            context_dense=torch.from_numpy(self._requests.context_dense[chosen]),
            candidate_dense=torch.from_numpy(self._requests.candidate_dense[candidates]),
            request_of_candidate=torch.from_numpy(np.repeat(np.arange(chosen.size), counts)),
            candidates=torch.from_numpy(candidates),
        )

    def _take_bags(self, feature: str, chosen: Int64Array) -> RowBags:
        rows, offsets = self._mapped[feature]
        lengths, positions = positions_in(offsets, chosen)
        weights = self._weights.get(feature)
        return RowBags(
            torch.from_numpy(rows[positions]),
            torch.from_numpy(offsets_of(lengths)),
            None if weights is None else torch.from_numpy(weights[positions]),
        )
