"""Features between arrays and messages: a caller's columns, packed in a model's order; answers as arrays.

Columns become flat arrays once; after that a request costs a few vector operations for each feature, and none for each
id. Only what a message can't express is refused, the rest by the server.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import chain
from types import MappingProxyType
from typing import Any, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
from google.protobuf.message import DecodeError, Message

from serving import errors
from serving.proto.shardrank.v1 import ranking_pb2
from serving.results import Float32Array, Int64Array, LookupResult, MissingKeys, Ragged, RankResult

Int32Array: TypeAlias = npt.NDArray[np.int32]
# Ids or weights of one feature: an array or a list, bag by bag as nested lists, or `Ragged`. See `Client.rank`.
Values: TypeAlias = Any
Features: TypeAlias = Mapping[str, Values]
M = TypeVar("M", bound=Message)

NO_FEATURES: Features = MappingProxyType({})
_NESTED = (list, tuple, np.ndarray)
_MAX_INT64 = 2**63 - 1
_MATRIX = 2


@dataclass(frozen=True, slots=True, eq=False)
class Column:
    """One feature of a request: ids, or else texts, [n], in bags of `lengths`, or of one id each if None."""

    ids: Int64Array
    texts: Sequence[str]
    lengths: Int32Array | None
    num_bags: int
    weights: Float32Array | None

    @classmethod
    def of(cls, path: str, ids: Values, weights: Values, *, is_context: bool = False) -> Column:
        """Read what a caller gave; a context feature is one bag. Raises InvalidRequestError."""
        if is_context:
            flat, lengths = [ids] if isinstance(ids, int | str | np.generic) else ids, None
        else:
            flat, lengths = _bags(ids, path)
        numbers, texts = _ids(flat, path, lengths)
        count = len(texts) or numbers.size
        factors = None
        if weights is not None:
            path = path.replace("sparse.", "weights.", 1)
            flat, shape = (weights, None) if is_context else _bags(weights, path)
            factors = _floats(flat, path, 1)
            if factors.size != count:
                raise errors.count_mismatch(path, f"{factors.size} weights for {count} ids")
            if shape is not None and not np.array_equal(shape, np.ones(count) if lengths is None else lengths):
                raise errors.count_mismatch(path, "the weights are not in the shape of the ids")
        num_bags = 1 if is_context else count if lengths is None else lengths.size
        if is_context and count != 1:
            lengths = np.array([count], "<i4")
        elif lengths is not None and (lengths == 1).all():
            lengths = None
        return cls(numbers, texts, lengths, num_bags, factors)

    @property
    def num_ids(self) -> int:
        """Ids of all bags."""
        return len(self.texts) or self.ids.size

    def message(self) -> ranking_pb2.SparseFeature:
        """Make the feature of the map form."""
        lengths, weights = (None if array is None else array.tolist() for array in (self.lengths, self.weights))
        return ranking_pb2.SparseFeature(ids=self.ids.tolist(), lengths=lengths, weights=weights, string_ids=self.texts)


class RankFeatures:
    """The columns of one rank request in any form of `Client.rank`. Raises InvalidRequestError."""

    def __init__(
        self, context: Features, candidates: Features, weights: Features, context_dense: Values, candidate_dense: Values
    ) -> None:
        context, context_weights, context_dense = _side("context", context, context_dense)
        candidates, candidate_weights, candidate_dense = _side("candidates", candidates, candidate_dense)
        weights = {**_by_name("weights", weights), **context_weights, **candidate_weights}
        _check_weighted(weights, context.keys() | candidates.keys())
        self.context = {
            name: Column.of(f"context.sparse.{name}", ids, weights.get(name), is_context=True)
            for name, ids in context.items()
        }
        self.candidates = {
            name: Column.of(f"candidates.sparse.{name}", ids, weights.get(name)) for name, ids in candidates.items()
        }
        self.context_dense = np.empty(0, "<f4") if context_dense is None else _floats(context_dense, "context.dense", 1)
        matrix = None if candidate_dense is None else _floats(candidate_dense, "candidates.dense", _MATRIX)
        rows = 0 if matrix is None else matrix.shape[0]
        self.num_candidates = next((column.num_bags for column in self.candidates.values()), rows)
        self.candidate_dense = np.empty((self.num_candidates, 0), np.float32) if matrix is None else matrix
        if self.candidate_dense.shape[0] != self.num_candidates:
            raise errors.count_mismatch("candidates.dense", f"{rows} rows for {self.num_candidates} candidates")

    def by_name(self) -> ranking_pb2.RankRequest:
        """Make the request by feature names, which any schema can read."""
        sides = ((self.context, self.context_dense), (self.candidates, self.candidate_dense.reshape(-1)))
        context, candidates = (
            ranking_pb2.FeatureSet(sparse={name: col.message() for name, col in columns.items()}, dense=dense.tolist())
            for columns, dense in sides
        )
        return ranking_pb2.RankRequest(context=context, candidates=candidates, num_candidates=self.num_candidates)


class Layout:
    """The order of a packed request to a version of a model."""

    def __init__(self, description: ranking_pb2.GetModelResponse) -> None:
        self.version = description.version
        self._digest = description.schema_digest
        self._widths = description.dense_inputs.context, description.dense_inputs.candidate
        self._features = [
            (feature.name, feature.side == "context", feature.id_type == "string", feature.weighted)
            for feature in description.features
        ]

    def packed(self, given: RankFeatures) -> ranking_pb2.RankRequest | None:
        """Make the request as arrays in the order of the model's features; None if it does not fit the model."""
        columns = []
        for name, is_context, has_texts, is_weighted in self._features:
            column = (given.context if is_context else given.candidates).get(name)
            if (
                column is None
                or column.num_bags != (1 if is_context else given.num_candidates)
                or (column.num_ids and bool(column.texts) != has_texts)
                or (column.weights is not None and not is_weighted)
            ):
                return None
            columns.append(column)
        widths = given.context_dense.size, given.candidate_dense.shape[1]
        if len(columns) != len(given.context) + len(given.candidates) or widths != self._widths:
            return None
        lengths = weights = b""
        if any(column.lengths is not None for column in columns):
            ones = np.ones(given.num_candidates, "<i4")
            lengths = b"".join(ones[: c.num_bags].data if c.lengths is None else c.lengths.data for c in columns)
        if any(column.weights is not None for column in columns):
            ones = np.ones(max(column.num_ids for column in columns), "<f4")
            weights = b"".join(ones[: c.num_ids].data if c.weights is None else c.weights.data for c in columns)
        return ranking_pb2.RankRequest(
            packed=ranking_pb2.PackedFeatures(
                schema_digest=self._digest,
                ids=b"".join(column.ids.data for column in columns),
                lengths=lengths,
                weights=weights,
                context_dense=given.context_dense.tobytes(),
                candidate_dense=given.candidate_dense.tobytes(),
                string_ids=chain.from_iterable(column.texts for column in columns),
            ),
            num_candidates=given.num_candidates,
        )


