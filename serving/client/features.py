"""Features between arrays and messages: what a caller gave as columns, packed in a model's order; answers as arrays.

What a caller gives is turned into flat arrays once, whatever it came as; after that a request costs a few vector
operations for each feature, and none for each id or candidate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
from google.protobuf.message import DecodeError, Message

from serving.client.errors import InternalError, InvalidRequestError
from serving.proto.shardrank.v1 import ranking_pb2

Float32Array: TypeAlias = npt.NDArray[np.float32]
Int32Array: TypeAlias = npt.NDArray[np.int32]
Int64Array: TypeAlias = npt.NDArray[np.int64]
# Ids or weights of one feature: an array or a list, bag by bag as nested lists, or `Ragged`. See `Client.rank`.
Values: TypeAlias = Any
Features: TypeAlias = Mapping[str, Values]
M = TypeVar("M", bound=Message)

_NESTED = (list, tuple, np.ndarray)
_MAX_INT64 = 2**63 - 1
_MATRIX = 2


@dataclass(frozen=True, slots=True, eq=False)
class Ragged:
    """Bags of different lengths in flat arrays.

    Attributes:
        values: all bags' values, one bag after the other: integers or strings [n], weights [n], or in the answer to a
            lookup float32 [n, embedding_dim].
        lengths: integers [bags], how many values each bag has.
    """

    values: Any
    lengths: Any

    def __len__(self) -> int:
        """The number of bags."""
        return len(self.lengths)


@dataclass(frozen=True, slots=True, eq=False)
class Column:
    """One feature of a request as flat arrays.

    Attributes:
        path: of the feature, for errors.
        ids: int64 [n], if they are integers.
        texts: the ids, if they are strings.
        lengths: int32 [bags]; None if every bag has one id.
        num_bags: 1 for a context feature, else one for each candidate, or however many a lookup asks for.
        weights: float32 [n], or None for all ones.
    """

    path: str
    ids: Int64Array
    texts: Sequence[str]
    lengths: Int32Array | None
    num_bags: int
    weights: Float32Array | None

    @property
    def num_ids(self) -> int:
        """Ids of all bags."""
        return len(self.texts) or self.ids.size

    def message(self) -> ranking_pb2.SparseFeature:
        """The feature of the map form."""
        lengths = None if self.lengths is None or self.path.startswith("context.") else self.lengths.tolist()
        weights = None if self.weights is None else self.weights.tolist()
        return ranking_pb2.SparseFeature(
            ids=self.ids.tolist(), lengths=lengths, weights=weights, string_ids=self.texts or None
        )


@dataclass(frozen=True, slots=True, eq=False)
class RankFeatures:
    """What a caller gave for one rank request, whatever the model wants.

    Attributes:
        context: by feature name.
        candidates: by feature name; all have `num_candidates` bags.
        num_candidates: N.
        context_dense: float32 [Kc].
        candidate_dense: float32 [N, Kd].
    """

    context: Mapping[str, Column]
    candidates: Mapping[str, Column]
    num_candidates: int
    context_dense: Float32Array
    candidate_dense: Float32Array

    @classmethod
    def of(
        cls, context: Features, candidates: Features, weights: Features, context_dense: Values, candidate_dense: Values
    ) -> RankFeatures:
        """Read what a caller gave; `Client.rank` says in which forms.

        Raises:
            InvalidRequestError: values of another type or shape, or features that do not agree on their candidates.
        """
        _check_weighted(weights, {**context, **candidates})
        own = {name: context_column(name, value, weights.get(name)) for name, value in context.items()}
        columns = {
            name: bags_column(f"candidates.sparse.{name}", value, weights.get(name))
            for name, value in candidates.items()
        }
        matrix = None if candidate_dense is None else _floats(candidate_dense, "candidates.dense", _MATRIX)
        counts = {one.path: one.num_bags for one in columns.values()}
        if matrix is not None:
            counts["candidates.dense"] = matrix.shape[0]
        first, count = next(iter(counts.items()), ("", 0))
        if different := next((path for path, other in counts.items() if other != count), ""):
            raise refused("count_mismatch", different, f"{counts[different]} candidates; {first} has {count}")
        if not count:
            raise refused("count_mismatch", "candidates", "0 candidates; a rank request needs at least 1")
        dense = np.empty(0, np.float32) if context_dense is None else _floats(context_dense, "context.dense", 1)
        return cls(own, columns, count, dense, np.empty((count, 0), np.float32) if matrix is None else matrix)

    def map_request(self) -> ranking_pb2.RankRequest:
        """Make the request by feature names, which any schema can read."""
        return ranking_pb2.RankRequest(
            context=_feature_set(self.context, self.context_dense),
            candidates=_feature_set(self.candidates, self.candidate_dense.reshape(-1)),
            num_candidates=self.num_candidates,
        )


class Layout:
    """What a packed request to a model looks like.

    Args:
        description: of the model's version.

    Attributes:
        version: that was described.
        digest: of the schema.
    """

    def __init__(self, description: ranking_pb2.GetModelResponse) -> None:
        self.version = description.version
        self.digest = description.schema_digest
        self._model = description.model
        self._features = list(description.features)
        self._by_name = {one.name: one for one in self._features}
        self._dense = description.dense_inputs

    def packed_request(self, given: RankFeatures) -> ranking_pb2.RankRequest:
        """Make the request as arrays in the order of the model's features.

        Raises:
            InvalidRequestError: features, id types, weights or widths that are not the model's.
        """
        self._check_names(given)
        columns = [(given.context if one.side == "context" else given.candidates)[one.name] for one in self._features]
        for feature, column in zip(self._features, columns, strict=True):
            self._check(feature, column)
        self._check_width("context.dense", given.context_dense.size, self._dense.context)
        self._check_width("candidates.dense", given.candidate_dense.shape[1], self._dense.candidate)
        lengths = weights = b""
        if any(one.lengths is not None for one in columns):
            ones = np.ones(given.num_candidates, "<i4")
            lengths = b"".join((ones[: one.num_bags] if one.lengths is None else one.lengths).data for one in columns)
        if any(one.weights is not None for one in columns):
            ones = np.ones(max(one.num_ids for one in columns), "<f4")
            weights = b"".join((ones[: one.num_ids] if one.weights is None else one.weights).data for one in columns)
        return ranking_pb2.RankRequest(
            packed=ranking_pb2.PackedFeatures(
                schema_digest=self.digest,
                ids=b"".join(one.ids.data for one in columns),
                lengths=lengths,
                weights=weights,
                context_dense=given.context_dense.tobytes(),
                candidate_dense=given.candidate_dense.tobytes(),
                string_ids=chain.from_iterable(one.texts for one in columns),
            ),
            num_candidates=given.num_candidates,
        )

    def _check_names(self, given: RankFeatures) -> None:
        for side, part, columns in (
            ("context", "context", given.context),
            ("candidate", "candidates", given.candidates),
        ):
            for name in columns:
                feature = self._by_name.get(name)
                if feature is None or feature.side != side:
                    why = "has no such feature" if feature is None else f"has it as a {feature.side} feature"
                    raise refused("unknown_feature", f"{part}.sparse.{name}", f"model {self._model!r} {why}")
            for one in self._features:
                if one.side == side and one.name not in columns:
                    raise refused("missing_feature", f"{part}.sparse.{one.name}", f"model {self._model!r} needs it")

    def _check(self, feature: ranking_pb2.FeatureInfo, column: Column) -> None:
        if column.num_ids and bool(column.texts) != (feature.id_type == "string"):
            got = "strings" if column.texts else "integers"
            raise refused("invalid_id", column.path, f"the ids are {got}; those of the model are {feature.id_type}s")
        if column.weights is not None and not feature.weighted:
            path = column.path.replace(".sparse.", ".weights.", 1)
            raise refused("invalid_field", path, "the feature takes no weights")

    def _check_width(self, path: str, got: int, wanted: int) -> None:
        if got != wanted:
            owner = "" if path == "context.dense" else " for each candidate"
            raise refused("count_mismatch", path, f"{got} values{owner}; model {self._model!r} takes {wanted}")


def refused(kind: str, field: str, problem: str) -> InvalidRequestError:
    """Make the error for a request that is not sent, in the words that the server would use."""
    return InvalidRequestError(f"{field}: {problem}", kind=kind, field=field)


def lookup_request(features: Features, weights: Features) -> ranking_pb2.LookupRequest:
    """Make a lookup. Raises InvalidRequestError."""
    _check_weighted(weights, features)
    columns = {name: bags_column(f"sparse.{name}", value, weights.get(name)) for name, value in features.items()}
    return ranking_pb2.LookupRequest(sparse={name: column.message() for name, column in columns.items()})


def _check_weighted(weights: Features, features: Features) -> None:
    if unknown := weights.keys() - features.keys():
        name = min(unknown)
        raise refused("unknown_feature", f"weights.{name}", "there are weights of this feature, but no ids")


def context_column(name: str, ids: Values, weights: Values) -> Column:
    """Read a context feature, which is one bag. Raises InvalidRequestError."""
    path = f"context.sparse.{name}"
    if isinstance(ids, Ragged):
        raise refused("invalid_field", path, "a context feature is one bag: a flat list of ids")
    numbers, texts = _ids([ids] if isinstance(ids, int | str | np.generic) else ids, path)
    count = len(texts) or numbers.size
    factors = None
    if weights is not None:
        factors = _weights(weights, path)
        if factors.size != count:
            raise _uneven(path, f"{factors.size} weights for {count} ids")
    return Column(path, numbers, texts, None if count == 1 else np.array([count], "<i4"), 1, factors)


def bags_column(path: str, ids: Values, weights: Values) -> Column:
    """Read a feature that has bags: one for each candidate, or those of a lookup. Raises InvalidRequestError."""
    flat, lengths = _bags(ids, path)
    numbers, texts = _ids(flat, path)
    count = len(texts) or numbers.size
    num_bags = count if lengths is None else lengths.size
    if lengths is not None and int(lengths.sum(dtype=np.int64)) != count:
        raise refused("count_mismatch", path, f"the lengths add up to {int(lengths.sum())}; there are {count} ids")
    if lengths is not None and (lengths == 1).all():
        lengths = None
    factors = None
    if weights is not None:
        flat_weights, weight_lengths = _bags(weights, path)
        factors = _weights(flat_weights, path)
        if factors.size != count:
            raise _uneven(path, f"{factors.size} weights for {count} ids")
        if weight_lengths is not None:
            wanted = np.ones(num_bags, np.int32) if lengths is None else lengths
            if not np.array_equal(weight_lengths, wanted):
                raise _uneven(path, "the weights are not in the shape of the ids")
    return Column(path, numbers, texts, lengths, num_bags, factors)


def _uneven(path: str, problem: str) -> InvalidRequestError:
    return refused("count_mismatch", path.replace("sparse.", "weights.", 1), problem)


def _bags(value: Values, path: str) -> tuple[Values, Int32Array | None]:
    """Flat values, and how many each bag has; None if they are not divided."""
    if isinstance(value, Ragged):
        lengths = np.asarray(value.lengths)
        if lengths.ndim != 1 or (lengths.size and lengths.dtype.kind not in "iu"):
            problem = f"lengths of dtype {lengths.dtype} and shape {lengths.shape}; they must be integers [bags]"
            raise refused("invalid_field", path, problem)
        most = int(lengths.max()) if lengths.size else 0
        if lengths.size and (int(lengths.min()) < 0 or most > len(value.values)):
            raise refused("invalid_field", path, f"a length is not in 0..{len(value.values)}, the number of values")
        return value.values, lengths.astype("<i4")
    if not isinstance(value, list | tuple):
        array = np.asarray(value)
        if array.ndim == _MATRIX:
            return array.reshape(-1), np.full(array.shape[0], array.shape[1], "<i4")
        if array.dtype != object or array.ndim != 1:
            return array, None
        # Such as a column of lists in pandas.
        value = array.tolist()
    nested = [issubclass(kind, _NESTED) for kind in set(map(type, value))]
    if not any(nested):
        return value, None
    if not all(nested):
        raise refused("invalid_field", path, "lists and single values beside one another; it must be one or the other")
    try:
        lengths = np.fromiter(map(len, value), "<i4", len(value))
    except TypeError:
        raise refused("invalid_field", path, "a bag is an array without dimensions") from None
    if all(issubclass(kind, np.ndarray) for kind in set(map(type, value))):
        return np.concatenate([one for one in value if len(one)] or [np.empty(0, np.int64)]), lengths
    return list(chain.from_iterable(value)), lengths


def _ids(values: Values, path: str) -> tuple[Int64Array, Sequence[str]]:
    """Integers as an array, or strings as a list. Nothing is converted: a float or a boolean is no id."""
    if not isinstance(values, list | tuple):
        array = np.asarray(values)
        if array.ndim != 1:
            raise refused("invalid_field", path, f"ids of shape {array.shape}; they must be flat")
        if not array.size:
            return np.empty(0, "<i8"), ()
        if array.dtype.kind in "iu":
            if array.dtype == np.uint64 and int(array.max()) > _MAX_INT64:
                raise refused("invalid_id", path, f"{array.max()} is not in 0..{_MAX_INT64}")
            return np.ascontiguousarray(array, "<i8"), ()
        if array.dtype.kind not in "OUT":
            raise refused("invalid_id", path, f"ids of dtype {array.dtype}; they must be integers or strings")
        values = array.tolist()
    kinds = set(map(type, values))
    if kinds and all(issubclass(kind, str) for kind in kinds):
        try:
            "".join(values).encode()
        except UnicodeEncodeError:
            raise refused("invalid_id", path, "a string is not valid Unicode: it has a lone surrogate") from None
        return np.empty(0, "<i8"), values
    if wrong := next((kind for kind in kinds if kind is bool or not issubclass(kind, int | np.integer)), None):
        value = next(one for one in values if type(one) is wrong)
        raise refused("invalid_id", path, f"{str(value)[:80]!r} is a {wrong.__name__}; ids are integers or strings")
    try:
        return np.array(values, "<i8"), ()
    except OverflowError:
        value = next(one for one in values if not 0 <= one <= _MAX_INT64)
        raise refused("invalid_id", path, f"{str(value)[:80]} is not in 0..{_MAX_INT64}") from None


def _weights(values: Values, path: str) -> Float32Array:
    return _floats(values, path.replace("sparse.", "weights.", 1), 1)


def _floats(values: Values, path: str, dimensions: int) -> Float32Array:
    """float32 of one or two dimensions."""
    try:
        array = np.asarray(values)
    except ValueError:
        raise refused("count_mismatch", path, "the rows have different lengths") from None
    if array.size and array.dtype.kind not in "fiu":
        raise refused("invalid_field", path, f"values of dtype {array.dtype}; they must be numbers")
    if array.ndim != dimensions:
        wanted = "[N, width]" if dimensions == _MATRIX else "flat"
        raise refused("count_mismatch", path, f"values of shape {array.shape}; they must be {wanted}")
    # What float32 can't hold becomes infinite, which the server refuses by its position.
    with np.errstate(over="ignore"):
        return np.ascontiguousarray(array, "<f4")


def _feature_set(columns: Mapping[str, Column], dense: Float32Array) -> ranking_pb2.FeatureSet:
    sparse = {name: column.message() for name, column in columns.items()}
    return ranking_pb2.FeatureSet(sparse=sparse, dense=dense.tolist())


@dataclass(frozen=True, slots=True, eq=False)
class RankResult:
    """Scores of one request.

    Attributes:
        model: that gave them.
        version: of the model, the same for all scores.
        scores: float32 [N], in the order of the candidates.
        order: int64 [N or top_k], positions of the candidates by descending score; equal scores by position.
        request_id: of the request.
    """

    model: str
    version: int
    scores: Float32Array
    order: Int64Array
    request_id: str


@dataclass(frozen=True, slots=True, eq=False)
class LookupResult:
    """Embeddings.

    Attributes:
        model: that they are of.
        version: of the model.
        embeddings: by feature name: float32 [bags, embedding_dim]; of a feature that is not pooled `Ragged` with
            float32 [ids, embedding_dim] and int64 [bags].
        request_id: of the request.
    """

    model: str
    version: int
    embeddings: dict[str, Float32Array | Ragged]
    request_id: str


def read_rank(data: bytes) -> RankResult:
    """Read a RankResponse. Raises InternalError."""
    answer = read_message(ranking_pb2.RankResponse, data)
    scores, order = _array(answer.scores, np.float32), _array(answer.order, np.int64)
    return RankResult(answer.model, answer.version, scores, order, answer.request_id)


def read_lookup(data: bytes) -> LookupResult:
    """Read a LookupResponse. Raises InternalError."""
    answer = read_message(ranking_pb2.LookupResponse, data)
    embeddings: dict[str, Float32Array | Ragged] = {}
    for name, one in answer.embeddings.items():
        values = _array(one.values, np.float32).reshape(-1, max(1, one.embedding_dim))
        embeddings[name] = Ragged(values, _array(one.lengths, np.int64)) if one.lengths else values
    return LookupResult(answer.model, answer.version, embeddings, answer.request_id)


def _array(numbers: Iterable[float], dtype: type[Any]) -> Any:
    # The library hands out the buffer of a repeated field.
    return np.array(numbers, dtype=dtype)


def read_message(kind: Callable[[], M], data: bytes) -> M:
    """Parse an answer. Raises InternalError for bytes that are no such message."""
    message = kind()
    try:
        message.ParseFromString(data)
    except DecodeError as error:
        problem = f"the answer is not a {message.DESCRIPTOR.full_name}: {error}"
        raise InternalError(problem, kind="malformed_answer") from error
    return message
