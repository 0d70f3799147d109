"""Golden requests: requests with the scores that training computed in float32, to check a version before it serves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from loader.errors import ExportError
from loader.snapshot.manifest import MAX_GOLDEN_BYTES, FeatureSpec, GoldenEntry, ModelSpec
from loader.snapshot.tensor_files import TensorInfo, expect_at_most, expect_tensors, length_of

_FLAT = ("num_candidates", "context_dense", "candidate_dense", "scores")
_BY_FEATURE = ("values", "lengths", "weights")


@dataclass(frozen=True)
class GoldenRequests:
    """R requests with N candidates in all, flat: candidate arrays are the requests' candidates one after the other.

    A context feature has one bag per request (R bags), a candidate feature one per candidate (N bags). Ids are raw ids,
    before id mapping; string ids are given by `fingerprint_strings`.

    Attributes:
        num_candidates: int32 [R], candidates of each request, at least 1.
        values: per feature, int64 [nnz], the ids of its bags one after the other.
        lengths: per feature, int32 [bags], ids in each bag.
        weights: per weighted feature, float32 [nnz].
        context_dense: float32 [R, dense_inputs.context].
        candidate_dense: float32 [N, dense_inputs.candidate].
        scores: float32 [N], the expected scores.
    """

    num_candidates: npt.NDArray[np.int32]
    values: Mapping[str, npt.NDArray[np.int64]]
    lengths: Mapping[str, npt.NDArray[np.int32]]
    context_dense: npt.NDArray[np.float32]
    candidate_dense: npt.NDArray[np.float32]
    scores: npt.NDArray[np.float32]
    weights: Mapping[str, npt.NDArray[np.float32]] = field(default_factory=dict)

    @property
    def num_requests(self) -> int:
        """R."""
        return len(self.num_candidates)

    def to_tensors(self) -> dict[str, npt.NDArray[Any]]:
        """Returns named arrays for a safetensors file: per-feature ones are named `values/<feature>` and so on."""
        tensors: dict[str, npt.NDArray[Any]] = {name: getattr(self, name) for name in _FLAT}
        for kind in _BY_FEATURE:
            tensors |= {f"{kind}/{feature}": array for feature, array in getattr(self, kind).items()}
        return {name: np.ascontiguousarray(array) for name, array in tensors.items()}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, npt.NDArray[Any]]) -> Self:
        """Reads back what `to_tensors` gave. Raises ExportError for a missing or unknown name."""
        fields: dict[str, Any] = {kind: {} for kind in _BY_FEATURE}
        for name, array in tensors.items():
            kind, _, feature = name.partition("/")
            if feature and kind in _BY_FEATURE:
                fields[kind][feature] = array
            elif name in _FLAT:
                fields[name] = array
            else:
                raise ExportError(f"golden requests: unknown tensor {name!r}")
        if missing := sorted(set(_FLAT) - set(fields)):
            raise ExportError(f"golden requests: missing tensors {missing}")
        return cls(**fields)

    def check(self, spec: ModelSpec) -> None:
        """Raises ExportError, naming the field, if anything does not fit the model or itself."""
        counts = self.num_candidates
        if counts.dtype != np.int32 or counts.ndim != 1 or len(counts) == 0 or counts.min() < 1:
            raise ExportError("golden requests: num_candidates: expected int32 [R] with R >= 1 and every count >= 1")
        requests, candidates = len(counts), int(counts.sum(dtype=np.int64))
        _check_floats("scores", self.scores, (candidates,))
        _check_floats("context_dense", self.context_dense, (requests, spec.dense_inputs.context))
        _check_floats("candidate_dense", self.candidate_dense, (candidates, spec.dense_inputs.candidate))
        names = {feature.name for feature in spec.features}
        weighted = {feature.name for feature in spec.features if feature.weighted}
        for kind, expected in (("values", names), ("lengths", names), ("weights", weighted)):
            if (given := set(getattr(self, kind))) != expected:
                raise ExportError(
                    f"golden requests: {kind}: expected the features {sorted(expected)}, got {sorted(given)}"
                )
        for feature in spec.features:
            self._check_feature(spec, feature, requests if feature.side == "context" else candidates)

    def request(self, index: int) -> Self:
        """Returns request `index` alone, as views. Raises IndexError if there is none."""
        if not 0 <= index < self.num_requests:
            raise IndexError(f"golden request {index} of {self.num_requests}")
        first = int(self.num_candidates[:index].sum())
        last = first + int(self.num_candidates[index])
        values, lengths, weights = {}, {}, {}
        for name, feature_lengths in self.lengths.items():
            # R bags: one per request. Should N equal R, every request has one candidate and both slices are the same.
            per_request = len(feature_lengths) == self.num_requests
            bags = slice(index, index + 1) if per_request else slice(first, last)
            lengths[name] = feature_lengths[bags]
            start = int(feature_lengths[: bags.start].sum())
            ids = slice(start, start + int(lengths[name].sum()))
            values[name] = self.values[name][ids]
            if name in self.weights:
                weights[name] = self.weights[name][ids]
        return type(self)(
            num_candidates=self.num_candidates[index : index + 1],
            values=values,
            lengths=lengths,
            weights=weights,
            context_dense=self.context_dense[index : index + 1],
            candidate_dense=self.candidate_dense[first:last],
            scores=self.scores[first:last],
        )

    def _check_feature(self, spec: ModelSpec, feature: FeatureSpec, num_bags: int) -> None:
        values, lengths = self.values[feature.name], self.lengths[feature.name]
        where = f"golden requests: feature {feature.name!r}"
        if lengths.dtype != np.int32 or lengths.shape != (num_bags,):
            raise ExportError(
                f"{where}: lengths: expected int32 [{num_bags}], got {lengths.dtype} {list(lengths.shape)}"
            )
        if num_bags and lengths.min() < 0:
            raise ExportError(f"{where}: lengths: {lengths.min()} is negative")
        num_ids = int(lengths.sum(dtype=np.int64))
        if values.dtype != np.int64 or values.shape != (num_ids,):
            raise ExportError(f"{where}: values: expected int64 [{num_ids}], got {values.dtype} {list(values.shape)}")
        if num_ids and values.min() < 0:
            raise ExportError(f"{where}: values: id {values.min()} is negative")
        table = spec.table_of(feature.name)
        strict = table.id_mapping.kind == "identity" and table.unknown_id == "reject"
        if strict and num_ids and values.max() >= table.num_embeddings:
            raise ExportError(
                f"{where}: values: id {values.max()} is not below num_embeddings {table.num_embeddings} "
                f"of table {table.name!r}"
            )
        if feature.weighted:
            _check_floats(f"weights of feature {feature.name!r}", self.weights[feature.name], (num_ids,))


def check_golden_header(path: Path, spec: ModelSpec, stated: GoldenEntry, tensors: Mapping[str, TensorInfo]) -> None:
    """Raises SnapshotCorruptError unless a golden file's tensors fit the spec and the manifest; reads none of them."""
    expect_at_most(path, tensors, MAX_GOLDEN_BYTES)
    requests, candidates = stated.num_requests, stated.num_candidates
    expected: dict[str, tuple[str, tuple[int, ...]]] = {
        "num_candidates": ("I32", (requests,)),
        "context_dense": ("F32", (requests, spec.dense_inputs.context)),
        "candidate_dense": ("F32", (candidates, spec.dense_inputs.candidate)),
        "scores": ("F32", (candidates,)),
    }
    for feature in spec.features:
        num_ids = length_of(tensors, f"values/{feature.name}")
        expected[f"values/{feature.name}"] = ("I64", (num_ids,))
        expected[f"lengths/{feature.name}"] = ("I32", (requests if feature.side == "context" else candidates,))
        if feature.weighted:
            expected[f"weights/{feature.name}"] = ("F32", (num_ids,))
    expect_tensors(path, tensors, expected)


def _check_floats(what: str, array: npt.NDArray[Any], shape: tuple[int, ...]) -> None:
    if array.dtype != np.float32 or array.shape != shape:
        raise ExportError(
            f"golden requests: {what}: expected float32 {list(shape)}, got {array.dtype} {list(array.shape)}"
        )
    if not np.isfinite(array).all():
        raise ExportError(f"golden requests: {what}: holds NaN or inf")