def lookup_request(features: Features, weights: Features) -> ranking_pb2.LookupRequest:
    """Make a lookup. Raises InvalidRequestError."""
    _check_weighted(_by_name("weights", weights), _by_name("sparse", features).keys())
    columns = {name: Column.of(f"sparse.{name}", ids, weights.get(name)) for name, ids in features.items()}
    return ranking_pb2.LookupRequest(sparse={name: column.message() for name, column in columns.items()})


def read_rank(data: bytes | RankResult, *, with_missing: bool = False) -> RankResult:
    """Read a RankResponse, unless it is read, and the keys that are missing. Raises InternalError."""
    if isinstance(data, RankResult):
        return data
    answer = read_message(ranking_pb2.RankResponse, data)
    # The library hands out the buffer of a repeated field.
    scores, order = np.array(answer.scores, np.float32), np.array(answer.order, np.int64)
    outputs = {name: np.array(output.values, np.float32) for name, output in answer.outputs.items()}
    model, version, request_id, step = answer.model, answer.version, answer.request_id, answer.dense_step
    missing = _missing(answer) if with_missing else None
    return RankResult(model, version, scores, order, request_id, step, outputs, *_freshness(answer), missing)


def read_lookup(data: bytes | LookupResult, *, with_missing: bool = False) -> LookupResult:
    """Read a LookupResponse likewise."""
    if isinstance(data, LookupResult):
        return data
    answer = read_message(ranking_pb2.LookupResponse, data)
    embeddings: dict[str, Float32Array | Ragged] = {}
    for name, rows in answer.embeddings.items():
        values, width = np.array(rows.values, np.float32), max(1, rows.embedding_dim)
        if values.size % width:
            problem = f"the answer is no lookup: {name!r} has {values.size} numbers in rows of {width}"
            raise errors.InternalError(problem, kind="malformed_answer")
        values = values.reshape(-1, width)
        embeddings[name] = Ragged(values, np.array(rows.lengths, np.int64)) if rows.lengths else values
    missing = _missing(answer) if with_missing else None
    head = answer.model, answer.version, embeddings, answer.request_id
    return LookupResult(*head, *_freshness(answer), missing)


