"""Golden requests: requests with the scores that training computed in float32, to check a version before it serves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from loader.errors import ExportError
from loader.snapshot.manifest import MAX_GOLDEN_BYTES, GoldenEntry, ModelSpec
from loader.snapshot.tables import fingerprint_strings
from loader.snapshot.tensor_files import TensorInfo, expect_at_most, expect_tensors, length_of

_FLAT = ("num_candidates", "context_dense", "candidate_dense", "scores")
_DTYPES = {"I32": "int32", "I64": "int64", "F32": "float32"}
_BY_NAME = ("values", "lengths", "weights", "outputs")


@dataclass(frozen=True)
class GoldenRequests:
    """R requests with N candidates in all, flat: candidate arrays are the requests' candidates one after the other.

    A context feature has one bag per request (R bags), a candidate feature one per candidate (N bags). Ids are raw
    ids, before id mapping; string ids are given by `fingerprint_strings`.

    Attributes:
        num_candidates: int32 [R], candidates of each request, at least 1.
        values, lengths: per feature, int64 [nnz], the ids of its bags one after the other; int32 [bags], ids in each.
        weights: per weighted feature, float32 [nnz].
        context_dense, candidate_dense: float32 [R, dense_inputs.context] and [N, dense_inputs.candidate].
        scores: float32 [N], the expected scores; `outputs`: the same for each output that the model names.
    """

    num_candidates: npt.NDArray[np.int32]
    values: Mapping[str, npt.NDArray[np.int64]]
    lengths: Mapping[str, npt.NDArray[np.int32]]
    context_dense: npt.NDArray[np.float32]
    candidate_dense: npt.NDArray[np.float32]
    scores: npt.NDArray[np.float32]
    weights: Mapping[str, npt.NDArray[np.float32]] = field(default_factory=dict)
    outputs: Mapping[str, npt.NDArray[np.float32]] = field(default_factory=dict)

    @property
    def num_requests(self) -> int:
        """R."""
        return len(self.num_candidates)

    def to_tensors(self) -> dict[str, npt.NDArray[Any]]:
        """Return named arrays for a safetensors file, such as `values/<feature>` and `outputs/<output>`."""
        tensors: dict[str, npt.NDArray[Any]] = {name: getattr(self, name) for name in _FLAT}
        for kind in _BY_NAME:
            tensors |= {f"{kind}/{feature}": array for feature, array in getattr(self, kind).items()}
        return {name: np.ascontiguousarray(array) for name, array in tensors.items()}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, npt.NDArray[Any]]) -> Self:
        """Read back what `to_tensors` gave. Raises ExportError for a missing or unknown name."""
        fields: dict[str, Any] = {kind: {} for kind in _BY_NAME}
        for name, array in tensors.items():
            kind, _, feature = name.partition("/")
            if feature and kind in _BY_NAME:
                fields[kind][feature] = array
            elif name in _FLAT:
                fields[name] = array
            else:
                raise ExportError(f"golden requests: unknown tensor {name!r}")
        if missing := sorted(set(_FLAT) - set(fields)):
            raise ExportError(f"golden requests: missing tensors {missing}")
        return cls(**fields)

    @classmethod
    def from_requests(
        cls,
        requests: Sequence[Mapping[str, Any]],
        scores: npt.ArrayLike,
        outputs: Mapping[str, npt.ArrayLike] = MappingProxyType({}),
    ) -> Self:
        """Make them of rank requests in the API's JSON form, as dicts: ids may be texts, and weights are optional.

        `scores`, [N], and each of `outputs` are of all candidates, request by request. Raises ExportError for requests
        that do not all have the same features, or whose lists do not fit each other.
        """
        bags: dict[str, dict[str, list[list[Any]]]] = {"sparse": {}, "weights": {}}
        counts, context_dense, candidate_dense = list[int](), list[Any](), list[Any]()
        for number, request in enumerate(requests):
            context, candidates = request.get("context", {}), request.get("candidates", {})
            count = len(next(iter(candidates.get("sparse", {}).values()), candidates.get("dense", ())))
            counts.append(count)
            context_dense.append(context.get("dense", []))
            candidate_dense += candidates.get("dense", [[]] * count)
            for kind, by_feature in bags.items():
                given = {name: [ids] for name, ids in context.get(kind, {}).items()}
                for name, of_candidates in candidates.get(kind, {}).items():
                    given[name] = [ids if isinstance(ids, list) else [ids] for ids in of_candidates]
                if number and given.keys() != by_feature.keys():
                    problem = f"{kind} of {sorted(given)}, of the first one {sorted(by_feature)}"
                    raise ExportError(f"golden requests: request {number} has {problem}")
                for name, lists in given.items():
                    by_feature.setdefault(name, []).extend(lists)
        try:
            return cls(
                num_candidates=np.array(counts, np.int32),
                values={name: _ids(list(chain.from_iterable(lists))) for name, lists in bags["sparse"].items()},
                lengths={name: np.array([*map(len, lists)], np.int32) for name, lists in bags["sparse"].items()},
                weights={
                    name: np.array([*chain.from_iterable(lists)], np.float32) for name, lists in bags["weights"].items()
                },
                context_dense=np.array(context_dense, np.float32).reshape(len(counts), -1),
                candidate_dense=np.array(candidate_dense, np.float32).reshape(sum(counts), -1),
                scores=np.asarray(scores, np.float32),
                outputs={name: np.asarray(values, np.float32) for name, values in outputs.items()},
            )
        except (ValueError, TypeError, AttributeError, OverflowError) as error:
            raise ExportError(f"golden requests: {error}") from error

    def check(self, spec: ModelSpec) -> None:
        """Raise ExportError, naming the field, if anything does not fit the model or itself."""
        counts = self.num_candidates
        if counts.dtype != np.int32 or counts.ndim != 1 or len(counts) == 0 or counts.min() < 1:
            raise ExportError("golden requests: num_candidates: expected int32 [R] with R >= 1 and every count >= 1")
        names = {feature.name for feature in spec.features}
        weighted = {feature.name for feature in spec.features if feature.weighted}
        for kind, features in (("values", names), ("lengths", names), ("weights", weighted)):
            if (given := set(getattr(self, kind))) != features:
                problem = f"expected the features {sorted(features)}, got {sorted(given)}"
                raise ExportError(f"golden requests: {kind}: {problem}")
        if (named := sorted(spec.dense_model.outputs)) != sorted(self.outputs):
            raise ExportError(f"golden requests: outputs: expected {named}, got {sorted(self.outputs)}")
        tensors = self.to_tensors()
        num_ids = {name: int(self.lengths[name].sum(dtype=np.int64)) for name in names}
        for name, (dtype, shape) in _expected(spec, len(counts), int(counts.sum(dtype=np.int64)), num_ids).items():
            array, expected = tensors[name], f"{_DTYPES[dtype]} {list(shape)}"
            if (got := f"{array.dtype} {list(array.shape)}") != expected:
                raise ExportError(f"golden requests: {name}: expected {expected}, got {got}")
            if dtype == "F32" and not np.isfinite(array).all():
                raise ExportError(f"golden requests: {name}: holds NaN or inf")
            kind, _, feature = name.partition("/")
            is_keyed = kind == "values" and getattr(spec.table_of(feature), "keys", None) is not None
            if dtype != "F32" and array.size and array.min() < 0 and not is_keyed:
                raise ExportError(f"golden requests: {name}: {array.min()} is negative")
        for name in names:
            table, ids = spec.table_of(name), self.values[name]
            strict = table.id_mapping.kind == "identity" and table.unknown_id == "reject"
            strict = strict and getattr(table, "keys", None) is None
            if strict and ids.size and ids.max() >= table.num_embeddings:
                raise ExportError(
                    f"golden requests: values/{name}: id {ids.max()} is not below num_embeddings "
                    f"{table.num_embeddings} of table {table.name!r}"
                )

    def request(self, index: int) -> Self:
        """Return request `index` alone, as views. Raises IndexError if there is none."""
        if not 0 <= index < self.num_requests:
            raise IndexError(f"golden request {index} of {self.num_requests}")
        first = int(self.num_candidates[:index].sum())
        candidates = slice(first, first + int(self.num_candidates[index]))
        values, lengths, weights = {}, {}, {}
        for name, feature_lengths in self.lengths.items():
            # R bags: one per request. Should N equal R, every request has one candidate and both slices are the same.
            bags = slice(index, index + 1) if len(feature_lengths) == self.num_requests else candidates
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
            candidate_dense=self.candidate_dense[candidates],
            scores=self.scores[candidates],
            outputs={name: values[candidates] for name, values in self.outputs.items()},
        )


def _ids(ids: list[Any]) -> npt.NDArray[np.int64]:
    return fingerprint_strings(ids) if ids and isinstance(ids[0], str) else np.array(ids, np.int64)


def check_golden_header(spec: ModelSpec, stated: GoldenEntry, path: Path, tensors: Mapping[str, TensorInfo]) -> None:
    """Raise SnapshotCorruptError unless a golden file's tensors fit the spec and the manifest; read none of them."""
    expect_at_most(path, tensors, MAX_GOLDEN_BYTES)
    num_ids = {feature.name: length_of(tensors, f"values/{feature.name}") for feature in spec.features}
    expect_tensors(path, tensors, _expected(spec, stated.num_requests, stated.num_candidates, num_ids))


def _expected(
    spec: ModelSpec, requests: int, candidates: int, num_ids: Mapping[str, int]
) -> dict[str, tuple[str, tuple[int, ...]]]:
    expected: dict[str, tuple[str, tuple[int, ...]]] = {
        "num_candidates": ("I32", (requests,)),
        "context_dense": ("F32", (requests, spec.dense_inputs.context)),
        "candidate_dense": ("F32", (candidates, spec.dense_inputs.candidate)),
        "scores": ("F32", (candidates,)),
    }
    expected |= {f"outputs/{name}": ("F32", (candidates,)) for name in spec.dense_model.outputs}
    for feature in spec.features:
        expected[f"lengths/{feature.name}"] = ("I32", (requests if feature.side == "context" else candidates,))
        expected[f"values/{feature.name}"] = ("I64", (num_ids[feature.name],))
        if feature.weighted:
            expected[f"weights/{feature.name}"] = ("F32", (num_ids[feature.name],))
    return expected