def _freshness(answer: Any) -> tuple[int, int]:
    """Return the delta and the age of an answer's rows; -1 for what its server does not know."""
    sequence = answer.delta_sequence if answer.HasField("delta_sequence") else -1
    return sequence, answer.age_ms if answer.HasField("age_ms") else -1


def _missing(answer: Any) -> dict[str, MissingKeys]:
    return {
        name: MissingKeys(np.array(keys.bags, np.int64), np.array(keys.keys, np.int64))
        for name, keys in answer.missing.items()
    }


def read_message(kind: type[M], data: bytes) -> M:
    """Parse an answer. Raises InternalError for bytes that are no such message."""
    try:
        return kind.FromString(data)
    except DecodeError as error:
        problem = f"the answer is not a {kind.DESCRIPTOR.full_name}: {error}"
        raise errors.InternalError(problem, kind="malformed_answer") from error


def _side(path: str, given: Features, dense: Values) -> tuple[Features, Features, Values]:
    """Return the ids, the weights and the dense values of a side: ids by feature, or an object of the JSON form."""
    # A feature's ids are no mapping.
    if not isinstance(_by_name(path, given).get("sparse"), Mapping) and given.keys() != {"dense"}:
        return given, NO_FEATURES, dense
    if unknown := given.keys() - {"sparse", "weights", "dense"}:
        raise errors.invalid_field(f"{path}.{min(unknown)}", "unknown key; allowed are ['dense', 'sparse', 'weights']")
    if dense is not None and "dense" in given:
        raise errors.invalid_field(f"{path}.dense", "it is given twice")
    weights = _by_name(f"{path}.weights", given.get("weights") or NO_FEATURES)
    return _by_name(f"{path}.sparse", given.get("sparse", NO_FEATURES)), weights, given.get("dense", dense)


def _by_name(path: str, given: Features) -> Features:
    if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
        raise errors.invalid_field(path, f"{given!r:.80} is not a mapping of names of features to their values")
    return given


def _check_weighted(weights: Features, names: Set[str]) -> None:
    if unknown := weights.keys() - names:
        raise errors.unknown_feature(f"weights.{min(unknown)}", "there are weights of this feature, but no ids")


def _bags(value: Values, path: str) -> tuple[Values, Int32Array | None]:
    """Flat values, and how many each bag has; None if they are not divided."""
    if isinstance(value, Ragged):
        try:
            lengths, count = np.asarray(value.lengths), len(value.values)
        except (TypeError, ValueError) as error:
            raise errors.invalid_field(path, f"Ragged: {error}") from error
        if lengths.ndim != 1 or (lengths.size and (lengths.dtype.kind not in "iu" or int(lengths.min()) < 0)):
            problem = f"lengths {str(lengths)[:80]} of {lengths.dtype}; they must be integers [bags], none below 0"
            raise errors.invalid_field(path, problem)
        if (total := int(lengths.sum(dtype=np.int64))) != count:
            raise errors.count_mismatch(path, f"lengths add up to {total}; there are {count} values")
        return value.values, lengths.astype("<i4")
    if not isinstance(value, list | tuple):
        array = np.asarray(value)
        if array.ndim == _MATRIX:
            return array.reshape(-1), np.full(array.shape[0], array.shape[1], "<i4")
        if array.dtype != object or array.ndim != 1:
            return array, None
        # A column of lists in pandas, for one.
        value = array.tolist()
    if not value or not isinstance(value[0], _NESTED):
        # A list among ids is refused as no id.
        return value, None
    kinds = set(map(type, value))
    if not all(issubclass(kind, _NESTED) for kind in kinds):
        raise errors.invalid_field(path, "lists and single values beside one another; it must be one or the other")
    try:
        lengths = np.fromiter(map(len, value), "<i4", len(value))
    except TypeError:
        raise errors.invalid_field(path, "a bag is an array without dimensions") from None
    if kinds == {np.ndarray}:
        # A tenth of the time that single numbers would take.
        return np.concatenate([bag for bag in value if len(bag)] or [np.empty(0, np.int64)]), lengths
    return list(chain.from_iterable(value)), lengths


def _ids(values: Values, path: str, lengths: Int32Array | None) -> tuple[Int64Array, Sequence[str]]:
    """Read integers as an array, or strings as a list. Nothing is converted: a float or a boolean is no id."""
    if not isinstance(values, list | tuple):
        array = np.asarray(values)
        if array.ndim != 1:
            raise errors.invalid_field(path, f"ids of shape {array.shape}; they must be flat")
        is_integer = array.dtype.kind in "iu" and (array.dtype != np.uint64 or int(array.max(initial=0)) <= _MAX_INT64)
        if is_integer or not array.size:
            return np.ascontiguousarray(array, "<i8"), ()
        values = array.tolist()

    def refusal(position: int, problem: str) -> errors.InvalidRequestError:
        if lengths is None:
            return errors.invalid_id(f"{path}[{position}]", problem)
        bag = int(np.searchsorted(np.cumsum(lengths), position, "right"))
        return errors.invalid_id(f"{path}[{bag}][{position - int(lengths[:bag].sum())}]", problem)

    kinds = set(map(type, values))
    if kinds and all(issubclass(kind, str) for kind in kinds):
        try:
            "".join(values).encode()
        except UnicodeEncodeError:
            raise errors.invalid_id(path, "a string is not valid Unicode: it has a lone surrogate") from None
        return np.empty(0, "<i8"), values
    if wrong := next((kind for kind in kinds if kind is bool or not issubclass(kind, int | np.integer)), None):
        position, value = next((number, value) for number, value in enumerate(values) if type(value) is wrong)
        raise refusal(position, f"{value!r:.80} is a {wrong.__name__}; ids are integers or strings")
    try:
        return np.array(values, "<i8"), ()
    except OverflowError:
        position, value = next((number, value) for number, value in enumerate(values) if not 0 <= value <= _MAX_INT64)
        raise refusal(position, f"{str(value)[:80]} is not in 0..{_MAX_INT64}") from None


def _floats(values: Values, path: str, dimensions: int) -> Float32Array:
    try:
        array = np.asarray(values)
    except ValueError:
        raise errors.count_mismatch(path, "the rows have different lengths") from None
    if array.size and array.dtype.kind not in "fiu":
        raise errors.invalid_field(path, f"values of dtype {array.dtype}; they must be numbers")
    if array.ndim != dimensions:
        expected = "[N, width]" if dimensions == _MATRIX else "flat"
        raise errors.count_mismatch(path, f"values of shape {array.shape}; they must be {expected}")
    # What float32 can't hold becomes infinite, which the server refuses by its position.
    with np.errstate(over="ignore"):
        return np.ascontiguousarray(array, "<f4")
